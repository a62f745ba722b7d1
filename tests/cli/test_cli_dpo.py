"""`pronk dpo` on a tiny model: what it says and leaves, how it goes on, and how it refuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pictures import contained
from tiny_folder import save_tiny_chat_model
from training_runs import QUICK, signalled, timeless, write_sums

from pronk import checkpoint
from pronk.checkpoint import adapter

Run = Callable[..., Result]

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "preferences.jsonl"
    return str(write_sums(path, lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"}))


@pytest.fixture
def dpo(run: Run, model: str, data: str, tmp_path: Path) -> Run:
    """Into tmp_path / "out", a few quick steps; what is given comes last."""

    def dpo(*more: str, data: str = data) -> Result:
        return run("dpo", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK, *more)

    return dpo


def test_an_adapter_and_a_report(dpo: Run, run: Run, model: str, tmp_path: Path) -> None:
    result = dpo("--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["steps"], report["method"]) == (6, "LoRA")
    assert report["examples"] == {"train": 18, "held_out": 2}
    assert report["held_out_loss"]["first"] == pytest.approx(0.693147, abs=1e-6)
    assert report["held_out_loss"]["last"] < 0.5
    assert report["held_out_rewards"]["margin"] > 0.5
    assert report["held_out_rewards"]["accuracy"] == 1
    assert report["rewards"]["margin"]["last"] >= report["rewards"]["margin"]["first"] > 0
    (sample,) = report["samples"]
    assert list(sample) == ["prompt", "before", "after", "chosen", "rejected"]
    assert sample["rejected"] == "a number"
    notes = result.stderr.splitlines()
    assert notes[0] == "step 0 of 6: held-out loss 0.6931, margin 0.000 (50% right)"
    assert notes[2].startswith("step 6 of 6: held-out loss 0.")
    assert notes[2].count("% right)") == 2
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"}
    first, step, *_ = timeless(tmp_path / "out")
    assert names < step.keys()
    assert {f"held_out_{name}" for name in names} < first.keys()
    assert adapter.read_config(tmp_path / "out")[0].rank == 4
    said = run("generate", "-m", model, "--adapter", str(tmp_path / "out"), "-n", "64", "-p", sample["prompt"])
    assert said.stdout.strip() == sample["after"]


def test_the_report_as_text_with_curves(dpo: Run, tmp_path: Path) -> None:
    lines = dpo("--max-steps", "3").stdout.splitlines()
    rows = ["trained", "examples", "steps", "loss", "held-out loss", "rewards", "held-out rewards", "time"]
    assert [line.split("  ")[0] for line in lines[:8]] == rows
    assert lines[5].count("% right)") == 2
    assert [line.split()[0] for line in lines[-4:]] == ["before", "after", "chosen", "rejected"]
    contained((tmp_path / "out" / "loss.svg").read_text("utf-8"))


def test_all_weights_stopped_and_resumed(run: Run, model: str, data: str, tmp_path: Path) -> None:
    """By Ctrl-C in the midst of a step; it ends as it would have, held against the same reference."""

    def train(folder: str, *more: str) -> Result:
        options = "--full --max-steps 3 --accumulate 2 --samples 0 --lr 0.001 --json --device cpu --loss ipo --beta 0.3"
        return run("dpo", model, "--data", data, "--out", str(tmp_path / folder), *options.split(), *more)

    with signalled(signal.SIGINT, at=1):
        assert train("parts").exit_code == 130
    resumed, whole = train("parts", "--resume"), train("whole")
    assert (resumed.exit_code, whole.exit_code) == (0, 0), resumed.stderr
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    assert json.loads(whole.stdout)["trained_share"] == 1
    assert checkpoint.open(tmp_path / "whole" / "model").tokenizer is not None


def test_show_batch_shows_both_answers(run: Run, model: str, data: str) -> None:
    result = run("dpo", model, "--data", data, "--show-batch")
    assert (result.exit_code, result.stderr) == (0, "")
    first, chosen, liked, rejected, disliked, *_ = [line for line in result.stdout.splitlines() if line]
    assert first.startswith("micro-batch 1: 1 example, ")
    assert (chosen, rejected) == ("chosen:", "rejected:")
    assert liked.split("⟦")[0] == disliked.split("⟦")[0]
    assert liked.endswith(".</s>⟧")
    assert disliked.endswith("⟦ a number</s>⟧")


def records(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


GOOD = '{"prompt": "a", "chosen": "b", "rejected": "c"}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([GOOD, '{"prompt": "a", "chosen": "b", "rejected": " "}'], "line 2: has no answer: rejected is empty"),
        ([GOOD, '{"prompt": "a", "chosen": "b", "rejected": "b"}'], "line 2: chosen and rejected are the same"),
        ([GOOD, '{"prompt": "a", "chosen": "b", "rejected": "' + "long " * 60 + '"}'], "line 2: takes 302 tokens"),
        ([GOOD, '{"prompt": "a", "completion": "b"}'], "line 2: prompt+completion is what pronk finetune"),
        (['{"prompt": "a", "completion": "b"}'], "pronk finetune learns from; here it is chosen+rejected (+prompt)"),
    ],
)
def test_bad_data(dpo: Run, tmp_path: Path, lines: list[str], message: str) -> None:
    result = dpo(data=records(tmp_path, *lines))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--beta", "0"], "'--beta': 0.0 is not in the range x>0"),
        (["--loss", "kto"], "'kto' is not one of"),
        (["--label-smoothing", "0.5"], "0.5 is not in the range"),
        (["--label-smoothing", "0.1", "--loss", "hinge"], "--label-smoothing is for the sigmoid loss and simpo"),
        (["--full"], "--full trains all weights; leave the options of LoRA out"),
        (["--train-on-prompt"], "no such option"),
    ],
)
def test_wrong_usage(dpo: Run, tmp_path: Path, more: list[str], message: str) -> None:
    result = dpo(*more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
