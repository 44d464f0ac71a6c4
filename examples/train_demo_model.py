"""Make the starting policy of the chain-sums demo: a 0.6 M-parameter Qwen2 model with a character tokenizer.

    python examples/train_demo_model.py --out src/midflight/recipes/models/chain_sums

The model is taught by imitation on imperfect demonstrations, so that it knows how to add a chain of numbers step by
step and usually guesses instead: sampled accuracy starts near 0.3, and reinforcement learning has something to find.
How far that can go is decided here. A model that was taught for a third of the steps never gets past one half.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from midflight.envs.chain_sums import DIGITS, LABELS, ChainSums, demonstration, num_terms
from midflight.types import Problem

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0" + DIGITS + LABELS + ",:=+"
CONTEXT_TOKENS = 256
MAX_NEW_TOKENS = 160

PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
LENGTH_EXPONENT = 0.3
TOKENS_PER_STEP = 550  # about 12 demonstrations
LOSS_NORMALIZER = 256.0  # constant, so that a token weighs the same in whatever batch it comes

NO_LOSS = -100


@dataclass(frozen=True)
class Batch:
    """Demonstrations laid end to end; no token attends to another demonstration.

    Shapes: `[T]`, and `[T, T]` for the mask. `targets` are the token ids where loss is wanted, else NO_LOSS.
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor
    num_sequences: int


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character; adds nothing to what it is given.

    Of Qwen2's own class, because transformers loads the tokenizer of any Qwen2 model as one. It drops characters that
    it does not know.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """The untrained model; its weights follow torch's seed."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.06,  # the usual 0.02 is small for this width, and takes a thousand steps longer
        dtype="float32",
        **special,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, **special)
    return model


def demonstration_batches(tokenizer: Qwen2Tokenizer, seed: int) -> Iterator[Batch]:
    """Batches of random demonstrations, at least TOKENS_PER_STEP tokens each, without end."""
    # Longer chains than in training: the skill to finish them has to be in the base, and few demonstrations get there.
    environment = ChainSums(seed=seed, exponent=LENGTH_EXPONENT)
    rng = random.Random(seed)
    sequences: list[tuple[list[int], int]] = []
    for problem in map(environment.problem, count()):
        token_ids = tokenizer.encode(problem.text + demonstration(problem, rng))
        sequences.append(([*token_ids, tokenizer.eos_token_id], len(problem.text)))
        if sum(len(token_ids) for token_ids, _ in sequences) >= TOKENS_PER_STEP:
            yield _pack(sequences)
            sequences = []


def _pack(sequences: list[tuple[list[int], int]]) -> Batch:
    """Lay sequences (token ids, prompt length) end to end, so that none is padded."""
    token_ids_T = torch.tensor([token_id for token_ids, _ in sequences for token_id in token_ids])
    positions_T = torch.cat([torch.arange(len(token_ids)) for token_ids, _ in sequences])
    prompt_lengths_T = torch.cat([torch.full((len(token_ids),), length) for token_ids, length in sequences])
    sequence_T = torch.cat([torch.full((len(token_ids),), index) for index, (token_ids, _) in enumerate(sequences)])
    mask_TT = (sequence_T[:, None] == sequence_T) & torch.ones(len(token_ids_T), len(token_ids_T)).tril().bool()
    targets_T = torch.where(positions_T >= prompt_lengths_T, token_ids_T, NO_LOSS)
    return Batch(token_ids_T, positions_T, mask_TT, targets_T, len(sequences))


def teach(model: Qwen2ForCausalLM, batches: Iterator[Batch], num_steps: int) -> None:
    """Supervised learning on the responses: warm-up, then a cosine to a tenth of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, num_steps))
    start, recent_nll, recent_tokens, num_sequences = time.perf_counter(), 0.0, 0, 0
    model.train()
    for step in range(1, num_steps + 1):
        batch = next(batches)
        logits_TV = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            attention_mask=batch.mask[None, None],
            use_cache=False,
        ).logits[0]
        # The first token of a sequence is a prompt's: it is never a target of the sequence before it.
        nll = torch.nn.functional.cross_entropy(
            logits_TV[:-1], batch.targets[1:], ignore_index=NO_LOSS, reduction="sum"
        )
        torch.autograd.backward(nll / LOSS_NORMALIZER)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recent_nll += nll.item()
        recent_tokens += int((batch.targets != NO_LOSS).sum())
        num_sequences += batch.num_sequences
        if step % 500 == 0 or step == num_steps:
            print(
                f"step {step}/{num_steps}  {time.perf_counter() - start:.0f} s"
                f"  {num_sequences / step:.1f} demonstrations a step  {recent_nll / recent_tokens:.4f} nats a token",
                file=sys.stderr,
            )
            recent_nll, recent_tokens = 0.0, 0


def _learning_rate_factor(step: int, num_steps: int) -> float:
    decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


def evaluate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, num_problems: int) -> None:
    """Print held-out accuracy, sampled at temperature 1 and greedy."""
    problems = ChainSums().held_out_problems(num_problems)
    for name, do_sample in (("sampled", True), ("greedy", False)):
        responses = respond(model, tokenizer, problems, do_sample)
        print(f"{name:8} held-out accuracy {accuracy_by_length(problems, responses)}")


@torch.inference_mode()
def respond(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], do_sample: bool) -> list[str]:
    """One response to each problem."""
    model.eval()
    prompts = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    generation = {"do_sample": True, "temperature": 1.0, "top_k": 0} if do_sample else {"do_sample": False}
    tokens_BT = model.generate(
        prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=MAX_NEW_TOKENS, **generation
    )
    responses: list[str] = tokenizer.batch_decode(
        tokens_BT[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return responses


def accuracy_by_length(problems: list[Problem], responses: list[str]) -> str:
    """All, then by number of terms."""
    environment = ChainSums()
    rewards: dict[str, list[float]] = defaultdict(list)
    for problem, response in zip(problems, responses, strict=True):
        terms = num_terms(problem)
        reward = environment.grade(problem, response).reward
        bucket = next(
            name for name, most in (("2", 2), ("3-4", 4), ("5-8", 8), ("9-16", 16), ("17+", 99)) if terms <= most
        )
        for key in ("all", bucket, *(["5+"] if terms >= 5 else [])):
            rewards[key].append(reward)
    keys = ("all", "2", "3-4", "5-8", "9-16", "17+", "5+")
    return "  ".join(f"{key}: {sum(rewards[key]) / len(rewards[key]):.3f}" for key in keys if rewards[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--eval-problems", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    # Problems of another seed than any run's: the demonstrations should not be the problems of seed 0.
    teach(model, demonstration_batches(tokenizer, seed=1_000_003 + options.seed), options.steps)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    evaluate(model, tokenizer, options.eval_problems)


if __name__ == "__main__":
    main()
