"""Signals and forks: Ctrl-C is heard in the middle of a pass, and a child generates what its parent does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of POSIX")

SETUP = """
import multiprocessing, os, signal, sys, time
import numpy as np
sys.path.insert(0, sys.argv[1])
from tiny import in_memory, random_weights, tiny_config
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

def engine(threads, isa=None, **sizes):
    config = tiny_config(**sizes)
    return CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=threads, isa=isa)
"""


def run(script: str) -> str:
    """In a process of its own: pytest's has threads, and handlers of signals."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SETUP + script, str(TESTS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


# Prints the processor's time from the beginning of a pass of many seconds to the exception.
INTERRUPTED = """
backend = engine(THREADS, "portable", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
kv = backend.new_kv(64, 64)
batch = Batch.of([Run([1] * 4096, 0, range(64))])
begun = 0.0

def at_alarm(signum, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGPROF, at_alarm)
begun = time.process_time()
try:
    signal.setitimer(signal.ITIMER_PROF, 0.5)  # of the processor: a busy machine may begin late
    backend.forward(batch, kv)
except KeyboardInterrupt:
    print("interrupted", time.process_time() - begun)
print("after", np.isfinite(backend.forward(Batch.of([Run([1, 2], 0, (0,))]), kv)).all())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_is_given_up_when_interrupted(threads: int) -> None:
    interrupted, after = run(INTERRUPTED.replace("THREADS", str(threads))).splitlines()
    word, seconds = interrupted.split()
    assert word == "interrupted"
    assert float(seconds) < 0.5 + threads * 0.2, "the signal came after half a second"
    assert after == "after True"


def test_an_exception_of_a_handler_is_the_one_raised() -> None:
    script = INTERRUPTED.replace("THREADS", "1").replace("    raise KeyboardInterrupt", "    raise LookupError('mine')")
    assert run(script.replace("except KeyboardInterrupt", "except LookupError")).startswith("interrupted")


FORKED = """
def text(backend):
    kv, ids = backend.new_kv(1, 64), [1, 2, 3]
    logits = backend.forward(Batch.of([Run(ids, 0, (0,))]), kv)
    while len(ids) < 20:
        ids.append(int(logits[-1].argmax()))
        logits = backend.forward(Batch.of([Run(ids[-1:], len(ids) - 1, (0,))]), kv)
    return ids

backend = engine(2)
expected = text(backend)
"""


def test_a_forked_child_generates() -> None:
    script = FORKED + "child = os.fork()\nif child == 0: os._exit(7 if text(backend) == expected else 1)\n"
    script += "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text(backend) == expected)"
    assert run(script) == "7 True\n"


# Forked off by a handler, amid a pass: the threads that have their part in it are the parent's.
FORKED_AMID = """
backend = engine(2, "portable", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
kv, batch = backend.new_kv(64, 64), Batch.of([Run([1] * 1000, 0, range(64))])
expected = backend.forward(batch, kv)
child = None

def fork(signum, frame):
    global child
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(250)  # rather than wait for ever

signal.signal(signal.SIGPROF, fork)
signal.setitimer(signal.ITIMER_PROF, 0.1)
try:
    same = np.array_equal(backend.forward(batch, kv), expected)
except PronkError as error:
    told = child == 0 and "forked off" in str(error)
    os._exit(7 if told and np.array_equal(backend.forward(batch, kv), expected) else 1)
if child == 0:
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), same)
"""


def test_a_child_forked_off_by_a_handler_amid_a_pass_is_told_so_and_can_begin_anew() -> None:
    assert run("from pronk.errors import PronkError\n" + FORKED_AMID) == "7 True\n"


def test_forked_workers_generate() -> None:
    script = FORKED + (
        "def work(n): return text(backend) == expected\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(work, range(4)))"
    )
    assert run(script) == "[True, True, True, True]\n"


def test_threads_of_python_share_a_model() -> None:
    script = FORKED + (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: texts = list(pool.map(lambda _: text(backend), range(8)))\n"
        "print(texts == [expected] * 8)"
    )
    assert run(script) == "True\n"


# Passes that end in the middle of Python's own end, and long ones; and a pass of the main thread after that began.
DAEMONS = """
import atexit, sys, threading, time
atexit.register(lambda: print(backends[2].forward(Batch.of([Run([1])]), None).shape))
sys.path.insert(0, sys.argv[1])
from tiny import in_memory, random_weights, tiny_config
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

config = tiny_config()
backends = [CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1) for _ in range(3)]

def forever(backend, tokens):
    while True:
        backend.forward(Batch.of([Run([1] * tokens)]), None)

for tokens, backend in zip((1, 1, 4000), (*backends[:2], backends[0])):
    threading.Thread(target=forever, args=(backend, tokens), daemon=True).start()
time.sleep(0.2)
"""


def test_a_program_ends_while_daemon_threads_compute() -> None:
    command = [sys.executable, "-c", DAEMONS, str(TESTS)]
    for _ in range(3):
        found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert (found.returncode, found.stdout, found.stderr) == (0, "(1, 96)\n", "")
