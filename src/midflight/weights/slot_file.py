"""The file that shared weights lie in: a header, a few words, and three slots that each hold every tensor once.

Magic, layout version and JSON of where every tensor lies in a slot; then the words; then the slots. A slot is written
between two stamps, `begin` before its first byte and `end` after its last, and only then becomes the newest. The newest
slot is never written to. A copy of a slot is whole if `begin` says after it what `end` said before it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.specs import dtype_name, num_bytes, torch_dtype

NUM_SLOTS = 3

# Indices of words. An aligned word is read and written whole, by any core.
NEWEST = 0  # version << 2 | slot + 1, so that one store publishes both; 0 before the first version
BEGIN, END, VERSION = 8, 16, 24  # + slot; not on the cache line that is polled

_MAGIC = b"MIDFLTWT"
_LAYOUT_VERSION = 1
_HEADER = struct.Struct("<8sII")  # magic, layout version, bytes of JSON
_WORDS_AT, _NUM_WORDS = 64, 32
_JSON_AT = _WORDS_AT + 8 * _NUM_WORDS
_TENSOR_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Where one tensor lies: bytes from the start of a slot."""

    spec: TensorSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where every tensor lies in a slot, in the order announced."""

    tensors: tuple[PlacedTensor, ...]
    slot_bytes: int

    def views(self, slot: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of a uint8 slot."""
        return {
            placed.spec.name: slot[placed.offset : placed.offset + placed.num_bytes]
            .view(torch_dtype(placed.spec))
            .view(placed.spec.shape)
            for placed in self.tensors
        }

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, one after the other, each checked against what was announced in its place.

        Raises: WeightUpdateError if one is missing, too many, or of another shape or dtype.
        """
        announced = {placed.spec.name: placed.spec for placed in self.tensors}
        expected = iter(announced.values())
        for name, tensor in weights:
            if name not in announced:
                raise WeightUpdateError(f"the weights have {name!r}, which was not announced")
            spec = next(expected, None)
            if spec is None or spec.name != name:
                raise WeightUpdateError(_misplaced(name, spec))
            if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                raise WeightUpdateError(
                    f"tensor {spec.name!r} is {found}, announced as {spec.dtype} {list(spec.shape)}"
                )
            yield name, tensor
        if (spec := next(expected, None)) is not None:
            raise WeightUpdateError(f"the weights lack {spec.name!r}")


def lay_out(specs: Sequence[TensorSpec]) -> SlotLayout:
    """The layout that holds these tensors.

    Raises: WeightUpdateError if a name is announced twice or a dtype cannot be sent.
    """
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise WeightUpdateError(f"tensor {repeated[0]!r} is announced twice")
    placed, end = [], 0
    for spec in specs:
        placed.append(PlacedTensor(spec, end, num_bytes(spec)))
        end = _aligned(end + placed[-1].num_bytes, _TENSOR_ALIGNMENT_BYTES)
    return SlotLayout(tuple(placed), end)


def _misplaced(name: str, expected: TensorSpec | None) -> str:
    if expected is None:
        return f"the weights have {name!r} twice"
    return f"the weights lack {expected.name!r}, or it is not before {name!r}, as was announced"


class SlotFile:
    """The mapped file: `layout`, `words` and the three `slots` as uint8 arrays.

    Raises: FileNotFoundError; WeightUpdateError if the file is something else.
    """

    def __init__(self, path: Path, writable: bool) -> None:
        self._fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.layout, first_slot = _read_header(path, self._fd)
            mapped = _map(self._fd, writable)
        except BaseException:
            os.close(self._fd)
            raise
        self.words = memoryview(mapped)[_WORDS_AT:_JSON_AT].cast("Q")
        size = self.layout.slot_bytes
        self.slots = [np.frombuffer(mapped, np.uint8, size, first_slot + index * size) for index in range(NUM_SLOTS)]

    def is_removed(self) -> bool:
        """Whether the path has come to mean another file, or none."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Let go of the file; the mapping itself goes with the last view of it."""
        self.words.release()
        self.slots = []
        os.close(self._fd)


class Fence:
    """Keeps memory accesses before a call from trading places with those after it, as another core sees them.

    x86 keeps the order that the two ends need by itself, ARM does not. Giving a lock back and taking it again is the
    one barrier that Python has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def create(path: Path, layout: SlotLayout) -> None:
    """Put a file with empty slots at `path`, whole or not at all, with its memory set aside.

    Without that, memory that runs out would kill the sender with SIGBUS in the middle of a write.
    Raises: WeightUpdateError if it does not fit.
    """
    text = msgspec.json.encode(layout)
    size = _first_slot(len(text)) + NUM_SLOTS * layout.slot_bytes
    draft = path.with_name(f".{path.name}.new")  # always the same, so that killed senders leave no more than one
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _LAYOUT_VERSION, len(text)), 0)
            os.pwrite(fd, text, _JSON_AT)
        finally:
            os.close(fd)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WeightUpdateError(f"{path}: cannot set aside {size / 1e6:.1f} MB: {error.strerror}") from error


def _read_header(path: Path, fd: int) -> tuple[SlotLayout, int]:
    """The layout and where the first slot starts."""
    try:
        magic, layout_version, num_text_bytes = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if magic != _MAGIC:
            raise ValueError("wrong magic number")
        if layout_version != _LAYOUT_VERSION:
            raise ValueError(f"layout version {layout_version}, not {_LAYOUT_VERSION}")
        layout = msgspec.json.decode(os.pread(fd, num_text_bytes, _JSON_AT), type=SlotLayout)
        first_slot = _first_slot(num_text_bytes)
        if os.fstat(fd).st_size != first_slot + NUM_SLOTS * layout.slot_bytes:
            raise ValueError("wrong size")
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise WeightUpdateError(f"{path} is not a file of shared weights ({error}); remove it") from error
    return layout, first_slot


def _map(fd: int, writable: bool) -> mmap.mmap:
    if not writable:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    # Faulting the pages in one by one makes the first sends many times slower than the later ones.
    populate = getattr(mmap, "MAP_POPULATE", 0)  # not on macOS
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | populate)


def _first_slot(num_text_bytes: int) -> int:
    return _aligned(_JSON_AT + num_text_bytes, mmap.PAGESIZE)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
