"""Formats of weights: what their numbers are rounded to, and what products they make."""

from pronk.formats.table import (
    FALLBACK,
    FLOATS,
    FORMATS,
    GROUP,
    KV_TYPES,
    SMALLEST,
    TRAINED,
    WITH_OUTLIERS,
    Format,
    KVName,
    Quantize,
    kept,
    names,
    packed,
    wider,
)

__all__ = [
    "FALLBACK",
    "FLOATS",
    "FORMATS",
    "GROUP",
    "KV_TYPES",
    "SMALLEST",
    "TRAINED",
    "WITH_OUTLIERS",
    "Format",
    "KVName",
    "Quantize",
    "kept",
    "names",
    "packed",
    "wider",
]
