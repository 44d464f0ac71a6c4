"""Page allocator and prefix cache. Plain Python: the only tensors, logits, are opaque here.

A page is free, held by one or more sequences, or idle. An idle page has no user, but still contains the keys and values
of a cached prefix. Free pages are allocated first, then idle pages, starting with the one that has been idle longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from midflight.types import Int32Array

Logits = TypeVar("Logits")
# Key of a prefix: the serial number of the page before, and the tokens of its last page. Exact, so keys cannot collide.
_Key = tuple[int, bytes]
_ROOT = 0
# Number of prefixes whose next logits are kept. Few are enough: the members of a group start within a few steps.
_MAX_ENDS = 64


@dataclass(frozen=True, slots=True)
class Prefix(Generic[Logits]):
    """The cached part of a token sequence: full pages from its start, and its end if all of it is cached."""

    pages: tuple[int, ...]
    end: End[Logits] | None


@dataclass(frozen=True, slots=True)
class End(Generic[Logits]):
    """Last page of a completely cached prefix, full or not, and the logits after its last token."""

    page: int
    logits: Logits


@dataclass(slots=True)
class _Keys:
    """The keys under which the prefix cache finds a page."""

    full: _Key | None = None
    ends: list[_Key] = field(default_factory=list)


class PagePool(Generic[Logits]):
    """Allocator of pages 1 .. num_pages - 1 with a prefix cache; page 0 is never allocated."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_users = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, _Keys] = {}
        self._full: dict[_Key, tuple[int, int]] = {}  # -> page, serial number
        self._ends: OrderedDict[_Key, End[Logits]] = OrderedDict()
        self._next_serial = _ROOT + 1

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated, free and idle."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int | None:
        """Allocate a page for one user; return None if all pages are held."""
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
        """Add a user to a page that is held or idle."""
        self._idle.pop(page, None)
        self.num_users[page] += 1

    def release(self, page: int) -> None:
        """Remove a user of a page; without users, the page becomes idle or free."""
        assert self.num_users[page] > 0, f"page {page} is released more often than it was allocated or shared"
        self.num_users[page] -= 1
        if not self.num_users[page]:
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, token_ids: Int32Array) -> Prefix[Logits]:
        """Return the longest cached prefix of these tokens. The caller must `share` the pages it uses."""
        pages: list[int] = []
        parent = _ROOT
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            entry = self._full.get((parent, token_ids[start : start + self.page_size].tobytes()))
            if entry is None:
                return Prefix(tuple(pages), None)
            page, parent = entry
            pages.append(page)
        end_key = (parent, token_ids[len(pages) * self.page_size :].tobytes())
        end = self._ends.get(end_key)
        if end:
            self._ends.move_to_end(end_key)
        return Prefix(tuple(pages), end)

    def remember(self, token_ids: Int32Array, pages: Sequence[int], logits: Logits | None = None) -> None:
        """Add a prefix to the cache.

        `pages`: pages with the keys and values of `token_ids`, held by the caller. `logits`: logits of the next token.
        """
        parent = _ROOT
        num_full = len(token_ids) // self.page_size
        for index in range(num_full):
            key = (parent, token_ids[index * self.page_size : (index + 1) * self.page_size].tobytes())
            if key in self._full:
                _, parent = self._full[key]
                continue
            keys = self._keys.setdefault(pages[index], _Keys())
            if keys.full:  # the parent has left the cache since, so the old key is unreachable
                del self._full[keys.full]
            keys.full, parent = key, self._next_serial
            self._full[key] = pages[index], parent
            self._next_serial += 1
        end_key = (parent, token_ids[num_full * self.page_size :].tobytes())
        if logits is None or end_key in self._ends:
            return
        last_page = pages[(len(token_ids) - 1) // self.page_size]
        self._keys.setdefault(last_page, _Keys()).ends.append(end_key)
        self._ends[end_key] = End(last_page, logits)
        if len(self._ends) > _MAX_ENDS:
            self._forget_oldest_end()

    def forget(self) -> None:
        """Empty the prefix cache; called when the weights have changed."""
        self._keys.clear()
        self._full.clear()
        self._ends.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget_page(self, page: int) -> None:
        keys = self._keys.pop(page)
        if keys.full:
            del self._full[keys.full]
        for key in keys.ends:
            del self._ends[key]

    def _forget_oldest_end(self) -> None:
        key, end = self._ends.popitem(last=False)
        keys = self._keys[end.page]
        keys.ends.remove(key)
        if not keys.full and not keys.ends:
            del self._keys[end.page]
            if end.page in self._idle:
                del self._idle[end.page]
                self._free.append(end.page)
