"""Logs: what TensorBoard and Weights & Biases are told, and that no failure of theirs ends a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pronk.errors import PronkError
from pronk.train.logs import Logs, check, named

SETTINGS = {"model": "tiny", "lora": {"rank": 4}}
LINES: list[dict[str, Any]] = [
    {"step": 0, "held_out_loss": 3.0},
    {"step": 1, "epoch": 0.5, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens": 99, "targets": 40, "seconds": 2.0},
    {"step": 2, "epoch": 1.0, "loss": 1.5, "lr": 5e-4, "grad_norm": 0.4, "tokens": 80, "targets": 30, "seconds": 1.0},
    {"step": 2, "held_out_loss": 2.5, "held_out_accuracy": 0.75},
]


def quiet(problem: str) -> None:
    raise AssertionError(problem)


def test_names_are_those_of_the_trainer() -> None:
    assert dict(named(LINES[3])) == {"eval/loss": 2.5, "eval/accuracy": 0.75}
    assert dict(named(LINES[1])) == {
        "train/tokens_per_second": 49.5,
        "train/epoch": 0.5,
        "train/loss": 2.0,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 0.5,
        "train/tokens": 99,
        "train/targets": 40,
        "train/seconds": 2.0,
    }


# -- TensorBoard --


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_reads_what_was_told(tmp_path: Path) -> None:
    """With a run that went on from step 1: what came after it is there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    check(["tensorboard"])
    first = Logs(["tensorboard", "tensorboard"], tmp_path, SETTINGS, 0, quiet)
    for line in LINES:
        first(line)
    first.close()
    again = Logs(["tensorboard"], tmp_path, SETTINGS, 1, quiet)
    for line in LINES[2:]:
        again({**line, "loss": 1.25} if "loss" in line else line)
    again.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 2.0), (2, 1.25)]
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [(0, 3.0), (2, 2.5)]
    assert found.Scalars("train/tokens_per_second")[0].value == 49.5
    (text,) = found.Tensors("settings/text_summary")
    assert json.dumps(SETTINGS["lora"], indent=2)[:3] in text.tensor_proto.string_val[0].decode()


# -- Weights & Biases --


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options, self.lines, self.finished = options, list[tuple[int, dict[str, float]]](), False

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """As much of it as is called."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(os.environ, "WANDB_PROJECT", raising=False)
    return runs


def test_wandb_is_told_all_and_a_resumed_run_is_the_same_there(wandb: list[FakeRun], tmp_path: Path) -> None:
    check(["wandb"])
    for after in (0, 2):
        logs = Logs(["wandb"], tmp_path, SETTINGS, after, quiet)
        for line in LINES:
            logs(line)
        logs.close()
    first, again = wandb
    assert first.lines == [(line["step"], dict(named(line))) for line in LINES]
    assert first.finished
    assert (first.options["project"], first.options["config"], first.options["resume"]) == ("pronk", SETTINGS, "allow")
    assert (first.options["dir"], first.options["name"]) == (str(tmp_path), tmp_path.name)
    assert first.options["id"] == again.options["id"]


def test_wandb_s_own_variables_are_honoured(
    wandb: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "llamas")
    Logs(["wandb"], tmp_path, SETTINGS, 0, quiet)(LINES[0])
    assert wandb[0].options["project"] == "llamas"


# -- Failures --


def at(name: str, problem: Exception) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise problem

        owner: Any = sys.modules["wandb"] if name == "init" else FakeRun
        monkeypatch.setattr(owner, name, fail)

    return plant


@pytest.mark.parametrize(
    "plant",
    [at("init", RuntimeError("no key\nconfigured")), at("log", OSError("disk full")), at("finish", ValueError("odd"))],
)
def test_a_log_that_fails_is_told_of_once(
    wandb: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    told: list[str] = []
    logs = Logs(["wandb"], tmp_path, SETTINGS, 0, told.append)
    for line in LINES:
        logs(line)
    logs.close()
    (problem,) = told
    assert problem.startswith("wandb failed, and the run goes on without it (")
    assert "\n" not in problem


def test_ctrl_c_is_no_failure(wandb: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at("log", KeyboardInterrupt())(monkeypatch)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        Logs(["wandb"], tmp_path, SETTINGS, 0, quiet)(LINES[0])


@pytest.mark.parametrize(
    ("kind", "module"), [("wandb", None), ("wandb", SimpleNamespace()), ("tensorboard", None)]
)  # a folder of that name is a module without anything in it
def test_what_is_absent_is_named(kind: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb" if kind == "wandb" else "torch.utils.tensorboard", module)
    with pytest.raises(PronkError, match=f"--log-to {kind} needs {kind}; install it with: pip install {kind}"):
        check([kind])
