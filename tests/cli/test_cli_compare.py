"""`pronk compare` as it is typed: the table, the files, Ctrl-C, and one line for what cannot be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

Run = Callable[..., Result]
QUICK = "--engine cpu --threads 1 --rounds 1 --prefill 8,40 --decode-tokens 4 --windows 1".split()


def test_a_table_on_stdout_and_a_report_in_a_folder(run: Run, model: str, tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = run("compare", model, "--to", "llm-int8", "--out", str(out), *QUICK)
    assert done.exit_code == 0, done.stderr
    for word in ("bf16", "llm-int8", "TTFT", "Perplexity"):
        assert word in done.stdout
    first, second, *_ = done.stderr.splitlines()
    assert first == f"{model}: bf16 against llm-int8, on the cpu engine"
    assert second == "latency and memory: a single round, prompts of 8, 40 tokens, 4 new ones each"
    assert {"REPORT.md", "report.html", "report.json"} <= {path.name for path in out.iterdir()}
    again = run("compare", model, "--to", "llm-int8", "--out", str(out), *QUICK)
    assert again.exit_code == 1
    assert again.stderr.count("\n") == 1
    assert "--resume" in again.stderr
    resumed = run("compare", "--resume", "--out", str(out), "--json")
    assert json.loads(resumed.stdout) == json.loads((out / "report.json").read_text())


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a report"
    command = [sys.executable, "-m", "pronk", "compare", model, "--to", "q8", "--out", str(out)]
    command += [*QUICK, "--rounds", "10000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not (out / "report.json").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            text, said = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 130
    assert text == ""
    assert f"go on with: pronk compare --resume --out '{out}'" in said
    kept = json.loads((out / "report.json").read_text())
    assert kept["steps"]
    assert not kept["finished"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "q5"], 2, "'q5' is not one of 'auto', 'f32'"),
        (["--against", "q5"], 2, "'q5' is not one of 'auto', 'f32'"),
        (["--prefill", "64,x"], 2, "is no list of lengths"),
        (["--resume", "--overwrite"], 2, "choose one"),
        (["--out", "/dev/null/report"], 1, "a report cannot be written there"),
        (["--text", "/dev/null"], 1, "the text has 0 tokens"),
    ],
)
def test_one_line_for_what_cannot_be(
    run: Run, model: str, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    done = run("compare", model, "--out", str(tmp_path / "out"), "--engine", "cpu", *arguments)
    assert done.exit_code == code
    assert done.stderr.startswith("pronk: ")
    assert len(done.stderr.splitlines()) == code
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_numbers_are_named_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    save_tiny_chat_model(tmp_path / "tiny")
    config = tiny_config(vocab_size=259, max_position_embeddings=1024)
    weights = random_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_huggingface(tmp_path / "tiny", config, weights)
    done = run("compare", str(tmp_path / "tiny"), "--to", "q8", "--out", str(tmp_path / "out"), *QUICK)
    assert done.exit_code == 1
    assert (
        "tensor 'model.layers.1.mlp.up_proj.weight': holds a number that is not finite" in done.stderr.splitlines()[-1]
    )
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_is_told_what_it_lacks(run: Run, tmp_path: Path) -> None:
    config = tiny_config()
    save_huggingface(tmp_path / "bare", config, random_weights(config))
    done = run("compare", str(tmp_path / "bare"), "--out", str(tmp_path / "out"), *QUICK)
    assert done.exit_code == 1
    assert "--tokenizer" in done.stderr


def test_ctrl_c_while_the_report_is_drawn_says_how_to_go_on(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronk.measure import compare, report

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def measured(comparison: object, journal: compare.Journal, **options: object) -> None:
        journal.steps["one"] = {}

    monkeypatch.setattr(compare, "compare", measured)
    monkeypatch.setattr(report, "render", interrupted)
    out = tmp_path / "report"
    result = run("compare", model, "--to", "q8", "--out", str(out))
    assert result.exit_code == 130
    assert f"go on with: pronk compare --resume --out {out}" in result.stderr


def test_a_context_without_room_for_texts_says_so_once(run: Run, model: str, tmp_path: Path) -> None:
    """Its report once named prompts that were never written, and texts of each variant as missing."""
    out = tmp_path / "report"
    arguments = ["--engine", "cpu", "--threads", "1", "--rounds", "1", "--prefill", "8", "--decode-tokens", "4"]
    done = run("compare", model, "--to", "q8", "--out", str(out), *arguments, "--windows", "2", "--ctx-size", "64")
    assert done.exit_code == 0, done.stderr
    assert "prompts, greedy" not in done.stderr
    page = (out / "REPORT.md").read_text()
    assert "texts: the prompts leave no room in a context of 64 tokens" in page
    assert "texts of q8" not in page
    assert "| Generation |" not in page
    assert "a single round, whose differences from the original may be the machine's noise; quality" in page


def test_a_tokenizer_that_is_another_models_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=200)
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    done = run("compare", str(tmp_path / "source"), "--to", "q8", "--out", str(tmp_path / "report"), *QUICK)
    assert done.exit_code == 1
    assert done.stderr.startswith("pronk: ")
    assert "another model's" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_report_is_told_of_as_that(run: Run, tmp_path: Path) -> None:
    """It was "report.json is absent", and a command that would overwrite what is not there."""
    for folder, found in ((tmp_path, "has neither report.json nor training.json"), (tmp_path / "no", "no such folder")):
        result = run("report", str(folder))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"pronk: {folder}: {found}; pronk compare MODEL --out FOLDER")
        assert "--overwrite" not in result.stderr
    (tmp_path / "report.html").touch()
    assert "report.html: is no folder" in run("report", str(tmp_path / "report.html")).stderr


def test_training_is_compared_by_a_verb_of_its_own(run: Run, model: str, tmp_path: Path) -> None:
    """It was an option of pronk compare that made no sense of most others there."""
    assert run("compare", model, "--training").exit_code == 2
    out = str(tmp_path / "out")
    both = run("compare-training", model, "--out", out, "--resume", "--overwrite")
    assert (both.exit_code, both.stderr.splitlines()[0][-10:]) == (2, "choose one")
    absent = run("compare-training", "--out", out, "--resume")
    assert absent.exit_code == 1
    assert absent.stderr.startswith(f"pronk: {tmp_path / 'out' / 'training.json'} is absent")
    short = run("compare-training", model, "--out", out, "--tokens", "7")
    assert (short.exit_code, list(tmp_path.iterdir())) == (2, [])
