"""The trainer's sender of weights to generation servers, over one process group.

training thread   send      waits for: a copy of the weights; without snapshots, for the transfer
sending thread              consumes: the newest version; the registry of servers; their answers
                            waits for: a new version, an answer, the next look at the registry
                            unblocked by: send, relabel, answers, the time

The sending thread keeps a table of the engines and their versions. It forms a group of the engines that lack the newest
version, and uses the same group again while its members stay. A version that has not begun is replaced by a newer one.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.buckets import Bucket, plan_buckets
from midflight.weights.fleet import Fleet, SenderSettings
from midflight.weights.membership import Entry
from midflight.weights.process_group import Announcement
from midflight.weights.slot_file import SlotLayout, lay_out
from midflight.weights.snapshot import Snapshot, new_memory

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0  # longest wait for the sending thread when the sender is closed


@dataclass(frozen=True, slots=True)
class _Published:
    """The newest version. `snapshot`: None if the sender keeps no copy."""

    version: int
    content: int
    snapshot: Snapshot | None
    published_s: float


class GroupSender:
    """Implements WeightSender. `publish` is called with each version once `send` has taken its weights."""

    def __init__(
        self,
        settings: SenderSettings,
        engines: Callable[[], Mapping[str, Entry]],
        publish: Callable[[int], object],
        note: Callable[[str], object],
        token: str | None,
    ) -> None:
        self._settings, self._engines, self._publish, self._note = settings, engines, publish, note
        self._token = token
        self._layout: SlotLayout | None = None
        self._specs: tuple[TensorSpec, ...] = ()
        self._buckets: list[Bucket] = []
        self._changed = threading.Condition()
        self._newest: _Published | None = None
        self._in_transit: Snapshot | None = None
        self._spare: Tensor | None = None  # memory of a snapshot that is neither the newest nor in transit
        self._is_closed = self._has_news = self._wants_weights = False
        self._fleet: Fleet | None = None
        self._thread = threading.Thread(target=self._run, name="weight sender", daemon=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors that have left this process so far."""
        return self._fleet.sent_bytes if self._fleet else 0

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        """Set the tensors that each `send` must bring; start to look for engines."""
        self._specs, self._layout = tuple(specs), lay_out(specs)
        self._buckets = plan_buckets(specs, self._settings.bucket_bytes)
        if self._fleet is None:
            self._fleet = Fleet(self._settings, self._engines, self._note, self._token, self._wake)
            self._thread.start()

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Publish these weights. Returns after a copy; without snapshots, after the transfer to all engines.

        The newest version may be sent once more, to the engines that lack it.
        Raises: WeightUpdateError if the weights differ from the announcement.
        """
        if self._layout is None or self._fleet is None:
            raise WeightUpdateError("weights were sent before they were announced; call announce() first")
        checked = self._layout.checked(weights)
        if self._settings.snapshot:
            snapshot = Snapshot(self._buckets, self._memory())
            self._set_newest(version, version, snapshot)
            snapshot.fill(checked)
        else:
            newest = self._newest
            content = newest.content if newest is not None and newest.version == version else version
            self._set_newest(version, content, None)
            self._fleet.stream(self._announcement(version), content, self._buckets, checked)
            deque(checked, maxlen=0)  # the rest, if no engine takes it
            self._wants_weights = self._fleet.is_lacking(version, content)
        self._publish(version)

    def relabel(self, version: int) -> None:
        """Publish this version with the weights that were sent last."""
        newest = self._newest
        if newest is None:
            raise WeightUpdateError("a version without weights was published before any weights were sent")
        self._set_newest(version, newest.content, newest.snapshot)
        self._publish(version)

    def wants_weights(self) -> bool:
        """Return True if an engine that can be reached lacks the newest version and the sender kept no copy."""
        return self._wants_weights

    def close(self) -> None:
        """Close the group and all connections; a transfer under way is given up."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._fleet is not None:
            self._fleet.close()
            self._thread.join(_CLOSE_S)

    def _memory(self) -> Tensor:
        """Memory for the next snapshot: a second one only if the first is in transit."""
        with self._changed:
            newest, memory = self._newest, self._spare
            if newest is not None and newest.snapshot is not None and newest.snapshot is not self._in_transit:
                self._newest, memory = None, newest.snapshot.memory  # nobody begins to send this version any more
            elif memory is not None:
                self._spare = None
        return memory if memory is not None else new_memory(self._buckets, self._settings.group.device)

    def _set_newest(self, version: int, content: int, snapshot: Snapshot | None) -> None:
        with self._changed:
            self._newest = _Published(version, content, snapshot, time.monotonic())
            self._has_news = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _announcement(self, version: int) -> Announcement:
        return Announcement(version, self._specs, self._settings.bucket_bytes)

    def _run(self) -> None:
        fleet = self._fleet
        assert fleet is not None
        while True:
            with self._changed:
                timeout_s = max(0.0, fleet.next_look_s() - time.monotonic())
                self._changed.wait_for(lambda: self._is_closed or self._has_news, timeout_s)
                self._has_news = False
                if self._is_closed:
                    return
            try:
                self._advance(fleet)
            except Exception as error:
                if self._is_closed:
                    return
                if isinstance(error, WeightUpdateError):
                    fleet.trouble(str(error))
                    continue
                _log.exception("the weight sender failed")
                fleet.trouble(f"weights could not be sent: {type(error).__name__}: {error}")

    def _advance(self, fleet: Fleet) -> None:
        """Look for engines, and send the newest version to those that lack it."""
        fleet.look()
        with self._changed:
            newest = self._newest
            self._in_transit = newest.snapshot if newest else None
        if newest is None:
            return
        try:
            fleet.relabel(newest.version, newest.content)
            if newest.snapshot is not None:
                is_awaited = functools.partial(self._is_awaited, newest.snapshot)
                snapshot, announcement = newest.snapshot, self._announcement(newest.version)
                if fleet.deliver(announcement, newest.content, snapshot.pieces, is_awaited):
                    self._wake()  # engines may be left
            else:
                self._wants_weights = fleet.is_lacking(newest.version, newest.content)
        finally:
            with self._changed:
                if self._newest is None or self._newest.snapshot is not self._in_transit:
                    self._spare = self._in_transit.memory if self._in_transit else self._spare
                self._in_transit = None

    def _is_awaited(self, in_transit: Snapshot, limit_s: float) -> bool:
        """True if a newer version has waited for the end of this transfer for `limit_s`."""
        newest = self._newest
        if newest is None or newest.snapshot is in_transit:
            return False
        return time.monotonic() - newest.published_s >= limit_s
