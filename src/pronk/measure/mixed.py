"""Mixed precision by measurement: each part of a model gets 16, 8 or 4 bits by the harm that fewer bits do there.

Harm is the mean KL divergence of the model's predictions from those of its weights in float32. It is measured for each
part in each format alone, all others in float32: roundings that are independent of each other add up in the logits as
variances do, so that harms nearly add up; and beside the roundings of 30 layers in 16 bits, those of one in 8 bits
would drown.

Which parts lose bits first is a knapsack's answer (calibrate/knapsack.py). How many steps are taken is decided by
measuring the whole, on the windows that the harms were measured on and on others that had no part in the choice. Both
must keep the budget, with a standard error to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import pronk
from pronk.calibrate.knapsack import Part, Step, in_order
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import BadRequest
from pronk.formats import FLOATS, FORMATS, names
from pronk.measure.noise import Mean
from pronk.measure.recording import Yardstick
from pronk.measure.watched import Told

Formats = dict[str, str]  # the beginning of tensor names -> a format, as pronk.load(quantize=) takes them

SIXTEEN = tuple(name for name in FLOATS if FORMATS[name].bits == 16)
SMALLER = tuple(name for name in names(engine="cpu", file="gguf") if FORMATS[name].codes)
_CTX = 128  # tokens of a window at most, whose second half counts: many short ones say more than a few long ones
_CHOOSE, _CONFIRM = 4, 8  # windows, at most; and 2 at least, for one has no standard error
_TRIES = 6  # of the whole, at most


def parts_of(checkpoint: Checkpoint) -> list[Part]:
    """The embedding, the layers, and the head where it is not the embedding."""
    sizes: dict[str, dict[str, int]] = {}
    for name, shape in checkpoint.config.tensor_shapes().items():
        if len(shape) != 2:
            continue
        path = name.split(".")
        part = ".".join(path[:3] if path[:2] == ["model", "layers"] else path[:-1]) + "."
        size = sizes.setdefault(part, dict.fromkeys((*SIXTEEN, *SMALLER), 0))
        rows, columns = shape
        for format in size:
            size[format] += FORMATS[format].nbytes(rows, columns)
    return [Part(name, nbytes) for name, nbytes in sizes.items()]


def sixteen_bits(checkpoint: Checkpoint) -> str:
    """The format of 16 bits that loses less of what the file has."""
    matrices = (tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    return "f16" if all(FORMATS["f16"].holds(tensor.dtype) for tensor in matrices) else "bf16"


def after(steps: Sequence[Step], wide: str) -> Formats:
    """What all tensors are when these have been taken."""
    return {"": wide, **{step.part: step.format for step in steps}}


# -- the choice --


class Whole(NamedTuple):
    """A model's divergence on the windows that formats are chosen on, and on those held out."""

    chosen: Mean
    held_out: Mean

    @property
    def upper(self) -> float:
        return max(self.chosen.upper, self.held_out.upper)


class Measures(NamedTuple):
    """Ways to measure a model with given formats."""

    alone: Callable[[Formats], Mean]  # on the windows to choose on
    whole: Callable[[Formats], Whole]


@dataclass(frozen=True)
class Choice:
    formats: Formats
    measured_kld: float  # the whole's mean on the windows held out
    steps: list[dict[str, Any]]  # that were taken, least harm a byte first: part, format, harm, saved (bytes)
    standard_error: float  # of measured_kld
    chosen_kld: float  # the whole's mean on the windows that the harms were measured on
    floor_kld: float  # the mean with all parts in 16 bits, on the windows held out
    max_kld: float
    nbytes: dict[str, int]  # of the matrices: "before", with all parts in 16 bits, and "after"
    parts: list[dict[str, Any]]  # all of them: part, format, harms by format, saved
    tries: list[dict[str, Any]]  # of the whole, in order: steps, predicted, chosen and held_out mean KLD


def choose(
    model: str | Path,
    *,
    max_kld: float,
    ids: Sequence[int],
    progress: Progress | None = None,
    loading: Mapping[str, Any] | None = None,
) -> Choice:
    """Formats with which `model` is as small as its mean KLD of at most `max_kld` on the text `ids` allows.

    `loading`: options of pronk.load. Raises BadRequest where 16 bits alone are over the budget, and where the text is
    too short.
    """
    _check(max_kld)
    options = dict(loading or {})
    reference = pronk.load(model, **options, quantize="f32")
    ctx = min(_CTX, reference.ctx_size)
    checkpoint, yardsticks = reference.checkpoint, [Yardstick(reference, text, ctx) for text in split(ids, ctx)]
    del reference

    def measured(formats: Formats, *which: int) -> list[Mean]:
        llm = pronk.load(model, **options, quantize=formats)
        found = [yardsticks[n].divergence(llm) for n in which]
        return [Mean(one["mean"], one["standard_error"]) for one in found]

    ways = Measures(lambda formats: measured(formats, 0)[0], lambda formats: Whole(*measured(formats, 0, 1)))
    return chosen_by(ways, checkpoint, max_kld, progress)


def chosen_by(measures: Measures, checkpoint: Checkpoint, max_kld: float, progress: Progress | None = None) -> Choice:
    """The choice, whatever measures the models."""
    _check(max_kld)
    wide, parts = sixteen_bits(checkpoint), parts_of(checkpoint)
    jobs = [(part.name, format) for part in parts for format in SMALLER]
    told = Told(progress, "measuring each part", 1 + len(jobs))
    told(0)
    floor = measures.whole({"": wide})
    if floor.upper > max_kld:
        raise BadRequest(
            f"{checkpoint.path}: with all weights in {wide} the mean KL divergence is already {floor.upper:.2g} (with "
            f"a standard error), and the budget is {max_kld:.2g}; allow more"
        )
    told()
    harms: dict[str, dict[str, float]] = {part.name: {} for part in parts}
    for name, format in jobs:
        harms[name][format] = measures.alone({"": "f32", name: format}).value
        told()
    steps = in_order(parts, wide, harms)
    count, whole, tries = _as_many_as_fit(
        [step.harm for step in steps], floor, max_kld, lambda count: measures.whole(after(steps[:count], wide)),
        progress or (lambda *_: None),
    )  # fmt: skip
    formats = after(steps[:count], wide)
    made = {part.name: formats.get(part.name, wide) for part in parts}
    saved = {part.name: part.nbytes[wide] - part.nbytes[made[part.name]] for part in parts}
    before = sum(part.nbytes[wide] for part in parts)
    return Choice(
        formats=formats,
        measured_kld=whole.held_out.value,
        steps=[asdict(step) for step in steps[:count]],
        standard_error=whole.held_out.error or 0.0,
        chosen_kld=whole.chosen.value,
        floor_kld=floor.held_out.value,
        max_kld=max_kld,
        nbytes={"before": before, "after": before - sum(saved.values())},
        parts=[
            {"part": name, "format": made[name], "harms": harms[name], "saved": less} for name, less in saved.items()
        ],
        tries=tries,
    )


def split(ids: Sequence[int], ctx: int = _CTX) -> tuple[list[int], list[int]]:
    """Windows of `ctx` tokens to choose on, and others to confirm the choice on, both from all over the text."""
    windows = [list(ids[at : at + ctx]) for at in range(0, len(ids) - ctx + 1, ctx)]
    if len(windows) < 4:
        raise BadRequest(
            f"choosing formats takes a text of {4 * ctx} tokens at least: two windows of {ctx} to choose on, and two "
            f"to confirm on; this one has {len(ids)}"
        )
    wanted = min(len(windows), _CHOOSE + _CONFIRM)
    spread = [windows[n * len(windows) // wanted] for n in range(wanted)]
    every = 3 if wanted >= 6 else 2
    choosing, confirming = spread[::every], [window for n, window in enumerate(spread) if n % every]
    return list(chain.from_iterable(choosing)), list(chain.from_iterable(confirming))


def _check(max_kld: float) -> None:
    if not max_kld > 0:
        raise BadRequest(f"a budget of KL divergence must be a number over 0, not {max_kld!r}")


def _as_many_as_fit(
    harms: Sequence[float], floor: Whole, max_kld: float, measured: Callable[[int], Whole], tell: Progress
) -> tuple[int, Whole, list[dict[str, Any]]]:
    """How many steps keep the budget: guessed from the sum of their harms, measured, and guessed anew by what that
    showed, between the most that are known to keep it and the fewest that are known to break it."""
    sums = [0.0, *accumulate(harms)]
    good, whole, bad, scale = 0, floor, len(sums), 1.0
    tries: list[dict[str, Any]] = []
    while bad - good > 1 and len(tries) < _TRIES:
        tell("measuring the whole", len(tries), _TRIES)
        fitting = sum(floor.upper + scale * harm <= max_kld for harm in sums) - 1
        count = min(max(fitting, good + 1), bad - 1)
        found = measured(count)
        kept = found.upper <= max_kld
        tries.append(
            {
                "steps": count,
                "predicted": floor.chosen.value + sums[count],
                "chosen": found.chosen.value,
                "held_out": found.held_out.value,
                "kept": kept,
            }
        )
        good, whole, bad = (count, found, bad) if kept else (good, whole, count)
        if sums[count] > 0:
            scale = max(found.upper - floor.upper, 0.0) / sums[count]
    tell("measuring the whole", _TRIES, _TRIES)
    return good, whole, tries
