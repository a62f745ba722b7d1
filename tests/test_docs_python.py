"""The Python in docs/*.md runs as it stands there, on a tiny model under the name of the default one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from adapters import random_adapter, save
from tiny_folder import save_tiny_chat_model
from training_runs import write_sums

import pronk

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `pronk.load("smollm2:135m")` loads."""
    folder, load = save_tiny_chat_model(tmp_path / "tiny"), pronk.load

    def instead(name: str, **options: Any) -> pronk.LLM:
        assert name == "smollm2:135m"
        return load(folder, **options)

    monkeypatch.setitem(vars(pronk), "load", instead)
    return folder


def run(page: str, heading: str = "") -> dict[str, Any]:
    """All that its Python has named; of a page in several parts, that under a heading."""
    names: dict[str, Any] = {}
    text = (DOCS / page).read_text("utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    return names


def test_training_from_python(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    finetune = pronk.finetune
    monkeypatch.setitem(vars(pronk), "finetune", lambda name, *given, **more: finetune(tiny, *given, **more))
    monkeypatch.chdir(tmp_path)
    write_sums(tmp_path / "mine.jsonl", lambda a, b: {"completion": f" {a + b}."})
    names = run("training.md", "From Python")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["held", "1", "2"]
    assert len(lines) == 20 + 3 + 1
    assert lines[-1].startswith("mine {'first': ")
    assert names["run"].result.adapter == "mine"
    assert names["llm"].generate("1 plus 1 is", max_new_tokens=1)


def test_a_reward_model_s_scores(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tiny.parent)
    pairs = write_sums(Path("pairs.jsonl"), lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"})
    pronk.reward(tiny, pairs, "rm", max_steps=1, samples=0, device="cpu").run()
    rm = run("preferences.md", "Reward models")["rm"]
    of_texts, of_talk = capsys.readouterr().out.splitlines()
    assert of_texts == str(rm.score(["Is the sea salty? Yes.", "Is the sea salty? Who knows."]))
    assert float(of_talk)


def test_several_adapters_of_one_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    for name in ("mine", "alpaca"):
        save(Path(name), random_adapter(pronk.checkpoint.open(tiny).config, uneven=False))
    assert list(run("trained-adapters.md")["llm"].adapters) == ["instructions"]


def test_every_function_of_training_is_on_the_page_of_python() -> None:
    page = (DOCS / "api.md").read_text("utf-8")
    for name in ("finetune", "dpo", "reward", "pretrain", "run.Run", "result.Result"):
        assert f"::: pronk.train.runs.{name}\n" in page


def test_all_that_pronk_offers_is_on_that_page() -> None:
    told = re.findall(r"^::: [\w.]*?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert {*pronk.__all__} - {"__version__"} <= {*told}


def test_ten_lines_of_adamw_learn_as_transformers_does(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    names = run("training.md", "A loop of your own")
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    theirs = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-5)
    ids, expected = names["ids"], []
    for _ in range(10):
        loss = theirs(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 1e-3
    assert names["module"].state_dict().keys() == theirs.state_dict().keys()


def test_looking_inside(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names = run("inside.md")
    logits, states, attentions, *fed = capsys.readouterr().out.splitlines()
    assert logits == "torch.Size([1, 24, 259])"
    assert states == "3 torch.Size([1, 24, 64])"
    assert attentions == "2 torch.Size([1, 8, 24, 24])"
    shapes = [line.split(")")[0] for line in fed[:5]]
    assert shapes == ["0 qkv (24, 64", "0 o (24, 64", "0 gate_up (24, 64", "0 down (24, 96", "-1 head (24, 64"]
    assert fed[5].split()[1:3] == ["of", str(24 * 2 * (3 * 64 + 96))]
    assert len(fed) == 6 + 3
    assert names["logits"].shape == (24, 259)


def test_looking_inside_a_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("look-inside.md")
    tokens = len("The llama lives in the Andes. The capital of France is Paris. Llamas eat telephones.")
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[:tokens]] == list(range(tokens))
    assert names["weights"].shape == (8, tokens)
    assert [line.split()[0] for line in lines[-3:]] == ["-1", "0", "1"]
    assert "head 5" in names["picture"]


def test_texts_in_a_form(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("structured-output.md")
    assert names["answer"].text.replace(" ", "").startswith('{"name":"')
    number, verdict, thing, sums = capsys.readouterr().out.splitlines()[-4:]
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", number)
    assert verdict in ("yes", "no", "cannot tell")
    assert thing.startswith("{")
    assert re.fullmatch("[0-9+*]+", sums)


def test_the_first_steps(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("tutorials/first-steps.md")
    assert [len(answer.tokens) for answer in names["answers"]] == [8, 8]
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_measuring(tiny: Path) -> None:
    names = run("measuring.md")
    assert names["found"]["mean"] > 0
    assert len(names["windows"]) == len(names["by_token"]) == 4
    assert names["largest"].kld.max() == max(window.kld.max() for window in names["windows"])


def test_quality(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pronk import _native

    if "avx2" not in _native.isas():
        pytest.skip("the page compares with AVX2")
    run("quality.md")
    floor, other = map(float, capsys.readouterr().out.split())
    assert 0 <= other < 100 * max(floor, 1e-9)


def test_calibrating(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    run("how-it-works/calibration.md")
    assert pronk.checkpoint.open("small.gguf").quantization == "Q4_0 x 14, Q4_1 x 2"
