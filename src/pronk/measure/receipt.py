"""Receipt: how far a model that was written lies from the one it was made of, on a few windows of a text.

Memory holds one of the two at a time: the source comes first, in float32, its logits are kept (recording.py), and it is
let go. A source that does not fit in float32 is read in the 16 bits that lose the least, and the receipt says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import NotEnoughMemory
from pronk.llm import LLM
from pronk.measure.mixed import sixteen_bits
from pronk.measure.recording import Yardstick
from pronk.measure.verify import sample_ids

CTX, WINDOWS = 256, 4
_KEPT = ("mean", "standard_error", "p99", "max", "top1", "rms_dp", "rows", "windows", "ctx")


def receipt(
    source: Checkpoint,
    load: Callable[[str], LLM],
    written: Callable[[], LLM],
    text: str | Sequence[int] | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`load`: the source with its weights in a format. `text`, or its token ids: None where there is no tokenizer.

    Keys: reference (the source's format); format, quantization and bytes {before, after} of what was written;
    divergence. Raises NotEnoughMemory.
    """
    reference = "f32"
    try:
        before = load(reference)
    except NotEnoughMemory:
        before = load(reference := sixteen_bits(source))
    ids = sample_ids(before, text or "") if text is None or isinstance(text, str) else text
    yardstick = Yardstick(before, ids, min(CTX, before.ctx_size, len(ids)), WINDOWS, progress=progress)
    del before
    after = written()
    found = yardstick.divergence(after, progress)
    made = after.checkpoint
    return {
        "reference": reference,
        "format": made.format,
        "quantization": made.quantization,
        "bytes": {"before": _nbytes(source), "after": _nbytes(made)},
        "divergence": {name: found[name] for name in _KEPT},
    }


def _nbytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.files)
