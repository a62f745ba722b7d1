"""Samples at each look: the model in training answers the same prompts, and the run is the same as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model
from training_runs import timeless, write_sums

import pronk
from pronk.errors import BadRequest
from pronk.train import samples

QUICK: dict[str, Any] = {
    "max_steps": 6, "accumulate": 2, "batch_size": 2, "eval_every": 2, "save_every": 2, "device": "cpu", "lr": 0.02,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "data.jsonl", lambda a, b: {"completion": f" {a + b}."})


@pytest.mark.parametrize(
    "how",
    [
        {"lora_rank": 4, "lora_dropout": 0.2},
        {"full": True, "precision": "bf16"},
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in (
                {"full": True},
                {"lora_rank": 4, "precision": "bf16", "recompute": 1},
                {"lora_rank": 4, "quantize": "q8"},
            )
        ),
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_a_run_is_the_same_with_samples(model: Path, data: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """To the bit: dropout's random numbers are where they were. And what is said changes as the model does."""
    for name in ("ends", "looks"):
        pronk.finetune(model, data, tmp_path / name, samples_at=name, **QUICK, **how).run()  # type: ignore[arg-type]
    assert timeless(tmp_path / "ends") == timeless(tmp_path / "looks")
    ends, looks = (samples.read(tmp_path / name) for name in ("ends", "looks"))
    prompts = [line["prompt"] for line in ends[:2]]
    assert [(line["step"], line["prompt"]) for line in ends[:2]] == [(0, prompt) for prompt in prompts]
    assert [line["step"] for line in looks[:-2]] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [line["prompt"] for line in looks] == prompts * 5
    assert [line.get("kept", False) for line in looks] == [False] * 8 + [True] * 2
    assert len({line["text"] for line in looks if line["prompt"] == prompts[0]}) > 1
    if not how.get("precision") and not how.get("quantize"):  # there the engine that answers at the ends computes alike
        assert [line["text"] for line in looks[:2]] == [line["text"].strip() for line in ends[:2]]
        last = looks[-1]["step"]
        said = {line["prompt"]: line["text"] for line in looks[:-2] if line["step"] == last}
        assert said == {line["prompt"]: line["text"] for line in looks[-2:]}
    page = (tmp_path / "looks" / "curves.html").read_text("utf-8")
    assert page.count("what was kept</small>") == 2
    assert 'http-equiv="refresh"' not in page


def test_stopped_and_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    """The file is that of a run that was never stopped, wherever it died; so is run.yaml."""
    whole = pronk.finetune(model, data, tmp_path / "whole", samples_at="looks", **QUICK)
    whole.run()
    for metrics in pronk.finetune(model, data, tmp_path / "run", samples_at="looks", **QUICK):
        if metrics["step"] == 4 and "held_out_loss" in metrics:
            break
    file = tmp_path / "run" / samples.FILE
    with file.open("a") as half:
        half.write(json.dumps({"step": 5, "prompt": "x", "text": "of a step that will come again"}) + '\n{"step": 6')
    pronk.finetune(model, data, tmp_path / "run", samples_at="looks", resume=True, **QUICK).run()
    assert file.read_text() == (tmp_path / "whole" / samples.FILE).read_text()
    written = [
        (tmp_path / name / "run.yaml").read_text().replace(str(tmp_path / name), "OUT") for name in ("run", "whole")
    ]
    assert written[0] == written[1]


def test_a_run_that_is_prolonged_has_its_beginning_once(model: Path, data: Path, tmp_path: Path) -> None:
    for steps, resume in ((2, False), (4, True)):
        pronk.finetune(model, data, tmp_path / "run", resume=resume, **{**QUICK, "max_steps": steps}).run()
    lines = samples.read(tmp_path / "run")
    assert [(line["step"] == 0, line.get("kept", False)) for line in lines] == [(True, False)] * 2 + [(False, True)] * 2


def test_pretraining_draws_with_the_same_seed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n}th of the lines, and no other one\n" for n in range(120)))
    shape = {"hidden": 32, "layers": 1, "heads": 2, "ctx_size": 64, "vocab_size": 300, "device": "cpu"}
    for name in ("one", "two"):
        run = pronk.pretrain(text, tmp_path / name, max_steps=4, eval_every=2, samples_at="looks", **shape)  # type: ignore[arg-type]
        run.run()
    one, two = (samples.read(tmp_path / name) for name in ("one", "two"))
    assert one == two
    assert [line["step"] for line in one[:-2]] == [0, 0, 2, 2, 4, 4]


def test_a_reward_model_writes_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="samples_at looks is of what a model writes"):
        pronk.reward(model, data, tmp_path / "run", samples_at="looks")


def test_samples_of_bare_texts_begin_as_these_do(model: Path, tmp_path: Path) -> None:
    """All were of the same prompt, an empty one."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} and {n + 1} are two of the numbers"}) + "\n" for n in range(20)))
    found = pronk.finetune(model, data, tmp_path / "run", lora_rank=4, **QUICK).run()
    assert len({one["prompt"] for one in found.samples}) == len(found.samples) == 2
    for one in found.samples:
        assert one["prompt"].strip()
        assert (one["prompt"] + one["data"]).replace(" ", "").endswith("aretwoofthenumbers")
