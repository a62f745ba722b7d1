"""GGUF's block types as `pronk quantize` makes them: on which text, and which type each matrix gets."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pronk import calibrate as calibration
from pronk.cli import console, progress, text_files
from pronk.cli.failures import short_of_memory
from pronk.cli.parameter_types import UNITS
from pronk.errors import BadRequest, NoTokenizer
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.tokenizer.vocabulary import Vocabulary

ONE_TEXT = "--calibration-text and --text name one text: what is measured on it says nothing of others"
_WRITES_IN = "int8"  # the fastest, and what it writes is what the model would in any other


@dataclass(frozen=True)
class Limit:
    """Of a file: bytes, or bits a weight, which do not count what is no tensor."""

    said: str
    number: float
    unit: str

    def nbytes(self, weights: int, beside: int) -> int:
        """`beside`: bytes of what is no tensor."""
        if self.unit == "bpw":
            return int(self.number * weights / 8) + beside
        return int(self.number * UNITS[self.unit])


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer click alone
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        found = re.fullmatch(r"(\d{1,15}|\d{0,15}\.\d{1,9}) *([a-z]*)", str(value).strip().lower())
        if not found or found[2] not in (*UNITS, "bpw") or not float(found[1]) > 0:
            self.fail(
                f"{value!r} is no size; write 80MB, 1.5GB, a number of bytes, or 4.5bpw (bits a weight)", param, ctx
            )
        return Limit(str(value), float(found[1]), found[2])


def steps(rounding: str | None, given: int | None, sized: bool) -> int | None:
    """AutoRound's; None where it is not what was asked for. Raises PronkError where there is no torch for it."""
    if rounding != "autoround":
        if given is not None:
            raise click.UsageError("--steps is for --rounding autoround")
        return None
    if sized:
        raise click.UsageError(
            "--rounding autoround is for --to: --max-size chooses by what GPTQ or plain rounding costs"
        )
    from pronk.torch_engine import import_torch

    import_torch()
    return given or calibration.STEPS


@dataclass(frozen=True)
class Fed:
    """What is calibrated on: `read` of a text's tokens, and `written` ones that the model wrote before."""

    ids: list[int]
    text: str  # what it is called
    tokens: int
    read: int
    written: int

    @property
    def called(self) -> str:
        return f"{self.text} and {self.written} tokens of its own" if self.written else self.text

    def said(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, "read": self.read, "written": self.written}


def fed(src: str, checkpoint: Checkpoint, file: str | None, measured_on: str, written: int | None) -> Fed:
    """`file`: a text's, or pronk's own. `written`: tokens that the model writes first; None: as is usual."""
    from pronk.calibrate.calibrated import windows
    from pronk.calibrate.written import together
    from pronk.loading import tokenizer_of

    text = calibration.own_text() if file is None else text_files.read_file(file, whole=True)
    name = {None: "pronk's calibration text", "-": "standard input"}.get(file, file) or ""
    if text.strip() == measured_on.strip():
        raise BadRequest(ONE_TEXT)
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None:
        raise NoTokenizer(f"{src} carries no tokenizer, and a text to calibrate on takes one: --tokenizer FILE")
    ids, longest = tokenizer.encode(text), checkpoint.config.max_position_embeddings
    try:
        windows(ids, longest)  # long enough, before the model is asked to write
    except BadRequest as problem:
        raise BadRequest(f"{name}: {problem}") from None
    if written is None:
        written = 0 if file or checkpoint.config.num_labels else calibration.WRITTEN
    own = tokenizer.encode(_written(src, checkpoint, written))[:written] if written else []
    both = together(own, ids, longest)
    read = sum(map(len, windows(both, longest)))  # where windows do not fill what may be read, one is left out
    return Fed(both, name, len(ids), max(0, read - len(own)), min(len(own), read))


def _written(src: str, checkpoint: Checkpoint, tokens: int) -> str:
    import pronk
    from pronk.calibrate.written import written

    if checkpoint.config.num_labels:
        raise BadRequest(f"{src} is a reward model, which writes nothing: leave out --self-written")
    ctx = min(calibration.CTX, checkpoint.config.max_position_embeddings)
    with (
        progress.shown(unit=progress.of_tokens) as advance,
        short_of_memory("it can be calibrated on a text alone, with --self-written 0"),
        pronk.load(checkpoint, engine="cpu", quantize=_WRITES_IN, ctx_size=ctx) as llm,
    ):
        return written(llm, tokens, progress=advance)


def made(
    checkpoint: Checkpoint, kinds: dict[str, str], fed: Fed | None, steps: int | None = None
) -> tuple[Checkpoint, Checkpoint | None, dict[str, Any] | None]:
    """In these types; where it is calibrated, beside it what plain rounding makes, and how it was calibrated.
    `steps`: AutoRound's; None: GPTQ."""
    from pronk.calibrate.calibrated import calibrated, rounded, to_round

    plain = rounded(checkpoint, kinds)
    if fed is None or not to_round(checkpoint, kinds):
        return plain, None, None
    what = fed.said() | {"rounding": calibration.ROUNDINGS[steps is not None], "steps": steps}
    with progress.shown("calibrating") as advance:
        if steps is None:
            return calibrated(checkpoint, kinds, fed.ids, advance), plain, what
        from pronk.train.autoround import autorounded

        return autorounded(checkpoint, kinds, fed.ids, advance, steps), plain, what


def check_kernels() -> None:
    """Raises BadRequest for a PRONK_ISA that this processor has not, before anything is read."""
    from pronk import _native

    try:
        _native.isa()
    except ValueError as error:
        raise BadRequest(str(error)) from None


def check_size(limit: Limit, src: str, checkpoint: Checkpoint, vocabulary: Vocabulary | None) -> tuple[int, int]:
    """Bytes that a file may have, and that its matrices may. Raises BadRequest where there is none so small."""
    from pronk.calibrate.calibrated import rounded
    from pronk.calibrate.sized import least, room
    from pronk.checkpoint.writers.write import gguf_size

    smallest = rounded(checkpoint, least(checkpoint))
    whole = gguf_size(smallest, vocabulary)
    matrices = room(checkpoint, least(checkpoint))
    shapes = [tensor.shape for tensor in checkpoint.tensors.values()]
    tensors = matrices + sum(4 * shape[0] for shape in shapes if len(shape) == 1)
    weights = sum(map(math.prod, shapes))
    most = limit.nbytes(weights, whole - tensors)
    if whole > most:
        enough = math.ceil(100 * 8 * tensors / weights) / 100
        raise BadRequest(
            f"--max-size {limit.said}{'' if limit.unit else ' bytes'}: {src} takes {whole} bytes at least "
            f"({enough:.2f}bpw); allow that, or choose a smaller model"
        )
    return most, most - whole + matrices


def within(
    limit: Limit,
    src: str,
    checkpoint: Checkpoint,
    vocabulary: Vocabulary | None,
    text_name: str,
    ids: list[int],
    calibrate: bool,
) -> dict[str, Any]:
    """What pronk.calibrate.sized chooses for a file of at most this size; see its Sizing. Raises BadRequest where there
    is none so small."""
    from pronk.calibrate.sized import choose

    most, of_matrices = check_size(limit, src, checkpoint, vocabulary)
    with progress.shown(unit=lambda done, total: f"{done} of {total}") as advance:
        found = choose(checkpoint, ids, of_matrices, carried=calibrate, progress=advance)
    return {"max_size": most, "text": text_name, **asdict(found)}


def tell_of_short_rows(checkpoint: Checkpoint, block: int, whose: str, kinds: Mapping[str, str]) -> None:
    """Say which matrices could not be in blocks of so many weights, and what they are in: of `kinds`, or f16."""
    rows = {name: shape[1] for name, shape in checkpoint.config.tensor_shapes().items() if len(shape) == 2}
    others = Counter(kinds.get(name, "F16") for name, columns in rows.items() if columns % block)
    if others:
        console.note(
            f"{others.total()} of {len(rows)} matrices have rows that do not fill blocks of {block} weights, as "
            f"{whose} them: they are in {', '.join(kind for kind, _ in others.most_common())}"
        )


def why(choice: Mapping[str, Any]) -> list[str]:
    """The types of each kind of matrix, and what all together were thought to cost."""
    kinds: dict[str, Counter[str]] = {}
    for name, kind in choice["kinds"].items():
        kinds.setdefault(name.split(".")[-2], Counter())[kind] += 1
    rows = [("matrices", "types")]
    for role, counts in kinds.items():
        rows.append((role, ", ".join(f"{kind} x {count}" for kind, count in sorted(counts.items()))))
    return [
        console.table(rows),
        f"chosen for at most {human_size(choice['max_size'])} by what errors cost on {choice['text']}, which makes "
        f"a mean KL divergence of {choice['predicted_kld']:.2g} expected, before activations are rounded",
        "",
    ]
