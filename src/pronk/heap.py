"""The C library's heap, which keeps what was freed in case it is wanted again."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Give the system back what is free, where the C library can be told to (glibc).

    Parsing a tokenizer.json of 49,152 tokens leaves 24 MB behind, one of 128,256 leaves 130. The weights, which are
    loaded next, are allocated elsewhere.
    """
    if sys.platform == "linux" and (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        malloc_trim(0)
