"""The C++ tables and Python's are of the same formats, stored types, and types of keys and values."""

from __future__ import annotations

import pytest
from test_native_kernels import FORMATS as KNOWN
from test_pack import DIRECT
from test_planes import TYPES

from pronk import _native
from pronk.cpu_engine import slots, weights
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.formats import FORMATS, KV_TYPES, kept

KEPT = {kept(stored).name: stored for stored in TYPES}
TABLE = {format.name: format for format in _native.formats()}


def test_formats_are_those_that_the_engine_computes_with() -> None:
    assert set(TABLE) == {name for name, format in FORMATS.items() if "cpu" in format.engines} == {*KNOWN, *KEPT}


def test_python_reads_no_type_that_rows_cannot_be_packed_from() -> None:
    assert set(_native.sources()) == {*weights._DIRECT, "F32", "F16", "BF16"}


def test_what_a_format_holds_is_packed_as_it_is() -> None:
    held = {(source, name) for name, format in TABLE.items() for source in format.holds}
    for name in TABLE:
        format = FORMATS[name]
        for source in (*format.stored, *format.nearly) if format.codes else ():
            assert (source, name) in held
    assert {pair for pair in held if not pair[0].endswith("INT8")} == {
        *DIRECT, ("Q4_K", "q4"), *((stored, name) for name, stored in KEPT.items())
    }  # fmt: skip


def test_a_row_is_as_long_as_sums_allow() -> None:
    for format in TABLE.values():
        codes = FORMATS[format.name].codes
        longest = slots._LONGEST_INT8_ROW if codes and codes.group is None else 1 << 22
        assert format.longest_row == longest
        assert _native.packed_bytes(format.name, 1, longest) > 0
        with pytest.raises(ValueError, match="columns must be from 1"):
            _native.packed_bytes(format.name, 1, longest + 1)


def test_types_of_keys_and_values_are_those_that_can_be_asked_for() -> None:
    assert list(_native.kv_types()) == list(KV_TYPES)
    assert _native.kv_block() == BLOCK_SIZE
