"""Process of one engine: reads JSON lines, answers each with a measurement, ends when stdin closes."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.decode_engines import ENGINES


def main() -> None:
    options = json.loads(sys.argv[1])
    # Only results go to stdout; the output of libraries goes to stderr.
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        torch.set_num_threads(options["num_threads"])
        engine = ENGINES[options["engine"]](
            Path(options["model"]), options["dtype"], options["new_tokens"], options["device"]
        )
        for line in sys.stdin:
            cpu_started = time.process_time()
            answer = asdict(engine.measure(**json.loads(line)))
            answer["cpu_seconds"] = time.process_time() - cpu_started
            print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
