"""Mixed precision by measurement: each part of a model gets 16, 8 or 4 bits by the harm that fewer bits do there.

Harm is the mean KL divergence of the model's predictions from those of its weights in float32. It is measured for each
part in each format alone, all others in float32: roundings that are independent of each other add up in the logits as
variances do, so that harms nearly add up; and beside the roundings of 30 layers in 16 bits, those of one in 8 bits
would drown.

Which parts should lose bits, so that the most bytes are saved for a given harm, is a knapsack. Of each part's ways down
(16 bits, 8, 4) only those on the lower convex hull of harm over size are of use: each of its steps costs more harm a
byte than the one before. Taking all parts' steps in the order of harm a byte saved then gives, wherever one stops, the
smallest model of all that do as little harm (what Lagrange multipliers find), and each such model is no larger than the
one before. How many steps are taken is decided by measuring the whole, on the windows that the harms were measured on
and on others that had no part in the choice. Both must keep the budget, with a standard error to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pronk
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import BadRequest
from pronk.formats import FLOATS, FORMATS, names
from pronk.measure.recording import Yardstick

Formats = dict[str, str]  # the beginning of tensor names -> a format, as pronk.load(quantize=) takes them

SIXTEEN = tuple(name for name in FLOATS if FORMATS[name].bits == 16)
SMALLER = tuple(name for name in names(engine="cpu", file="gguf") if FORMATS[name].codes)
_CTX = 128  # tokens of a window at most, whose second half counts: many short ones say more than a few long ones
_CHOOSE, _CONFIRM = 4, 8  # windows, at most; and 2 at least, for one has no standard error
_TRIES = 6  # of the whole, at most


# -- parts, and steps down --


@dataclass(frozen=True)
class Part:
    """The matrices of a decoder layer, the embedding or the head."""

    name: str  # that all its tensors' names begin with
    nbytes: Mapping[str, int]  # by format


@dataclass(frozen=True)
class Step:
    """A part given fewer bits: what that costs beyond what it had before, and what it saves."""

    part: str
    format: str
    harm: float  # mean KLD
    saved: int  # bytes


class _Point(NamedTuple):
    nbytes: int
    harm: float
    format: str


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


def in_order(parts: Sequence[Part], wide: str, harms: Mapping[str, Mapping[str, float]]) -> list[Step]:
    """All steps down from `wide` that are of use, those that do the least harm a byte first. `harms`: of each part in
    each smaller format alone."""
    steps = (step for part in parts for step in _steps(part, wide, harms[part.name]))
    return sorted(steps, key=lambda step: step.harm / step.saved)


def after(steps: Sequence[Step], wide: str) -> Formats:
    """What all tensors are when these have been taken."""
    return {"": wide, **{step.part: step.format for step in steps}}


def _steps(part: Part, wide: str, harms: Mapping[str, float]) -> list[Step]:
    hull = [_Point(part.nbytes[wide], 0.0, wide)]
    for format in sorted(harms, key=lambda format: -part.nbytes[format]):
        # Measured harm may come out below nothing; a part must not seem to heal what others have done.
        point = _Point(part.nbytes[format], max(harms[format], 0.0), format)
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [
        Step(part.name, small.format, small.harm - large.harm, large.nbytes - small.nbytes)
        for large, small in pairwise(hull)
    ]


def _slope(large: _Point, small: _Point) -> float:
    """Harm a byte saved."""
    return (small.harm - large.harm) / (large.nbytes - small.nbytes)


# -- the choice --


class Divergence(NamedTuple):
    mean: float
    standard_error: float

    @property
    def upper(self) -> float:
        return self.mean + self.standard_error


class Whole(NamedTuple):
    """A model's divergence on the windows that formats are chosen on, and on those held out."""

    chosen: Divergence
    held_out: Divergence

    @property
    def upper(self) -> float:
        return max(self.chosen.upper, self.held_out.upper)


class Measures(NamedTuple):
    """Ways to measure a model with given formats."""

    alone: Callable[[Formats], Divergence]  # on the windows to choose on
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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

    def measured(formats: Formats, *which: int) -> list[Divergence]:
        llm = pronk.load(model, **options, quantize=formats)
        found = [yardsticks[n].divergence(llm) for n in which]
        return [Divergence(one["mean"], one["standard_error"]) for one in found]

    ways = Measures(lambda formats: measured(formats, 0)[0], lambda formats: Whole(*measured(formats, 0, 1)))
    return chosen_by(ways, checkpoint, max_kld, progress)


def chosen_by(measures: Measures, checkpoint: Checkpoint, max_kld: float, progress: Progress | None = None) -> Choice:
    """The choice, whatever measures the models."""
    _check(max_kld)
    wide, parts = sixteen_bits(checkpoint), parts_of(checkpoint)
    jobs = [(part.name, format) for part in parts for format in SMALLER]
    tell = progress or (lambda *_: None)
    tell("measuring each part", 0, 1 + len(jobs))
    floor = measures.whole({"": wide})
    if floor.upper > max_kld:
        raise BadRequest(
            f"{checkpoint.path}: with all weights in {wide} the mean KL divergence is already {floor.upper:.2g} (with "
            f"a standard error), and the budget is {max_kld:.2g}; allow more"
        )
    harms: dict[str, dict[str, float]] = {part.name: {} for part in parts}
    for done, (name, format) in enumerate(jobs, 1):
        tell("measuring each part", done, 1 + len(jobs))
        harms[name][format] = measures.alone({"": "f32", name: format}).mean
    tell("measuring each part", 1 + len(jobs), 1 + len(jobs))
    steps = in_order(parts, wide, harms)
    count, whole, tries = _as_many_as_fit(
        [step.harm for step in steps], floor, max_kld, lambda count: measures.whole(after(steps[:count], wide)), tell
    )
    formats = after(steps[:count], wide)
    rows, saved = [], 0
    for part in parts:
        format = formats.get(part.name, wide)
        less = part.nbytes[wide] - part.nbytes[format]
        rows.append({"part": part.name, "format": format, "harms": harms[part.name], "saved": less})
        saved += less
    before = sum(part.nbytes[wide] for part in parts)
    return Choice(
        formats=formats,
        measured_kld=whole.held_out.mean,
        steps=[asdict(step) for step in steps[:count]],
        standard_error=whole.held_out.standard_error,
        chosen_kld=whole.chosen.mean,
        floor_kld=floor.held_out.mean,
        max_kld=max_kld,
        nbytes={"before": before, "after": before - saved},
        parts=rows,
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
                "predicted": floor.chosen.mean + sums[count],
                "chosen": found.chosen.mean,
                "held_out": found.held_out.mean,
                "kept": kept,
            }
        )
        good, whole, bad = (count, found, bad) if kept else (good, whole, count)
        if sums[count] > 0:
            scale = max(found.upper - floor.upper, 0.0) / sums[count]
    tell("measuring the whole", _TRIES, _TRIES)
    return good, whole, tries
