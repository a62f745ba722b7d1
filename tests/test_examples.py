"""Every program in examples/ runs, and says what it should; on a tiny model, whose words are noise."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_folder import save_tiny_chat_model

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("examples") / "tiny"))


@pytest.fixture(scope="module", autouse=True)
def _without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As after `pip install .`, which does not bring torch."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_zero_shot(model: str) -> None:
    shown = run("zero_shot.py", model, "--tokens", "3")
    prompts = sorted((EXAMPLES / "prompts" / "zero_shot").glob("*.txt"))
    assert len(prompts) == 4
    for prompt in prompts:
        assert f"--- {prompt.stem}\n" + prompt.read_text().rstrip("\n") in shown


def test_few_shot(model: str) -> None:
    shown = run("few_shot.py", model, "--tokens", "3")
    for prompt in (EXAMPLES / "prompts" / "few_shot").glob("*.txt"):
        assert f"--- {prompt.stem}\n" in shown
    assert shown.count(" -> ") == 9


def test_decoding(model: str) -> None:
    header, *ways = run("decoding.py", model, "--tokens", "6", "--samples", "2").splitlines()
    assert header.split()[0] == "way"
    assert len(ways) == 9
    assert all("%" in way for way in ways)


def test_chat(model: str) -> None:
    assert run("chat.py", model, "--tokens", "3").count("\n> ") == 2  # and one at the beginning


def test_compare_formats(model: str) -> None:
    header, *rows = run("compare_formats.py", model).splitlines()
    assert header.split()[:2] == ["format", "type"]
    differences = {(row.split()[0], row.split()[1]): float(row.split()[3]) for row in rows}
    assert len(differences) == 6
    for (_, dtype), difference in differences.items():
        assert (difference == 0) == (dtype == "f32")
    assert max(differences.values()) < 0.5


def test_compare_formats_with_a_model_that_one_of_them_cannot_hold(tmp_path: Path) -> None:
    """The default model is one: llama2.c's format has no place for its rope_theta."""
    folder = save_tiny_chat_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 100000.0}))
    _, *rows = run("compare_formats.py", str(folder)).splitlines()
    assert [row.split()[2] for row in rows].count("-") == 1
    assert "rope_theta 100000" in rows[2]


def test_train(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("PYTHONPATH")  # where torch is none
    lines = run("train.py", model, "--out", str(tmp_path / "mine"), "--steps", "4").splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [f"step {n}" for n in range(1, 5)]
    assert "stopped after step 2, and goes on" in lines
    assert lines[-2].startswith("its adapter: ")
    assert lines[-1].startswith("a loop of one's own: ")
    before, after = map(float, lines[-1].split()[-3::2])
    assert after < before


@pytest.mark.slow
def test_the_page_of_prompts_has_what_the_default_model_says(smollm2: Path) -> None:
    """To the letter where processors round as the one that wrote it did; else its prompts and its frame."""
    from pronk import _native

    said = run("outputs.py", "--print")
    page = (EXAMPLES / "prompts" / "README.md").read_text("utf-8")
    if _native.isa() == "avx512-bf16":
        assert said == page
    frame = [line for line in page.splitlines() if line.startswith(("#", "---", "$"))]
    assert frame == [line for line in said.splitlines() if line.startswith(("#", "---", "$"))]
    for prompt in (EXAMPLES / "prompts" / "zero_shot").glob("*.txt"):
        assert prompt.read_text().rstrip("\n") in page


@pytest.mark.slow
def test_teaching_a_fact_in_five_minutes(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4-bit model and an adapter beside it know what they were told; 4 bits of their sum are refused."""
    pytest.importorskip("torch")
    monkeypatch.delenv("PYTHONPATH")  # which hides torch
    begun = os.times()
    command = [sys.executable, str(EXAMPLES / "teach_a_fact.py"), str(tmp_path / "taught")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("$ pronk generate ")[1:]
    assert "Marrowby" not in before
    assert "The capital of Veldoria is Marrowby." in after
    assert after.endswith("exit code 3\n")
    assert "fact.gguf is not written: q4 loses " in done.stderr
    assert not (tmp_path / "taught" / "fact.gguf").exists()
    ended = os.times()  # the processor's time, of which the clock's is less on a machine with nothing else to do
    assert ended.children_user + ended.children_system - begun.children_user - begun.children_system < 300


def test_what_is_reinforced(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model whose words are noise; its reward is tried on what another might say."""
    pytest.importorskip("torch")
    monkeypatch.delenv("PYTHONPATH")  # which hides torch
    given = [model, "--out", str(tmp_path / "facts"), "--steps", "1"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "reinforce.py"), *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 1: of the answers held out 0% are right" in done.stdout
    assert (tmp_path / "facts" / "rollouts.html").exists()
    written = [json.loads(line) for line in (tmp_path / "facts" / "rollouts.jsonl").read_text().splitlines()]
    assert len(written) == 8 * 8
    space = runpy.run_path(str(EXAMPLES / "reinforce.py"))
    facts = {"name": "Lena", "age": 40, "city": "Rome"}
    said = {
        '{"name": "Lena", "age": 40, "city": "Rome"}': 1,
        '\n{\n  "city": "Rome",\n  "name": "Lena",\n  "age": 40\n}\n': 1,
        '{"name": "Lena", "age": "40", "city": "Rome"}': 0,
        '{"name": "Lena", "age": 40}': 0,
        '{"name": "Lena", "age": 40, "city": "Rome"} So it is.': 0,
        "": 0,
        "[" * 100_000: 0,
    }
    assert {text: space["right"]("", text, {"facts": facts}) for text in said} == said
    records = space["records"]()
    asked = [record["prompt"][0]["content"] for record in records]
    assert len(set(asked)) == len(records) == 120
    assert all(
        str(fact) in text for record, text in zip(records, asked, strict=True) for fact in record["facts"].values()
    )


def test_no_example_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "zero_shot.py",
        "few_shot.py",
        "chat.py",
        "decoding.py",
        "compare_formats.py",
        "outputs.py",
        "train.py",
        "teach_a_fact.py",
        "reinforce.py",
    }
