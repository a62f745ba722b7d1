"""`pronk reward` and `pronk score` on a tiny model: what they say and leave, how a run goes on, what they refuse."""

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

import pronk

Run = Callable[..., Result]

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "preferences.jsonl"
    return str(write_sums(path, lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"}))


@pytest.fixture(scope="module")
def full(model: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a reward model."""
    out = tmp_path_factory.mktemp("full") / "rm"
    pronk.reward(model, data, out, full=True, lr=1e-3, max_steps=4, accumulate=4, samples=0, device="cpu").run()
    return str(out / "model")


def test_an_adapter_a_report_and_scores(run: Run, model: str, data: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("reward", model, "--data", data, "--out", str(out), *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["steps"], report["method"]) == (6, "LoRA")
    assert report["held_out_rewards"]["accuracy"] == 1
    assert report["held_out_loss"]["kept"] < 0.1
    notes = result.stderr.splitlines()
    assert notes[0].startswith("step 0 of 6: held-out loss ")
    assert notes[2].startswith("step 6 of 6: held-out loss 0.")
    assert notes[2].count("% right)") == 2
    (sample,) = report["samples"]
    assert list(sample) == ["prompt", "chosen", "rejected"]
    asked = [f"{sample['prompt']}{sample[name].split('  ', 1)[1]}" for name in ("chosen", "rejected")]
    said = run("score", model, "--adapter", str(out), *asked)
    assert said.exit_code == 0, said.stderr
    better, worse = said.stdout.splitlines()
    assert better.endswith(asked[0])
    assert float(better.split()[0]) == pytest.approx(float(sample["chosen"].split()[0]), abs=1e-3)
    assert float(better.split()[0]) > float(worse.split()[0])
    compared = run("score", model, "--adapter", str(out), "--data", data, "--json")
    found = json.loads(compared.stdout)
    assert (found["pairs"], len(found["each"])) == (20, 20)
    assert found["accuracy"] == sum(chosen > rejected for chosen, rejected in found["each"]) / 20 == 1
    assert found["margin"] == pytest.approx(sum(chosen - rejected for chosen, rejected in found["each"]) / 20)


def test_the_report_as_text_with_curves(run: Run, model: str, data: str, tmp_path: Path) -> None:
    result = run("reward", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK)
    lines = result.stdout.splitlines()
    rows = ["trained", "examples", "steps", "loss", "held-out loss", "rewards", "held-out rewards", "time"]
    assert [line.split("  ")[0] for line in lines[:8]] == rows
    assert [line.split()[0] for line in lines[-2:]] == ["chosen", "rejected"]
    contained((tmp_path / "out" / "loss.svg").read_text("utf-8"))


def test_all_weights_stopped_and_resumed(run: Run, model: str, data: str, tmp_path: Path) -> None:
    """By Ctrl-C in the midst of a step; the model's bytes are those of a run that was never stopped."""

    def train(folder: str, *more: str) -> Result:
        options = "--full --max-steps 3 --accumulate 2 --samples 0 --lr 0.001 --json --device cpu --center-rewards 0.01"
        return run("reward", model, "--data", data, "--out", str(tmp_path / folder), *options.split(), *more)

    with signalled(signal.SIGINT, at=1):
        assert train("parts").exit_code == 130
    resumed, whole = train("parts", "--resume"), train("whole")
    assert (resumed.exit_code, whole.exit_code) == (0, 0), resumed.stderr
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    files = [(tmp_path / folder / "model" / "model.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert files[0] == files[1]
    assert isinstance(pronk.load(tmp_path / "whole" / "model").score("a"), float)


def test_show_batch_marks_the_token_that_is_scored(run: Run, model: str, data: str) -> None:
    result = run("reward", model, "--data", data, "--show-batch")
    assert (result.exit_code, result.stderr) == (0, "")
    first, chosen, liked, rejected, disliked, *_ = [line for line in result.stdout.splitlines() if line]
    assert first.startswith("micro-batch 1: 1 example, ")
    assert first.endswith(" tokens, 2 of them scored")
    assert (chosen, rejected) == ("chosen:", "rejected:")
    assert liked.endswith(".⟦</s>⟧")
    assert disliked.endswith(" a number⟦</s>⟧")


def test_a_plan(run: Run, model: str, data: str) -> None:
    result = run("reward", model, "--data", data, "--plan")
    assert result.exit_code == 0
    assert "It fits. Trained: LoRA, " in result.stdout


SCORING: list[tuple[list[str], int, str]] = [
    (["{rm}"], 2, "give TEXTs to score, or --data FILE with pairs to compare; one of the two"),
    (["{rm}", "a", "--data", "{data}"], 2, "one of the two"),
    (["{rm}", "a", "--too-long", "cut"], 2, "are for --data"),
    (["{model}", "a"], 1, "is no reward model: pronk reward makes one"),
    (["{rm}", "x" * 300], 1, "the text has 301 tokens and at most 256 fit"),
    (["{rm}", "--data", "none"], 1, "none"),
    (["{rm}", "--data", "{data}", "--fields", "a=prompt"], 1, "no record has the key 'a', which --fields renames"),
]


@pytest.mark.parametrize(("given", "code", "message"), SCORING, ids=[message for *_, message in SCORING])
def test_scoring_that_cannot_be(
    run: Run, model: str, data: str, full: str, given: list[str], code: int, message: str
) -> None:
    result = run("score", *(part.format(rm=full, model=model, data=data) for part in given))
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_another_adapter_scores_nothing(run: Run, model: str, data: str, tmp_path: Path) -> None:
    """Who has given an adapter is not told to give one."""
    out = str(tmp_path / "tuned")
    names = ["--fields", "chosen=completion,rejected="]
    tuned = run("finetune", model, "--data", data, "--out", out, "--max-steps", "1", "--samples", "0", *names)
    assert tuned.exit_code == 0, tuned.stderr
    result = run("score", model, "a", "--adapter", out)
    assert result.exit_code == 1
    assert "is no reward model, nor does its adapter make one of it" in result.stderr


def test_records_that_are_not_compared_are_counted(run: Run, full: str, tmp_path: Path) -> None:
    good, long = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b" * 300, "rejected": "c"}
    lines = [good, {"prompt": "a"}, long]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["score", full, "--data", str(tmp_path / "d.jsonl")]
    assert "line 2: has the keys" in run(*given).stderr
    assert "line 3: takes 302 tokens" in run(*given, "--skip-bad-records").stderr
    result = run(*given, "--skip-bad-records", "--too-long", "skip")
    assert result.exit_code == 0, result.stderr
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert rows["pairs"].strip().startswith("1 of ")
    assert "(1 malformed, 1 too long)" in rows["pairs"]
    assert "±" not in result.stdout  # of one pair nobody knows


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("generate", ["-m", "{rm}", "-p", "a"]),
        ("look", ["-m", "{rm}", "a"]),
        ("perplexity", ["{rm}", "--ctx", "64"]),
        ("divergence", ["{model}", "{rm}", "--ctx", "64"]),
        ("verify", ["{rm}"]),
        ("outliers", ["{rm}", "--ctx", "64", "--engine", "torch", "--device", "cpu"]),
        ("compare", ["{rm}", "--out", "new"]),
        ("compare-training", ["{rm}", "--out", "new"]),
        ("serve", ["-m", "{rm}", "--port", "0"]),
    ],
)
def test_verbs_of_models_that_predict_tokens_refuse_it(
    run: Run, model: str, full: str, verb: str, more: list[str]
) -> None:
    result = run(verb, *(part.format(rm=full, model=model) for part in more))
    assert (result.exit_code, result.stdout) == (1, ""), result.stderr
    assert result.stderr.splitlines()[-1].startswith("pronk: this is a reward model, which gives a text a score and")
    assert result.stderr.count("pronk: ") == 1


def test_merging_it_is_refused_before_anything_is_written(run: Run, model: str, data: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("reward", model, "--data", data, "--out", str(out), *QUICK, "--samples", "0").exit_code == 0
    result = run("merge", model, str(out), str(tmp_path / "merged"))
    assert result.exit_code == 1
    assert (
        "a reward model's adapter; what merging loses is measured by tokens, of which it predicts none" in result.stderr
    )
    assert not (tmp_path / "merged").exists()
