"""A run's README.md: what it says is what the run was, no path of anybody's is in it, and what others wrote stays."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_folder import save_tiny_chat_model
from training_runs import write_sums

import pronk
from pronk.train import card
from pronk.train.folder import read_metrics

QUICK: dict[str, Any] = {
    "lr": 0.02, "max_steps": 4, "accumulate": 2, "batch_size": 2, "eval_every": 2, "samples": 0,
    "device": "cpu", "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name nobody is to read, with a model, data, and runs."""
    folder = tmp_path_factory.mktemp("secret-place")
    save_tiny_chat_model(folder / "tiny", max_position_embeddings=256)
    write_sums(folder / "su|ms.jsonl", lambda a, b: {"completion": f" {a + b}."})
    write_sums(folder / "pairs.jsonl", lambda a, b: {"chosen": f" {a + b}.", "rejected": " 99."})
    (folder / "text.txt").write_text("Once upon a time there was a sum. " * 200)
    return folder


@pytest.fixture(scope="module")
def tuned(private: Path) -> Path:
    pronk.finetune(private / "tiny", private / "su|ms.jsonl", private / "mine", lora_rank=4, **QUICK).run()
    return private / "mine"


def front(folder: Path) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)---\n", (folder / card.CARD).read_text(), re.DOTALL)
    assert found
    return yaml.safe_load(found[1])


def test_what_it_says(private: Path, tuned: Path) -> None:
    page = (tuned / card.CARD).read_text()
    assert front(tuned) == {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["pronk", "sft", "lora", "llama"],
    }  # fmt: skip
    assert "secret-place" not in page
    assert str(private.parent) not in page
    assert "# mine\n" in page
    assert "LoRA, " in page
    assert "`su/ms.jsonl`" in page  # a bar would be another column
    assert "| examples | 18 |" in page
    assert "| held out | 2 |" in page
    assert "| `lr` | `0.02` |" in page
    assert "| `lora.rank` | `4` |" in page
    assert "pronk generate -m tiny --adapter mine" in page
    looks = [line for line in read_metrics(tuned) if "held_out_loss" in line]
    assert [look["step"] for look in looks] == [0, 2, 4]
    means = ["", *(
        f"{sum(line['loss'] for line in read_metrics(tuned) if 'loss' in line and 0 < line['step'] - n <= 2) / 2:.4f}"
        for n in (0, 2)
    )]  # fmt: skip
    for look, mean in zip(looks, means, strict=True):
        assert f"| {look['step']} | {mean} | {look['held_out_loss']:.4f} |" in page
    assert re.search(r"\| peak memory \| \d+\.\d\d GB \|", page)
    assert re.findall(r"\| (.*) \|\n\|---", page) == [  # whose first row was drawn as a head
        "data | ", "step | training loss | held-out loss", "cost | ", "setting | value",
    ]  # fmt: skip
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("verb", ["dpo", "reward", "pretrain", "full"])
def test_every_verb_writes_one(private: Path, verb: str) -> None:
    folder = private / verb
    if verb == "pretrain":
        sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "vocab_size": 300, "context": 32}
        taken = {name: value for name, value in sizes.items() if name in _options(pronk.pretrain)}
        pronk.pretrain(private / "text.txt", folder, **taken, **_of(pronk.pretrain)).run()
    elif verb == "full":
        pronk.finetune(private / "tiny", private / "su|ms.jsonl", folder, full=True, **QUICK).run()
    else:
        getattr(pronk, verb)(private / "tiny", private / "pairs.jsonl", folder, **_of(getattr(pronk, verb))).run()
    page, told = (folder / card.CARD).read_text(), front(folder)
    lora = verb in ("dpo", "reward")
    assert told["library_name"] == ("peft" if lora else "transformers")
    assert told["pipeline_tag"] == ("text-classification" if verb == "reward" else "text-generation")
    assert "secret-place" not in page
    assert f"{verb}/model" in page or lora
    assert card.ours(page.encode())


def _options(function: Any) -> set[str]:
    import inspect

    return {*inspect.signature(function).parameters}


def _of(function: Any) -> dict[str, Any]:
    return {name: value for name, value in QUICK.items() if name in _options(function)}


def test_what_others_wrote_stays(anew: Any, tuned: Path, tmp_path: Path) -> None:
    """A page of one's own, and one that was pronk's and was changed; YAML that was added is no change of the page."""
    found, settings, data = anew
    folder = tmp_path / "mine"
    shutil.copytree(tuned, folder)
    page = folder / card.CARD
    good = page.read_text()
    assert card.write(folder, found, settings, data) is None
    page.write_text(good.replace("---\n", "---\nlicense: mit\n", 1))
    assert card.write(folder, found, settings, data) is None
    for changed in ("# Mine\n", good.replace("## Use", "## How to use it"), good + "More.\n", ""):
        page.write_text(changed)
        assert str(page) in (card.write(folder, found, settings, data) or "")
        assert page.read_text() == changed


@pytest.fixture(scope="module")
def anew(private: Path) -> tuple[dict[str, Any], Any, Any]:
    """What a card is written of."""
    run = pronk.finetune(private / "tiny", private / "su|ms.jsonl", private / "other", lora_rank=4, **QUICK)
    return run.run().to_dict(), run.settings, run.data


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2:135m", "smollm2:135m"),
        ("owner/name", "owner/name"),
        ("/home/me/models/one", "one"),
        ("/home/me/models/one/", "one"),
        ("~/one", "one"),
        ("../mine/data.jsonl=0.5", "data.jsonl=0.5"),
        (r"C:\Users\me\one.gguf", "one.gguf"),
        ("/home/me/rewards.py:score", "rewards.py:score"),
    ],
)
def test_paths_are_cut_to_their_names(name: str, said: str) -> None:
    assert card.public(name) == said


def test_a_folder_that_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert card.public("owner/name") == "name"


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("owner/name", "owner/name"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    ],
)
def test_a_repository_is_the_base_model(anew: Any, tuned: Path, tmp_path: Path, name: str, repository: str) -> None:
    from dataclasses import replace

    found, settings, data = anew
    shutil.copyfile(tuned / "metrics.jsonl", tmp_path / "metrics.jsonl")
    assert card.write(tmp_path, found, replace(settings, model=name), data) is None
    assert front(tmp_path)["base_model"] == repository
    assert f"with {repository} as the base" in (tmp_path / card.CARD).read_text()
    assert front(tmp_path)["base_model_relation"] == "adapter"
    assert json.loads(json.dumps(front(tmp_path))) == front(tmp_path)


def test_what_transformers_cannot_read_is_no_base_model(anew: Any, tuned: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    found, settings, data = anew
    shutil.copyfile(tuned / "metrics.jsonl", tmp_path / "metrics.jsonl")
    assert card.write(tmp_path, found, replace(settings, model="stories15M"), data) is None
    assert "base_model" not in front(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_run_of_rewards_tells_these(private: Path, tmp_path: Path, share: float) -> None:
    """It told losses, which are nearly 0 whatever is learned."""
    options = {**QUICK, "eval_share": share, "num_generations": 2, "max_new_tokens": 4, "lora_rank": 4}
    run = pronk.grpo(private / "tiny", private / "su|ms.jsonl", tmp_path / "run", reward="length:4", **options)
    found, page = run.run(), (tmp_path / "run" / card.CARD).read_text()
    rewards = [line for line in read_metrics(tmp_path / "run") if "held_out_reward" in line]
    assert "## Rewards\n" in page
    assert "loss |" not in page
    assert ("| step | training reward | held-out reward |" in page) is bool(share)
    for line in rewards:
        assert f" | {line['held_out_reward']:.4f} |\n" in page
    if not share:
        assert found.reward
        assert f"{found.reward['first']:.4f} and {found.reward['last']:.4f}: means of the first" in page


@pytest.mark.parametrize("full", [False, True])
def test_a_run_whose_time_is_over_has_one(private: Path, tmp_path: Path, full: bool) -> None:
    """Only a run that came to its end had one; and what it says to use is there."""
    run = pronk.finetune(private / "tiny", private / "su|ms.jsonl", tmp_path / "run", full=full, max_time=1e-3, **QUICK)
    run.run()
    page = (tmp_path / "run" / card.CARD).read_text()
    assert "| steps | 1 of 4: stopped, and --resume goes on, " in page
    if full:
        assert "stopped before there was a model to be used" in page
    else:
        assert "--adapter run/checkpoints/step-000001" in page
        assert (tmp_path / "run" / "checkpoints" / "step-000001" / "adapter_model.safetensors").exists()
    again = pronk.finetune(private / "tiny", private / "su|ms.jsonl", tmp_path / "run", full=full, resume=True, **QUICK)
    again.run()
    page = (tmp_path / "run" / card.CARD).read_text()
    assert "| steps | 4, " in page
    assert "checkpoints" not in page
