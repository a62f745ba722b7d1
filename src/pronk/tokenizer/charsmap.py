"""SentencePiece's precompiled_charsmap, a normalizer in binary: checked before a library walks through it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from pronk.errors import BadFile

_LONGEST_REPLACEMENT = 64  # bytes; NFKC's longest takes 33


def check_charsmap(path: Path, charsmap: bytes) -> None:
    """The libraries walk this double-array trie unchecked: every step from every unit must stay inside it.

    uint32 size of the trie, uint32 units (darts-clone's layout), then the replacement strings, each closed by NUL.
    """
    field = "precompiled_charsmap"
    size = struct.unpack_from("<I", charsmap)[0] if len(charsmap) >= 4 else 0
    if size < 1024 or size % 1024 or size > len(charsmap) - 4:
        raise BadFile(path, f"a trie of {size} bytes does not fit", field=field)
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    strings = charsmap[4 + size :]
    # A unit's children lie at base ^ label; blocks hold 256 units, so the base alone decides whether they are inside.
    base = np.arange(len(units)) ^ ((units >> 10) << ((units & (1 << 9)) >> 6))
    is_node = units >> 31 == 0
    is_node[0] = True  # the walk starts there without looking
    if (base[is_node] >= len(units)).any() or strings[-1:] != b"\0":
        raise BadFile(path, "a trie that leads outside itself", field=field)
    values = units[base[is_node & (units >> 8 & 1 == 1)]] & 0x7FFFFFFF
    if (values >= len(strings)).any():
        raise BadFile(path, "a trie that leads outside its strings", field=field)
    longest = max(map(len, strings.split(b"\0")))
    if longest > _LONGEST_REPLACEMENT:
        raise BadFile(path, f"puts {longest} bytes in a character's place", field=field)
