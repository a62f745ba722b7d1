"""Provenance: every JSON of measurements says what its figures come from."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.cli import group
from pronk.errors import BadFile
from pronk.measure.divergence import compared, divergence
from pronk.measure.machine import commit, compiler, provenance
from pronk.measure.perplexity import perplexity, surprises

TEXT = "The text is read in windows, and the second half of each of them counts. " * 4
CPU = ["--engine", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(group, list(arguments))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_every_json_says_what_its_figures_come_from(model: str, text: str, tmp_path: Path) -> None:
    window = ["--ctx", "64", "--json", *CPU]
    one = json.loads(run("perplexity", model, "-f", text, *window))["provenance"]
    both = json.loads(run("divergence", model, "--quantize", "q8", "-f", text, *window))["provenance"]
    verified = json.loads(run("verify", model, "-f", text, "--json", *CPU))["provenance"]
    outliers = json.loads(run("outliers", model, "-f", text, *window))["provenance"]
    run("compare", model, "--to", "q8", "-o", str(tmp_path / "out"), "--windows", "1", "--rounds", "1", "--prefill",
        "8", "--decode-tokens", "2", *CPU)  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    written = run("quantize", model, str(tmp_path / "q8.gguf"), "--to", "q8", "-f", text, "--json")
    quantized = json.loads(written)["provenance"]
    (weights,) = Path(model).glob("*.safetensors")
    for found in (one, both["reference"], both["own"], verified, outliers, quantized, report["provenance"]):
        assert found["pronk"] == pronk.__version__
        assert found["command"].startswith("pronk")
        assert found["model_sha256"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
        assert found["versions"]["numpy"] == np.__version__
        assert found["versions"]["torch"] == torch.__version__
        assert found["versions"]["compiler"] == compiler()
        assert found["machine"]["cpu"]
    for found in (one, both["own"], verified, quantized):
        assert found["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert quantized["machine"]["threads"]
    assert quantized["machine"]["isa"]
    for found in (one, both["own"], verified, report["provenance"]):
        assert (found["machine"]["threads"], bool(found["machine"]["isa"])) == (1, True)
    page = (tmp_path / "out" / "REPORT.md").read_text()
    assert report["provenance"]["model_sha256"][weights.name] in page
    assert f"numpy {np.__version__}" in page


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert commit(tmp_path) is None
    git("init", "-q")
    assert commit(tmp_path) is None  # it lies in one that does not track it
    (tmp_path / "file").write_text("one")
    git("add", ".")
    git("commit", "-qm", "one")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == git("rev-parse", "HEAD") + "+"


def test_a_file_that_is_gone_is_named(model: str, tmp_path: Path) -> None:
    opened = pronk.load(model, engine="cpu", threads=1).checkpoint
    object.__setattr__(opened, "files", (tmp_path / "gone.safetensors",))
    with pytest.raises(BadFile, match=r"gone\.safetensors"):
        provenance(opened, None, "pronk")


def test_values_by_window_and_by_token(model: str, text: str, tmp_path: Path) -> None:
    table = tmp_path / "windows.csv"
    found = json.loads(run("perplexity", model, model, "-f", text, "--ctx", "64", "--per-window", str(table), "--json",
                           *CPU))["models"]  # fmt: skip
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["window"] for row in rows] == ["1", "2", "3", "4"] * 2
    assert [int(row["begin"]) for row in rows[:4]] == [0, 64, 128, 192]
    assert [float(row["surprise"]) for row in rows[:4]] == found[0]["per_window"]["surprise"]
    llm, own = (pronk.load(model, engine="cpu", threads=1, quantize=quantize) for quantize in ("f32", "q8"))
    ids = llm.tokenizer.encode(TEXT)
    tokens = surprises(llm, ids, ctx=64)
    assert [of.nats.mean() for of in tokens] == found[0]["per_window"]["surprise"]
    assert np.exp(np.concatenate([of.nats for of in tokens]).mean()) == pytest.approx(found[0]["value"])
    assert perplexity(llm, ids, ctx=64)["per_window"] == found[0]["per_window"]
    # By an independent way: the log-probabilities of all logits of the third window.
    logits = torch.from_numpy(llm.logits(ids[128:192])).double().log_softmax(-1)
    expected = -logits[32:63].gather(-1, torch.tensor(ids[161:192])[:, None])[:, 0]
    np.testing.assert_allclose(tokens[2].nats, expected, rtol=1e-9)
    run("divergence", model, "--quantize", "q8", "-f", text, "--ctx", "64", "--per-window", str(table), *CPU)
    rows = [row for row in csv.DictReader(table.read_text().splitlines()) if row["of"] == "divergence"]
    windows = compared(llm, own, ids, ctx=64)
    assert [float(row["kld"]) for row in rows] == pytest.approx([of.kld.mean() for of in windows])
    assert [of.begin for of in windows] == [0, 64, 128, 192]
    whole = divergence(llm, own, ids, ctx=64)
    assert np.concatenate([of.kld for of in windows]).mean() == pytest.approx(whole["mean"])
    assert np.concatenate([of.top1 for of in windows]).mean() == pytest.approx(whole["top1"])
    assert windows[0].own_surprise.mean() == pytest.approx(whole["per_window"]["own_surprise"][0])


def test_a_folder_that_is_none_is_refused_before_anything_is_measured(model: str) -> None:
    result = CliRunner().invoke(group, ["perplexity", model, "--per-window", "--json"])
    assert "name a file that ends in .csv, not --json" in result.stderr, "an option that forgot its file took the next"
    result = CliRunner().invoke(group, ["perplexity", model, "--per-window", "/nowhere/at/all.csv"])
    assert result.exit_code == 1
    assert "/nowhere/at: there is no such folder" in result.stderr


def test_the_page_names_every_key(model: str, text: str) -> None:
    """And its example runs, here with the tiny model."""
    page = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
    window = ["-f", text, "--ctx", "64", "--json", *CPU]
    one = json.loads(run("perplexity", model, model, *window))["models"][1]
    two = json.loads(run("divergence", model, "--quantize", "q8", *window))
    sized = [model, f"{model}.gguf", "--max-size", "9bpw", "--overwrite", "--calibrate", "--self-written", "0"]
    three = json.loads(run("quantize", *sized, "--json"))
    keys = {*one, *one["per_window"], *one["beside_first"], *one["provenance"], *one["provenance"]["machine"], *two}
    keys |= {*three, *three["calibration"], *three["choice"], *three["choice"]["parts"][0]}
    keys |= {*two["divergence"], *two["divergence"]["per_window"], *two["divergence"]["perplexity"], *two["own_floor"]}
    assert {key for key in keys if f"`{key}`" not in page} == set()
    example = page.split("```python")[1].split("```")[0].replace('"smollm2:135m"', f'"{model}", threads=1')
    exec(compile(example, "docs/measuring.md", "exec"), {})
