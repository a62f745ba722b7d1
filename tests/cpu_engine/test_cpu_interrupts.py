"""Signals during a pass, or the wait for one: after Ctrl-C no more is computed, and a handler cannot start another.

The signals come of a clock that counts the processor's time: by another, a busy machine may not have begun the pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Many layers of many heads and next to no products: from the signal to the exception, in seconds of the processor.
INTERRUPTED = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from tiny import in_memory, random_weights, tiny_config
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

config = tiny_config(
    hidden_size=4, intermediate_size=4, num_hidden_layers=100, num_attention_heads=16,
    num_key_value_heads=16, head_dim=64,
)
backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1, isa="portable")
heard = 0.0

def stop(signum, frame):
    global heard
    heard = time.process_time()
    raise KeyboardInterrupt

signal.signal(signal.SIGPROF, stop)
try:
    signal.setitimer(signal.ITIMER_PROF, 0.2)
    backend.forward(Batch.of([Run([1] * 4000)]), None)
except KeyboardInterrupt:
    print(time.process_time() - heard)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupted_pass_does_not_go_through_its_layers() -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(Path(__file__).parents[1])]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 0.2


# Of a size whose passes last long enough to be interrupted.
MADE = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from tiny import in_memory, random_weights, tiny_config
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

def made(threads):
    config = tiny_config(hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    source = in_memory(config, random_weights(config))
    backend = CpuBackend.from_checkpoint(source, threads=threads, isa="portable")
    return source, backend, backend.new_kv(64, 64)
"""

# The handler asks the model that it interrupts for another pass, in the way named by the second argument.
CALLED_AGAIN = """
from pronk.errors import PronkError

source, backend, kv = made(threads=2)
called = {
    "forward": lambda: backend.forward(Batch.of([Run([1])]), None),
    "farther": lambda: backend.forward(Batch.of([Run([1] * 2100)]), None),
    "resize": lambda: kv.resize(80),
    "dequantized": lambda: backend.dequantized(source).tensors["lm_head.weight"].read(),
}[sys.argv[2]]

def handler(signum, frame):
    try:
        called()
    except PronkError as error:
        print(error)

signal.signal(signal.SIGPROF, handler)
signal.setitimer(signal.ITIMER_PROF, 0.2)
backend.forward(Batch.of([Run([1] * 2000, 0, range(64))]), kv)
called()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("call", ["forward", "farther", "resize", "dequantized"])
def test_a_handler_that_calls_the_model_it_interrupts_is_refused(call: str) -> None:
    command = [sys.executable, "-c", MADE + CALLED_AGAIN, str(Path(__file__).parents[1]), call]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    refused, done = found.stdout.splitlines()
    assert "signal handler" in refused, found.stderr
    assert done == "done"


# While a thread computes, the main one waits for its turn; what it calls is named by the second argument.
WAITING = """
import threading, time

source, backend, kv = made(threads=1)
called = {
    "forward": lambda: backend.forward(Batch.of([Run([1])]), None),
    "dequantized": lambda: backend.dequantized(source).tensors["lm_head.weight"].read(),
}[sys.argv[2]]

def stop(signum, frame):
    raise KeyboardInterrupt

backend.forward(Batch.of([Run([1])]), kv=None)
other = threading.Thread(target=lambda: backend.forward(Batch.of([Run([1] * 1500, 0, range(64))]), kv))
before = time.process_time()
other.start()
while time.process_time() - before < 0.1:
    time.sleep(0.01)
signal.signal(signal.SIGPROF, stop)
try:
    signal.setitimer(signal.ITIMER_PROF, 0.1)
    called()
except KeyboardInterrupt:
    print("heard while it waited" if other.is_alive() else "heard too late")
other.join()
called()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("call", ["forward", "dequantized"])
def test_who_waits_for_another_threads_pass_hears_a_signal(call: str) -> None:
    command = [sys.executable, "-c", MADE + WAITING, str(Path(__file__).parents[1]), call]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.stdout.splitlines() == ["heard while it waited", "done"], found.stderr
