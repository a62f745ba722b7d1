"""What `pronk convert` does with an adapter: a GGUF file that llama.cpp applies, and the same receipt as of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pronk.cli import console, progress
from pronk.cli.saving import open_source
from pronk.errors import BadRequest, PronkError
from pronk.formats import FLOATS


def is_adapter(src: str) -> bool:
    """Whether it is the folder of an adapter, in PEFT's format, and not that of a model."""
    from pronk.checkpoint import adapter
    from pronk.system import expanded

    folder = expanded(src)
    return folder.is_dir() and adapter.found(folder)


def convert(
    src: str,
    dst: str,
    base: str | None,
    dtype: str,
    tokenizer: str | None,
    revision: str | None,
    overwrite: bool,
    sample: str,
) -> dict[str, Any]:
    """Write it, and measure on the text `sample` how far the logits of the base model with either lie apart."""
    import pronk
    from pronk.checkpoint import adapter as adapters
    from pronk.checkpoint import adapter_config, adapter_gguf
    from pronk.checkpoint.writers.write import check_destination
    from pronk.measure.verify import compare, sample_ids
    from pronk.system import expanded, replacing
    from pronk.tokenizer.source import chat_template

    if dtype not in FLOATS:
        raise click.UsageError(f"an adapter is not written in {dtype}; choose from {', '.join(FLOATS)}")
    folder, destination = expanded(src), expanded(dst)
    named = base or adapter_config.read(folder).base
    if not named:
        raise BadRequest(f"{src}: does not say which model it is an adapter of; name it: --base MODEL")
    source = open_source(named, tokenizer, revision)
    adapter = adapters.open(folder, source)
    adapter_gguf.check(adapter, source.config)
    check_destination(source, destination, "gguf", overwrite)
    try:
        with replacing(destination) as fresh, fresh.open("xb") as file:
            adapter_gguf.write(file, adapter, source.config, dtype.upper(), folder.resolve().name)
    except OSError as error:
        raise PronkError(f"{dst}: cannot be written: {error.strerror or error}") from None
    if chat_template(folder) is not None:
        console.note(
            f"its chat template is not written, of which llama.cpp's adapters have none; it stays in {src}: give it to "
            "llama.cpp with --chat-template-file, or to pronk with --chat-template"
        )

    def loaded(adapter: Path, called: str) -> pronk.LLM:
        with progress.shown(f"reading {named} with {called}") as advance:
            return pronk.load(source, adapter=adapter, quantize="f32", engine="cpu", progress=advance)

    try:
        before, after = loaded(folder, "SRC"), loaded(destination, "DST")
        ids = sample_ids(before, sample)[: before.ctx_size]
        found = compare(before, after, ids)
    except PronkError as error:
        raise PronkError(f"{dst} is written and complete, but cannot be measured: {error}") from error
    return {
        "src": src,
        "dst": dst,
        "base": named,
        "rotate": None,
        "format": "gguf adapter",
        "quantization": None,
        "bytes": destination.stat().st_size,
        **found,
    }
