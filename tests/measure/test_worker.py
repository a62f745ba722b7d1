"""A worker's errors arrive as one line, whether it raised, crashed or was killed; and nothing hangs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pronk.errors import PronkError
from pronk.measure import worker as workers
from pronk.measure.worker import Worker, WorkerDied, WorkerFailed

TOY = """
import os, signal, sys, time
from pronk.errors import BadFile
from pronk.measure.worker import serve

class Toy:
    def add(self, a, b):
        print("a library that prints")
        return a + b
    def count(self, n):
        for i in range(n):
            self.progress("counting", i + 1, n)
        return n
    def refuse(self):
        raise BadFile("model.bin", "broken\\nin two lines", offset=3)
    def fail(self):
        return 1 / 0
    def exhaust(self):
        raise MemoryError
    def exhaust_torch(self, said):
        raise RuntimeError(said)
    def leave(self):
        print("something about the allocator", file=sys.stderr, flush=True)
        os._exit(3)
    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def half(self):
        os.write(answers, b'{"resu')
        os._exit(0)
    def sleep(self):
        os.write(2, b"asleep")
        time.sleep(600)

answers = os.dup(1)
serve(Toy())
"""


@pytest.fixture
def toy() -> Iterator[Worker]:
    with Worker("q8", [sys.executable, "-c", TOY]) as worker:
        yield worker


def test_results_and_progress_come_back(toy: Worker) -> None:
    told: list[tuple[str, int, int]] = []
    assert toy.call("add", a="Bär ", b="🐻") == "Bär 🐻"
    assert toy.call("count", n=3, progress=lambda *what: told.append(what)) == 3
    assert told == [("counting", n, 3) for n in (1, 2, 3)]
    assert toy.call("count", n=2) == 2  # nobody listens


def test_its_errors_are_ours_and_it_goes_on(toy: Worker) -> None:
    with pytest.raises(PronkError) as refused:
        toy.call("refuse")
    assert str(refused.value) == "model.bin at byte 3: broken in two lines"
    with pytest.raises(WorkerFailed, match=r"(?s)q8, in fail:.*ZeroDivisionError"):
        toy.call("fail")
    with pytest.raises(PronkError, match="in 'exhaust': out of memory; fewer bits"):
        toy.call("exhaust")
    for said in ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"):
        with pytest.raises(PronkError, match=f"in 'exhaust_torch': {said}; fewer bits"):
            toy.call("exhaust_torch", said=f"{said}\nand a trace")
    assert toy.call("add", a=1, b=2) == 3


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        ("leave", "exit code 3; something about the allocator"),
        ("killed", "killed by signal 9 (SIGKILL), which is what the system does where memory runs out"),
        ("half", "exit code"),
    ],
)
def test_one_that_dies_is_said_to_have_died(toy: Worker, operation: str, says: str) -> None:
    with pytest.raises(WorkerDied) as died:
        toy.call(operation)
    line = str(died.value)
    assert line.startswith(f"q8: the process that measured it ended in '{operation}': ")
    assert says in line or operation == "half"
    assert "\n" not in line
    with pytest.raises(WorkerDied):  # and stays so
        toy.call("add", a=1, b=2)


def test_a_worker_in_the_middle_of_something_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Worker("q8", [sys.executable, "-c", TOY]) as worker:
        worker.call("count", n=1, progress=interrupt)
    assert worker.process.poll() is not None
    worker = Worker("q8", [sys.executable, "-c", TOY])
    assert worker.process.stdin is not None
    worker.process.stdin.write('["sleep", {}]\n')
    worker.process.stdin.flush()
    worker.close()  # and not in the 600 s that it sleeps, which are more than a test has
    assert worker.process.poll() is not None


def test_the_real_one_says_what_is_wrong_with_a_model() -> None:
    with Worker("bf16") as worker, pytest.raises(PronkError, match="no such file or folder"):
        worker.call("load", name="own", model="./nowhere.gguf", engine="cpu", options={})
