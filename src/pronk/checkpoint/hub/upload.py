"""A model or an adapter, brought from a folder here into a repository on the Hugging Face hub.

What goes there is chosen by name: weights, their configuration, tokenizer, template, card and licence. A run's
checkpoints, logs and options stay here: they hold names of folders, and nobody asked for them to be shown. Of the path
of an adapter's base model its last part goes there.
huggingface_hub does the transfer, and finds the token where it always does.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from pronk import strict_json
from pronk.checkpoint.hub.local import public, say
from pronk.errors import BadFile, BadRequest, ModelNotFound, PronkError, one_line
from pronk.system import expanded, human_size

if TYPE_CHECKING:
    from huggingface_hub import HfApi, errors

_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin")
_BESIDE = (
    "config.json", "generation_config.json", "adapter_config.json", "*.index.json", "tokenizer*.json",
    "tokenizer.model", "tokenizer.bin", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "recipe.json", "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
_ADAPTER, _BASE = "adapter_config.json", "base_model_name_or_path"
_MODEL, _CARD = "model", "README.md"  # in the folder of a run that trained all weights
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def push(
    folder: str | PathLike[str],
    repository: str,
    *,
    private: bool = True,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> str:
    """Upload a model, an adapter, or what a run of training made, in one commit; gives the address of that.

    `private`: of a repository that is new; one that is there keeps what it is. `revision`: a branch that is there.
    `dry_run`: nothing is sent, and what would be is said, a line a file.

    Raises BadRequest and ModelNotFound for what cannot be pushed, and PronkError, in one line, for what the hub says.
    """
    check(repository, token=not dry_run)
    found = files(expanded(folder))
    size = sum(path.stat().st_size for path in found.values())
    if dry_run:
        return "".join(f"{name} ({human_size(path.stat().st_size)})\n" for name, path in found.items())
    with _errors_in_one_line(repository):
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        say(f"uploading {len(found)} files ({human_size(size)}) to {repository}", progress)
        api: HfApi = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.create_commit(
            repository,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=_sent(path)) for name, path in found.items()],
            commit_message=message or f"pronk: {one_line(expanded(folder).resolve().name, 60)}",
            revision=revision,
        )
        return str(done.commit_url)


def check(repository: str, *, token: bool = True) -> None:
    """Before there is anything to push: its name, and that somebody is logged in. Raises BadRequest."""
    if not _NAME.fullmatch(repository) or "--" in repository or ".." in repository:
        raise BadRequest(f"{one_line(repository, 100)!r} is no name of a repository on the hub, which is owner/name")
    if not token:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise BadRequest(f"{repository}: HF_HUB_OFFLINE is set, and nothing can be pushed; unset it")
    if not get_token():
        raise BadRequest(f"{repository}: pushing needs a token of the hub: set HF_TOKEN, or log in with: hf auth login")


def files(folder: Path) -> dict[str, Path]:
    """What of it goes to the hub, by the names that it has there. Raises ModelNotFound."""
    if folder.is_file() and folder.suffix == ".gguf":
        card = folder.with_name(_CARD)
        return {folder.name: folder} | ({_CARD: card} if card.is_file() else {})
    if not folder.is_dir():
        is_there = folder.exists()
        raise ModelNotFound(f"{folder}: {'is neither a folder nor a GGUF file' if is_there else 'no such folder'}")
    inner = folder / _MODEL
    try:
        found = _chosen(folder)
        if not _has_weights(found) and inner.is_dir():
            found = _chosen(inner) | {name: path for name, path in found.items() if name == _CARD}
    except OSError as error:
        raise BadFile(folder, f"cannot be read: {error.strerror or error}") from None
    if not _has_weights(found):
        raise ModelNotFound(f"{folder}: holds no weights to push: a model, an adapter or a finished run")
    return found


def _sent(path: Path) -> Path | bytes:
    """A file, or what goes to the hub in its place."""
    if path.name != _ADAPTER:
        return path
    said = strict_json.read(path)
    if not isinstance(base := said.get(_BASE), str) or public(base) == base:
        return path
    return json.dumps(said | {_BASE: public(base)}, indent=2).encode()


def _chosen(folder: Path) -> dict[str, Path]:
    there = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path for path in there if any(fnmatch(path.name, one) for one in (*_WEIGHTS, *_BESIDE))}


def _has_weights(found: dict[str, Path]) -> bool:
    return any(fnmatch(name, one) for name in found for one in _WEIGHTS)


def _said_by(error: errors.HfHubHTTPError) -> str:
    """What is wrong with what was sent, in the hub's words: later it would be no better."""
    return one_line(error.server_message or "", 200) if 400 <= error.response.status_code < 429 else ""


@contextmanager
def _errors_in_one_line(repository: str) -> Iterator[None]:
    """What huggingface_hub raises, as one line; what it logs, not at all."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except errors.RevisionNotFoundError:
        raise PronkError(f"{repository}: has no branch of that name") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = {
            401: "the token is not valid; check HF_TOKEN",
            403: "the token may not write there; make one that may, and check the owner's name",
            404: "there is no such repository, or the token may not see it",
        }.get(status, _said_by(error) or "try again later")
        raise PronkError(f"{repository}: nothing was pushed; the hub answered {status}: {hint}") from error
    except PronkError:
        raise
    except Exception as error:  # the transport's own, which differ from release to release
        said = " ".join(str(error).split())
        why = one_line(said, 200) if said else type(error).__name__
        raise PronkError(f"{repository}: could not be pushed ({why}); check the connection and try again") from error
    finally:
        hub_logging.set_verbosity(verbosity)
