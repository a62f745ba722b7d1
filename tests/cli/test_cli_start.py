"""Ctrl-C while pronk starts: it ends in silence. Measured by interrupting it at one moment after another."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pronk

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal"),
    pytest.mark.timeout(1800),  # dozens of starts, each of seconds where a machine is busy with something else
]
# As pip writes it for [project.scripts]; and with a byte that says when pronk has set the signal.
PACKAGE = Path(pronk.__file__).parent
ENTRY = (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
SCRIPT = "import sys\nfrom pronk.__main__ import main\nsys.exit(main())\n"
TELLING = f"""import os, _signal
real = _signal.signal
def told(*given):
    _signal.signal = real
    real(*given)
    os.write(1, b'.')
_signal.signal = told
{SCRIPT}"""
DELAYS = [*range(0, 60, 5), *range(60, 301, 15)]  # ms


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "pronk"


def interrupted(script: Path, model: str, delay: int) -> tuple[int, str]:
    command = [sys.executable, str(script), "generate", "-m", model, "-n", "-1", "--ignore-eos", "x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        if "os.write" in script.read_text():
            assert process.stdout
            assert process.stdout.read(1) == "."
        time.sleep(delay / 1000)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=240)[1]
    return process.returncode, said


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start_is_silent(script: Path, model: str) -> None:
    script.write_text(TELLING)
    early = 0
    for delay in DELAYS:
        code, said = interrupted(script, model, delay)
        assert "Traceback" not in said, (delay, said)
        assert "Error" not in said, (delay, said)
        assert "Aborted" not in said, (delay, said)
        assert code in (-signal.SIGINT, 130, 0), (delay, code)  # 0: it was done before
        early += code == -signal.SIGINT
        if code == -signal.SIGINT:
            assert said == "" or "tok/s" in said, (delay, said)  # or it was done, and about to end
    assert early > 3


def test_ctrl_c_within_what_cannot_fail_is_not_lost(script: Path) -> None:
    """It was told of, in a traceback, and the program went on."""
    script.write_text(
        "import os, signal, time, weakref\n"
        "from pronk import cli\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "def gone(_):\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(1000): pass\n"
        "reference = weakref.ref(thing, gone)\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "try:\n    with cli._interruptible():\n        del thing\n        time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


@pytest.mark.slow
def test_before_that_no_traceback_reaches_into_pronk(script: Path, model: str) -> None:
    """While Python itself starts, no program has a say: its traceback ends at our entry at the latest."""
    script.write_text(SCRIPT)
    for delay in DELAYS[:12]:
        _, said = interrupted(script, model, delay)
        frames = re.findall(r'File "(.*)", line', said)
        assert not [file for file in frames if str(PACKAGE) in file and Path(file) not in ENTRY], said


def test_the_entry_imports_nothing_before_it_sets_the_signal() -> None:
    """`typing`, `enum` and `re` would take as long as Python's own start."""
    known = (
        "import sys; before = set(sys.modules)\n"
        "import _signal; real = _signal.signal\n"
        "def signal(*given):\n"
        "    print(sorted(set(sys.modules) - before - {'_signal', 'pronk', 'pronk.__main__', '__future__'}))\n"
        "    return real(*given)\n"
        "_signal.signal = signal\n"
        "from pronk.__main__ import main\n"
        "sys.argv[1:] = ['--version']; main()\n"
    )
    found = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    done = subprocess.run([sys.executable, "-S", "-c", found + known], capture_output=True, text=True)
    assert done.stdout.startswith("[]\n"), done.stderr


def test_an_import_of_the_entry_leaves_ctrl_c_as_it_is() -> None:
    """It did not: a test that imported it had the next test's Ctrl-C end the whole run."""
    before = signal.getsignal(signal.SIGINT)
    importlib.import_module("pronk.__main__")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_installed_program_begins_there() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'pronk = "pronk.__main__:main"' in project
