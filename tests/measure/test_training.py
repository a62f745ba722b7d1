"""Techniques of training compared: what figures become arrows, and what becomes of memory that runs out."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_folder import save_tiny_chat_model

from pronk import checkpoint, loading
from pronk.cli import group
from pronk.errors import BadFile, BadRequest
from pronk.measure import journal as journals
from pronk.measure import training, training_report
from pronk.measure.report.pages import escaped
from pronk.measure.training import begin
from pronk.measure.training_grid import BATCH, PLAIN, TECHNIQUES, Setting, settled
from pronk.measure.windows import evaluation_text
from pronk.measure.worker import OutOfMemory, Worker, WorkerDied
from pronk.train.data.examples import Example
from pronk.train.memory import LIBRARIES
from pronk.train.runs import options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


def taken(setting: Setting, account: bool) -> dict[str, Any]:
    """As a worker might answer: a model of 100 bytes, activations of 10 an example."""
    at_once = setting.batch_size * (4 if setting.recompute else 10)
    of_each = {"parameters": 100, "gradients": 5 if setting.lora else 100, "optimizer": 10 if setting.lora else 200}
    found: dict[str, Any] = {
        "plan": {"total": 1100, "fits": True},
        "load": {"device": "cpu", "threads": 1, "torch": "2", "trained_share": 1.0},
        "steps": {
            "seconds": [9.0, *[setting.micro_batches * (1.3 if setting.recompute else 1.0)] * 2],
            "tokens": [8 * setting.micro_batches] * 3, "loss": [3.0, 2.0, 1.0], "peak_bytes": 1000,
        },
    }  # fmt: skip
    if account:
        sizes = {**of_each, "activations": at_once // 2, "logits": at_once - at_once // 2}
        flops = 80 * setting.micro_batches * (4 if setting.recompute else 3)
        found["account"] = {"bytes": sizes, "at_peak": sizes, "flops": flops, "tokens": 8 * setting.micro_batches}
    return found


def run(
    model: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any = taken,
    *,
    resume: bool = False,
    **asked: Any,
) -> dict[str, Any]:
    monkeypatch.setattr(training, "_measured", lambda grid, setting, account, *_: answer(setting, account))
    monkeypatch.setattr(journals, "Worker", FakeWorker)
    _, journal = begin({"model": model, "tokens": 16, "rounds": 2, **asked}, folder, resume=resume)
    return journal.run()


def page_of(folder: Path) -> str:
    training_report.render(folder)
    return (folder / training_report.PAGE).read_text()


def test_arrows_are_of_what_was_measured(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(model, tmp_path, monkeypatch)
    arrows = {
        technique["name"].split()[0]: {kind: change["arrow"] for kind, change in technique["changes"].items()}
        for technique in report["techniques"]
    }
    same = dict.fromkeys(("parameters", "activations", "gradients", "optimizer", "compute", "time", "peak"), "=")
    assert arrows["Activation"] == {**same, "activations": "↓", "compute": "↑", "time": "↑"}
    assert arrows["Mixed"] == same
    assert arrows["LoRA"] == {**same, "gradients": "↓", "optimizer": "↓"}
    assert arrows["Accumulation,"] == {**same, "activations": "↓"}
    assert len(report["points"]) == 17
    assert report["finished"]
    assert ["account" in step for step in report["steps"].values()] == [True] * 17 + [False] * 17
    page = page_of(tmp_path)
    assert "| Activation checkpointing | = | ↓ 0.40× | = | = | = | ↑ 1.33× | ↑ 1.30× |" in page
    assert "| full, f32, kept, 1 x 1 | 0 | +10% | 1.00 (1.00 to 1.00) | 8 | 100.00% | 3.0000, 1.0000 |" in page
    assert {own for _, own, _ in TECHNIQUES} | {PLAIN, BATCH} <= {
        Setting(*[point[name] for name in Setting.__dataclass_fields__]) for point in report["points"]
    }


@pytest.mark.parametrize(
    ("own", "other", "arrow"), [(101.9, 100, "="), (98.1, 100, "="), (103, 100, "↑"), (97, 100, "↓"), (1, 0, "=")]
)
def test_what_differs_by_a_fiftieth_is_the_same(own: float, other: float, arrow: str) -> None:
    assert training._change(own, other) == {"times": own / other if other else None, "arrow": arrow}


def test_of_a_single_round_nobody_knows_whether_times_differ(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(model, tmp_path, monkeypatch, rounds=1)
    assert {technique["changes"]["time"]["arrow"] for technique in report["techniques"]} == {"?"}


def test_rates_are_those_of_finetune() -> None:
    assert {True: options.RATES["sft"].lora, False: options.RATES["sft"].full} == training._RATES


def test_nobody_always_goes_first_and_all_read_the_same(model: str) -> None:
    """Examples of a text begin all over it; of each all but the first token is learned."""
    grid = settled({"model": model, "tokens": 16, "rounds": 2})
    names = [setting.name for setting in grid.settings]
    expected = [*(f"{name} 1" for name in names), *(f"{name} 2" for name in reversed(names))]
    assert [step.name for step in training.steps(grid)] == [step.process for step in training.steps(grid)] == expected
    codec = loading.tokenizer_of(checkpoint.open(model))
    assert codec
    ids = codec.encode(evaluation_text())
    begins = [at for at in range(len(ids) - 16) if any(ids[at : at + 17] == one.ids.tolist() for one in grid.examples)]
    assert len(begins) == 8
    assert max(b - a for a, b in pairwise(begins)) < 2 * min(b - a for a, b in pairwise(begins))
    assert begins[-1] > len(ids) / 2
    assert {tuple(one.loss_mask.tolist()) for one in grid.examples} == {(False, *[True] * 16)}


def test_examples_that_the_context_cannot_hold_are_refused(model: str) -> None:
    """They were cut to it without a word."""
    with pytest.raises(
        BadRequest, match=r"has a context of \d+ tokens; take examples of fewer than these \(--tokens\)"
    ):
        settled({"model": model, "tokens": 100_000})


def test_data_of_one_s_own(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of it, and enough of it; what was begun with it is gone on with as long as it is the same."""
    data = tmp_path / "data.jsonl"
    texts = [json.dumps({"text": "It rained" + " again" * number}) + "\n" for number in range(12)]
    data.write_text("".join(texts[:7]))
    asked = {"model": model, "data": str(data), "tokens": 40, "rounds": 1}
    with pytest.raises(BadRequest, match="holds 7 examples, and 8 are needed"):
        settled(asked)
    data.write_text("".join(texts))
    lengths = [len(one) - 1 for one in settled(asked).examples]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 40  # cut
    run(model, tmp_path, monkeypatch, data=str(data), tokens=40, rounds=1)
    assert f"Examples of {lengths[0]} to 40 tokens of {escaped(str(data))}" in page_of(tmp_path)
    data.write_text("".join(reversed(texts)))
    with pytest.raises(BadRequest, match="was begun with other settings or data"):
        begin({}, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("schema", 0, "is no report of this version of pronk"),
        ("steps", {"full, f32, kept, 1 x 1 1": {}}, "steps: is damaged"),
        ("settings", {"model": 3}, "is damaged: report.settings.model is a int"),
        ("machine", {}, "is damaged: report.machine.cpu is null or absent"),
    ],
)
def test_a_damaged_one_is_not_gone_on_with(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, value: Any, says: str
) -> None:
    run(model, tmp_path, monkeypatch)
    file = tmp_path / training.NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), part: value}))
    with pytest.raises(BadFile, match=f"{says}.*begin anew"):
        begin({}, tmp_path, resume=True)


class FakeWorker:
    """Answers `answers`, or raises them; what it was asked is kept in `asked`."""

    answers: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, *_: Any) -> None:
        self.asked.clear()

    def close(self) -> None: ...

    kill = close

    def call(self, function: Any, **arguments: Any) -> Any:
        self.asked.append((function.__name__, arguments))
        answer = self.answers.get(function.__name__, {})
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "asked", "says"),
    [
        ({}, ["plan", "trained"], None),
        ({"plan": {"fits": False, "total": 5e9}}, ["plan"], "5.0 GB are needed: foreseen, and not tried"),
        ({"plan": OutOfMemory("full", "none left")}, ["plan"], "none left"),
        ({"trained": WorkerDied("killed by signal 9 (SIGKILL)")}, ["plan", "trained"], "killed by signal 9"),
    ],
)
def test_where_memory_runs_out_nothing_more_is_asked(
    model: str, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], asked: list[str], says: str | None
) -> None:
    monkeypatch.setattr(FakeWorker, "answers", answers)
    grid = settled({"model": model, "tokens": 16})
    longest = Example(np.arange(30, dtype=np.int32), np.arange(30) > 0)
    grid.examples[3] = longest
    found = training._measured(grid, PLAIN, True, FakeWorker(), None)  # type: ignore[arg-type]
    assert [operation for operation, _ in FakeWorker.asked] == asked
    assert FakeWorker.asked[0][1]["examples"] == [longest]  # the longest, which takes the most
    assert found.get("out_of_memory", "").startswith(says or "")
    assert ("out_of_memory" in found) == bool(says)


def test_a_worker_that_crashed_is_no_result(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = settled({"model": model, "tokens": 16})
    monkeypatch.setattr(FakeWorker, "answers", {"trained": WorkerDied("killed by signal 11 (SIGSEGV)")})
    with pytest.raises(WorkerDied):
        training._measured(grid, PLAIN, False, FakeWorker(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(FakeWorker, "answers", {})
    training._measured(grid, PLAIN, False, FakeWorker(), None)  # type: ignore[arg-type]
    assert [(name, arguments.get("account")) for name, arguments in FakeWorker.asked] == [
        ("plan", None),
        ("trained", False),
    ]


def test_rendered_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `pronk report`, of the folder or its file; damage is told in a line."""
    run(model, tmp_path, monkeypatch)
    page_of(tmp_path)
    page = tmp_path / training_report.PAGE
    before = page.read_bytes()
    for given in (tmp_path, tmp_path / training.NAME):
        page.unlink()
        done = CliRunner().invoke(group, ["report", str(given)])
        assert (done.exit_code, page.read_bytes()) == (0, before)
        assert done.stdout.startswith("Technique ")
    (tmp_path / training.NAME).write_text('{"schema": 1}')
    done = CliRunner().invoke(group, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "training.json: is damaged" in done.stderr
    assert page.read_bytes() == before


def test_memory_that_runs_out_is_a_result(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(setting: Setting, account: bool) -> dict[str, Any]:
        if setting == BATCH:
            return {"plan": {"total": 5000, "fits": False}, "out_of_memory": "foreseen"}
        return taken(setting, account)

    report = run(model, tmp_path, monkeypatch, answer)
    assert report["finished"]
    assert [point["name"] for point in report["points"] if "out_of_memory" in point] == [BATCH.name]
    assert [technique["changes"] for technique in report["techniques"]][3:] == [None, None]
    assert "out of memory: foreseen" in page_of(tmp_path)


def test_what_was_finished_is_kept_and_gone_on_with(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def until_ten(setting: Setting, account: bool) -> dict[str, Any]:
        if len(seen) == 10:
            raise KeyboardInterrupt
        seen.append(setting.name)
        return taken(setting, account)

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, monkeypatch, until_ten)
    half = json.loads((tmp_path / training.NAME).read_text())
    assert (len(half["steps"]), half["finished"]) == (10, False)
    with pytest.raises(BadRequest, match="exists"):
        run(model, tmp_path, monkeypatch)
    rest: list[str] = []
    whole = run(model, tmp_path, monkeypatch, lambda s, a: rest.append(s.name) or taken(s, a), resume=True)
    assert len(rest) == 24
    assert whole["finished"]
    with pytest.raises(BadRequest, match="--tokens is 17 now, but the report was begun with 16"):
        begin({"tokens": 17}, tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(True, "bf16", True, 8), PLAIN])
def test_a_setting_is_measured_in_a_process_of_its_own(model: str, tmp_path: Path, setting: Setting) -> None:
    grid, _ = begin({"model": model, "tokens": 16, "threads": 1}, tmp_path)
    worker = Worker(setting.name)
    found = training._measured(grid, setting, True, worker, lambda *_: None)
    worker.close()
    # Of so small a model the libraries are most, of which processors with fewer instruction sets load less.
    assert (
        0.85 * found["steps"]["peak_bytes"] < found["plan"]["total"] < found["steps"]["peak_bytes"] * 1.15 + LIBRARIES
    )
    assert found["steps"]["tokens"] == [16 * setting.micro_batches] * 3
    assert found["account"]["flops"] > 0
    assert found["steps"]["loss"][0] == pytest.approx(math.log(259), rel=0.2)  # nothing is learned yet
    assert found["steps"]["loss"][-1] < found["steps"]["loss"][0]
    assert found["account"]["bytes"]["parameters"] == found["plan"]["most"]["parameters"]
