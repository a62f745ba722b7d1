"""Looks judged by a task of lm-evaluation-harness: what is kept, when a run ends, and that it goes on as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import timeless, write_sums

import pronk
from pronk.errors import BadRequest, PronkError
from pronk.measure import tasks
from pronk.train.folder import METRICS

QUICK: dict[str, Any] = {
    "lora_rank": 4, "lr": 0.02, "max_steps": 12, "accumulate": 2, "batch_size": 2, "eval_every": 2, "samples": 0,
    "lora_dropout": 0.2, "device": "cpu", "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})


class Harness:
    """Scores one after another, in the place of the harness, whose seeds it sets as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *scores: float, better: str = "higher") -> None:
        self.scores, self.asked, self.better = list(scores), list[tuple[list[str], int | None]](), better
        monkeypatch.setattr(tasks, "check", lambda names: None)
        monkeypatch.setattr(tasks, "evaluate", self.evaluate)

    def evaluate(self, llm: Any, names: list[str], *, limit: int | None, progress: Any) -> dict[str, Any]:
        assert llm.generate("1 plus 1 is", max_new_tokens=2).tokens
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1234)
        self.asked.append((names, limit))
        value = self.scores.pop(0)
        return {names[0]: {"metrics": {"acc": {"value": value, "better": self.better}}}}


def test_the_best_on_the_task_is_kept_and_patience_ends_the_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(monkeypatch, 0.9, 0.2, 0.5, 0.4, 0.5, 0.1)
    run = pronk.finetune(model, data, tmp_path / "out", early_stop_task="mine", early_stop_limit=7, patience=2, **QUICK)
    adapters = {}
    for metrics in run:
        if "held_out_loss" in metrics and metrics["step"]:
            adapters[metrics["step"]] = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert harness.asked == [(["mine"], 7)] * 5
    looks = [line for line in timeless(tmp_path / "out") if "held_out_loss" in line]
    assert [line["held_out_task"] for line in looks] == [0.9, 0.2, 0.5, 0.4, 0.5]  # the first is no rival
    assert run.finished
    assert looks[-1]["step"] == 8
    assert run.result.held_out_task == {"first": 0.9, "last": 0.5, "kept": 0.5}
    assert run.result.held_out_loss
    assert run.result.held_out_loss["kept_step"] == 4
    assert adapters[2] != adapters[4] == adapters[6] == adapters[8]


def test_it_changes_no_number_of_a_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws as it would, though the harness sets torch's seed."""
    Harness(monkeypatch, *range(7))
    pronk.finetune(model, data, tmp_path / "with", early_stop_task="mine", patience=9, **QUICK).run()
    pronk.finetune(model, data, tmp_path / "without", patience=9, **QUICK).run()
    found = [{n: v for n, v in line.items() if n != "held_out_task"} for line in timeless(tmp_path / "with")]
    assert found == timeless(tmp_path / "without")


def test_it_resumes(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [0.0, 0.3, 0.6, 0.5, 0.6, 0.5]
    Harness(monkeypatch, *scores)
    given: dict[str, Any] = {"early_stop_task": "mine", "patience": 3, **QUICK}
    pronk.finetune(model, data, tmp_path / "whole", **given).run()
    harness = Harness(monkeypatch, *scores)
    for metrics in pronk.finetune(model, data, tmp_path / "parts", **given):
        if metrics["step"] == 7:
            break
    again = pronk.finetune(model, data, tmp_path / "parts", resume=True, **given)
    again.run()
    assert not harness.scores, "patience counts on from where it was"
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    assert again.result.held_out_task == {"first": 0.0, "last": 0.5, "kept": 0.6}
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    with pytest.raises(BadRequest, match="early_stop_task"):
        pronk.finetune(model, data, tmp_path / "parts", resume=True, **{**given, "early_stop_task": "other"}).run()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"early_stop_task": "mine"}, "give patience"),
        ({"early_stop_limit": 3, "patience": 1}, "name one"),
    ],
)
def test_what_cannot_be(model: Path, data: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        pronk.finetune(model, data, "out", **given)


def test_what_cannot_be_judged(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Harness(monkeypatch, 1.0, better="lower")
    given: dict[str, Any] = {"early_stop_task": "mine", "patience": 1, **QUICK}
    with pytest.raises(BadRequest, match="no metric of which more is better"):
        pronk.finetune(model, data, tmp_path / "out", **given).run()
    Harness(monkeypatch, float("nan"))
    with pytest.raises(BadRequest, match="gave nan in the place of a score"):
        pronk.finetune(model, data, tmp_path / "nan", **given).run()
    with pytest.raises(BadRequest, match="hold some out"):
        pronk.finetune(model, data, tmp_path / "none", eval_share=0.0, **given).run()
    with pytest.raises(BadRequest, match="asks what a model says"):
        pronk.reward(model, data, tmp_path / "reward", early_stop_task="mine", patience=1)


def test_a_harness_that_is_missing_is_told_before_anything_is_answered(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(names: list[str]) -> None:
        raise PronkError("no harness")

    monkeypatch.setattr(tasks, "check", missing)
    given: dict[str, Any] = {**QUICK, "samples": 1, "early_stop_task": "mine", "patience": 1}
    run = pronk.finetune(model, data, tmp_path / "out", **given)
    monkeypatch.setattr(run, "_before", lambda place: pytest.fail("the model answered first"))
    with pytest.raises(PronkError, match="no harness"):
        run.run()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the harness says so of functions of its own
def test_the_harness_itself_judges(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'pronk[eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    questions = [{"context": f"{a} plus {b} is", "word": f"{a + b}."} for a in range(2) for b in range(3)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "few.yaml").write_text(
        f"task: few\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'few.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: ' {{word}}'\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    given: dict[str, Any] = {**QUICK, "max_steps": 40, "eval_every": 20, "patience": 5}
    run = pronk.finetune(model, data, tmp_path / "out", early_stop_task=tmp_path / "few.yaml", **given)
    run.run()
    assert run.result.held_out_task
    kept = pronk.load(model, adapter=tmp_path / "out", engine="torch", quantize="f32", threads=1)
    found = tasks.evaluate(kept, [str(tmp_path / "few.yaml")])
    assert found["few"]["metrics"]["acc"]["value"] == run.result.held_out_task["kept"]
    assert "held_out_task" in (tmp_path / "out" / METRICS).read_text()
    with pytest.raises(PronkError, match="there is no task 'nothing'"):
        pronk.finetune(model, data, tmp_path / "not", early_stop_task="nothing", patience=1, **QUICK).run()
    assert not (tmp_path / "not").exists()
