"""Techniques of training compared: what figures become arrows, and what becomes of memory that runs out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_folder import save_tiny_chat_model

from pronk.cli import group
from pronk.errors import BadRequest
from pronk.measure import training, training_report
from pronk.measure.training import begin, measure
from pronk.measure.training_grid import BATCH, PLAIN, TECHNIQUES, Request, Setting


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


def taken(setting: Setting, account: bool) -> dict[str, Any]:
    """As a worker might answer: a model of 100 bytes, activations of 10 an example."""
    at_once = setting.batch_size * (4 if setting.recompute else 10)
    of_each = {"parameters": 100, "gradients": 5 if setting.lora else 100, "optimizer": 10 if setting.lora else 200}
    found: dict[str, Any] = {
        "plan": {"total": 1000, "fits": True},
        "load": {"device": "cpu", "threads": 1, "torch": "2", "trained_share": 1.0},
        "steps": {
            "seconds": [9.0, *[setting.micro_batches * (1.3 if setting.recompute else 1.0)] * 2],
            "tokens": [8 * setting.micro_batches] * 3, "loss": [3.0, 2.0, 1.0], "peak_bytes": 1000,
        },
    }  # fmt: skip
    if account:
        sizes = {**of_each, "activations": at_once, "logits": 0}
        flops = 80 * setting.micro_batches * (4 if setting.recompute else 3)
        found["account"] = {"bytes": sizes, "at_peak": sizes, "flops": flops, "tokens": 8 * setting.micro_batches}
    return found


def run(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Any = taken, **how: Any) -> dict[str, Any]:
    monkeypatch.setattr(training, "_measured", lambda grid, setting, account: answer(setting, account))
    grid, journal = begin(Request(model=model, tokens=16, rounds=2), folder, **how)
    report = measure(grid, journal)
    training_report.render(folder)
    return report


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
    page = (tmp_path / training_report.PAGE).read_text()
    assert "| Activation checkpointing | = | ↓ 0.40× | = | = | = | ↑ 1.33× | ↑ 1.30× |" in page
    assert {own for _, own, _ in TECHNIQUES} | {PLAIN, BATCH} <= {
        Setting(*[point[name] for name in Setting.__dataclass_fields__]) for point in report["points"]
    }


def test_rendered_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `pronk report`, of the folder or its file; damage is told in a line."""
    run(model, tmp_path, monkeypatch)
    page = tmp_path / training_report.PAGE
    before = page.read_bytes()
    for given in (tmp_path, tmp_path / training.NAME):
        page.unlink()
        done = CliRunner().invoke(group, ["report", str(given)])
        assert (done.exit_code, page.read_bytes()) == (0, before)
        assert done.stdout.startswith("Technique ")
    (tmp_path / training.NAME).write_text("{}")
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
    assert "out of memory: foreseen" in (tmp_path / training_report.PAGE).read_text()


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
    with pytest.raises(BadRequest, match="another tokens"):
        begin(Request(tokens=17), tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(True, "bf16", True, 8), PLAIN])
def test_a_setting_is_measured_in_a_process_of_its_own(model: str, tmp_path: Path, setting: Setting) -> None:
    grid, _ = begin(Request(model=model, tokens=16, threads=1), tmp_path)
    found = training._measured(grid, setting, account=True)
    assert found["plan"]["total"] == pytest.approx(found["steps"]["peak_bytes"], rel=0.15)
    assert found["steps"]["tokens"] == [16 * setting.micro_batches] * 3
    assert found["account"]["flops"] > 0
    assert found["account"]["bytes"]["parameters"] == found["plan"]["most"]["parameters"]
