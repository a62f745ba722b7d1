"""Block bookkeeping, against a model that writes real contents through the tables."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mock_backend import MockKV

from pronk.engine.kv_blocks import BlockPool, BlockTable, OutOfBlocks


class Tables(RuleBasedStateMachine):
    """Every table must read back exactly what was written through it, whoever else shares its blocks."""

    @initialize(num_blocks=st.integers(0, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.storage = MockKV(num_blocks, block_size)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.written = 0

    @rule()
    def new(self) -> None:
        self.tables.append((BlockTable(self.pool), []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        table, content = data.draw(st.sampled_from(self.tables))
        needed, free = table.blocks_needed(count), self.pool.num_free
        before = list(table.blocks), table.length
        if needed > free:
            with pytest.raises(OutOfBlocks):
                table.append(count)
            assert (table.blocks, table.length) == before
            assert self.pool.num_free == free
            return
        self.storage.copy(table.append(count))
        for position in range(table.length - count, table.length):
            block = table.blocks[position // self.pool.block_size]
            assert self.pool.references(block) == 1, "a shared block is written to"
            self.written += 1
            self.storage.tokens[block, position % self.pool.block_size] = self.written
            content.append(self.written)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, content = data.draw(st.sampled_from(self.tables))
        free = self.pool.num_free
        self.tables.append((table.fork(), list(content)))
        assert self.pool.num_free == free

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, content = data.draw(st.sampled_from(self.tables))
        length = data.draw(st.integers(0, table.length))
        table.truncate(length)
        del content[length:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        table.free()
        table.free()  # a table that holds nothing has nothing to free
        assert table.blocks == []

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        self.pool.grow(count)
        self.storage.resize(self.pool.num_blocks)

    @invariant()
    def contents_are_whole(self) -> None:
        for table, content in getattr(self, "tables", ()):
            assert table.length == len(content)
            assert self.storage.tokens[table.blocks].reshape(-1)[: table.length].tolist() == content

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "tables"):
            return
        named = [block for table, _ in self.tables for block in table.blocks]
        counts = [named.count(block) for block in range(self.pool.num_blocks)]
        assert counts == [self.pool.references(block) for block in range(self.pool.num_blocks)]
        assert self.pool.num_free == counts.count(0)
        for table, _ in self.tables:
            assert len(table.blocks) == -(-table.length // self.pool.block_size)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_lone_sequence_is_one_range() -> None:
    pool = BlockPool(8, 4)
    for _ in range(2):  # again after everything was freed
        table = BlockTable(pool)
        for _ in range(30):
            table.append(1)
        assert table.blocks == list(range(8))
        table.free()


def test_a_sequence_goes_on_behind_its_last_block_though_lower_ones_are_free() -> None:
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    first.append(8)
    second.append(4)
    first.free()
    second.append(12)
    assert second.blocks == [2, 3, 4, 5]


def test_double_free_and_use_after_free_are_refused() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="freed twice"):
        pool.release(block)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(block)


def test_an_interrupt_between_two_blocks_frees_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(4, 2)
    table = BlockTable(pool)
    table.append(8)

    def interrupted(block: int) -> None:
        monkeypatch.undo()
        pool.release(block)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.truncate(2)
    table.free()  # which a scheduler does before it passes the interrupt on
    assert table.blocks == []


def test_a_table_cannot_be_cut_longer() -> None:
    table = BlockTable(BlockPool(2, 4))
    table.append(3)
    for length in (-1, 4):
        with pytest.raises(ValueError, match="cannot be cut"):
            table.truncate(length)


def test_only_the_last_of_two_writers_writes_in_place() -> None:
    pool = BlockPool(4, 4)
    first = BlockTable(pool)
    first.append(3)
    second = first.fork()
    assert first.append(1) == [(0, 1)]
    assert second.append(1) == []
    assert (first.blocks, second.blocks) == ([1], [0])


def test_full_blocks_are_shared_and_never_copied() -> None:
    pool = BlockPool(4, 4)
    first = BlockTable(pool)
    first.append(4)
    second = first.fork()
    assert first.append(1) == second.append(1) == []
    assert (first.blocks, second.blocks) == ([0, 1], [0, 2])
