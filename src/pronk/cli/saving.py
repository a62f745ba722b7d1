"""What verbs that write a checkpoint share: the source opened, the tokenizer that goes along, and saving with a bar."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.cli import console, progress
from pronk.errors import Unsupported

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.tokenizer.vocabulary import Vocabulary


def save(
    checkpoint: Checkpoint, dst: str, to: Any, vocabulary: Vocabulary | None, files: dict[str, bytes] | None, **how: Any
) -> None:
    """Write it to `dst`, with the tokenizer as `tokenizer_for` gives it; `how`: more of write.save's arguments."""
    from pronk.checkpoint.writers import write

    with progress.shown("writing") as advance:
        write.save(checkpoint, Path(dst), to=to, vocabulary=vocabulary, tokenizer_files=files, progress=advance, **how)
    if problem := write.tokenizer_problem(checkpoint, to, vocabulary, files):
        console.note(f"the tokenizer stays behind: {problem}")


def open_source(src: str, tokenizer: str | None, revision: str | None) -> Checkpoint:
    """The checkpoint, with the tokenizer that --tokenizer names, if any, so that it is that one which goes along."""
    from pronk import checkpoint
    from pronk.checkpoint.hub import resolve as hub
    from pronk.loading import find_tokenizer

    opened = checkpoint.open(hub.resolve(src, revision=revision))
    return replace(opened, tokenizer=find_tokenizer(tokenizer)) if tokenizer else opened


def tokenizer_for(checkpoint: Checkpoint, to: Any) -> tuple[Vocabulary | None, dict[str, bytes] | None]:
    """The tokenizer in the form that the format wants it in: a vocabulary to embed, or files to put beside."""
    from pronk import tokenizer
    from pronk.checkpoint.writers.write import needs_tokenizer_files
    from pronk.tokenizer.export import huggingface_files

    if checkpoint.tokenizer is None or (to == "safetensors" and not needs_tokenizer_files(checkpoint)):
        return None, None
    try:
        loaded = tokenizer.load(checkpoint.tokenizer)
        return (None, huggingface_files(loaded)) if to == "safetensors" else (loaded.vocabulary(), None)
    except Unsupported as error:
        console.note(str(error))
        return None, None
