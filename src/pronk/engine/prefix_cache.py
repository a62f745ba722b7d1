"""PrefixCache: a KV cache that remembers texts, so that a text which begins like an earlier one is not computed again.

Full blocks of a text stay in the pool when their sequence ends. They are found by what they hold: a block's key is the
identity of the block before it and its own tokens, all of them. So one look-up a block walks the longest known
beginning of a text, and no hash is ever trusted in place of the tokens. Blocks that no sequence names are evicted, the
one that was not named for the longest time first, when their room is needed: see BlockPool, which knows them.

One scheduler uses a cache at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pronk.engine.backend import Backend
from pronk.engine.kv_blocks import BlockPool, BlockTable
from pronk.errors import NotEnoughMemory

BLOCK_SIZE = 64  # tokens; the tile that engines store keys and values in, and the CPU engine's kernels know no other
FIRST_BLOCKS = 4  # that a cache begins with; it grows on demand
_NO_LIMIT = 1 << 31


class _Key(NamedTuple):
    parent: int | tuple[Hashable]  # serial number of the block before; for a text's first, whose text it is
    tokens: tuple[int, ...]


class _Kept(NamedTuple):
    serial: int  # never used twice, unlike the block's number
    block: int


class PrefixCache:
    """Pool and storage, and which blocks in them hold which text. `keep_tokens` 0: nothing is remembered.

    Up to `keep_tokens` the storage grows before anything is evicted; beyond, only when there is nothing left to evict.
    """

    def __init__(
        self, backend: Backend, block_size: int = BLOCK_SIZE, keep_tokens: int = 0, first_blocks: int = FIRST_BLOCKS
    ) -> None:
        self._keep_blocks = -(-keep_tokens // block_size)
        first_blocks = min(first_blocks, self._keep_blocks or first_blocks)
        self.pool = BlockPool(first_blocks, block_size)
        self.storage = backend.new_kv(first_blocks, block_size)
        self._budget = _NO_LIMIT  # blocks: see `reserve`
        self._refused: NotEnoughMemory | None = None  # why the storage could not grow when it was last to
        self._kept: dict[_Key, _Kept] = {}
        self._keys: dict[int, _Key] = {}  # by block
        self._next_serial = 1
        self.changes = 0  # how often a block was remembered or forgotten: what is known of a text may be another thing

    @property
    def oversized(self) -> bool:
        """Whether the storage is larger than what may be kept."""
        return self.pool.num_blocks > self._keep_blocks

    @property
    def remembers(self) -> bool:
        return self._keep_blocks > 0

    def match(self, tokens: Sequence[int], whose: Hashable = None) -> BlockTable:
        """A table of the longest known beginning, in full blocks. The last token is never part of it: it is computed
        again, because its logits are wanted. `whose`: nothing is found but what was kept under the same."""
        table = BlockTable(self.pool)
        self.extend(table, tokens, whose)
        return table

    def extend(self, table: BlockTable, tokens: Sequence[int], whose: Hashable = None) -> int:
        """Let a table of the text's beginning go on with what is known beyond it; gives by how many tokens.

        Cheap where nothing was remembered since it was last asked.
        """
        if table.looked == self.changes:
            return 0
        size, known, parent = self.pool.block_size, table.known, self._parent(table, whose)
        found = list[_Kept]()
        for at in range(known * size, len(tokens) - size, size):
            kept = self._kept.get(_Key(parent, tuple(tokens[at : at + size])))
            if kept is None:
                break
            found.append(kept)
            parent = kept.serial
        gained = (known + len(found)) * size - table.length
        if gained > 0:
            table.truncate(known * size)
            table.extend([kept.block for kept in found])
            table.known, table.serial = known + len(found), found[-1].serial
        table.looked = self.changes
        return max(0, gained)

    def next_key(self, table: BlockTable, tokens: Sequence[int], whose: Hashable = None) -> Hashable:
        """What the first block that is not known of a text will be found by; None where it is never looked for."""
        begin, size = table.known * self.pool.block_size, self.pool.block_size
        if not self.remembers or begin + size >= len(tokens):
            return None
        return _Key(self._parent(table, whose), tuple(tokens[begin : begin + size]))

    @staticmethod
    def _parent(table: BlockTable, whose: Hashable) -> int | tuple[Hashable]:
        return table.serial if table.known else (whose,)

    def keep(self, tokens: Sequence[int], table: BlockTable, whose: Hashable = None) -> None:
        """Remember the full blocks of a table, which hold the keys and values of the first of `tokens`.

        Those that the table already knows itself by are passed over: it holds them, so none was evicted.
        """
        if not self._keep_blocks:
            return
        size, others = self.pool.block_size, []
        parent = self._parent(table, whose)
        for place in range(table.known, table.length // size):
            block, key = table.blocks[place], _Key(parent, tuple(tokens[place * size : (place + 1) * size]))
            if (kept := self._kept.get(key)) is None:
                if block in self._keys:  # known after a block that was evicted since
                    self._forget(self._keys[block])
                kept = _Kept(self._next_serial, block)
                self._next_serial += 1
                self.changes += 1
                self.pool.pin(block)
                self._kept[key], self._keys[block] = kept, key
            parent = kept.serial
            if kept.block != block:
                others.append(kept.block)
            elif not others:
                table.known, table.serial = place + 1, parent
        for block in reversed(others):
            self.pool.refresh(block)

    def forget(self, table: BlockTable) -> None:
        """What the table's blocks hold is not to be reused."""
        for block in table.blocks:
            if block in self._keys:
                self._forget(self._keys[block])
        table.known = 0

    def reserve(self, max_blocks: int) -> None:
        """It is to grow to so many blocks at the most. What there is memory for at this moment, if that is less, is its
        budget from now on: who has no room in it is not admitted."""
        if self._budget == _NO_LIMIT:
            self._budget = max(self.storage.reserve(max_blocks), self.pool.num_blocks)

    def available(self, max_blocks: int) -> int:
        """How many blocks `make_room` can give, as far as is known."""
        in_use = self.pool.num_blocks - self.pool.num_free - self.pool.num_idle
        return (self.pool.num_blocks if self._refused else min(max_blocks, self._budget)) - in_use

    def make_room(self, count: int, max_blocks: int = _NO_LIMIT) -> bool:
        """Whether `count` blocks are free, after growing to at most `max_blocks` or evicting if that helps.

        The size doubles, for some storages move when they grow, and so a sequence of S tokens is moved O(log S) times;
        where memory is short it grows by an eighth, or by what is needed, or else texts are forgotten. Raises
        NotEnoughMemory where not even that gives room.
        """
        short = count - self.pool.num_free
        bound = min(self._keep_blocks, max_blocks)
        if short > 0 and self.pool.num_blocks + short > bound:
            short -= self._evict(short)
            bound = max_blocks
        if short <= 0:
            return True
        if self.pool.num_blocks + short > max_blocks:
            return False
        blocks = self.pool.num_blocks
        enough, bound = blocks + short, max(blocks + short, min(bound, self._budget))
        sizes = sorted({min(max(size, enough), bound) for size in (2 * blocks, blocks + blocks // 8, enough)})
        if not any(map(self._grow, reversed(sizes))):
            short -= self._evict(short)
            if short and not self._grow(self.pool.num_blocks + short):
                assert self._refused
                raise self._refused
        return True

    def _grow(self, num_blocks: int) -> bool:
        try:
            self.storage.resize(num_blocks)
        except NotEnoughMemory as error:
            self._refused = error
            return False
        except MemoryError:
            what = f"memory ran out for a KV cache of {num_blocks * self.pool.block_size} tokens"
            self._refused = NotEnoughMemory(what, "shorten the text")
            return False
        self.pool.grow(num_blocks - self.pool.num_blocks)
        self._refused = None
        return True

    def _evict(self, count: int) -> int:
        """Forget up to `count` blocks that no table names, the longest idle first; gives how many."""
        count = min(count, self.pool.num_idle)
        for _ in range(count):
            self._forget(self._keys[self.pool.longest_idle()])
        return count

    def _forget(self, key: _Key) -> None:
        block = self._kept.pop(key).block
        del self._keys[block]
        self.changes += 1
        self.pool.unpin(block)
