"""What verbs that write a checkpoint share: the source opened, the tokenizer that goes along, and saving with a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.cli import console, progress
from pronk.cli.failures import short_of_memory
from pronk.errors import Unsupported

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.llm import LLM
    from pronk.tokenizer.vocabulary import Vocabulary


def save(
    checkpoint: Checkpoint, dst: str, to: Any, vocabulary: Vocabulary | None, files: dict[str, bytes] | None, **how: Any
) -> None:
    """Write it to `dst`, with the tokenizer as `tokenizer_for` gives it; `how`: more of write.save's arguments."""
    from pronk.checkpoint.writers import write

    with progress.shown("writing") as advance:
        write.save(checkpoint, Path(dst), to=to, vocabulary=vocabulary, tokenizer_files=files, progress=advance, **how)
    if problem := write.tokenizer_problem(checkpoint, to, vocabulary, files):
        console.note(f"the tokenizer is not written: {problem}")


def open_source(src: str, tokenizer: str | None, revision: str | None) -> Checkpoint:
    from pronk.loading import open_source

    return open_source(src, tokenizer, revision)


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


def receipt(
    source: Checkpoint,
    called: str,
    path: str,
    loading: Mapping[str, Any],
    made: Path,
    text: str | Sequence[int] | None,
    way_out: str,
) -> dict[str, Any]:
    """pronk.measure.receipt of what was `made` of `source`, which --help calls `called`. `loading`: the options of
    pronk.load that it is loaded with; `way_out`: where memory is short."""
    import pronk
    from pronk.measure.receipt import receipt

    def before(format: Any) -> LLM:
        with progress.shown(f"reading {called} in {format}") as advance:
            return pronk.load(path, **loading, engine="cpu", quantize=format, progress=advance)

    def after() -> LLM:
        with progress.shown("reading DST") as advance:
            return pronk.load(made, engine="cpu", progress=advance)

    with progress.shown("measuring", unit=progress.of_tokens) as advance, short_of_memory(way_out):
        return receipt(source, before, after, text, advance)
