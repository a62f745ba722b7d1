"""What each technique of training costs and buys: a grid of settings, measured, into training.json.

The grid: all weights or LoRA, float32 or bfloat16, activations kept or recomputed, one micro-batch a step or eight.
Each setting runs in a process of its own, whose peak is its memory, in rounds that take turns (A B C, then C B A). How
much tensors of each kind take, and how many operations a step has, is counted in steps of their own (train/ledger.py),
outside of what is timed. Where memory does not suffice, that is what was found.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import __version__, checkpoint, strict_json
from pronk.checkpoint import hub
from pronk.errors import BadFile, BadRequest, NoTokenizer
from pronk.measure import journal as journals
from pronk.measure import latency
from pronk.measure.journal import Journal
from pronk.measure.machine import machine
from pronk.measure.pace import Note, Pace
from pronk.measure.windows import evaluation_text
from pronk.measure.worker import Worker, WorkerDied

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint, Progress

NAME = "training.json"
SCHEMA = 1
WORKER = (sys.executable, "-m", "pronk.measure.training_subject")
EXAMPLES = 8  # of a step with accumulation, or of the batch that it stands for
WARM_UP, TIMED = 1, 2  # steps of a process
SAME = 0.02  # by how much a figure may differ and still be called the same
_RATES = {True: 2e-4, False: 2e-5}  # LoRA, full: those of pronk finetune
_START = 12.0  # what starting, loading and one step under a ledger cost, in micro-batches
KINDS = ("parameters", "activations", "gradients", "optimizer")


@dataclass(frozen=True)
class Setting:
    lora: bool = False
    precision: str = "f32"
    recompute: bool = False
    accumulate: int = 1
    batch_size: int = 1

    @property
    def name(self) -> str:
        parts = ["LoRA" if self.lora else "full", self.precision, "recomputed" if self.recompute else "kept"]
        return ", ".join([*parts, f"{self.accumulate} x {self.batch_size}"])

    @property
    def micro_batches(self) -> int:
        return self.accumulate * self.batch_size


PLAIN = Setting()
BATCH = Setting(batch_size=EXAMPLES)  # what accumulation stands for
# Each technique alone, against what it changes.
TECHNIQUES = (
    ("Activation checkpointing", Setting(recompute=True), PLAIN),
    ("Mixed precision (bf16)", Setting(precision="bf16"), PLAIN),
    ("LoRA", Setting(lora=True), PLAIN),
    (f"Accumulation, {EXAMPLES} x 1 for 1 x {EXAMPLES}", Setting(accumulate=EXAMPLES), BATCH),
    ("All of them", Setting(True, "bf16", True, EXAMPLES), BATCH),
)


@dataclass(frozen=True)
class Request:
    """What was asked for. None: not said; the default holds, or what was begun with."""

    model: str | None = None
    data: str | None = None  # a file of records
    tokens: int | None = None  # of an example
    rounds: int | None = None
    rank: int | None = None
    threads: int | None = None
    device: str | None = None


DEFAULTS = Request(model=hub.DEFAULT_MODEL, tokens=256, rounds=3, rank=16)


@dataclass(frozen=True)
class Grid:
    request: Request  # settled
    checkpoint: Checkpoint
    examples: Sequence[tuple[list[int], list[bool]]]  # token ids, what is learned

    @property
    def settings(self) -> list[Setting]:
        axes = product((False, True), ("f32", "bf16"), (False, True), (1, EXAMPLES))
        return [*(Setting(lora, precision, again, count) for lora, precision, again, count in axes), BATCH]

    def steps(self) -> Iterator[tuple[str, Setting, int]]:
        for number in range(self.request.rounds or 1):
            for setting in self.settings if number % 2 == 0 else reversed(self.settings):
                yield f"{setting.name} {number + 1}", setting, number

    def costs(self) -> dict[str, float]:
        return {name: _START + (WARM_UP + TIMED) * setting.micro_batches for name, setting, _ in self.steps()}

    def asked(self) -> dict[str, Any]:
        text = " ".join(str(part) for example in self.examples for part in example)
        return {**asdict(self.request), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def begin(
    request: Request, folder: Path, *, resume: bool = False, overwrite: bool = False, command: str = ""
) -> tuple[Grid, Journal]:
    """Settle what will be measured, and open its journal. Raises PronkErrors for all that can be known now."""
    steps: Mapping[str, Any] = {}
    about: dict[str, Any] = {"machine": machine(), "command": command}
    if resume:
        saved = read(folder)
        begun = Request(**{name: saved["settings"].get(name) for name in Request.__dataclass_fields__})
        for name, now in asdict(request).items():
            if now is not None and now != getattr(begun, name):
                raise BadRequest(f"{folder / NAME} was begun with another {name}; leave it out to go on with that")
        grid = _settled(begun)
        for what, now, then in (
            ("settings or data", grid.asked(), saved["settings"]),
            ("version of pronk", __version__, saved["pronk"]),
            ("machine", about["machine"]["cpu"], saved["machine"]["cpu"]),
        ):
            if now != then:
                raise BadRequest(f"{folder / NAME} was begun with another {what}; {journals.ANEW}")
        steps, about = saved["steps"], {"machine": saved["machine"], "command": saved["command"]}
    else:
        journals.check_writable(folder, replace=overwrite, name=NAME)
        grid = _settled(request)
    return grid, Journal(folder, steps, lambda taken: composed(grid, about, taken), NAME)


def read(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if not path.is_file():
        raise BadRequest(f"{path} is absent: there is nothing to go on with; begin without --resume")
    saved = strict_json.read(path)
    parts = ("steps", "settings", "machine")
    if saved.get("schema") != SCHEMA or not all(isinstance(saved.get(part), dict) for part in parts):
        raise BadFile(path, f"is not what this version of pronk writes (schema {SCHEMA}); {journals.ANEW}")
    return saved


def measure(
    grid: Grid, journal: Journal, *, progress: Progress | None = None, note: Note = lambda line: None
) -> dict[str, Any]:
    """Do what is not done yet; gives the report. Whatever ends it early leaves on disk what was finished."""
    pace = Pace({name: cost for name, cost in grid.costs().items() if name not in journal.steps}, progress, note)
    for name, setting, number in grid.steps():
        if name not in journal.steps:
            with pace.step(name, f"{setting.name}, round {number + 1} of {grid.request.rounds}"):
                journal.record(name, _measured(grid, setting, account=number == 0))
    journal.write()
    return journal.report()


def _measured(grid: Grid, setting: Setting, *, account: bool) -> dict[str, Any]:
    """Of one process. Where memory ran out: "out_of_memory", and whether that was foreseen."""
    request = grid.request
    chosen = {
        "precision": setting.precision, "recompute": int(setting.recompute), "accumulate": setting.accumulate,
        "batch_size": setting.batch_size, "quantize": "f32" if setting.lora else None, "rate": _RATES[setting.lora],
        "warmup": 0.0, "schedule": "constant", "max_steps": 100,
    }  # fmt: skip
    longest = sorted(grid.examples, key=lambda example: len(example[0]), reverse=True)
    found: dict[str, Any] = {}
    with Worker(setting.name, WORKER) as worker:
        try:
            found["plan"] = worker.call(
                "plan", model=request.model, settings=chosen, lora={"rank": request.rank} if setting.lora else None,
                examples=longest[: setting.micro_batches], device=request.device,
            )  # fmt: skip
            if found["plan"].get("fits") is False:
                said = f"{found['plan']['total'] / 1e9:.1f} GB are needed: foreseen, and not tried"
                return {**found, "out_of_memory": said}
            calls: tuple[tuple[str, dict[str, Any]], ...] = (
                ("load", {"threads": request.threads}),
                ("steps", {"count": WARM_UP + TIMED}),
                ("account", {}),
            )
            for operation, arguments in calls[: 3 if account else 2]:
                found[operation] = worker.call(operation, **arguments)
                if said := found[operation].get("out_of_memory"):
                    return {**found, "out_of_memory": said}
        except WorkerDied as died:
            if not any(sign in str(died) for sign in ("SIGKILL", "bad_alloc", "MemoryError", "memory")):
                raise
            return {**found, "out_of_memory": str(died)}
    return found


# -- what it comes to --


def composed(grid: Grid, about: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """training.json, but for its steps: what they come to so far."""
    points = {setting: _point(grid, setting, steps) for setting in grid.settings}
    first: Mapping[str, Any] = next((one["load"] for one in steps.values() if "device" in one.get("load", {})), {})
    return {
        "schema": SCHEMA,
        "pronk": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": about["command"],
        "finished": all(name in steps for name, *_ in grid.steps()),
        "model": {
            "name": grid.request.model,
            "config": grid.checkpoint.config.to_dict(),
        },
        "machine": {**about["machine"], **{key: first.get(key) for key in ("device", "threads", "torch")}},
        "settings": grid.asked(),
        "lengths": [len(ids) - 1 for ids, _ in grid.examples],  # as they are read
        "timed_steps": TIMED,
        "points": [point for point in points.values() if point],
        "techniques": [
            {"name": name, "of": own.name, "against": other.name, "changes": _changes(points[own], points[other])}
            for name, own, other in TECHNIQUES
        ],
    }


def _point(grid: Grid, setting: Setting, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    taken = [steps[name] for name, one, _ in grid.steps() if one == setting and name in steps]
    if not taken:
        return None
    point: dict[str, Any] = {"name": setting.name, **asdict(setting), "rounds": len(taken)}
    if plans := [one["plan"]["total"] for one in taken if "total" in one.get("plan", {})]:
        point["planned_bytes"] = plans[0]
    if short := [one["out_of_memory"] for one in taken if "out_of_memory" in one]:
        return {**point, "out_of_memory": short[0]}
    timed = [one["steps"]["seconds"][WARM_UP:] for one in taken]
    seconds = latency.summary([sum(round_) / len(round_) for round_ in timed])
    tokens = taken[0]["steps"]["tokens"][-1]
    accounts = [one["account"] for one in taken if "account" in one]
    return {
        **point,
        "seconds": seconds,
        "tokens": tokens,
        "tok_s": tokens / seconds["median"],
        "peak_bytes": latency.summary([one["steps"]["peak_bytes"] for one in taken]),
        "trained_share": taken[0]["load"]["trained_share"],
        "loss": {"first": taken[0]["steps"]["loss"][0], "last": taken[0]["steps"]["loss"][-1]},
        **{key: accounts[0][key] for key in ("bytes", "at_peak", "flops") if accounts},
    }


def _changes(own: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of each kind of memory, of operations and of time, both a token: how many times the other's, and an arrow.

    Logits count as activations. Times are the same where those of the rounds overlap.
    """
    if not own or not other or "bytes" not in own or "bytes" not in other:
        return None
    found = {kind: (own["bytes"][kind], other["bytes"][kind]) for kind in KINDS}
    found["activations"] = _activations(own), _activations(other)
    found["compute"] = own["flops"] / own["tokens"], other["flops"] / other["tokens"]
    changes = {kind: _change(*pair) for kind, pair in found.items()}
    a_token = [{key: one["seconds"][key] / one["tokens"] for key in ("median", "min", "max")} for one in (own, other)]
    apart = a_token[0]["min"] > a_token[1]["max"] or a_token[0]["max"] < a_token[1]["min"]
    changes["time"] = _change(a_token[0]["median"], a_token[1]["median"])
    if min(own["rounds"], other["rounds"]) < 2:
        changes["time"]["arrow"] = "?"  # nobody knows by how much it varies
    elif not apart:
        changes["time"]["arrow"] = "="
    changes["peak"] = _change(own["peak_bytes"]["median"], other["peak_bytes"]["median"])
    return changes


def _activations(point: Mapping[str, Any]) -> int:
    return int(point["bytes"]["activations"]) + int(point["bytes"]["logits"])


def _change(own: float, other: float) -> dict[str, Any]:
    ratio = own / other if other else None
    if ratio is None or abs(ratio - 1) <= SAME:
        return {"times": ratio, "arrow": "="}
    return {"times": ratio, "arrow": "↑" if ratio > 1 else "↓"}


# -- what it is measured on --


def _settled(request: Request) -> Grid:
    given = {name: value for name, value in asdict(request).items() if value is not None}
    settled = Request(**{**asdict(DEFAULTS), **given})
    opened = checkpoint.open(hub.resolve(str(settled.model)))
    length = min(settled.tokens or 0, opened.config.max_position_embeddings - 1) + 1  # the last is not read
    settled = Request(**{**asdict(settled), "tokens": length - 1})
    examples = _of_text(opened, length) if settled.data is None else _of_records(opened, settled.data, length)
    return Grid(settled, opened, examples)


def _of_text(opened: Checkpoint, length: int) -> list[tuple[list[int], list[bool]]]:
    """Windows of the text that comes with pronk, all of it learned."""
    from pronk.loading import tokenizer_of

    codec = tokenizer_of(opened)
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and without one no text can be read")
    ids = codec.encode(evaluation_text())
    step = max(1, (len(ids) - length) // EXAMPLES)
    if len(ids) < length:
        raise BadRequest(f"the text has {len(ids)} tokens; take examples of fewer (--tokens)")
    learned = [False] + [True] * (length - 1)
    return [(list(ids[at : at + length]), learned) for at in range(0, step * EXAMPLES, step)]


def _of_records(opened: Checkpoint, data: str, length: int) -> list[tuple[list[int], list[bool]]]:
    """The first records, as pronk finetune reads them, cut where they are longer."""
    from pronk.loading import tokenizer_of
    from pronk.train.data import prepare
    from pronk.train.examples import Example
    from pronk.train.settings import Settings

    codec = tokenizer_of(opened)
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and without one no record can be read")
    settings = Settings("", data, eval_share=0.0, max_length=length, too_long="cut")
    found = prepare(settings, codec, opened.config.max_position_embeddings).train[:EXAMPLES]
    if len(found) < EXAMPLES:
        raise BadRequest(f"{data}: holds {len(found)} examples, and {EXAMPLES} are needed")
    return [(one.ids.tolist(), one.learned.tolist()) for one in found if isinstance(one, Example)]
