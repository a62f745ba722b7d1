"""`pronk kto` on a tiny model: the verb itself, with its data read and kept as its options say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tiny_folder import save_tiny_chat_model
from training_runs import QUICK, timeless, write_sums

Run = Callable[..., Result]

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256))


def judged(path: Path) -> str:
    write_sums(path, lambda a, b: {"completion": f" {a + b}.", "label": "true" if (a + b) % 3 else "false"})
    return str(path)


def test_an_adapter_and_a_report(run: Run, model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("kto", model, "--data", judged(tmp_path / "judged.jsonl"), "--out", str(out), *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["steps"], report["method"]) == (6, "LoRA")
    assert report["held_out_loss"]["first"] == pytest.approx(0.5, abs=1e-6)
    looks = {line["step"]: line["held_out_rewards/accuracies"] for line in timeless(out) if "held_out_loss" in line}
    assert looks[0] == 0.5
    assert report["held_out_rewards"] == {"accuracy": looks[report["held_out_loss"]["kept_step"]]}
    steps = [line["rewards/accuracies"] for line in timeless(out) if "loss" in line]
    ends = {"first": sum(steps[:3]) / 3, "last": sum(steps[3:]) / 3}
    assert report["rewards"] == {"accuracy": pytest.approx(ends)}
    notes = result.stderr.splitlines()
    assert notes[0] == "step 0 of 6: held-out loss 0.5000, 50% right"
    assert any(" right, " in note and "tokens/s" in note for note in notes[1:])
    assert {"kl", "rewards/signed", "rewards/accuracies"} < timeless(out)[1].keys()
    picture = (out / "loss.svg").read_text()
    assert "accuracy of rewards" in picture
    assert "nats a token" not in picture  # a loss of 0.5 is none of tokens


def test_pairs_shown_and_learned(run: Run, model: str, tmp_path: Path) -> None:
    data = str(write_sums(tmp_path / "pairs.jsonl", lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"}))
    shown = run(
        "kto", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK, "--show-batch", "--batch-size", "8"
    )
    assert shown.exit_code == 0, shown.stderr
    good = re.findall(r"good:\n(\d+) plus (\d+) is⟦ (\d+)\.</s>⟧", shown.stdout)
    bad = re.findall(r"bad:\n\d+ plus \d+ is⟦ a number</s>⟧", shown.stdout)
    assert len(good) + len(bad) == 16
    assert min(len(good), len(bad)) > 0
    assert all(int(a) + int(b) == int(total) for a, b, total in good)
    planned = run("kto", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "The reference is the model before training" in planned.stdout
    done = run("kto", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK)
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^rewards +\d+% right and \d+% right: means as of the loss$", done.stdout, re.MULTILINE)
    assert re.search(r"^held-out rewards +\d+% right, of step \d$", done.stdout, re.MULTILINE)
