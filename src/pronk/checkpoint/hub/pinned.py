"""A model of a few files on the Hugging Face hub, each pinned to a commit and to its bytes: llama2.c's, which lie apart
from their tokenizers. They land in one folder of `PRONK_HOME`, whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from pronk.checkpoint.hub import download
from pronk.checkpoint.hub.local import check_space, digest, disk_errors, home, locked, say
from pronk.checkpoint.hub.repository import Repository
from pronk.errors import DownloadFailed


@dataclass(frozen=True)
class PinnedFile:
    repository: str
    revision: str  # a commit
    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class PinnedModel:
    """The first file is the one to open."""

    name: str
    files: tuple[PinnedFile, ...]
    kind: str = "models"  # of folder

    @property
    def path(self) -> Path:
        """Where it is, or would be, on this machine."""
        return self.places[0]

    @property
    def places(self) -> list[Path]:
        return [home() / self.kind / self.name / Path(pinned.file).name for pinned in self.files]

    @property
    def nbytes(self) -> int:
        return sum(pinned.nbytes for pinned in self.files)

    def is_here(self) -> bool:
        """By size, as wheel.WheelModel.is_here."""
        return not self.absent()

    def absent(self) -> list[tuple[PinnedFile, Path]]:
        return [
            (pinned, path)
            for pinned, path in zip(self.files, self.places, strict=True)
            if not (path.is_file() and path.stat().st_size == pinned.nbytes)
        ]


def fetch(model: PinnedModel, *, verify: bool = False, progress: bool = True) -> Path:
    """The model's file, downloaded unless it is here; `verify` hashes what is. Raises DownloadFailed."""
    if not verify and model.is_here():
        return model.path
    with disk_errors(model.name, model.path.parent), locked(model.name, model.path.parent, progress):
        if verify:
            for pinned, path in zip(model.files, model.places, strict=True):
                if path.exists() and digest(path, hashlib.sha256()) != pinned.sha256:
                    say(f"{model.name}: the copy at {path} is damaged; downloading it again", progress)
                    path.unlink()
        wanted = model.absent()
        if not wanted:
            say(f"{model.name}: already there, verified", progress)
        check_space(model.name, model.path.parent, sum(pinned.nbytes for pinned, _ in wanted), "PRONK_HOME")
        for pinned, path in wanted:
            _download(model, pinned, path, progress)
    return model.path


def _download(model: PinnedModel, pinned: PinnedFile, path: Path, progress: bool) -> None:
    """Under the lock, in a folder that an interrupted download goes on in."""
    temp = path.parent / ".partial"
    came = download.fetch_file(
        Repository(pinned.repository, pinned.revision, pinned.file), temp, pinned.nbytes, progress
    )
    if digest(came, hashlib.sha256()) != pinned.sha256:
        shutil.rmtree(temp, ignore_errors=True)
        raise DownloadFailed(
            f"{model.name}: {pinned.file} came with the wrong sha256 and was thrown away; try again, and if it stays "
            "so, the hub or a mirror in between is serving something else"
        )
    came.replace(path)
    shutil.rmtree(temp, ignore_errors=True)
