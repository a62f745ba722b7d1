"""A worker's errors arrive as one line, whether it raised, crashed or was killed; and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pronk.errors import BadFile, PronkError
from pronk.measure import worker as workers
from pronk.measure.operations import Loading, loaded
from pronk.measure.worker import Held, Worker, WorkerDied, WorkerFailed


def add(held: Held, a: Any, b: Any) -> Any:
    print("a library that prints", flush=True)
    return a + b


def count(held: Held, n: int) -> int:
    for i in range(n):
        held.progress("counting", i + 1, n)
    return n


def hold(held: Held) -> int:
    held.model = (held.model or 0) + 1
    return int(held.model)


def refuse(held: Held) -> None:
    raise BadFile("model.bin", "broken\nin two lines", offset=3)


def fail(held: Held) -> float:
    return 1 / 0


def exhaust(held: Held) -> None:
    raise MemoryError


def exhaust_torch(held: Held, said: str) -> None:
    raise RuntimeError(said)


def leave(held: Held) -> None:
    print("something about the allocator", file=sys.stderr, flush=True)
    os._exit(3)


def killed(held: Held) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(held: Held) -> None:
    """An answer of which only the beginning comes."""
    (pipe,) = (cell.cell_contents for cell in held.progress.__closure__)  # type: ignore[attr-defined]
    os.write(pipe.fileno(), b"\x00\x00\x10\x00half")
    os._exit(0)


def ctrl_c(held: Held) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "as if nothing had happened"


def sleep(held: Held) -> None:
    time.sleep(600)


@pytest.fixture
def toy() -> Iterator[Worker]:
    worker = Worker("q8")
    yield worker
    worker.kill()


def test_results_and_progress_come_back(toy: Worker) -> None:
    told: list[tuple[str, int, int]] = []
    assert toy.call(add, a="Bär ", b="🐻") == "Bär 🐻"
    assert toy.call(count, n=3, progress=lambda *what: told.append(what)) == 3
    assert told == [("counting", n, 3) for n in (1, 2, 3)]
    assert toy.call(count, n=2) == 2  # nobody listens
    assert [toy.call(hold), toy.call(hold)] == [1, 2]  # from one call to the next


def test_its_errors_are_ours_and_it_goes_on(toy: Worker) -> None:
    with pytest.raises(PronkError) as refused:
        toy.call(refuse)
    assert str(refused.value) == "model.bin at byte 3: broken in two lines"
    with pytest.raises(WorkerFailed, match=r"(?s)^q8:.*ZeroDivisionError"):
        toy.call(fail)
    with pytest.raises(PronkError, match="q8: out of memory; fewer bits"):
        toy.call(exhaust)
    for said in ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"):
        with pytest.raises(PronkError, match=f"^q8: {said}; fewer bits"):
            toy.call(exhaust_torch, said=f"{said}\nand a trace")
    assert toy.call(ctrl_c) == "as if nothing had happened"  # what it means is the caller's business
    assert toy.call(add, a=1, b=2) == 3


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (leave, "exit code 3; something about the allocator"),
        (killed, "killed by signal 9 (SIGKILL), which is what the system does where memory runs out"),
        (half, "exit code 0"),
    ],
)
def test_one_that_dies_is_said_to_have_died(toy: Worker, function: Callable[[Held], None], says: str) -> None:
    with pytest.raises(WorkerDied) as died:
        toy.call(function)
    assert str(died.value) == f"q8: the process that measured it ended: {says}"
    with pytest.raises(WorkerDied):  # and stays so
        toy.call(add, a=1, b=2)


def test_a_worker_in_the_middle_of_something_is_not_waited_for(toy: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.call(count, n=1, progress=interrupt)
    toy._pipe.send((sleep, {}))
    toy.close()  # and not in the 600 s that it sleeps, which are more than a test has
    assert not toy.process.is_alive()


def test_without_its_caller_it_ends(tmp_path: Path) -> None:
    """Were the caller killed, models of gigabytes would go on lying in memory."""
    script = "import sys\nfrom pronk.measure.worker import Worker\n"
    script += "worker = Worker('q8')\nprint(worker.process.pid, flush=True)\nsys.stdin.read()\n"
    caller = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)})  # fmt: skip
    assert caller.stdin
    assert caller.stdout
    pid = int(caller.stdout.readline())
    caller.kill()
    caller.communicate()
    deadline = time.monotonic() + 120
    with suppress(ProcessLookupError, FileNotFoundError):  # it may end between two looks at it
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
            if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        pytest.fail("it is there still")


def test_the_real_one_says_what_is_wrong_with_a_model() -> None:
    worker = Worker("bf16")
    with pytest.raises(PronkError, match="no such file or folder"):
        worker.call(loaded, how=Loading("./nowhere.gguf", "cpu", {}))
    worker.close()


def test_ctrl_c_while_a_worker_starts_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was: the signal was ignored meanwhile, and `pronk compare` went on for hours."""
    started: list[Any] = []
    start = workers._SPAWN.Process.start

    def interrupted(process: Any) -> None:
        started.append(process)
        os.kill(os.getpid(), signal.SIGINT)
        start(process)

    monkeypatch.setattr(workers._SPAWN.Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker("toy")
    assert not started[0].is_alive()


def test_a_worker_does_not_hear_ctrl_c() -> None:
    worker = Worker("toy")
    try:
        assert worker.process.pid
        os.kill(worker.process.pid, signal.SIGINT)
        assert worker.call(add, a=1, b=2) == 3
    finally:
        worker.close()
