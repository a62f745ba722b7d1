"""Which block of the KV cache belongs to whom: allocation, sharing and copy on write. The storage is the backend's.

A sequence's keys and values lie in whole blocks of `block_size` tokens, listed in order by its BlockTable. Beams and
samples are tables that name the same blocks of a common past; a table writes into a block only while no other names it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence


class OutOfBlocks(Exception):
    """No block is free. Callers make room first; whoever sees this has a bug."""


class BlockPool:
    """Reference counts of `num_blocks` blocks; a count of 0 is a free block.

    A block may be pinned: whoever pins it holds one reference. Those that have no other are idle, the longest idle one
    first. Whatever is asked takes the same time however many blocks there are, or a little more.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot be")
        self.block_size = block_size
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._pinned: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._lowest = list(range(num_blocks))  # a heap of all free blocks, and of some that were taken since
        self._listed = [True] * num_blocks  # which stand in it

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, after: int = -1) -> int:
        """A free block, with one reference: the one that follows `after` if it can be had, else the lowest.

        So a sequence that has the cache for itself is one range of consecutive blocks.
        """
        if not self.num_free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are taken")
        block = after + 1
        if not 0 < block < self.num_blocks or self._references[block]:
            block = self._lowest_free()
        self._references[block] = 1
        self.num_free -= 1
        return block

    def _lowest_free(self) -> int:
        while True:
            block = heapq.heappop(self._lowest)
            self._listed[block] = False
            if not self._references[block]:
                return block

    def share(self, block: int) -> None:
        if not self._references[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give up one reference; the last one frees the block."""
        if not self._references[block]:
            raise ValueError(f"block {block} is freed twice")
        self._references[block] -= 1
        if self._references[block] == 1 and block in self._pinned:
            self._idle[block] = None
        elif not self._references[block]:
            self.num_free += 1
            if not self._listed[block]:
                self._listed[block] = True
                heapq.heappush(self._lowest, block)

    def is_idle(self, block: int) -> bool:
        """Whether nobody names the block but who pinned it."""
        return block in self._idle

    def longest_idle(self) -> int:
        """The block that nobody has named for the longest time but who pinned it. Raises StopIteration."""
        return next(iter(self._idle))

    def refresh(self, block: int) -> None:
        """It was wanted just now: of idle blocks it is the last."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def pin(self, block: int) -> None:
        """Take a reference that leaves the block idle while it is the only one."""
        self.share(block)
        self._pinned.add(block)

    def unpin(self, block: int) -> None:
        self._idle.pop(block, None)
        self._pinned.remove(block)
        self.release(block)

    def grow(self, count: int) -> None:
        self._lowest.extend(range(self.num_blocks, self.num_blocks + count))  # larger than all: still a heap
        self._listed.extend([True] * count)
        self._references.extend([0] * count)
        self.num_free += count


class BlockTable:
    """The blocks of one sequence, in order, and how many tokens they hold."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0
        # For a cache that remembers texts: how many of the first blocks it knows, what it calls the last of them, and
        # what it knew when it last looked for more.
        self.known, self.serial, self.looked = 0, 0, -1

    def extend(self, blocks: Sequence[int]) -> None:
        """Go on with full blocks that others name too, after full ones."""
        assert self.length == len(self.blocks) * self.pool.block_size
        for block in blocks:
            self.pool.share(block)
        self.blocks += blocks
        self.length += len(blocks) * self.pool.block_size

    def blocks_needed(self, count: int) -> int:
        """How many free blocks `append(count)` takes."""
        if count == 0:
            return 0
        return -(-(self.length + count) // self.pool.block_size) - len(self.blocks) + self._must_copy()

    def append(self, count: int) -> list[tuple[int, int]]:
        """Make room for `count` more tokens.

        Gives the copies (source, destination) of whole blocks to be made in the storage before the tokens are written.
        Raises OutOfBlocks, having changed nothing.
        """
        needed = self.blocks_needed(count)
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"{needed} blocks wanted, {self.pool.num_free} free")
        copies = []
        if needed and self._must_copy():
            source = self.blocks[-1]
            self.blocks[-1] = self.pool.allocate(after=self.blocks[-2] if len(self.blocks) > 1 else -1)
            self.pool.release(source)
            copies.append((source, self.blocks[-1]))
        self.length += count
        while len(self.blocks) * self.pool.block_size < self.length:
            self.blocks.append(self.pool.allocate(after=self.blocks[-1] if self.blocks else -1))
        return copies

    def fork(self) -> BlockTable:
        """Another table of the same tokens; neither copies anything until it writes."""
        for block in self.blocks:
            self.pool.share(block)
        child = BlockTable(self.pool)
        child.blocks, child.length = list(self.blocks), self.length
        child.known, child.serial = self.known, self.serial
        return child

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a table of {self.length} tokens cannot be cut to {length}")
        keep = -(-length // self.pool.block_size)
        unwanted = self.blocks[keep:]
        # Before they are released: an interrupt between may lose blocks, but none is ever freed twice.
        del self.blocks[keep:]
        self.length, self.looked = length, -1
        if self.known * self.pool.block_size > length:
            self.known = 0
        for block in reversed(unwanted):  # so that the end of a text is idle for longer than its beginning
            self.pool.release(block)

    def free(self) -> None:
        self.truncate(0)

    def _must_copy(self) -> bool:
        """Whether the next token goes into a block that another table names too."""
        return self.length % self.pool.block_size > 0 and self.pool.references(self.blocks[-1]) > 1
