"""A process within limits, and what its work does with the pipes that it talks by."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pronk.limited.process import LimitedProcess

WORK = """
import json, os, subprocess, sys

def answer(line):
    found = eval(json.loads(line))
    return json.dumps({"found": found}).encode() + b"\\n"
"""


@pytest.mark.parametrize(
    "work",
    [
        "os.write(1, b'[1]\\n')",
        "print('{}', flush=True)",
        "subprocess.run(['echo', 'said']).returncode",
        "subprocess.run(['cat']).returncode",  # which reads what there is
        "len(sys.stdin.read())",
    ],
)
def test_what_work_prints_and_reads_is_no_part_of_what_is_said(tmp_path: Path, work: str) -> None:
    """A reward that started a program lost its run: what that printed was taken for an answer."""
    (tmp_path / "work.py").write_text(WORK)
    process = LimitedProcess(tmp_path / "work.py", "the work", "works")
    try:
        assert process.request(json.dumps(work)) in ({"found": 0}, {"found": None}, {"found": 4})
        assert process.request(json.dumps("6 * 7")) == {"found": 42}
    finally:
        process.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_that_comes_back_answers_nothing(tmp_path: Path) -> None:
    """A reward that forked and returned in both gave two answers to one request: all later ones came a request late."""
    (tmp_path / "work.py").write_text(WORK)
    process = LimitedProcess(tmp_path / "work.py", "the work", "works")
    try:
        assert process.request(json.dumps("'parent' if os.fork() else 'child'")) == {"found": "parent"}
        assert process.request(json.dumps("6 * 7")) == {"found": 42}
        assert process.request(json.dumps("6 * 8")) == {"found": 48}
    finally:
        process.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("ends", ["closed", "over its time", "killed by itself"])
def test_what_work_started_ends_with_it(tmp_path: Path, ends: str) -> None:
    """Programs that a reward had started went on after the run, each until it had enough."""
    (tmp_path / "work.py").write_text(WORK)
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = LimitedProcess(tmp_path / "work.py", "the work", "works", seconds=0.5)
    try:
        started = f"subprocess.Popen(['sleep', '60'], stdout=os.open({str(pipe)!r}, os.O_WRONLY)).returncode"
        assert process.request(json.dumps(started)) == {"found": None}
        with pytest.raises(BlockingIOError):  # somebody holds the other end
            os.read(reader, 1)
        if ends == "closed":
            process.close()
        else:
            work = "sum(iter(int, 1))" if ends == "over its time" else "os.kill(os.getpid(), 9)"
            assert "broken" in process.request(json.dumps(work))
        assert _nobody_writes(reader)
    finally:
        os.close(reader)
        process.close()


def _nobody_writes(reader: int) -> bool:
    for _ in range(200):
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            time.sleep(0.05)
    return False
