"""What a zip archive holds and where: stored entries only, so that each is a range of the file that can be mapped.

Format: PKWARE's APPNOTE 6.3, sections 4.3 and 4.5.3. torch writes its archives with Zip64 records whatever their size.
Only the central directory is believed, and each of its entries only once its local header agrees.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers.mapped import MappedFile
from pronk.errors import BadFile, short

MAGIC = b"PK\x03\x04"

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")


@dataclass(frozen=True)
class Entry:
    """Bytes `offset` to `offset + size` of the file."""

    offset: int
    size: int


def read(file: MappedFile, budget: Budget) -> dict[str, Entry]:
    """Every entry by name. Raises BadFile."""
    count, size, start = _find_directory(file)
    if start + size > file.size:
        _fail(file, f"runs over the end of the file, at {file.size}", start)
    if count > size // _CENTRAL.size:
        _fail(file, f"truncated: {count} entries in {size} bytes", start)
    budget.spend(file.path, "zip entries", count, field="zip directory", offset=start)
    budget.spend(file.path, "bytes of headers", size, field="zip directory", offset=start)
    entries: dict[str, Entry] = {}
    ranges = []
    for name, local, nbytes, at in _entries(file, count, size, start):
        if name in entries:
            _fail(file, f"names {short(name)} twice", at)
        entry = _locate(file, name, local, nbytes, limit=start)
        entries[name] = entry
        ranges.append((local, entry.offset + nbytes, name))
    end = 0
    for begin, stop, name in sorted(ranges):
        if begin < end:
            raise BadFile(file.path, "overlaps the entry before it", field=f"zip entry {short(name)}", offset=begin)
        end = stop
    return entries


def _fail(file: MappedFile, problem: str, offset: int | None) -> NoReturn:
    raise BadFile(file.path, problem, field="zip directory", offset=offset)


def _find_directory(file: MappedFile) -> tuple[int, int, int]:
    """How many entries, and the size and the start of the directory that lists them."""
    tail_start = max(0, file.size - _END.size - 0xFFFF)
    found = file.bytes(tail_start, file.size - tail_start).rfind(b"PK\x05\x06")
    end = tail_start + found
    if found < 0 or end + _END.size > file.size:
        _fail(file, "not found at the end of the file: truncated, or no zip archive", None)
    _, disk, first_disk, here, count, size, start, comment = _END.unpack(file.bytes(end, _END.size))
    if end + _END.size + comment != file.size:
        _fail(file, "does not end where the file does", end)
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and file.bytes(locator, 4) == b"PK\x06\x07":
        _, disk, end64, _ = _END64_LOCATOR.unpack(file.bytes(locator, _END64_LOCATOR.size))
        if end64 + _END64.size > locator or file.bytes(end64, 4) != b"PK\x06\x06":
            _fail(file, f"no Zip64 record at {end64}", locator)
        _, _, _, _, _, first_disk, here, count, size, start = _END64.unpack(file.bytes(end64, _END64.size))
    if disk or first_disk or here != count:
        _fail(file, "belongs to an archive of several parts", end)
    return count, size, start


def _entries(file: MappedFile, count: int, size: int, start: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, offset of the local header, size of the content, and where the directory says so."""
    position, stop = start, start + size
    for _ in range(count):
        at = position
        if at + _CENTRAL.size > stop:
            _fail(file, "truncated", at)
        fields = _CENTRAL.unpack(file.bytes(at, _CENTRAL.size))
        signature, _, _, flags, method = fields[:5]
        packed, nbytes, name_length, extra_length, comment_length = fields[8:13]
        local = fields[16]
        position = at + _CENTRAL.size + name_length + extra_length + comment_length
        if signature != b"PK\x01\x02" or position > stop:
            _fail(file, "truncated, or no entry where one should be", at)
        try:
            name = file.bytes(at + _CENTRAL.size, name_length).decode()
        except UnicodeDecodeError:
            _fail(file, "a name that is not UTF-8", at)
        extra = file.bytes(at + _CENTRAL.size + name_length, extra_length)
        nbytes, packed, local = _widen(file, extra, (nbytes, packed, local), at)
        if method != 0 or packed != nbytes or flags & 1:
            _fail(file, f"{short(name)} is compressed or encrypted; torch stores its entries as they are", at)
        yield name, local, nbytes, at
    if position != stop:
        _fail(file, f"{stop - position} bytes after the last entry", position)


def _widen(file: MappedFile, extra: bytes, values: tuple[int, int, int], at: int) -> tuple[int, int, int]:
    """Zip64: a 32-bit value of all ones stands for the next 64-bit one in extra field 1."""
    wide = list(values)
    narrow = [index for index, value in enumerate(values) if value == 0xFFFFFFFF]
    position = 0
    while narrow and position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            if length < 8 * len(narrow) or position + 4 + length > len(extra):
                break
            for index, value in zip(narrow, struct.unpack_from(f"<{len(narrow)}Q", extra, position + 4), strict=True):
                wide[index] = value
            return wide[0], wide[1], wide[2]
        position += 4 + length
    if narrow:
        _fail(file, "a Zip64 size is missing", at)
    return values


def _locate(file: MappedFile, name: str, local: int, nbytes: int, limit: int) -> Entry:
    """The content, which follows a local header that repeats the name; all of it before the directory, at `limit`."""
    field = f"zip entry {short(name)}"
    if local + _LOCAL.size > limit:
        raise BadFile(file.path, "lies outside the file", field=field, offset=local)
    header = _LOCAL.unpack(file.bytes(local, _LOCAL.size))
    name_length, extra_length = header[9:]
    if header[0] != MAGIC or file.bytes(local + _LOCAL.size, name_length) != name.encode():
        raise BadFile(file.path, "has no local header of that name", field=field, offset=local)
    offset = local + _LOCAL.size + name_length + extra_length
    if offset + nbytes > limit:
        raise BadFile(file.path, f"its {nbytes} bytes run into the directory", field=field, offset=offset)
    return Entry(offset, nbytes)
