"""What verbs that write a checkpoint share: the source opened, the tokenizer that goes along, and saving with a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, progress
from pronk.cli.failures import Loss, short_of_memory
from pronk.errors import Unsupported
from pronk.formats import FORMATS, SMALLEST

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.llm import LLM
    from pronk.tokenizer.vocabulary import Vocabulary


def save(
    checkpoint: Checkpoint,
    dst: str | Path,
    to: Any,
    vocabulary: Vocabulary | None,
    files: dict[str, bytes] | None,
    **how: Any,
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
    made: Path,
    text: str | Sequence[int] | None,
    way_out: str,
    base: Checkpoint | None = None,
    plain: Checkpoint | None = None,
) -> dict[str, Any]:
    """pronk.measure.receipt of what was `made` of `source`, which --help calls `called`, and which learned from `base`.
    `way_out`: where memory is short. `plain`: what plain rounding makes of it."""
    import pronk
    from pronk.measure.receipt import Role, receipt

    doing = {"source": f"reading {called} in {{}}", "base": "reading BASE in {}", "written": "reading DST",
             "plain": "rounding plainly, to compare"}  # fmt: skip

    def load(role: Role, model: Checkpoint | Path, format: str | None) -> LLM:
        with progress.shown(doing[role].format(format)) as advance:
            return pronk.load(model, engine="cpu", quantize=format, progress=advance)

    with progress.shown("measuring", unit=progress.of_tokens) as advance, short_of_memory(way_out):
        return receipt(source, made, text, load, advance, base, plain)


accept_loss_option = click.option(
    "--accept-loss",
    is_flag=True,
    help="Write DST even if over a third of what was learned is lost.  [default: refuse to]",
)


def check_loss(
    dst: str, dtype: str, receipt: Mapping[str, Any], text: str, accepted: bool, apart: str | None = None
) -> None:
    """Raises Loss where over a third of what was learned is lost. `apart`: a way out besides other formats."""
    from pronk.measure.receipt import MOST_LOST

    learned = receipt["learned"]
    if learned is None:
        return
    found, whole, lost = receipt["divergence"]["mean"], learned["divergence"]["mean"], learned["lost"]
    if lost is None:
        console.note(
            f"{text} shows nothing of what was learned (KL divergence {whole:.2g} nats, which is rounding); measure on "
            "one that does, with --text FILE"
        )
    elif lost > MOST_LOST:
        loss = (
            f"{dtype} loses {lost:.0%} of what was learned: on {text} its predictions lie {found:.3g} nats from those "
            f"in floats, which lie {whole:.3g} from the untouched base's"
        )
        if accepted:
            return console.note(loss)
        if dtype == SMALLEST:
            ways = ["store q8", "4 bits in some parts only (pronk quantize --max-kld)"]
        elif dtype in FORMATS:
            ways = ["store 16 bits"]
        else:  # GGUF's block types, or a mixture
            ways = ["calibrate it (--calibrate)", "allow more bits", "store q8"]
        ways += [apart] if apart else []
        raise Loss(f"{dst} is not written: {loss}; {', '.join(ways)}, or write it anyway (--accept-loss)")


def of_what_was_learned(receipt: Mapping[str, Any]) -> str:
    """A line of the receipt, if there is a base to compare with."""
    learned = receipt["learned"]
    if learned is None or learned["lost"] is None:
        return ""
    whole = learned["divergence"]["mean"]
    return f"\nlost of what was learned: {learned['lost']:.1%}; the untouched base lies {whole:.3g} nats away"
