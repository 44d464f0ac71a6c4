"""CUDA graphs for decode steps: the kernel launches of each batch size are captured once, then replayed.

A captured graph reads and writes fixed addresses. Therefore the inputs of a step are copied into static buffers, the
number of sequences is rounded up to one of a few buckets, and each of the two weight sets has its own graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midflight.engine.cache import PAGE_SIZE, SCRATCH_PAGE, KVCache
from midflight.engine.model import EngineModel
from midflight.engine.plan import Batch

# Takes the function to capture and returns a function that replays it. Every replay writes to the same tensor.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def bucket_of(num_seqs: int) -> int:
    """Return the padded batch size of a step: powers of two up to 8, multiples of 8 up to 64, then multiples of 32."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    width = 8 if num_seqs <= 64 else 32
    return -(-num_seqs // width) * width


class CudaGraphs:
    """Implements Capture on a CUDA device. All graphs share one memory pool: no two of them ever run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a graph, after the required warm-up on a side stream."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # By default, an allocation or a copy of any other thread, such as one that receives weights, ends a capture
            # with an error.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Batch
    replay: Callable[[], Tensor]


class GraphedModel:
    """Implements EngineModel around another model: replays pure decode steps, passes steps with prefills through."""

    def __init__(self, model: EngineModel, max_pages: int, capture: Capture | None = None) -> None:
        """Wrap a model.

        `max_pages`: largest number of pages of one sequence. `capture`: None means CUDA graphs on the model's device.
        """
        self._model, self._max_pages = model, max_pages
        self._capture = capture or CudaGraphs(model.device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.shape, self.dtype, self.device, self.kernels = model.shape, model.dtype, model.device, model.kernels
        self.weights = model.weights

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if batch.chunks:
            return self._model.forward(batch, cache)
        bucket = bucket_of(batch.num_decode)
        key = (self.weights.index, bucket)
        if key not in self._graphs:
            inputs = self._static_inputs(bucket)
            _fill(inputs, batch)
            self._graphs[key] = _Graph(inputs, self._capture(lambda: self._model.forward(inputs, cache)))
        graph = self._graphs[key]
        _fill(graph.inputs, batch)
        # The next replay overwrites this result, and the prefix cache keeps some of the rows.
        return graph.replay()[: batch.num_decode].clone()

    def _static_inputs(self, bucket: int) -> Batch:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        return Batch(
            token_ids=zeros(bucket),
            positions=zeros(bucket),
            slots=torch.arange(bucket, device=self.device),
            slot_mapping=zeros(bucket),
            tables=zeros(bucket, self._max_pages, dtype=torch.int32),
            logits_index=torch.arange(bucket, device=self.device),
            num_decode=bucket,
            chunks=(),
            max_length=self._max_pages * PAGE_SIZE,
        )


def _fill(inputs: Batch, batch: Batch) -> None:
    """Copy the batch into the static buffers.

    Padding decodes token 0 at position 0 of the scratch page; its logits are never read.
    """
    num_seqs = batch.num_decode
    inputs.token_ids[:num_seqs].copy_(batch.token_ids)
    inputs.positions[:num_seqs].copy_(batch.positions)
    inputs.slot_mapping[:num_seqs].copy_(batch.slot_mapping)
    torch.index_select(batch.tables, 0, batch.slots, out=inputs.tables[:num_seqs])
    inputs.token_ids[num_seqs:] = 0
    inputs.positions[num_seqs:] = 0
    inputs.slot_mapping[num_seqs:] = SCRATCH_PAGE * PAGE_SIZE
    inputs.tables[num_seqs:] = SCRATCH_PAGE
