"""What each technique of training costs and buys: a grid of settings (training_grid.py), measured, into training.json.

Each setting runs in a process of its own, whose peak is its memory, in rounds that take turns (A B C, then C B A). How
much tensors of each kind take, and how many operations a step has, is counted in steps of their own (train/ledger.py),
outside of what is timed. Where memory does not suffice, that is what was found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import checkpoint, system
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Progress
from pronk.measure import journal as journals
from pronk.measure import latency
from pronk.measure.journal import Journal, Step
from pronk.measure.machine import provenance
from pronk.measure.schema import KINDS, TRAINING
from pronk.measure.training_grid import TECHNIQUES, TIMED, WARM_UP, Grid, Request, Setting, settled
from pronk.measure.worker import Held, OutOfMemory, Worker, WorkerDied
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.train.data.examples import Example
    from pronk.train.loop import Loop
    from pronk.train.settings import Settings

NAME = "training.json"
SAME = 0.02  # by how much a figure may differ and still be called the same
_RATES = {True: 2e-4, False: 2e-5}  # LoRA, full: those of pronk finetune
_START = 12.0  # what starting, loading and one step under a ledger cost, in micro-batches


def begin(
    said: Mapping[str, Any], folder: Path, *, resume: bool = False, overwrite: bool = False, command: str = ""
) -> tuple[Grid, Journal]:
    """Settle what will be measured, of which this much is said, and open its journal. Raises PronkErrors for all that
    can be known now."""
    path = folder / NAME
    saved = journals.opened(path, TRAINING, resume=resume, overwrite=overwrite)
    if saved:
        begun = {name: saved["settings"].get(name) for name in Request.__dataclass_fields__}
        journals.check_said(said, begun)
        said = begun
    grid = settled(said)
    origin = provenance(grid.checkpoint, None, command)
    if saved:
        journals.check_same(path, origin, saved, [
            ("with other settings or data", grid.asked(), saved["settings"]),
            ("on another machine", origin["machine"]["cpu"], saved["machine"]["cpu"]),
        ])  # fmt: skip
    return grid, Journal(path, steps(grid), partial(composed, grid), origin, saved)


def steps(grid: Grid) -> list[Step]:
    """Each setting in each round, in a process of its own; in the first round it is looked at from inside as well."""
    found, rounds = [], grid.request.rounds
    for number in range(rounds):
        for setting in grid.settings if number % 2 == 0 else reversed(grid.settings):
            name, what = _step(setting, number), f"{setting.name}, round {number + 1} of {rounds}"
            cost = _START + (WARM_UP + TIMED) * setting.micro_batches
            found.append(Step(name, what, cost, setting.name, name, partial(_measured, grid, setting, number == 0)))
    return found


def _step(setting: Setting, number: int) -> str:
    return f"{setting.name} {number + 1}"


def _measured(grid: Grid, setting: Setting, account: bool, worker: Worker, _: Progress) -> dict[str, Any]:
    """Of one process. Where memory ran out: "out_of_memory", and whether that was foreseen."""
    from pronk.checkpoint.adapter import LoraConfig
    from pronk.train.settings import Settings

    request = grid.request
    settings = Settings(
        request.model, "", precision=setting.precision, recompute=int(setting.recompute),
        accumulate=setting.accumulate, batch_size=setting.batch_size, quantize="f32" if setting.lora else None,
        lora=LoraConfig(rank=request.rank) if setting.lora else None, lr=_RATES[setting.lora], warmup=0.0,
        schedule="constant", max_steps=100,
    )  # fmt: skip
    longest = sorted(grid.examples, key=len, reverse=True)[: setting.micro_batches]
    training: dict[str, Any] = {"settings": settings, "examples": longest, "device": request.device}
    found: dict[str, Any] = {}
    try:
        found["plan"] = worker.call(plan, **training)
        if found["plan"].get("fits") is False:
            said = f"{human_size(found['plan']['total'])} are needed: foreseen, and not tried"
            return {**found, "out_of_memory": said}
        steps = WARM_UP + TIMED
        measured = worker.call(trained, **training, threads=request.threads, count=steps, account=account)
        return {**found, **measured}
    except OutOfMemory as error:
        return {**found, "out_of_memory": error.said}
    except WorkerDied as died:
        if not any(sign in str(died) for sign in ("SIGKILL", "bad_alloc", "MemoryError", "memory")):
            raise
        return {**found, "out_of_memory": str(died)}


# -- in a worker --


def plan(held: Held, settings: Settings, examples: Sequence[Example], device: str | None) -> dict[str, Any]:
    """train.memory's."""
    from pronk.torch_engine.backend import pick_device
    from pronk.train import memory

    opened = checkpoint.open(hub.resolve(settings.model, progress=False))
    found = memory.plan(opened, settings, examples, pick_device(device))
    return {**found.to_dict(), "name": settings.model}  # as it was asked for: a path says where somebody's files lie


def trained(
    held: Held,
    settings: Settings,
    examples: Sequence[Example],
    device: str | None,
    threads: int | None,
    count: int,
    account: bool,
) -> dict[str, Any]:
    """What was loaded; of each of so many steps seconds, tokens read and loss; and the peak of memory since the process
    began. With `account` the steps are then looked at from inside. Nothing of it is ever written."""
    from pronk.torch_engine import device_memory
    from pronk.train.data.sources import Data
    from pronk.train.trainer import Trainer

    opened = checkpoint.open(hub.resolve(settings.model, progress=False))
    run = Trainer(opened, Data(examples), settings, Path(), device=device, threads=threads)
    torch = sys.modules["torch"]
    taken = [run.loop.step() for _ in range(count)]
    on_gpu = device_memory.of(run.loop.device)
    return {
        "load": {
            "trained_share": run.trained_share,
            "device": str(run.loop.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "steps": {
            "seconds": [step.seconds for step in taken],
            "tokens": [step.tokens for step in taken],
            "loss": [step.loss for step in taken],
            "peak_bytes": on_gpu.peak() if on_gpu else system.peak_memory(),
        },
        **({"account": _account(run.loop, opened.config.vocab_size)} if account else {}),
    }


def _account(loop: Loop, vocabulary: int) -> dict[str, Any]:
    """Two steps more, looked at from inside, which takes its time: the most bytes of each kind, and operations."""
    from pronk.train.ledger import KINDS, Ledger, operations

    with Ledger(loop.model, loop.optimizer, vocabulary) as ledger:
        loop.step()
    flops, step = operations(loop.step)  # apart, for counting holds on to what the ledger would see go
    return {
        "bytes": {kind: ledger.most[kind] for kind in KINDS},
        "at_peak": {kind: ledger.at_peak[kind] for kind in KINDS},
        "flops": flops,
        "tokens": step.tokens,
    }


# -- what it comes to --


def composed(grid: Grid, about: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """training.json, but for what every journal has: what the steps come to so far."""
    points = {setting: _point(grid, setting, taken) for setting in grid.settings}
    first: Mapping[str, Any] = next((one["load"] for one in taken.values() if "device" in one.get("load", {})), {})
    return {
        "model": {"name": grid.request.model, "config": grid.checkpoint.config.to_dict()},
        "machine": {**about["machine"], **{key: first.get(key) for key in ("device", "threads", "torch")}},
        "provenance": about.get("provenance"),
        "settings": grid.asked(),
        "lengths": [len(one) - 1 for one in grid.examples],  # as they are read
        "timed_steps": TIMED,
        "points": [point for point in points.values() if point],
        "techniques": [
            {"name": name, "of": own.name, "against": other.name, "changes": _changes(points[own], points[other])}
            for name, own, other in TECHNIQUES
        ],
    }


def _point(grid: Grid, setting: Setting, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    rounds = range(grid.request.rounds)
    taken = [steps[name] for number in rounds if (name := _step(setting, number)) in steps]
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
