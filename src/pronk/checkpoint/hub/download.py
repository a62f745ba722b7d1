"""A repository's model, brought into the Hugging Face hub's own cache and verified.

huggingface_hub does the transfer (resume, tokens, its environment variables); what is chosen, checked and said is ours.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronk.checkpoint.hub.local import check_space, digest, say
from pronk.checkpoint.hub.repository import COMPANIONS, Model, Repository, choose, has_all_pieces, models_in
from pronk.errors import DownloadFailed, ModelNotFound
from pronk.system import human_size
from pronk.terminal import shown_in_line

_TIMEOUT_S = 10.0


def fetch(repository: Repository, *, verify: bool = False, progress: bool = True) -> Path:
    """A folder or file in the hub's cache, downloaded where absent; what has just come is checked against its hash.

    `verify` checks all of it. Without a network, and where a commit is pinned, a complete copy in the cache will do.
    Raises ModelNotFound or DownloadFailed.
    """
    with _errors_in_one_line(repository):
        from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        if verify and _offline():
            raise DownloadFailed(
                f"{repository}: the hub knows its hashes and HF_HUB_OFFLINE is set; unset it to verify"
            )
        pinned = re.fullmatch("[0-9a-f]{40}", repository.revision or "")
        if pinned and not verify and (copy := _cached(repository)):
            return copy
        try:
            info = HfApi().model_info(
                repository.id, revision=repository.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:
            if verify or not (copy := _cached(repository)):
                raise
            if not _offline():
                say(f"{repository}: the hub cannot be reached ({_first_line(error)}); using the copy here", progress)
            return copy
        siblings = {s.rfilename: s for s in info.siblings or ()}
        model = choose(siblings, repository)
        here = {f: try_to_load_from_cache(repository.id, f, revision=info.sha) for f in model.files}
        for file, path in here.items():
            if isinstance(path, str) and siblings[file].size not in (None, Path(path).stat().st_size):
                say(f"{repository}: the copy of {file} is damaged; downloading it again", progress)
                _throw_away(Path(path))
        fresh = [f for f, path in here.items() if not (isinstance(path, str) and Path(path).is_file())]
        need = sum(siblings[f].size or 0 for f in fresh)
        _check_names(repository, model.files)
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        check_space(str(repository), cache, need, "HF_HOME")
        bars = progress and need > 0 and sys.stderr.isatty()
        if need and not bars:
            say(f"downloading {repository} ({human_size(need)})", progress)
        with _progress_bars(bars):
            patterns = [glob.escape(f) for f in model.files]
            folder = Path(
                snapshot_download(repository.id, revision=repository.revision, allow_patterns=patterns, max_workers=4)
            )
        for file in model.files if verify else fresh:
            _check_hash(repository, folder / file, siblings[file])
        if verify and not fresh:
            say(f"{repository}: already there, verified", progress)
        return _place(folder, model)


def fetch_file(repository: Repository, folder: Path, nbytes: int, progress: bool = True) -> Path:
    """The one file that is the `part` of a repository, brought into a folder outside the hub's cache."""
    bars = progress and sys.stderr.isatty()
    with _errors_in_one_line(repository), _progress_bars(bars):
        from huggingface_hub import hf_hub_download

        if not bars:
            say(f"downloading {repository.part} of {repository.id} ({human_size(nbytes)})", progress)
        assert repository.part
        if not _offline() and not (folder / repository.part).exists():
            _look_for_network(repository.id, repository.part, repository.revision)
        return Path(hf_hub_download(repository.id, repository.part, revision=repository.revision, local_dir=folder))


def _look_for_network(repository: str, file: str, revision: str | None) -> None:
    """Without one a download looks for the file for 24 s, and does not say what is wrong. All else it tries again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, file, revision=revision), timeout=_TIMEOUT_S)
    except Exception as error:
        cause: BaseException | None = error
        while cause and not isinstance(cause, ConnectionRefusedError | socket.gaierror):
            cause = cause.__cause__ or cause.__context__
        if cause:
            raise


def cached() -> Iterator[tuple[str, Path, int]]:
    """(name, path, bytes) of every model in the hub's cache that is complete and in a format that pronk reads."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda r: r.repo_id):
        for revision in repository.revisions:
            if repository.repo_type != "model":
                continue
            sizes = {f.file_path.relative_to(revision.snapshot_path).as_posix(): f for f in revision.files}
            at = "" if "main" in revision.refs else min(revision.refs, default=revision.commit_hash)
            for part, model in models_in(sizes).items():
                if has_all_pieces(model):
                    name = Repository(repository.repo_id, at or None, part or None)
                    size = sum(sizes[f].size_on_disk for f in model.files)
                    yield str(name), _place(revision.snapshot_path, model), size


def _cached(repository: Repository) -> Path | None:
    """The model from the cache alone, or None unless all of it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def local(patterns: list[str]) -> Path:
        # Complains of files that match and are absent, where the cache knows the repository's listing.
        found = snapshot_download(
            repository.id, revision=repository.revision, local_files_only=True, allow_patterns=patterns
        )
        return Path(found)

    try:
        folder = local([])
        files = [f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()]
        model = choose(files, repository)
        beside = [f"{model.entry}/{name}".lstrip("/") for name in COMPANIONS] if (folder / model.entry).is_dir() else []
        local([glob.escape(f) for f in (*model.files, *beside)])
    except (LocalEntryNotFoundError, ModelNotFound):
        return None
    return _place(folder, model) if has_all_pieces(model) else None


def _place(folder: Path, model: Model) -> Path:
    """What to open. Where another model of the repository came to lie in the same folder, the folder is both of them,
    and one of the model's own weight files is not."""
    place = folder / model.entry
    shared = place.is_dir() and len(models_in(file.name for file in place.iterdir())) > 1
    return folder / model.files[-1] if shared else place


def _check_names(repository: Repository, files: Iterable[str]) -> None:
    """huggingface_hub writes them beside its bars as they are."""
    for file in files:
        if shown_in_line(file) != file:
            raise DownloadFailed(f"{repository}: {file}: a terminal would obey characters of this name")


def _check_hash(repository: Repository, path: Path, sibling: Any) -> None:
    """Large files are known by their sha256, small ones by git's sha1 of a blob."""
    if sibling.lfs:
        expected, hasher = sibling.lfs.sha256, hashlib.sha256()
    else:
        expected, hasher = sibling.blob_id, hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    if digest(path, hasher) != expected:
        _throw_away(path)
        raise DownloadFailed(f"{repository}: {path.name} has the wrong hash and was thrown away; try again")


def _throw_away(path: Path) -> None:
    path.resolve().unlink()  # the blob that the name in the snapshot leads to
    path.unlink(missing_ok=True)


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _first_line(error: BaseException) -> str:
    """huggingface_hub's messages run over many lines and begin with the status; the class alone says enough then."""
    text = str(error).strip()
    return text if text and "\n" not in text else type(error).__name__


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    """huggingface_hub draws them off the terminal as well, and where there is nothing to fetch."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _errors_in_one_line(repository: Repository) -> Iterator[None]:
    """What huggingface_hub raises, as one line; what it logs, not at all."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging as hub_logging

    name, verbosity = str(repository), hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except (ModelNotFound, DownloadFailed):
        raise
    except errors.GatedRepoError as error:
        raise DownloadFailed(
            f"{name}: the repository is gated; accept its licence on the model's page, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: no such file here, and no such repository on the hub (or a private one: set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repository.id}: has no branch, tag or commit {repository.revision!r}") from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{name}: no such file here, and not the name of a repository") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "check HF_TOKEN" if status in (401, 403) else "try again later"
        raise DownloadFailed(f"{name}: the hub answered {status}; {hint}") from error
    except Exception as error:  # the transport's own, which differ from release to release
        raise DownloadFailed(f"{name}: {_why_it_failed(error)}") from error
    finally:
        hub_logging.set_verbosity(verbosity)


def _why_it_failed(error: Exception) -> str:
    if _offline():
        return "not (all) in the cache, and HF_HUB_OFFLINE is set"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; make room, or set HF_HOME to a folder elsewhere"
    if isinstance(error, PermissionError):
        return (
            f"{error.filename or 'the cache'}: {error.strerror}; make it writable, or set HF_HOME to a folder elsewhere"
        )
    return f"could not be downloaded ({_first_line(error)}); check the connection and try again"
