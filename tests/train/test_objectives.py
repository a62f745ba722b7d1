"""Objectives: one is a file of its own (and its verb), and nothing else in the house asks which one it has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny_chat_model
from torch import Tensor
from training_runs import run_of, timeless, write_sums

from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.records import Record
from pronk.train.distributed import Group
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.objective import NextToken
from pronk.train.objectives.sft import SFT
from pronk.train.settings import Settings

SRC = Path(__file__).parents[2] / "src" / "pronk"


@dataclass(frozen=True)
class Liked(NextToken):
    """Of each preference the answer that was chosen is learned, at a share of the loss."""

    name = "liked"
    kinds = ("preference",)

    share: float = 1.0

    def encode(self, record: Record, encoder: Encoder) -> list[Example]:
        return encoder.fitted(encoder.answer(record.values["prompt"], record.values["chosen"]))

    def prepare(
        self, model: Llama, examples: Sequence[Example], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        if watch:
            watch(len(examples), len(examples))

    def loss(self, model: Llama, batch: MicroBatch) -> tuple[Tensor, Mapping[str, float]]:
        loss, _ = super().loss(model, batch)
        return self.share * loss, {"share": self.share * batch.weight}


@pytest.fixture
def asked(tmp_path: Path) -> Settings:
    save_tiny_chat_model(tmp_path / "tiny")
    write_sums(tmp_path / "pairs.jsonl", lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"})
    write_sums(tmp_path / "plain.jsonl", lambda a, b: {"completion": f" {a + b}."})
    return Settings(
        str(tmp_path / "tiny"), str(tmp_path / "pairs.jsonl"), lora=LoraConfig(rank=2), objective=Liked(),
        max_steps=4, batch_size=2, accumulate=2, lr=1e-2, eval_every=2, save_every=2,
    )  # fmt: skip


def test_an_objective_of_one_s_own_is_one_class(asked: Settings, tmp_path: Path) -> None:
    """Its records are read, its run is planned, prepared, resumed and told of, and its settings are saved."""
    told: list[tuple[int, int]] = []
    run = run_of(asked, tmp_path / "run", preparing=lambda done, of: told.append((done, of)))
    assert told == [(20, 20)]
    assert not run.train(stop=lambda: run.loop.position.step == 2)
    again = run_of(asked, tmp_path / "run")
    again.resume()
    assert again.train()
    assert {line["share"] for line in timeless(tmp_path / "run") if "loss" in line} == {1.0}
    with pytest.raises(BadRequest, match=r"made with share=1\.0, and now it is 0\.5; resume with the same"):
        run_of(replace(asked, objective=Liked(0.5)), tmp_path / "run").resume()
    with pytest.raises(BadRequest, match=r"made with objective='liked', and now it is 'dpo'; resume with the same"):
        run_of(replace(asked, objective=DPO()), tmp_path / "run").resume()
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-000004" / "position.json").read_text())["settings"]
    assert (saved["objective"], saved["objective.share"]) == ("liked", 1.0)


def test_its_numbers_are_those_of_the_same_answers_in_records_of_another_kind(asked: Settings, tmp_path: Path) -> None:
    run_of(asked, tmp_path / "liked").train()
    run_of(replace(asked, objective=SFT(), data=str(tmp_path / "plain.jsonl")), tmp_path / "plain").train()
    losses = [[line["loss"] for line in timeless(tmp_path / name) if "loss" in line] for name in ("liked", "plain")]
    assert losses[0] == losses[1]
    assert torch.isfinite(torch.tensor(losses[0])).all()


def test_nobody_asks_which_objective_it_has() -> None:
    """memory.py and run.py asked for Preferences, data for settings.preference. Functions have theirs."""
    every = "".join(path.read_text(encoding="utf-8") for path in (SRC / "train" / "objectives").glob("*.py"))
    classes = re.findall(r"^class (\w+)\((?:NextToken|Objective)\)", every, re.MULTILINE)
    assert {"SFT", "DPO", "Reward", "GRPO", "Pretraining"} <= set(classes)
    pattern = re.compile(rf"\b({'|'.join(classes)})\b(?!:)|objective\.name")
    places = {
        str(path.relative_to(SRC)) for room in ("train", "measure", "cli") for path in (SRC / room).rglob("*.py")
        if "objectives" not in path.parts and pattern.search(_code(path))
    }  # fmt: skip
    assert places == {
        "train/settings.py", "train/loop.py", "train/passes.py", "train/runs/__init__.py",
        "train/runs/reinforcing.py",  # of what writes for it alone
        "train/data/encoded.py",  # a part of the key of what is kept encoded
    }  # fmt: skip


def _code(path: Path) -> str:
    """Without help texts, docstrings and comments, which may well speak of them."""
    return re.sub(r'"""(.|\n)*?"""|"[^"\n]*"|#.*', "", path.read_text(encoding="utf-8"))
