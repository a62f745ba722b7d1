"""Pages of a mapped file are given back, and read again when touched."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pronk.checkpoint.containers import mapped
from pronk.errors import BadFile


def resident(path: Path) -> int:
    """Bytes of a file's mapping that are in memory now."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux tells of them")
def test_pages_that_were_read_can_be_given_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    numbers = np.arange(1 << 20, dtype=np.uint32)
    path.write_bytes(numbers.tobytes())
    file = mapped.MappedFile(path)
    array = file.array(0, numbers.shape, numbers.dtype)
    assert np.array_equal(array, numbers)
    assert resident(path) == numbers.nbytes
    mapped.let_go()
    assert resident(path) == 0
    assert np.array_equal(array, numbers)


def test_a_part_is_read_as_a_file_of_its_own(tmp_path: Path) -> None:
    """At any byte, aligned or not, and of a part as well."""
    path = tmp_path / "weights"
    path.write_bytes(b"abc" + np.arange(5, dtype=np.uint32).tobytes())
    part = mapped.MappedFile(path).part(2, 21).part(1, 20)
    assert part.size == 20
    assert part.bytes(4, 2) == b"\1\0"
    assert part.array(8, (3,), np.dtype(np.uint32)).tolist() == [2, 3, 4]
    with pytest.raises(BadFile, match="has shrunk"):
        part.array(12, (3,), np.dtype(np.uint32))
