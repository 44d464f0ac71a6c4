"""Continuous batching with in-flight weight updates, in one process, over PyTorch.

`step()` = adopt staged weights, if asked for -> schedule -> run -> sample -> record. Another thread stages new weights
meanwhile, and they take effect between two steps: sequences in flight keep their tokens, keys and values, and continue.
Every token is recorded with the weight version that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from midflight.engine.cache import PAGE_SIZE, KVCache, page_bytes
from midflight.engine.graphs import GraphedModel
from midflight.engine.model import EngineModel
from midflight.engine.pages import PagePool
from midflight.engine.plan import Batch, StepPlan
from midflight.engine.running_batch import MAX_STOP_TOKENS, RunningBatch, StopRules
from midflight.engine.sampler import score, truncate
from midflight.engine.scheduler import Scheduler
from midflight.errors import ModelError, RequestError
from midflight.protocols import IncomingWeights
from midflight.types import TEMPERATURES, Completion, GeneratedTokens, GenerationRequest, Int64Array, RolloutId


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity of an engine."""

    max_num_seqs: int  # slots of the running batch
    max_prompt_tokens: int
    max_new_tokens: int
    max_batched_tokens: int = 512  # decode and prefill tokens in one step
    kv_cache_bytes: int | None = None  # None: enough for every slot at its maximum length
    max_total_tokens: int | None = None  # prompt and response together; None: the sum of their limits

    @property
    def max_length(self) -> int:
        """Largest number of prompt and response tokens of one sequence."""
        return self.max_total_tokens or self.max_prompt_tokens + self.max_new_tokens


class Engine:
    """Implements LocalEngine over an EngineModel.

    After a weight update, sequences in flight keep their keys and values. If `recompute_kv`, the new weights compute
    them again from the tokens. The prefix cache is emptied. An update with the same content changes the number only.

    A model with one set of weights pauses: `step` returns no tokens while `stage` replaces the weights, and uses them
    as soon as they are complete, whether adopted or not. If this fails, the engine has no weights. `step` then raises
    WeightUpdateError once, and samples nothing until the next complete version.
    """

    def __init__(
        self,
        model: EngineModel,
        limits: EngineLimits,
        *,
        version: int = 0,
        recompute_kv: bool = False,
        prefix_caching: bool = True,
        stop_rules: StopRules | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """Allocate the KV cache. Without `stop_rules`, the engine ignores the stop strings of requests.

        `cuda_graphs`: on a CUDA device, replay decode steps as graphs instead of launching their kernels one by one.
        Raises: ModelError if the model's context or the cache is too small for one sequence.
        """
        shape = model.shape
        if limits.max_length > shape.max_positions:
            raise ModelError(
                f"{limits.max_prompt_tokens} prompt and {limits.max_new_tokens} new tokens are more than the model's"
                f" context of {shape.max_positions}; lower one of the two limits"
            )
        self._model: EngineModel = model
        self._limits, self._recompute_kv = limits, recompute_kv
        self._weights, self._num_changes = model.weights, model.weights.num_changes
        self._weights.set_first_version(version)
        max_pages = -(-limits.max_length // PAGE_SIZE)
        # Plus the scratch page, which is never allocated to a sequence.
        num_pages = limits.max_num_seqs * max_pages + 1
        if limits.kv_cache_bytes is not None:
            one_page = page_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype)
            num_pages = min(num_pages, limits.kv_cache_bytes // one_page)
            if num_pages - 1 < max_pages:
                raise ModelError(
                    f"a KV cache of {limits.kv_cache_bytes} bytes has {num_pages} pages of {one_page} bytes; one"
                    f" sequence of {limits.max_length} tokens needs {max_pages + 1}; give the cache more bytes"
                )
        if model.device.type == "cuda" and cuda_graphs:
            self._model = GraphedModel(model, max_pages)
        self._cache = KVCache(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, num_pages, model.dtype, model.device
        )
        self._running = RunningBatch(limits.max_num_seqs, limits.max_length, max_pages, stop_rules)
        pool: PagePool[Tensor] = PagePool(num_pages, PAGE_SIZE)
        max_scored_tokens = max(1, _MAX_SCORED_LOGITS // shape.vocab_size)
        self._scheduler = Scheduler(self._running, pool, limits.max_batched_tokens, prefix_caching, max_scored_tokens)

    @property
    def weight_version(self) -> int:
        return self._weights.version

    @property
    def num_in_flight(self) -> int:
        return self._scheduler.num_in_flight

    @property
    def num_engines(self) -> int:
        return 1

    @property
    def num_preempted(self) -> int:
        """Number of preemptions so far: a sequence gave back its pages and is prefilled again later."""
        return self._scheduler.num_preempted

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the forward pass and the KV cache."""
        return self._model.dtype

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        seen: set[RolloutId] = set()
        for request in requests:
            self._check(request)
            if request.rollout_id in seen:
                raise RequestError(f"request {request.rollout_id} is in the list twice; every request needs its own id")
            seen.add(request.rollout_id)
        for request in requests:
            self._scheduler.add(request)

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        return self._scheduler.generated(rollout_id, start)

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        return self._scheduler.abort(rollout_ids)

    def adopt(self, version: int) -> None:
        self._weights.adopt(version)

    def stage(self, incoming: IncomingWeights) -> None:
        """Copy new weights to where a later step can adopt them; return when they are complete.

        A second caller waits until the first one has ended. Weights of another lineage may have a lower version:
        `adopt` accepts it once they are staged, and the engine uses them when nothing is in flight.
        Raises: WeightUpdateError; see `WeightSets.stage`.
        """
        self._weights.stage(incoming)

    def step(self) -> list[Completion]:
        if not self._weights.begin_step(idle=not self.num_in_flight):
            return []
        try:
            if self._num_changes != self._weights.num_changes:
                self._num_changes = self._weights.num_changes
                self._scheduler.weights_changed(self._recompute_kv)
            return self._sample_step()
        finally:
            self._weights.end_step()

    def _sample_step(self) -> list[Completion]:
        plan = self._scheduler.plan()
        if plan is None:
            return []
        if plan.copies:
            self._cache.copy_pages(plan.copies)
        logits = None
        token_ids, logprobs, scores = _NO_TOKENS, _NO_LOGPROBS, _NO_LOGPROBS
        if len(plan.token_ids):
            tables = self._running.tables[: self._running.num_active]
            logits = self._model.forward(Batch.from_plan(plan, tables, self._model.device), self._cache)
        if logits is not None and len(plan.scored_slots):
            num_sampled = len(logits) - len(plan.scored_slots)
            scores = self._score(plan, logits[num_sampled:]).cpu().numpy()
            logits = logits[:num_sampled]
        if len(plan.sampled_slots):  # none if the step has only unfinished prefills
            drawn, drawn_logprobs = self._sample(plan, logits)
            token_ids, logprobs = drawn.cpu().numpy().astype(np.int32), drawn_logprobs.cpu().numpy()
        return self._scheduler.record(plan, logits, token_ids, logprobs, scores, self.weight_version)

    @torch.inference_mode()
    def _score(self, plan: StepPlan, logits: Tensor) -> Tensor:
        """Return the log-probability of the prompt token that follows each row of logits.

        Shapes: [P, V] -> [P].
        """
        running = self._running
        token_ids = running.token_ids[plan.scored_slots, plan.scored_positions].astype(np.int64)
        temperatures = running.temperatures[plan.scored_slots]
        return score(
            logits, torch.from_numpy(temperatures).to(logits.device), torch.from_numpy(token_ids).to(logits.device)
        )

    @torch.inference_mode()
    def _sample(self, plan: StepPlan, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        running, device = self._running, self._model.device
        parts = [*([logits] if logits is not None else []), *(logits[None] for logits in plan.cached_logits)]
        all_logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        sampled = plan.sampled_slots
        truncated = np.flatnonzero(
            (running.top_ks[sampled] > 0) | (running.top_ps[sampled] < 1) | (running.min_ps[sampled] > 0)
        )
        if len(truncated):
            all_logits = self._truncate(all_logits, sampled, truncated)
        return self._model.kernels.sample(
            all_logits,
            torch.from_numpy(running.temperatures[sampled]).to(device),
            torch.from_numpy(running.next_uniforms(sampled)).to(device),
        )

    def _truncate(self, logits: Tensor, sampled: Int64Array, truncated: Int64Array) -> Tensor:
        running = self._running
        options = (running.temperatures, running.top_ks, running.top_ps, running.min_ps)
        on_device = [torch.from_numpy(option[sampled[truncated]]).to(logits.device) for option in options]
        index = torch.from_numpy(truncated).to(logits.device)
        return logits.index_copy(0, index, truncate(logits[index], *on_device))

    def _check(self, request: GenerationRequest) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        limits, vocab_size = self._limits, self._model.shape.vocab_size
        name = f"request {request.name}"
        if request.rollout_id in self._scheduler:
            raise RequestError(f"{name} is in flight already")
        # Prompts that are only scored or contain earlier turns may exceed max_prompt_tokens, up to max_length in total.
        only_scored = request.score_prompt and not sampling.max_tokens
        max_prompt_tokens = limits.max_length - min(sampling.max_tokens, limits.max_new_tokens)
        if not (only_scored or request.first_position):
            max_prompt_tokens = min(max_prompt_tokens, limits.max_prompt_tokens)
        if not 0 < len(prompt) <= max_prompt_tokens:
            raise RequestError(f"{name}: its prompt has {len(prompt)} tokens, not 1 to {max_prompt_tokens}")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise RequestError(f"{name}: its prompt has token ids outside 0 to {vocab_size - 1}")
        if not (0 < sampling.max_tokens <= limits.max_new_tokens or only_scored):
            raise RequestError(f"{name}: max_tokens is {sampling.max_tokens}, not 1 to {limits.max_new_tokens}")
        if request.generated and len(request.generated) >= sampling.max_tokens:
            raise RequestError(
                f"{name}: it already has {len(request.generated)} of {sampling.max_tokens} tokens, so none is left to"
                " sample"
            )
        if (
            request.generated
            and not 0 <= request.generated.token_ids.min() <= request.generated.token_ids.max() < vocab_size
        ):
            raise RequestError(f"{name}: its generated tokens have ids outside 0 to {vocab_size - 1}")
        lowest, highest = TEMPERATURES
        if sampling.temperature != 0 and not lowest <= sampling.temperature <= highest:
            raise RequestError(f"{name}: temperature is {sampling.temperature}, not 0 or {lowest} to {highest}")
        if sampling.top_k < 0:
            raise RequestError(f"{name}: top_k is {sampling.top_k}, not 0 (all) or more")
        if not 0 < sampling.top_p <= 1:
            raise RequestError(f"{name}: top_p is {sampling.top_p}, not above 0 and up to 1")
        if not 0 <= sampling.min_p <= 1:
            raise RequestError(f"{name}: min_p is {sampling.min_p}, not 0 to 1")
        if request.score_prompt and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1, 0):
            raise RequestError(f"{name}: a prompt is scored without top_k, top_p and min_p; leave them out")
        if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(f"{name}: {len(sampling.stop_token_ids)} stop tokens, not {MAX_STOP_TOKENS} or fewer")
        unknown = [token_id for token_id in sampling.stop_token_ids if not 0 <= token_id < vocab_size]
        if unknown:
            raise RequestError(f"{name}: stop token ids {unknown} are outside 0 to {vocab_size - 1}")


# Largest size of the logits for prompt scores in one step (elements): 128 MB of float32.
_MAX_SCORED_LOGITS = 1 << 25
_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
