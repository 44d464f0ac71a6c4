"""PipelineRL's algorithm 2 in one file: an actor that always generates and a trainer that always trains.

    python examples/pipeline_in_one_file.py [--steps 20]

Actor: keeps H sequences in flight. Before every token it adopts new weights of the trainer, if there are any. No
sequence is aborted, and keys and values computed by older weights stay. It then samples a token for every sequence, and
stores the log-probability and the weight version with the token. It grades ended sequences and queues complete groups.
Trainer: takes the B rollouts of the first complete groups, makes an optimizer step, and publishes the weights.

Both are generators; each `yield` lets one decode step pass. In the package, actor and trainer are two processes at full
speed. Here an optimizer step always takes TRAIN_TICKS decode steps, so every run is the same.

    version   number of optimizer steps behind the weights
    mu, pi    behavior policy, which sampled a token; policy in training
    lag       version of pi minus version of mu, for each token
    shapes    N sequences, S tokens of a sequence, T sampled tokens, V vocabulary, W tokens in a cache,
              C keys and values of all layers (2 per layer), K heads, E head size
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from midflight.config import SHIPPED_RECIPES
from midflight.engine.randomness import stream_key, uniforms_at
from midflight.envs.chain_sums import ChainSums

MODEL = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
TRAIN_TICKS = 8  # decode steps that pass during an optimizer step
MAX_RATIO = 5.0  # c of equation 5
LEARNING_RATE, ADAM_BETAS, MAX_GRAD_NORM = 2e-4, (0.9, 0.95), 1.0


@dataclass
class Rollout:
    """One attempt at problem `group_id`; the last three lists have one entry per sampled token."""

    rollout_id: int
    group_id: int
    prompt: list[int]
    reward: float | None = None  # None: in flight
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # log mu
    versions: list[int] = field(default_factory=list)


@dataclass
class Pipeline:
    """Settings, and the state that actor and trainer share: groups go to the trainer, weights to the actor."""

    seed: int = 0
    num_in_flight: int = 64  # H
    batch_size: int = 32  # B, rollouts per optimizer step
    group_size: int = 8  # rollouts per problem
    max_tokens: int = 160  # per response
    queue: deque[list[Rollout]] = field(default_factory=deque)  # complete groups, in order of completion
    version: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    batches: list[list[Rollout]] = field(default_factory=list)  # one batch per optimizer step
    ratios: Tensor = field(default_factory=lambda: torch.ones(0))  # pi/mu of every token in the last batch


def run(pipeline: Pipeline, num_steps: int) -> Iterator[list[Rollout]]:
    """Yield the batch of every optimizer step, right after the step."""
    logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    acting, training = actor(pipeline, policy), trainer(pipeline, copy.deepcopy(policy))
    for version in range(num_steps):
        while pipeline.version == version:
            next(training)
            next(acting)
        yield pipeline.batches[version]


def actor(pipeline: Pipeline, policy: Any) -> Iterator[None]:
    environment, tokenizer = ChainSums(seed=pipeline.seed), AutoTokenizer.from_pretrained(MODEL)
    version, group_size = 0, pipeline.group_size
    started: list[Rollout] = []  # every rollout so far
    in_flight: list[Rollout] = []
    caches: dict[int, Tensor] = {}  # by rollout id: keys and values of all tokens but the last, [S, C, K, E]
    while True:
        if pipeline.version > version:  # the in-flight update: sequences and caches stay unchanged
            policy.load_state_dict(pipeline.weights)
            version = pipeline.version
        # Free slots are filled immediately, unless more than a batch waits for the trainer.
        num_excess = max(0, len(pipeline.queue) * group_size - pipeline.batch_size)
        for _ in range(pipeline.num_in_flight - len(in_flight) - num_excess):
            group_id = len(started) // group_size
            prompt = tokenizer.encode(environment.problem(group_id).prompt)
            started.append(Rollout(len(started), group_id, prompt))
            in_flight.append(started[-1])
        if in_flight:
            sample_tokens(policy, version, in_flight, caches, pipeline.seed)
        for rollout in in_flight:
            stopped = rollout.response[-1] == tokenizer.eos_token_id
            if stopped or len(rollout.response) == pipeline.max_tokens:
                text = tokenizer.decode(rollout.response[:-1] if stopped else rollout.response)
                rollout.reward = environment.grade(environment.problem(rollout.group_id), text).reward
                del caches[rollout.rollout_id]
                group = started[rollout.group_id * group_size : (rollout.group_id + 1) * group_size]
                if len(group) == group_size and all(member.reward is not None for member in group):
                    pipeline.queue.append(group)
        in_flight = [rollout for rollout in in_flight if rollout.reward is None]
        yield


@torch.inference_mode()
def sample_tokens(policy: Any, version: int, rollouts: list[Rollout], caches: dict[int, Tensor], seed: int) -> None:
    """Run one decode step: feed the last token of every sequence, and sample the next one."""
    for rollout in rollouts:
        if rollout.rollout_id not in caches:  # just admitted
            prefilled = policy(torch.tensor([rollout.prompt[:-1]]), use_cache=True).past_key_values
            caches[rollout.rollout_id] = columns(prefilled, start=0)[0]
    pasts = [caches[rollout.rollout_id] for rollout in rollouts]
    lengths_N1 = torch.tensor([[len(past)] for past in pasts])
    # Padding is on the left, so that the new token of every sequence is in the last column.
    past_CNKWE = pad_sequence(pasts, batch_first=True, padding_side="left").permute(2, 0, 3, 1, 4)
    width = past_CNKWE.shape[3]
    visible_NW = torch.arange(width + 1) >= width - lengths_N1
    cache = DynamicCache(list(zip(past_CNKWE[::2], past_CNKWE[1::2], strict=True)))
    last_N1 = torch.tensor([(rollout.prompt + rollout.response)[-1:] for rollout in rollouts])
    output = policy(last_N1, attention_mask=visible_NW.long(), position_ids=lengths_N1, past_key_values=cache)
    logprobs_NV = output.logits[:, -1].log_softmax(dim=-1)
    # A uniform number selects the token where the cumulative probability exceeds it. The number depends on seed,
    # rollout and position only, and so not on other sequences in flight or on the time of an update.
    keys_N = np.array([stream_key(seed, rollout.rollout_id) for rollout in rollouts])
    uniforms_N = torch.from_numpy(uniforms_at(keys_N, np.array([len(rollout.response) for rollout in rollouts])))
    sums_NV = logprobs_NV.double().exp().cumsum(dim=-1)
    sampled_N = (sums_NV <= uniforms_N[:, None] * sums_NV[:, -1:]).sum(dim=-1)
    new_tokens = zip(rollouts, sampled_N.tolist(), logprobs_NV, columns(cache, start=width), strict=True)
    for rollout, token_id, logprobs_V, column in new_tokens:
        rollout.response.append(token_id)
        rollout.logprobs.append(float(logprobs_V[token_id]))
        rollout.versions.append(version)
        caches[rollout.rollout_id] = torch.cat([caches[rollout.rollout_id], column])


def columns(cache: Any, start: int) -> Tensor:
    """Return the cache of a model from column `start` on, all layers in one tensor, [N, W, C, K, E]."""
    parts = [part[:, :, start:] for layer in cache.layers for part in (layer.keys, layer.values)]
    return torch.stack(parts).permute(1, 3, 0, 2, 4)


def trainer(pipeline: Pipeline, policy: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0)
    while True:
        while len(pipeline.queue) * pipeline.group_size < pipeline.batch_size:
            yield
        groups = [pipeline.queue.popleft() for _ in range(pipeline.batch_size // pipeline.group_size)]
        for _ in range(TRAIN_TICKS):  # the actor continues meanwhile, with weights about to be outdated
            yield
        batch = [rollout for group in groups for rollout in group]
        num_tokens, ratios = sum(len(rollout.response) for rollout in batch), []
        for group in groups:
            rewards_N = torch.tensor([rollout.reward for rollout in group])
            advantages_N = (rewards_N - rewards_N.mean()) / (rewards_N.std(correction=0) + 1e-4)
            responses_NT = pad_sequence([torch.tensor(rollout.response) for rollout in group], batch_first=True)
            log_mus = [torch.tensor(rollout.logprobs) for rollout in group]
            log_mu_NT = pad_sequence(log_mus, batch_first=True, padding_value=torch.inf)  # ratio 0 for padding
            token_ids_NS = torch.cat([torch.tensor([rollout.prompt for rollout in group]), responses_NT], dim=1)
            # The logits at a token are for the next token.
            logits_NTV = policy(token_ids_NS[:, :-1], use_cache=False).logits[:, len(group[0].prompt) - 1 :]
            log_pi_NT = logits_NTV.log_softmax(dim=-1).gather(2, responses_NT[..., None]).squeeze(2)
            # Equation 5; the ratio is a constant weight without gradient.
            ratio_NT = (log_pi_NT.detach() - log_mu_NT).exp()
            loss = -(ratio_NT.clamp(max=MAX_RATIO) * advantages_N[:, None] * log_pi_NT).sum() / num_tokens
            loss.backward()
            ratios.append(ratio_NT[log_mu_NT.isfinite()])
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        pipeline.batches.append(batch)
        pipeline.ratios = torch.cat(ratios)
        pipeline.weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        pipeline.version += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    torch.set_num_threads(1)  # the model is too small to profit from threads
    pipeline = Pipeline()
    for index, batch in enumerate(run(pipeline, parser.parse_args().steps)):
        reward = np.mean([rollout.reward for rollout in batch])
        lags = [index - version for rollout in batch for version in rollout.versions]
        # Effective sample size, equation 6: 1 if all tokens have equal weights, as on-policy.
        ess = pipeline.ratios.sum() ** 2 / (len(lags) * pipeline.ratios.square().sum())
        print(f"version {index + 1:3}  reward {reward:.2f}  lag {np.mean(lags):.2f}, max {max(lags):2}  ESS {ess:.4f}")
