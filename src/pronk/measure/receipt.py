"""Receipt: how far a model that was written lies from the one it was made of, on a few windows of a text.

Memory holds one of the two at a time: the source comes first, in float32, its logits are kept (recording.py), and it is
let go. A source that does not fit in float32 is read in the 16 bits that lose the least, and the receipt says so.

Where the source was learned from a base, the share of that which is lost is

    KLD(source || written) / KLD(source || untouched base)

over the same predictions: 0 where the model that was written answers as the source does, 1 where rounding moved it as
far as learning had. On a text where source and base cannot be told apart (noise.py) there is no such share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import NotEnoughMemory
from pronk.llm import LLM
from pronk.measure.mixed import sixteen_bits
from pronk.measure.noise import TIMES
from pronk.measure.recording import Yardstick
from pronk.measure.verify import sample_ids

CTX, WINDOWS = 256, 4
MOST_LOST = 1 / 3  # of what was learned; over that, verbs that write it refuse
_KEPT = ("mean", "standard_error", "p99", "max", "top1", "rms_dp", "rows", "windows", "ctx")


Role = Literal["source", "base", "written", "plain"]


def receipt(
    source: Checkpoint,
    written: Path,
    text: str | Sequence[int] | None,
    load: Callable[[Role, Checkpoint | Path, str | None], LLM],
    progress: Progress | None = None,
    base: Checkpoint | None = None,
    plain: Checkpoint | None = None,
) -> dict[str, Any]:
    """`base`: what the source was before it learned; `plain`: what another rounding makes of it. `text`, or its token
    ids: None where there is no tokenizer. `load` loads one of these models, with its weights in a format (None: as they
    are).

    Keys: reference (the source's format); format, quantization and bytes {before, after} of what was written; ran, the
    conditions under which it did; divergence; plain, that of `plain`, None without; learned, None without a base: the
    divergence of the untouched base, the noise_floor of the source's (a mean KLD), and lost, a share (None where the
    text shows nothing of what was learned). Raises NotEnoughMemory.
    """
    reference = "f32"
    try:
        before = load("source", source, reference)
    except NotEnoughMemory:
        before = load("source", source, reference := sixteen_bits(source))
    ids = sample_ids(before, text or "") if text is None or isinstance(text, str) else text
    yardstick = Yardstick(before, ids, min(CTX, before.ctx_size, len(ids)), WINDOWS, progress=progress)
    floor = yardstick.noise_floor(before, progress)["mean"] if base else 0.0
    del before
    untouched = yardstick.divergence(load("base", base, reference), progress) if base else None
    after = load("written", written, None)
    found = yardstick.divergence(after, progress)
    made, ran = after.checkpoint, after.backend.conditions()
    del after
    beside = yardstick.divergence(load("plain", plain, None), progress) if plain else None
    return {
        "reference": reference,
        "format": made.format,
        "quantization": made.quantization,
        "bytes": {"before": _nbytes(source), "after": _nbytes(made)},
        "ran": ran,
        "divergence": _kept(found),
        "plain": beside and _kept(beside),
        "learned": untouched and {
            "divergence": _kept(untouched),
            "noise_floor": floor,
            "lost": found["mean"] / untouched["mean"] if untouched["mean"] > TIMES * floor else None,
        },
    }  # fmt: skip


def _kept(divergence: Mapping[str, Any]) -> dict[str, Any]:
    return {name: divergence[name] for name in _KEPT}


def _nbytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.files)
