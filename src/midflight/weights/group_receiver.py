"""An engine's end of a process group: receives weights, hands them to the engine, passes them on to the next engine.

    receiving thread    waits for: room in the ring; the rank before this one
    passing-on thread   waits for: a piece received; the rank after this one
    caller              waits for: the pieces of the next tensor

The three work at the same time on different parts of a ring of a few buckets. Any error aborts the group on this rank.
The trainer hears of it and closes the group; its other ranks notice at once that their connections to the trainer end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Literal

import torch
from torch import Tensor

from midflight.concurrency.background import run_in_background
from midflight.errors import WeightUpdateError
from midflight.weights.buckets import Bucket, place_in_ring, plan_buckets
from midflight.weights.group_joining import join_group
from midflight.weights.group_links import Transfer
from midflight.weights.group_peers import end_connection
from midflight.weights.process_group import NUM_AHEAD, Announcement, Invitation, addresses_of
from midflight.weights.progress import Progress

_JOIN_S = 2.0  # longest wait of `close` for transfers to fail

Lost = Literal["previous", "next", "group"]


class ProcessGroupReceiver:
    """Membership of an engine in one process group; the constructor joins.

    `address`: IP address of the trainer; default: the first one of the invitation's host.
    Raises: WeightUpdateError if the group is not complete in time, or was formed without this engine.
    """

    def __init__(self, invitation: Invitation, device: torch.device | str = "cpu", address: str | None = None) -> None:
        self.is_chain = invitation.backend == "tcp"
        self._device = torch.device("cpu" if self.is_chain else device)
        self._name = f"{invitation.master_address}:{invitation.master_port}"
        self._closed = threading.Event()
        self._incoming: _Incoming | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        address = address or addresses_of(invitation.master_address, invitation.master_port)[0]
        joined = join_group(invitation, address, self._device)
        self.rank, self.world_size = joined.rank, len(joined.members) + 1
        self._peers = [
            f"the trainer at {invitation.master_address}",
            *(f"the engine at {member.address}" for member in joined.members),
        ]
        # Ends without a byte sent when the trainer closes the group or dies.
        self._links, self._lifeline = joined.links, joined.trainer
        threading.Thread(target=self._watch, name="weights group watch", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """True until the trainer or this rank closes the group, or a transfer fails."""
        return not self._closed.is_set()

    def tensors(self, announcement: Announcement) -> Iterator[tuple[str, Tensor]]:
        """Receive the announced tensors; each is valid until the next one is taken.

        The transfer starts at once. It goes on, for the engines behind this one, if the caller stops early.
        Raises (the iterator): WeightUpdateError if the rest does not arrive; the group is then closed.
        """
        buckets = plan_buckets(announcement.specs, announcement.bucket_bytes)
        places, size = place_in_ring(buckets, announcement.bucket_bytes)
        if len(self._memory) < size:
            # Kept for the next update: fresh memory costs a page fault every 4 kB, about as much as the transfer.
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        slots = [
            self._memory[place.offset : place.offset + bucket.num_bytes]
            for place, bucket in zip(places, buckets, strict=True)
        ]
        incoming = _Incoming(self, announcement.version, buckets, slots, [place.num_left for place in places])
        self._incoming = incoming
        return incoming.start()

    def progress(self) -> Progress:
        """State of the last or running receive."""
        incoming = self._incoming
        return incoming.progress() if incoming else Progress(self._name, self.rank, self.world_size)

    def close(self) -> None:
        """Leave the group; a running receive fails at once, on this and on all other ranks."""
        self._fail("group", "the group was closed")
        if self._incoming is not None:
            self._incoming.join()

    def _watch(self) -> None:
        with self._lifeline, contextlib.suppress(OSError):
            self._lifeline.recv(1)
        self._fail("group", f"{self._peers[0]} closed the group or is gone")

    def _fail(self, lost: Lost, reason: str) -> None:
        """Leave the group; running receives fail with this reason, unless they have already failed."""
        is_first = not self._closed.is_set()
        self._closed.set()
        if self._incoming is not None:
            self._incoming.fail(lost, reason)
        if is_first:
            self._links.abort()
            end_connection(self._lifeline)


class _Incoming:
    """One update on its way through this rank."""

    def __init__(
        self,
        receiver: ProcessGroupReceiver,
        version: int,
        buckets: Sequence[Bucket],
        slots: Sequence[Tensor],
        num_left: Sequence[int],
    ) -> None:
        """Store the plan. `slots`: memory of each bucket; `num_left`: buckets that must have left the ring before."""
        self._receiver, self._version = receiver, version
        self._buckets, self._slots, self._num_left = buckets, slots, num_left
        self._changed = threading.Condition()
        self._received = self._passed_on = self._taken = 0  # bytes
        self._num_taken = self._num_passed_on = 0  # buckets
        self._has_room = True
        self._lost: Lost | Literal[""] = ""
        self._reason: str | None = None
        self._transfers: list[Future[None]] = []
        self._source = receiver.rank - 1 if receiver.is_chain else 0
        self._passes_on = receiver.is_chain and receiver.rank + 1 < receiver.world_size
        if not self._passes_on:
            self._num_passed_on = len(buckets)
        self._num_bytes = sum(bucket.num_bytes for bucket in buckets)
        if not receiver.is_open:
            self.fail("group", "the group was closed")

    def start(self) -> Iterator[tuple[str, Tensor]]:
        """Start the transfer; return the tensors. If the iterator is dropped, the rest counts as taken."""
        self._transfers = [run_in_background(self._receive)]
        if self._passes_on:
            self._transfers.append(run_in_background(self._pass_on))
        tensors = self._tensors()
        next(tensors)
        return tensors

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield "", torch.empty(0)  # for `start`: the iterator runs its `finally` only after it was entered
            before = 0  # bytes of earlier buckets
            for bucket, slot in zip(self._buckets, self._slots, strict=True):
                for placed, (name, view) in zip(bucket.layout.tensors, bucket.layout.views(slot).items(), strict=True):
                    self._wait_for(before + placed.offset + placed.num_bytes)
                    yield name, view
                before += bucket.num_bytes
                self._take(bucket.num_bytes, 1)
        finally:
            self._take(self._num_bytes - self._taken, len(self._buckets) - self._num_taken)

    def progress(self) -> Progress:
        receiver = self._receiver
        return Progress(
            receiver._name, receiver.rank, receiver.world_size, self._version, self._num_bytes,
            self._received, self._passed_on, self._taken, self._has_room, self._lost,
        )  # fmt: skip

    def fail(self, lost: Lost, reason: str) -> None:
        with self._changed:
            if self._reason is None:
                self._lost, self._reason = lost, reason
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads, after `fail`: at the end of the process, a thread inside of NCCL would abort it."""
        wait(self._transfers, _JOIN_S)

    def _receive(self) -> None:
        """Receive all pieces. Thread."""
        ahead: deque[tuple[Transfer, int]] = deque()
        try:
            for number, piece in self._pieces():
                while not self._enter(number, wait=not ahead):
                    if not ahead:
                        return
                    self._finish_receiving(*ahead.popleft())
                ahead.append((self._receiver._links.receive(piece), len(piece)))
                if len(ahead) == NUM_AHEAD:
                    self._finish_receiving(*ahead.popleft())
            while ahead:
                self._finish_receiving(*ahead.popleft())
        except RuntimeError as error:
            previous = self._receiver._peers[self._source]
            self._receiver._fail("previous", f"the connection to {previous} failed: {error}")

    def _pass_on(self) -> None:
        """Send all pieces to the next rank. Thread."""
        ahead: deque[tuple[Transfer, int, int]] = deque()
        end = 0
        ends = list(itertools.accumulate(bucket.num_bytes for bucket in self._buckets))
        try:
            for number, piece in self._pieces():
                end += len(piece)
                while ahead and not self._has_ended(end):  # the next piece may need the room of these
                    self._finish_sending(*ahead.popleft())
                with self._changed:
                    self._changed.wait_for(functools.partial(self._has_ended, end))
                    if self._received < end:
                        return
                num_left = number + (end == ends[number])
                ahead.append((self._receiver._links.send(piece), len(piece), num_left))
                if len(ahead) == NUM_AHEAD:
                    self._finish_sending(*ahead.popleft())
            while ahead:
                self._finish_sending(*ahead.popleft())
        except RuntimeError as error:
            following = self._receiver._peers[self._receiver.rank + 1]
            self._receiver._fail("next", f"passing on to {following} failed: {error}")

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield every piece in order: the number of its bucket and its memory."""
        for number, (bucket, slot) in enumerate(zip(self._buckets, self._slots, strict=True)):
            for part in bucket.pieces():
                yield number, slot[part]

    def _enter(self, number: int, wait: bool) -> bool:
        """Return True once bucket `number` has room in the ring; False if it has none, or the transfer has failed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._is_free(number) or self._reason is not None)
            self._has_room = self._is_free(number)
            return self._has_room and self._reason is None

    def _is_free(self, number: int) -> bool:
        return self._num_left[number] <= min(self._num_taken, self._num_passed_on)

    def _has_ended(self, end: int) -> bool:
        """True once all bytes before `end` have arrived, or the transfer has failed."""
        return self._received >= end or self._reason is not None

    def _wait_for(self, end: int) -> None:
        """Wait until all bytes before `end` have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended(end))
            if self._received < end:
                raise WeightUpdateError(f"version {self._version} did not arrive: {self._reason}")

    def _finish_receiving(self, transfer: Transfer, num_bytes: int) -> None:
        transfer.wait()
        with self._changed:
            self._received += num_bytes
            self._changed.notify_all()

    def _finish_sending(self, transfer: Transfer, num_bytes: int, num_left: int) -> None:
        transfer.wait()
        with self._changed:
            self._passed_on += num_bytes
            self._num_passed_on = num_left
            self._changed.notify_all()

    def _take(self, num_bytes: int, num_buckets: int) -> None:
        with self._changed:
            self._taken += num_bytes
            self._num_taken += num_buckets
            self._changed.notify_all()
