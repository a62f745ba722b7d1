"""system.replacing: nobody ever finds half of a file, and what a killed process left goes with the next one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

from pronk.system import replacing

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kill -9 and fork are POSIX's")
# Writes half of it, says so, and waits; as a file, as a folder, or as a file that is the part of another.
WRITER = """
import sys
from pathlib import Path
from pronk.system import replacing
def half(path, kind):
    with replacing(path) as fresh:
        if kind == "nested":
            half(fresh, "file")
        if kind == "folder":
            fresh.mkdir()
            (fresh / "half").write_text("half")
        else:
            fresh.write_text("half")
        print("writing", flush=True)
        sys.stdin.read()
half(Path(sys.argv[1]), sys.argv[2])
"""


class Writers:
    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def __call__(self, path: Path, kind: str = "file") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(path), kind]
        pipe = subprocess.PIPE
        process = self.stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        self.stack.callback(process.kill)
        assert process.stdout
        assert process.stdout.readline() == "writing\n"
        return process


@pytest.fixture
def writing() -> Iterator[Writers]:
    with ExitStack() as stack:
        yield Writers(stack)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(60)


def write(path: Path, text: str = "new") -> None:
    with replacing(path) as fresh:
        fresh.write_text(text)


@pytest.mark.parametrize("kind", ["file", "folder", "nested"])
@pytest.mark.parametrize("name", ["model.gguf", "a [b]*.?", "0"])
def test_parts_of_a_killed_process_go_with_the_next_run_to_that_target(
    tmp_path: Path, writing: Writers, kind: str, name: str
) -> None:
    for _ in range(2):
        process = writing(tmp_path / name, kind)
        killed(process)
        assert any(found.startswith(f".{name}.{process.pid}.") for found in names(tmp_path))
    (tmp_path / "model.gguf.part").touch()  # nobody's of ours
    (tmp_path / f".{name}.mine.part").touch()
    write(tmp_path / name)
    assert names(tmp_path) == sorted([name, "model.gguf.part", f".{name}.mine.part"])
    assert (tmp_path / name).read_text() == "new"


def test_a_part_that_a_living_process_writes_stays(tmp_path: Path, writing: Writers) -> None:
    path = tmp_path / "model.gguf"
    process = writing(path)
    before = names(tmp_path)
    write(path)
    assert names(tmp_path) == sorted([*before, "model.gguf"])
    process.communicate("", timeout=60)
    assert process.returncode == 0
    assert path.read_text() == "half"  # the last to end
    assert names(tmp_path) == ["model.gguf"]


def test_a_living_process_of_the_same_number_keeps_its_part(tmp_path: Path, writing: Writers) -> None:
    """In two containers that share a disk, numbers of processes tell nothing: the lock does."""
    path = tmp_path / "model.gguf"
    process = writing(path)
    number = 4_000_000  # beyond what Linux gives
    for kind in ("part", "lock"):
        (theirs,) = tmp_path.glob(f".model.gguf.{process.pid}.*.{kind}")
        theirs.rename(tmp_path / f".model.gguf.{number}.{kind}")
    write(path)
    assert (tmp_path / f".model.gguf.{number}.part").exists()
    killed(process)
    write(path)
    assert names(tmp_path) == ["model.gguf"]


def test_a_part_of_another_target_is_not_touched(tmp_path: Path, writing: Writers) -> None:
    killed(writing(tmp_path / "b"))
    before = names(tmp_path)
    write(tmp_path / "a")
    assert names(tmp_path) == sorted([*before, "a"])


def test_a_folder_that_stood_there_comes_back_after_a_kill_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    pid = os.fork()
    if not pid:

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Path.replace = die  # type: ignore[method-assign,assignment]
        with replacing(target) as fresh:
            fresh.mkdir()
        os._exit(1)
    os.waitpid(pid, 0)
    assert not target.exists()
    with suppress(ValueError), replacing(target):
        assert names(target) == ["old"]
        raise ValueError
    assert (names(tmp_path), names(target)) == (["model"], ["old"])


def test_failures_leave_nothing(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with suppress(error), replacing(tmp_path / "a") as fresh:
            fresh.write_text("half")
            raise error
    assert names(tmp_path) == []
    with pytest.raises(OSError, match="nowhere/a"):
        write(tmp_path / "nowhere" / "a")


def test_a_disk_without_locks_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unknown(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    (tmp_path / ".a.1.part").touch()
    (tmp_path / ".a.1.lock").touch()
    write(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / ".a.1.part").exists()  # whose it is cannot be told
    assert not list(tmp_path.glob(f".a.{os.getpid()}.*"))


def test_a_conversion_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path / "tiny")
    command = ["convert", str(model), str(tmp_path / "tiny.gguf"), "--to", "gguf"]
    dies = (
        "import os, signal, pronk.checkpoint.writers.gguf as gguf\n"
        "gguf.write_numbers = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from pronk.cli import main; main()"
    )
    died = subprocess.run([sys.executable, "-c", dies, *command], capture_output=True)
    assert died.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    done = subprocess.run([sys.executable, "-m", "pronk", *command], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["tiny", "tiny.gguf"]
