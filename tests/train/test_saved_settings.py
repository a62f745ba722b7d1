"""Settings as runs save them: what 0.1 wrote resumes, what came since is what it was, and what differs is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model
from training_runs import run_of, write_sums

from pronk.checkpoint import adapter
from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadFile, BadRequest
from pronk.train import saved_settings
from pronk.train.folder import read_metrics
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.pretraining import Pretraining
from pronk.train.objectives.sft import SFT
from pronk.train.pretrain import Shape
from pronk.train.saved_settings import check, defaults, flat
from pronk.train.settings import Settings

NEW = "a new LLaMA (hidden 128, 4 layers, 4 heads, 4 for keys and values,"
GOLDENS = Path(__file__).parents[1] / "goldens" / "training"  # written by 0.1; its README says how
OF_0_1 = json.loads((GOLDENS / "settings.json").read_text())
HERE = Path("step-000001")

# What each run of settings.json was asked for.
ASKED = {
    "dpo": Settings("tiny", "pairs.jsonl", objective=DPO(beta=0.2, loss_type="ipo"), max_steps=3),
    "full": Settings("tiny", "data.jsonl", lora=None, objective=SFT(train_on_prompt=True), max_steps=3),
    "pretrain": Settings(
        f"{Shape(hidden=32, layers=1, heads=2, ctx_size=48)} of 360 tokens", "text.txt", lora=None,
        objective=Pretraining(), max_steps=3, pack=4 * 49, eval_every=1,
    ),
}  # fmt: skip
SAVED = {"model": "m", "lr": 1e-3, "lora": True, "lora.rank": 4, "objective": "sft"}


def compare(settings: Settings, version: int, before: dict[str, Any]) -> None:
    digests = {key: value for key, value in before.items() if key.startswith(saved_settings.DIGEST)}
    check({"version": version, "settings": before}, HERE, flat(settings) | digests, defaults(settings))


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A run that 0.1 stopped after half of its six steps, beside its model and data."""
    monkeypatch.chdir(tmp_path)
    save_tiny_chat_model(Path("tiny"))
    write_sums(Path("data.jsonl"), lambda a, b: {"completion": f" {a + b}."})
    shutil.copytree(GOLDENS / "lora", "run")
    lora = LoraConfig(rank=1, alpha=8, target_modules=("q_proj",))
    asked = Settings(
        "tiny", "data.jsonl", lora=lora, max_steps=6, batch_size=2, accumulate=2, lr=1e-2, save_every=3, eval_every=3
    )
    return lambda **changes: run_of(replace(asked, **changes), Path("run"))


def test_a_run_of_0_1_goes_on(old: Callable[..., Any]) -> None:
    """And comes to what 0.1 came to without a stop; its later checkpoints are of today's form."""
    run = old()
    run.resume()
    assert run.loop.position.step == 3
    assert run.train()
    losses = [line["loss"] for line in read_metrics(Path("run")) if "loss" in line]
    # Sums of some hundred float32 terms in another order, through six steps of AdamW.
    assert losses == pytest.approx(json.loads((GOLDENS / "losses.json").read_text()), rel=1e-4)
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert ['"lr"' in line for line in lines if '"loss"' in line] == [True] * 6  # it was "rate"
    again = old()
    again.resume()
    assert again.finished
    saved = json.loads(Path("run/checkpoints/step-000006/position.json").read_text())
    assert (saved["version"], saved["settings"]["lr"]) == (saved_settings.VERSION, 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 2e-2}, "made with lr=0.01, and now it is 0.02; resume with the same"),
        ({"lora": LoraConfig(rank=2, alpha=8, target_modules=("q_proj",))}, "made with lora_rank=1, and now it is 2;"),
        ({"lora": None}, "made without full=True; resume"),
        ({"objective": SFT(train_on_prompt=True)}, "made without train_on_prompt=True; resume"),
    ],
)
def test_a_run_of_0_1_with_another_setting_is_refused(
    old: Callable[..., Any], change: dict[str, Any], message: str
) -> None:
    """The inverse: by the one key, and not by all settings of both."""
    with pytest.raises(BadRequest) as error:
        old(**change).resume()
    assert message in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("kind", ASKED)
def test_other_kinds_of_runs_of_0_1_go_on(kind: str) -> None:
    compare(ASKED[kind], 0, OF_0_1[kind])
    for key, value in OF_0_1[kind].items():
        if key in ("rate", "seed", "accumulate"):
            with pytest.raises(BadRequest, match="was made with"):
                compare(ASKED[kind], 0, OF_0_1[kind] | {key: value * 2 + 1})


@pytest.mark.parametrize("version", [0, 1])
def test_what_instructions_went_through_in_a_run_of_0_1(version: int) -> None:
    """It was a switch, off unless asked for: Alpaca's templates, and nothing where there were no instructions."""
    old = dict(OF_0_1["full"])
    if version == 1:
        old = saved_settings._of_0_1(old)
    key = "chat_instructions" if version == 0 else "objective.chat_instructions"
    fits = {False: ("auto", "alpaca"), True: ("chat",)}
    for was, now in product(fits, ("auto", "alpaca", "chat")):
        asked = replace(ASKED["full"], objective=SFT(train_on_prompt=True, instructions=now))
        if now in fits[was]:
            compare(asked, version, old | {key: was})
        else:
            with pytest.raises(BadRequest, match=rf"made with instructions='.*', and now it is '{now}'"):
                compare(asked, version, old | {key: was})
    digest = saved_settings.DIGEST + "examples"
    before = {"version": version, "settings": old | {digest: "a"}}
    with pytest.raises(BadRequest, match=r"made with other examples; .*: --instructions alpaca"):
        check(before, HERE, flat(ASKED["full"]) | {digest: "b"}, defaults(ASKED["full"]))


def test_a_setting_that_came_later_is_what_it_was_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field more in LoraConfig made every earlier run impossible to resume."""

    @dataclass(frozen=True)
    class Wider(LoraConfig):
        use_dora: bool = False

    wider = replace(ASKED["dpo"], lora=Wider())
    compare(wider, 0, OF_0_1["dpo"])
    with pytest.raises(BadRequest, match=r"was made without lora\.use_dora=True; resume"):
        compare(replace(wider, lora=Wider(use_dora=True)), 0, OF_0_1["dpo"])
    monkeypatch.setattr(saved_settings, "ADDED", {"lora.use_dora": True})  # its default when it came, and no longer
    compare(replace(wider, lora=Wider(use_dora=True)), 0, OF_0_1["dpo"])


def test_every_setting_since_0_1_is_on_record() -> None:
    """Or a changed default would be taken for what older runs did: put {key: its default} into saved_settings.ADDED."""
    known = set(saved_settings.ADDED)
    for kind in ASKED:
        known |= set(saved_settings._of_1(saved_settings._of_0_1(OF_0_1[kind]), {}))
    assert not {key for asked in ASKED.values() for key in flat(asked)} - known


def test_what_a_newer_pronk_saved_is_refused_by_its_version_and_keys() -> None:
    newer = flat(ASKED["full"]) | {"objective.margin": 0.5}
    with pytest.raises(BadRequest, match=r"of version 4 \(objective\.margin among them\), and this pronk knows"):
        compare(ASKED["full"], saved_settings.VERSION + 1, newer)
    with pytest.raises(BadRequest, match=r"was made with objective\.margin, which this pronk does not know"):
        compare(ASKED["full"], saved_settings.VERSION, newer)


@pytest.mark.parametrize("damage", [{"version": "1"}, {"version": -1}, {"version": True}, {"settings": []}])
def test_damage(damage: dict[str, Any]) -> None:
    whole = {"version": 1, "settings": SAVED}
    check(whole, HERE, SAVED, {})
    with pytest.raises(BadFile, match=r"step-000001: (version|settings)"):
        check(whole | damage, HERE, SAVED, {})


@pytest.mark.parametrize("value", [None, [], 5, "x", {"rank": [math.pi]}])
def test_settings_of_0_1_that_are_damaged_are_other_settings(value: Any) -> None:
    for key in ("lora", "preference", "model", "rate"):
        if OF_0_1["dpo"][key] != value:
            with pytest.raises(BadRequest, match="was made with"):
                compare(ASKED["dpo"], 0, OF_0_1["dpo"] | {key: value})


def test_what_is_saved_is_json_and_flat() -> None:
    for asked in ASKED.values():
        assert not any(isinstance(value, dict) for value in flat(asked).values())
        compare(asked, saved_settings.VERSION, json.loads(json.dumps(flat(asked))))
    assert flat(ASKED["dpo"])["lora.target_modules"] == list(adapter.TARGETS)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"lora": LoraConfig(rank=16)}, {"lora": LoraConfig(rank=8)}, "with lora_rank=16, and now it is 8"),
        ({"lora": LoraConfig()}, {"lora": LoraConfig(rslora=True)}, "without rslora=True"),
        ({"lora": LoraConfig(dora=True)}, {"lora": LoraConfig()}, "with dora=True, and now is without"),
        ({"lora": None}, {"lora": LoraConfig()}, "with full=True, and now is without"),
        ({"lora": LoraConfig()}, {"lora": None}, "without full=True"),
        ({"skip_bad": True}, {}, "with skip_bad_records=True, and now is without"),
        ({"pack": 64}, {}, "with pack=64, and now is without"),
        # It was cut off before the number that differs.
        (
            {"model": f"/home/{'a' * 80}/checkpoint-1000/model"},
            {"model": f"/home/{'a' * 80}/checkpoint-2000/model"},
            "with model='...aaaaaaaa/checkpoint-1000/model', and now it is '...aaaaaaaa/checkpoint-2000/model'",
        ),
        (
            {"model": f"{NEW} context 64)"},
            {"model": f"{NEW} context 256)"},
            "with model='...context 64)', and now it is '...context 256)'",
        ),
        ({"lr": 1e-5, "objective": DPO()}, {}, "with pronk dpo, and this is pronk finetune"),
    ],
)
def test_a_setting_is_told_as_its_option_is_called(before: Any, now: Any, told: str) -> None:
    """It was lora.rank=16, which is no option's name."""
    made = Settings(**{"model": "m", "data": "d", **before})
    with pytest.raises(BadRequest) as caught:
        compare(Settings(**{"model": "m", "data": "d", **now}), saved_settings.VERSION, flat(made))
    assert f" was made {told}; resume with the same, or begin in another folder" in str(caught.value)
