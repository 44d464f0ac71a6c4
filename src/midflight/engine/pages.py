"""Who holds which page, and which pages hold prefixes that may be used again. Plain Python: no tensors but opaque ones.

A page is free, held by one or more sequences, or idle: nobody holds it, but it still has the keys and values of a
known prefix. Idle pages are reused last, the longest idle first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from midflight.types import Int32Array

Logits = TypeVar("Logits")
# A prefix is named by the serial number of the page before and the tokens of its own page: exact, no hash to collide.
_Key = tuple[int, bytes]
_ROOT = 0
# Prefixes whose next logits are kept; a group's members start within a few steps of each other.
_MAX_ENDS = 64


@dataclass(frozen=True, slots=True)
class Prefix(Generic[Logits]):
    """What is known of a token sequence: full pages from its start, and perhaps all of it."""

    pages: tuple[int, ...]
    end: End[Logits] | None


@dataclass(frozen=True, slots=True)
class End(Generic[Logits]):
    """The last page of a whole prefix, full or not, and the logits that follow it."""

    page: int
    logits: Logits


@dataclass(slots=True)
class _Names:
    """Under which names a page can be found."""

    full: _Key | None = None
    ends: list[_Key] = field(default_factory=list)


class PagePool(Generic[Logits]):
    """Pages 1 .. num_pages - 1; page 0 is never given out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_users = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._names: dict[int, _Names] = {}
        self._full: dict[_Key, tuple[int, int]] = {}  # -> page, serial number
        self._ends: OrderedDict[_Key, End[Logits]] = OrderedDict()
        self._next_serial = _ROOT + 1

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> int | None:
        """A page for one user, or None if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget_page(page)
        else:
            return None
        self.num_users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a page that is held or idle."""
        self._idle.pop(page, None)
        self.num_users[page] += 1

    def release(self, page: int) -> None:
        assert self.num_users[page] > 0, f"page {page} is released more often than it was given out"
        self.num_users[page] -= 1
        if not self.num_users[page]:
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, token_ids: Int32Array) -> Prefix[Logits]:
        """The longest known prefix. The caller shares the pages it uses."""
        pages: list[int] = []
        parent = _ROOT
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            found = self._full.get((parent, token_ids[start : start + self.page_size].tobytes()))
            if found is None:
                return Prefix(tuple(pages), None)
            page, parent = found
            pages.append(page)
        end_key = (parent, token_ids[len(pages) * self.page_size :].tobytes())
        end = self._ends.get(end_key)
        if end:
            self._ends.move_to_end(end_key)
        return Prefix(tuple(pages), end)

    def remember(self, token_ids: Int32Array, pages: Sequence[int], logits: Logits | None = None) -> None:
        """These tokens are in these pages, which the caller holds; `logits`, if given, follow the last token."""
        parent = _ROOT
        num_full = len(token_ids) // self.page_size
        for index in range(num_full):
            key = (parent, token_ids[index * self.page_size : (index + 1) * self.page_size].tobytes())
            if key in self._full:
                _, parent = self._full[key]
                continue
            names = self._names.setdefault(pages[index], _Names())
            if names.full:  # its parent was forgotten meanwhile: under that name nothing can find it
                del self._full[names.full]
            names.full, parent = key, self._next_serial
            self._full[key] = pages[index], parent
            self._next_serial += 1
        end_key = (parent, token_ids[num_full * self.page_size :].tobytes())
        if logits is None or end_key in self._ends:
            return
        last_page = pages[(len(token_ids) - 1) // self.page_size]
        self._names.setdefault(last_page, _Names()).ends.append(end_key)
        self._ends[end_key] = End(last_page, logits)
        if len(self._ends) > _MAX_ENDS:
            self._forget_oldest_end()

    def forget(self) -> None:
        """No prefix is known any more: the weights have changed."""
        self._names.clear()
        self._full.clear()
        self._ends.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget_page(self, page: int) -> None:
        names = self._names.pop(page)
        if names.full:
            del self._full[names.full]
        for key in names.ends:
            del self._ends[key]

    def _forget_oldest_end(self) -> None:
        key, end = self._ends.popitem(last=False)
        names = self._names[end.page]
        names.ends.remove(key)
        if not names.full and not names.ends:
            del self._names[end.page]
            if end.page in self._idle:
                del self._idle[end.page]
                self._free.append(end.page)
