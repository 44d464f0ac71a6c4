"""Time that TRL's GRPOTrainer takes on the chain-sum task: the external baseline of the demo.

Run it in a separate environment, on the same machine:

    python3.11 -m venv /tmp/trl-env
    /tmp/trl-env/bin/pip install torch==2.13.0        # first, so that the CPU build is taken
    /tmp/trl-env/bin/pip install trl==1.16.0 transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0
    PYTHONPATH=src /tmp/trl-env/bin/python benchmarks/trl_baseline.py --batch-size 32 --seeds 0 1 2 --json

Same as the demo: checkpoint, problems, grading, group size 8, temperature 1, 160 new tokens, AdamW 2e-4 (0.9, 0.95, no
decay), advantages (r - mean) / (std + 1e-4), loss summed over tokens / response tokens of the batch, clipping at 1, no
KL. In TRL's favor: no logging, no saving, no activation checkpointing, fp32 (bf16 gains nothing at this size), both
cores.

The clock starts at the first training step and stops during evaluations. Every `--eval-every` steps, an evaluation
samples one answer to each of 512 held-out problems at temperature 1. `seconds_to_0.85` is the clock at the first
evaluation that reaches 0.85, so it is late by up to one interval. Sampling noise of one evaluation: 0.016 (one standard
deviation).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the Hugging Face imports; no network is needed

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from midflight.config import SHIPPED_RECIPES
from midflight.envs.chain_sums import ChainSums
from midflight.types import Problem

CHECKPOINT = Path(os.path.relpath(SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"))
GROUP_SIZE = 8
MAX_NEW_TOKENS = 160
TARGETS = (0.85, 0.90)


@dataclass
class Options:
    batch_size: int
    steps_per_generation: int
    threads: int
    max_seconds: float
    max_steps: int
    eval_every: int
    eval_problems: int
    cache_implementation: str | None
    continuous_batching: bool
    model: Path


@dataclass
class Run:
    """Result of one seed. Units: seconds of reinforcement learning, evaluations excluded."""

    seed: int
    seconds_to: dict[str, float | None] = field(default_factory=lambda: {f"{target:.2f}": None for target in TARGETS})
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds_per_step: float = 0.0
    load_before: float = 0.0  # 1-minute load average of the machine
    others_cores: float = 0.0  # mean number of cores that other processes kept busy; 0 is a fair measurement


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Callback that evaluates between steps, off the clock, and stops at the last target or after `max_seconds`."""

    def __init__(self, run: Run, options: Options, tokenizer: Any) -> None:
        self._run, self._options, self._tokenizer = run, options, tokenizer
        self._problems = ChainSums().held_out_problems(options.eval_problems)
        self._rl_seconds = 0.0
        self._resumed_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(0, kwargs["model"])
        self._resumed_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        elapsed = self._rl_seconds + time.perf_counter() - self._resumed_at
        self._run.seconds_per_step = elapsed / step
        out_of_time = elapsed > self._options.max_seconds
        if step % self._options.eval_every and not out_of_time and step < self._options.max_steps:
            return
        self._rl_seconds = elapsed
        self._evaluate(step, kwargs["model"])
        control.should_training_stop = out_of_time or all(self._run.seconds_to.values())
        self._resumed_at = time.perf_counter()

    def _evaluate(self, step: int, model: Any) -> None:
        was_training = model.training
        # The random state is restored, so that the interval of evaluations does not change training.
        with torch.random.fork_rng():
            accuracy = held_out_accuracy(model, self._tokenizer, self._problems)
        model.train(was_training)
        seconds = round(self._rl_seconds, 2)
        self._run.curve.append({"step": step, "seconds": seconds, "accuracy": round(accuracy, 4)})
        for target in TARGETS:
            if accuracy >= target and self._run.seconds_to[f"{target:.2f}"] is None:
                self._run.seconds_to[f"{target:.2f}"] = seconds
        print(f"seed {self._run.seed}  step {step}  {seconds:.1f} s  held-out {accuracy:.3f}", file=sys.stderr)


@torch.inference_mode()
def held_out_accuracy(model: Any, tokenizer: Any, problems: list[Problem], rows: int = 128) -> float:
    """Share of correct answers, one sample per problem at temperature 1."""
    model.eval()
    environment = ChainSums()
    problems = sorted(
        problems, key=lambda problem: len(problem.prompt)
    )  # a chunk lasts as long as its longest response
    right = 0.0
    for start in range(0, len(problems), rows):
        chunk = problems[start : start + rows]
        prompts = tokenizer(
            [problem.prompt for problem in chunk], padding=True, padding_side="left", return_tensors="pt"
        )
        tokens_BT = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        responses = tokenizer.batch_decode(tokens_BT[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(environment.grade(*pair).reward for pair in zip(chunk, responses, strict=True))
    return right / len(problems)


def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Grade every completion with the environment."""
    rows = zip(prompts, answer, completions, strict=True)
    return [ChainSums().grade(Problem("", prompt, right), response).reward for prompt, right, response in rows]


def train(seed: int, options: Options) -> Run:
    """Run GRPOTrainer once."""
    set_seed(seed)
    environment = ChainSums(seed=seed)
    problems = [environment.problem(index) for index in range(options.max_steps * options.batch_size // GROUP_SIZE)]
    dataset = Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    run = Run(seed, load_before=os.getloadavg()[0])
    others_busy, start = others_cpu_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=dataset,
            args=make_config(seed, options, directory),
            callbacks=[Stopwatch(run, options, tokenizer)],
        )
        trainer.remove_callback(PrinterCallback)  # it would print between the lines of --json
        trainer.train()
    run.others_cores = round((others_cpu_seconds() - others_busy) / (time.perf_counter() - start), 3)
    return run


def make_config(seed: int, options: Options, directory: str) -> GRPOConfig:
    """Build the task's settings, without logging, saving and other costs that do not affect learning."""
    return GRPOConfig(
        output_dir=directory,
        seed=seed,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=1,
        steps_per_generation=options.steps_per_generation,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        scale_rewards="group",
        loss_type="dapo",  # the denominator is the number of response tokens in the batch
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,  # same order of problems as in all other runs
        cache_implementation=options.cache_implementation,
        use_transformers_continuous_batching=options.continuous_batching,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def report(options: Options, runs: list[Run]) -> dict[str, Any]:
    """Collect settings, machine, all runs, and the median over seeds of the seconds to each target."""
    medians: dict[str, float | None] = {}
    for target in runs[0].seconds_to:
        reached = [seconds for run in runs if (seconds := run.seconds_to[target]) is not None]
        medians[target] = statistics.median(reached) if len(reached) == len(runs) else None
    return {
        "command": " ".join(["PYTHONPATH=src", "python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")},
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "median_seconds_to": medians,
        "runs": [vars(run) for run in runs],
    }


def others_cpu_seconds() -> float:
    """CPU time of the whole machine since its start, minus this process's CPU time (seconds)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    machine = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return machine - time.process_time()


def cpu_model() -> str:
    """Name of the CPU, with family and model: virtual machines often hide the marketing name."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    )
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    return f"{fields.get('model name', '?')} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=32, help="rollouts per optimizer step")
    parser.add_argument("--steps-per-generation", type=int, default=1, help="optimizer steps per generation phase")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--max-seconds", type=float, default=180.0, help="limit on reinforcement learning per seed (seconds)"
    )
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--eval-every", type=int, default=5, help="optimizer steps between evaluations")
    parser.add_argument("--eval-problems", type=int, default=512)
    parser.add_argument("--cache-implementation", help="cache of transformers' generate; default: dynamic cache")
    parser.add_argument(
        "--continuous-batching", action="store_true", help="use transformers' continuous batching instead of generate"
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    arguments = vars(parser.parse_args())
    seeds, as_json = arguments.pop("seeds"), arguments.pop("json")
    options = Options(**arguments)
    torch.set_num_threads(options.threads)
    result = report(options, [train(seed, options) for seed in seeds])
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        for target, seconds in result["median_seconds_to"].items():
            print(f"{target}: {'not reached by every seed' if seconds is None else f'{seconds:.1f} s'}")


if __name__ == "__main__":
    main()
