"""Which block of the KV cache belongs to whom: allocation, sharing and copy on write. The storage is the backend's.

A sequence's keys and values lie in whole blocks of `block_size` tokens, listed in order by its BlockTable. Beams and
samples are tables that name the same blocks of a common past; a table writes into a block only while no other names it.
"""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocks(Exception):
    """No block is free. Callers make room first; whoever sees this has a bug."""


class BlockPool:
    """Reference counts of `num_blocks` blocks; a count of 0 is a free block.

    A block may be pinned: whoever pins it holds one reference, and `num_idle` counts the blocks that have no other.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot be")
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_idle = 0
        self._references = [0] * num_blocks
        self._pinned: set[int] = set()
        self._lowest = 0  # no block under this one is free

    @property
    def num_blocks(self) -> int:
        return len(self._references)

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
            block = self._lowest = self._references.index(0, self._lowest)
        self._references[block] = 1
        self.num_free -= 1
        return block

    def share(self, block: int) -> None:
        if not self._references[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self.num_idle -= self.is_idle(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give up one reference; the last one frees the block."""
        if not self._references[block]:
            raise ValueError(f"block {block} is freed twice")
        self._references[block] -= 1
        self.num_idle += self.is_idle(block)
        if not self._references[block]:
            self.num_free += 1
            self._lowest = min(self._lowest, block)

    def is_idle(self, block: int) -> bool:
        """Whether nobody names the block but who pinned it."""
        return self._references[block] == 1 and block in self._pinned

    def pin(self, block: int) -> None:
        """Take a reference that leaves the block idle while it is the only one."""
        self.share(block)
        self._pinned.add(block)

    def unpin(self, block: int) -> None:
        self.num_idle -= self.is_idle(block)
        self._pinned.remove(block)
        self.release(block)

    def grow(self, count: int) -> None:
        self._references.extend([0] * count)
        self.num_free += count


class BlockTable:
    """The blocks of one sequence, in order, and how many tokens they hold."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0

    @classmethod
    def of(cls, pool: BlockPool, blocks: Sequence[int]) -> BlockTable:
        """A table of full blocks that others name too."""
        table = cls(pool)
        for block in blocks:
            pool.share(block)
        table.blocks, table.length = list(blocks), len(blocks) * pool.block_size
        return table

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
        return child

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a table of {self.length} tokens cannot be cut to {length}")
        keep = -(-length // self.pool.block_size)
        unwanted = self.blocks[keep:]
        # Before they are released: an interrupt between may lose blocks, but none is ever freed twice.
        del self.blocks[keep:]
        self.length = length
        for block in unwanted:
            self.pool.release(block)

    def free(self) -> None:
        self.truncate(0)

    def _must_copy(self) -> bool:
        """Whether the next token goes into a block that another table names too."""
        return self.length % self.pool.block_size > 0 and self.pool.references(self.blocks[-1]) > 1
