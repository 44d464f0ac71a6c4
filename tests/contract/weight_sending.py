"""Sending of weights to servers, as the trainer's sender does it: one group, one version at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from midflight.protocols import IncomingWeights
from midflight.weights.buckets import plan_buckets
from midflight.weights.engine_control import EngineControl
from midflight.weights.group_forming import form_group
from midflight.weights.group_source import GroupSettings, GroupSource, Rules
from midflight.weights.process_group import Announcement
from midflight.weights.snapshot import streamed
from midflight.weights.specs import specs_of

Weights = Mapping[str, Tensor]


def incoming(version: int, weights: Weights, lineage: str = "") -> IncomingWeights:
    """Weights that an engine can stage, without a transfer."""
    return IncomingWeights(version, version, list(weights.items()), lineage=lineage)


class _Control(EngineControl):
    """Control requests that may ask for the adoption of the weights, as the paper's contract does."""

    def __init__(self, token: str | None, timeout_s: float, adopt: bool) -> None:
        super().__init__(token, timeout_s)
        self._adopt = adopt

    async def _ask(
        self, method: str, url: str, kind: Any, timeout_s: float | None, body: Mapping[str, Any] | None = None
    ) -> Any:
        if body and "adopt" in body:
            body = {**body, "adopt": self._adopt}
        return await super()._ask(method, url, kind, timeout_s, body)


class Sender:
    """Sends weights to servers. A failed transfer closes the group; the next `send` forms a new one."""

    def __init__(self, *urls: str, adopt: bool = False, token: str | None = None, timeout_s: float = 20.0) -> None:
        self._urls = dict(zip(map(str, range(len(urls))), urls, strict=True))
        self._settings = GroupSettings("tcp", None, timeout_s, torch.device("cpu"))
        self._control = _Control(token, timeout_s, adopt)
        self._group: GroupSource | None = None

    def send(self, version: int, weights: Weights, lineage: str = "") -> None:
        """Send a version. Raises: EngineError of the first server that did not take it; an error of `weights`."""
        if self._group is None or not self._group.is_open:
            formation = form_group(self._control, self._urls, self._settings)
            self._group = formation.group
            _raise_first(formation.failures)
        assert self._group
        announcement = Announcement(version, specs_of(weights), bucket_bytes=4096)
        buckets = plan_buckets(announcement.specs, announcement.bucket_bytes)
        pieces = streamed(buckets, _items(weights), torch.device("cpu"))
        rules = Rules(self._settings.timeout_s, spare_first=False, is_awaited=lambda: False)
        outcome = self._group.broadcast(announcement, lineage, version, pieces, rules)
        _raise_first(outcome.failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()
        self._control.close()


def _items(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name in weights:
        yield name, weights[name]


def _raise_first(failures: Mapping[str, Exception]) -> None:
    for error in failures.values():
        raise error
