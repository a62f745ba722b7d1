"""Valid files, broken at random: bits flipped, bytes cut, inserted and moved, integers replaced by extremes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pronk import checkpoint
from pronk.errors import PronkError

EXTREMES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EXTREMES += [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@st.composite
def broken(draw: st.DrawFn, valid: bytes, header: int) -> bytes:
    """`valid` with one to four things done to it, mostly in its first `header` bytes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        end = len(data) if draw(st.integers(0, 4)) == 0 else min(header, len(data))
        at = draw(st.integers(0, max(end - 1, 0)))
        what = draw(st.sampled_from(["flip", "integer", "integer", "nudge", "cut", "delete", "insert", "copy"]))
        width = draw(st.sampled_from([1, 2, 4, 8]))
        if what == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "integer":
            order = draw(st.sampled_from(["little", "big"]))
            value = draw(st.sampled_from(EXTREMES)) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, order)
        elif what == "nudge":
            value = int.from_bytes(data[at : at + width], "little") + draw(st.integers(-2, 2))
            data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif what == "cut":
            del data[at:]
        elif what == "delete":
            del data[at : at + draw(st.integers(1, 64))]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=32))
        elif what == "copy":
            start = draw(st.integers(0, max(end - 1, 0)))
            data[at:at] = data[start : start + draw(st.integers(1, 64))]
    return bytes(data)


def outcome(path: Path) -> str:
    """What comes of opening and reading everything: "read", or the kind of pronk's error."""
    try:
        for tensor in checkpoint.open(path).tensors.values():
            assert tensor.read().shape == tensor.shape
    except PronkError as error:
        message = str(error).encode()  # no lone surrogates, so that it can be printed
        assert b"\n" not in message
        assert len(message) < 600
        return type(error).__name__
    return "read"


def survives(examples: int, valid: list[tuple[bytes, int]], check: Callable[[bytes], None]) -> int:
    """Run `check` on that many broken versions of the (file, length of its header) pairs; returns how many it was."""
    count = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.one_of([broken(*pair) for pair in valid]))
    def run(data: bytes) -> None:
        nonlocal count
        count += 1
        check(data)

    run()
    return count


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    """As `modestly`, of time alone: watching allocations slows many small ones down several times."""
    gc.freeze()  # what other tests left is not gone through for each new list
    started = process_time()
    try:
        yield
    finally:
        gc.unfreeze()
    assert (took := process_time() - started) < seconds, f"{took:.2f} s"


@contextmanager
def modestly(seconds: float = 1.0, megabytes: float = 100.0) -> Iterator[None]:
    """What happens inside must take no more of the processor's time, and allocate no more, than this."""
    gc.freeze()  # or else a collection goes through what tests before this one have left, which takes seconds
    tracemalloc.start()
    started = process_time()
    try:
        yield
    finally:
        gc.unfreeze()
        took, peak = process_time() - started, tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    assert took < seconds, f"{took:.2f} s"
    assert peak < megabytes, f"{peak:.0f} MB"
