"""The prefix cache of a replica, by the hashes of blocks that a trace names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


class PrefixCache:
    """Blocks that sequences hold, and those that none holds any more, from the longest unused one to the latest.

    hash_ids: of every request, in the order of its prompt. Blocks that nobody holds stay until the space is needed.
    """

    def __init__(self, hash_ids: Sequence[Sequence[int]], block_tokens: int) -> None:
        self._hash_ids, self._block_tokens = hash_ids, block_tokens
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    def match(self, request: int, tokens: int) -> tuple[int, int]:
        """Tokens of the request's longest cached prefix, less than `tokens`, and tokens of its blocks that are held."""
        ids, holders, idle = self._hash_ids[request], self._holders, self._idle
        cached = sum(1 for _ in takewhile(lambda block: block in holders or block in idle, ids))
        held = sum(block in holders for block in set(ids))
        usable = min(cached, (tokens - 1) // self._block_tokens)
        return usable * self._block_tokens, held * self._block_tokens

    def acquire(self, request: int, room_tokens: float) -> int:
        """Holds the request's blocks, and drops idle ones beyond the room; returns the tokens of all its blocks."""
        ids, holders, idle = set(self._hash_ids[request]), self._holders, self._idle
        for block in ids:
            holders[block] = holders.get(block, 0) + 1
            idle.pop(block, None)
        while len(idle) * self._block_tokens > room_tokens:
            del idle[next(iter(idle))]
        return len(ids) * self._block_tokens

    def release(self, request: int) -> int:
        """Returns the tokens of the request's blocks that no other sequence holds; these become idle."""
        holders, released = self._holders, 0
        # The end of a prefix is of use only together with its beginning, so it is dropped first.
        for block in reversed(dict.fromkeys(self._hash_ids[request])):
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                self._idle[block] = None
                released += 1
        return released * self._block_tokens
