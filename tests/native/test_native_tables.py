"""The names of the C++ tables are those that Python gives to formats, stored types, and types of keys and values."""

from __future__ import annotations

from typing import get_args

import pytest
from test_native_kernels import FORMATS
from test_pack import DIRECT

from pronk import _native
from pronk.cpu_engine import formats, weights
from pronk.cpu_engine.backend import KV_DTYPES
from pronk.cpu_engine.kv import BLOCK_SIZE

TABLE = {format.name: format for format in _native.formats()}


def test_formats_are_those_that_can_be_asked_for() -> None:
    """And q4_0, which a file alone can ask for."""
    assert {*get_args(formats.Quantize), "q4_0"} == {"auto", *TABLE}
    assert set(TABLE) == set(FORMATS)


def test_python_reads_no_type_that_rows_cannot_be_packed_from() -> None:
    assert set(_native.sources()) == {*weights._DIRECT, "F32", "F16", "BF16"}


def test_what_a_format_holds_is_packed_as_it_is() -> None:
    """Whatever auto keeps a type of codes in holds these codes."""
    for source, format in formats._KEEPS.items():
        plain = source in ("F32", "F16", "BF16")
        assert format == source.lower() if plain else source in TABLE[format].holds
    held = {(source, name) for name, format in TABLE.items() for source in format.holds}
    assert {pair for pair in held if not pair[0].endswith("INT8")} == {*DIRECT, ("Q4_K", "q4")}


def test_a_row_is_as_long_as_sums_allow() -> None:
    for format in TABLE.values():
        longest = formats._LONGEST_INT8_ROW if "int8" in format.name else 1 << 22
        assert format.longest_row == longest
        assert _native.packed_bytes(format.name, 1, longest) > 0
        with pytest.raises(ValueError, match="columns must be from 1"):
            _native.packed_bytes(format.name, 1, longest + 1)


def test_types_of_keys_and_values_are_those_that_can_be_asked_for() -> None:
    assert ["auto", *_native.kv_types()] == list(KV_DTYPES)
    assert _native.kv_block() == BLOCK_SIZE
