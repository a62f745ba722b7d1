"""Which kernels run, and what the system is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pronk import _native

ASKED = """
import ctypes
from pronk import _native

def permissions():
    bits = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(bits)) == 0  # arch_prctl, ARCH_GET_XCOMP_PERM
    return bits.value

before = permissions()
print(_native.isa(), (permissions() ^ before) >> 18)
"""

SMALL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
from pronk import _native
print(_native.isa())
"""

needs_amx = pytest.mark.skipif("amx" not in _native.isas(), reason="there is no AMX, or the system lets nobody have it")


def run(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PRONK_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@needs_amx
@pytest.mark.parametrize(("isa", "said"), [("amx", "amx 1"), ("", "amx 1"), ("avx2", "avx2 0")])
def test_the_system_is_asked_for_tiles_only_where_they_are_used(isa: str, said: str) -> None:
    """No signal stack of under 12 KB can be had afterwards, anywhere in the process."""
    assert run(ASKED, isa).stdout.strip() == said


@needs_amx
def test_where_the_system_refuses_tiles_the_next_best_runs_and_amx_is_an_error() -> None:
    assert run(SMALL_STACK, "").stdout.strip() == "avx512-bf16"
    refused = run(SMALL_STACK, "amx")
    assert refused.returncode == 1
    assert "portable, and the system lets it have no amx" in refused.stderr
