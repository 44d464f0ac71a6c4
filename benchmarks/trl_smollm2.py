"""TRL's GRPOTrainer on the problems of a SmolLM2 recipe with LoRA, for as many seconds: a process of its own.

Same as the recipe: model, problems and their order, prompts, rewards, batch and group size, adapters, learning rate and
warm-up, temperature, response length, AdamW (0.9, 0.95, no decay), advantages (r - mean) / std, loss over response
tokens, clipping of gradients at 1, no KL. The base model is bfloat16 and the adapters are float32, as in the recipe.

In TRL's favor: both cores in turns, no logging, no activation checkpointing, and the clock stops while adapters are
saved. Each saved adapter is merged into a model directory after the training, off the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the Hugging Face imports; no network is needed

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from midflight.config import Recipe, load_recipe
from midflight.launch.environments import build_environment
from midflight.protocols import GradedTask

_MAX_STEPS = 1000


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Callback that ends the training after `seconds`, and saves an adapter every `seconds / num_saved`."""

    def __init__(self, out: Path, seconds: float, num_saved: int) -> None:
        self.steps: list[dict[str, float]] = []  # step, and its seconds since the start of training
        self._out, self._seconds, self._every = out, seconds, seconds / num_saved
        self._paused_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        elapsed = time.perf_counter() - self._started - self._paused_s
        last = self.steps[-1]["seconds"] if self.steps else 0.0
        self.steps.append({"step": state.global_step, "seconds": elapsed})
        control.should_training_stop = elapsed >= self._seconds
        if control.should_training_stop or elapsed // self._every > last // self._every:
            began = time.perf_counter()
            kwargs["model"].save_pretrained(self._out / f"adapter_{state.global_step}")
            self._paused_s += time.perf_counter() - began


def train(recipe: Recipe, out: Path, seconds: float, num_saved: int) -> dict[str, Any]:
    """Train for `seconds`; return the steps and the saved models in `out`."""
    seed, model_path = recipe.run.seed, recipe.model.path
    set_seed(seed)
    task = cast(GradedTask, build_environment(recipe))
    num_problems = _MAX_STEPS * recipe.batch.batch_size // recipe.batch.group_size
    problems = [task.problem(index) for index in range(num_problems)]

    def reward(prompts: list[Any], completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return [task.grade(problems[i], text).reward for i, text in zip(index, texts, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rank = recipe.trainer.lora_rank
    assert rank is not None, "this comparison trains adapters"
    stopwatch = Stopwatch(out, seconds, num_saved)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, recipe.trainer.dtype)),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [{"prompt": _messages(problem.prompt), "index": index} for index, problem in enumerate(problems)]
        ),
        args=_config(recipe, out),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[stopwatch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {"steps": stopwatch.steps, "models": _merge(model_path, tokenizer, out, stopwatch.steps)}


def _messages(prompt: Any) -> list[dict[str, str]]:
    return [dict(message) for message in prompt]


def _config(recipe: Recipe, out: Path) -> GRPOConfig:
    """Build the recipe's settings, without logging, saving and other costs that do not affect learning."""
    trainer = recipe.trainer
    return GRPOConfig(
        output_dir=str(out / "trainer"),
        seed=recipe.run.seed,
        max_steps=_MAX_STEPS,
        per_device_train_batch_size=recipe.batch.batch_size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=recipe.batch.group_size,
        max_completion_length=recipe.sampling.max_tokens,
        temperature=recipe.sampling.temperature,
        top_k=0,
        beta=0.0,
        scale_rewards="group",
        loss_type="dapo",  # the denominator is the number of response tokens in the batch
        learning_rate=trainer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        optim="adamw_torch_fused",
        adam_beta1=trainer.adam_betas[0],
        adam_beta2=trainer.adam_betas[1],
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        shuffle_dataset=False,  # the same order of problems
        use_cpu=True,
        bf16=False,  # the model has its dtype already
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _merge(model_path: Path, tokenizer: Any, out: Path, steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Replace the adapters by models with merged weights; return their directories and seconds."""
    models = []
    for entry in steps:
        adapter = out / f"adapter_{entry['step']:.0f}"
        if not adapter.is_dir():
            continue
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().to(torch.bfloat16)
        directory = out / f"step_{entry['step']:.0f}"
        merged.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        shutil.rmtree(adapter)
        models.append({**entry, "path": str(directory)})
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="seconds of training")
    parser.add_argument("--num-saved", type=int, default=4, help="number of saved models")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    result = train(recipe, arguments.out, arguments.seconds, arguments.num_saved)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
