"""A process within limits, and what its work does with the pipes that it talks by."""

from __future__ import annotations

import json
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
