"""The file of shared weights: a header, a few 64-bit words, and three slots that each hold every tensor.

The header has a magic number, the layout version, and the JSON layout of a slot. A slot is written between two stamps:
`begin` before the first byte, `end` after the last. Then the slot becomes the newest; the newest slot is never written
to. The contents of a slot were of one version if `begin`, read after them, equals `end`, read before them.
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
import numpy.typing as npt
from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.specs import dtype_name, num_bytes, torch_dtype

NUM_SLOTS = 3

# Indices of words. Every core reads and writes an aligned word atomically.
NEWEST = 0  # version << 2 | slot + 1, so that one store publishes both; 0 before the first version
BEGIN, END, CONTENT = 8, 16, 24  # + slot; not on the cache line of NEWEST, which receivers poll

_MAGIC = b"MIDFLTWT"
_LAYOUT_VERSION = 2
_HEADER = struct.Struct("<8sII")  # magic, layout version, bytes of JSON
_WORDS_AT, _NUM_WORDS = 64, 32
_JSON_AT = _WORDS_AT + 8 * _NUM_WORDS
_TENSOR_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Position of one tensor in a slot: offset and size (bytes)."""

    spec: TensorSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Positions of all tensors in a slot, in the order announced."""

    tensors: tuple[PlacedTensor, ...]
    slot_bytes: int

    def views(self, slot: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of a uint8 slot."""
        return {
            placed.spec.name: slot[placed.offset : placed.offset + placed.num_bytes]
            .view(torch_dtype(placed.spec))
            .view(placed.spec.shape)
            for placed in self.tensors
        }

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights one by one, each checked against the announcement.

        Raises: WeightUpdateError if a tensor is missing, out of order, not announced, or of another shape or dtype.
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
                actual = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                raise WeightUpdateError(
                    f"tensor {spec.name!r} is {actual}, announced as {spec.dtype} {list(spec.shape)}"
                )
            yield name, tensor
            del tensor  # the next one may be gathered into new memory
        if (spec := next(expected, None)) is not None:
            raise WeightUpdateError(f"the weights lack {spec.name!r}")


def lay_out(specs: Sequence[TensorSpec]) -> SlotLayout:
    """Return the layout of a slot for these tensors.

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
    return f"the weights lack {expected.name!r}, or it comes after {name!r}; it was announced before {name!r}"


class SlotFile:
    """The mapped file: `layout`, `words` and the three `slots` as uint8 arrays.

    Raises: FileNotFoundError; WeightUpdateError if `path` is another kind of file.
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
        self._all_words = np.frombuffer(mapped, np.uint64, _NUM_WORDS, _WORDS_AT)
        size = self.layout.slot_bytes
        self.slots = [np.frombuffer(mapped, np.uint8, size, first_slot + index * size) for index in range(NUM_SLOTS)]

    def begin_of(self, slot: int) -> npt.NDArray[np.uint64]:
        """Return the stamp `begin` of a slot as an array of one word, which stays readable after `close`."""
        return self._all_words[BEGIN + slot : BEGIN + slot + 1]

    def is_removed(self) -> bool:
        """Return True if the file was removed or replaced by another one."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Close the file. The mapping stays until its last view is gone."""
        self.words.release()
        self.slots = []
        os.close(self._fd)


class Fence:
    """Memory barrier: other cores see the accesses before a call ahead of the accesses after the call.

    x86 guarantees the order that sender and receiver need; ARM does not. Python has no barrier other than releasing
    and acquiring a lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def create(path: Path, layout: SlotLayout) -> None:
    """Create a file with empty slots at `path`, atomically, and reserve its memory.

    Without the reservation, a shortage of memory would kill the sender with SIGBUS during a write.
    Raises: WeightUpdateError if there is no room for the file.
    """
    text = msgspec.json.encode(layout)
    size = _first_slot(len(text)) + NUM_SLOTS * layout.slot_bytes
    draft = path.with_name(f".{path.name}.new")  # a fixed name, so that killed senders leave at most one draft
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
    """Return the layout and the offset of the first slot (bytes)."""
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
        # Private: PyTorch has no read-only tensors, and a write to a view must not reach the sender's weights. Pages
        # that this process does not write to are the shared ones.
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # Mapping all pages at once: page faults one by one would make the first sends many times slower than later ones.
    populate = getattr(mmap, "MAP_POPULATE", 0)  # not on macOS
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | populate)


def _first_slot(num_text_bytes: int) -> int:
    return _aligned(_JSON_AT + num_text_bytes, mmap.PAGESIZE)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
