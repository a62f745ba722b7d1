"""Sizes that overflow, and locks that nobody will ever unlock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pronk import _native


def test_a_cache_whose_bytes_overflow_is_refused() -> None:
    heads = 1 << 14
    model = _native.Model(
        vocab_size=1, hidden_size=1, intermediate_size=1, num_hidden_layers=1024, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=256, rms_norm_eps=1e-5, threads=1,
    )  # fmt: skip
    kv = _native.KV(model, "f32", 0)
    wraps = (1 << 64) // kv.block_bytes + 1  # blocks of as many bytes as one has, counted in 64 bits
    assert wraps < 1 << 31
    with pytest.raises(MemoryError):
        _native.KV(model, "f32", wraps)
    with pytest.raises(MemoryError):
        kv.resize(wraps)
    assert kv.num_blocks == 0


FORKED_AT_WORK = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from tiny import in_memory, random_weights, tiny_config
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import PronkError

config = tiny_config(hidden_size=512, num_hidden_layers=4)
backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=2, isa="portable")
batch = Batch.of([Run([1] * 4096, 0, range(64))])
kv, over = backend.new_kv(64, 64), threading.Event()

def work():
    while not over.is_set():
        backend.forward(batch, kv)

worker, before = threading.Thread(target=work), time.process_time()
worker.start()
while time.process_time() - before < 0.2:  # of the processor; the pass takes longer
    time.sleep(0.01)
child = os.fork()
if child == 0:
    try:
        backend.forward(Batch.of([Run([1])]), None)
    except PronkError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(0)
over.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
worker.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks of POSIX")
def test_a_child_forked_off_during_a_pass_is_told_so() -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED_AT_WORK, str(tests)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (found.stdout, found.returncode) == ("7\n", 0), found.stderr
