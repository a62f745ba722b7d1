"""run.yaml: what a run was asked for, from Python or the command line, gives the same run when `--config` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from training_runs import QUICK, write_sums

import pronk
from pronk.cli import training, training_options
from pronk.train.runs import recipe

pytest.importorskip("torch")

Run = Callable[..., Result]


def fair(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return 1.0


@pytest.fixture
def again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The run that its verb would make of what another was asked for."""

    def again(first: Any, *more: str) -> Any:
        made: list[Any] = []

        def perform(make: Callable[..., Any], given: dict[str, Any]) -> None:
            made.append(make(**{name: value for name, value in given.items() if name not in training_options.VIEWS}))

        monkeypatch.setattr(training, "perform", perform)
        verb, said = first.recipe
        told: list[str] = []
        recipe.write(tmp_path, verb, said, told.append)
        result = run(verb, "--config", str(tmp_path / recipe.FILE), *more)
        assert (result.exit_code, told) == (0, []), result.stderr
        return made[0]

    return again


RUNS: list[Callable[[], Any]] = [
    lambda: pronk.finetune("m", "a.jsonl", "out"),
    lambda: pronk.finetune(
        Path("a model"), ["a.jsonl=0.5", "b: c.jsonl", "#"], Path("out"), lr=1e-5, max_time="1h30m", full=True,
        fields={"answer": "output", "id": ""}, gradient_checkpointing=True, clip=0.0, train_on_prompt=True,
    ),
    lambda: pronk.finetune("null", "010", "true", target_modules=["q_proj", "v_proj"], lora_rank=3, lora_alpha=1e-7),
    lambda: pronk.finetune("m", "a", "out", max_time=90, samples_at="looks", too_long="split", samples=0, seed=2**60),
    lambda: pronk.dpo("m", "a", "out", beta=0.25, loss_type="ipo", eval_data="x", patience=3),
    lambda: pronk.reward("m", "a", "out", center_rewards=0.01),
    lambda: pronk.grpo("m", "a", "out", reward=[fair, "exact", "regex:^\\d+: [x]#'\""], reward_weights=[1, 0.5, 2e-5]),
    lambda: pronk.grpo("m", "a", "out", reward=fair, scale_rewards="none", epsilon_high=0.28, dynamic_sampling=True),
    lambda: pronk.pretrain("text.txt", "out", ctx_size=64, vocab_size=300, hidden=32, heads=2, separator="%%% x"),
    lambda: pronk.pretrain("text.txt", "out", tokenizer="llama2", epochs=2, samples_at="looks"),
]  # fmt: skip


@pytest.mark.parametrize("make", RUNS)
def test_the_same_run(make: Callable[[], Any], again: Callable[..., Any]) -> None:
    first = make()
    second = again(first)
    assert (type(second), second.settings, second.how) == (type(first), first.settings, first.how)
    assert second.recipe[1].keys() == first.recipe[1].keys()
    assert "resume" not in first.recipe[1]
    assert again(first, "--out", "other", "--seed", "7").settings.seed == 7


def test_what_is_as_by_default_is_left_out() -> None:
    assert pronk.finetune("m", "a", "out", epochs=3.0, lr=None, resume=True).recipe == (
        "finetune", {"model": "m", "data": "a", "out": "out"},
    )  # fmt: skip


def test_a_run_again_from_its_folder(run: Run, model: str, tmp_path: Path) -> None:
    """The very losses; and the file beside them, but for where it is."""
    data = write_sums(tmp_path / "data.jsonl", lambda a, b: {"completion": f" {a + b}."})
    first = run("finetune", model, "--data", str(data), "--out", str(tmp_path / "one"), *QUICK, "--json")
    assert first.exit_code == 0, first.stderr
    file = tmp_path / "one" / "run.yaml"
    second = run("finetune", "--config", str(file), "--out", str(tmp_path / "two"), "--json")
    assert second.exit_code == 0, second.stderr
    reports = [json.loads(result.stdout) for result in (first, second)]
    for key in ("loss", "held_out_loss", "samples", "steps", "planned_steps", "trained_share"):
        assert reports[0][key] == reports[1][key]
    texts = [(tmp_path / name / "run.yaml").read_text() for name in ("one", "two")]
    assert texts[0].replace(str(tmp_path / "one"), str(tmp_path / "two")) == texts[1]
    assert "lora-rank: 4\n" in texts[0]
    assert "resume" not in texts[0]
    longer = run("finetune", "--config", str(file), "--resume", "--max-steps", "8", "--json")
    assert json.loads(longer.stdout)["steps"] == 8
    assert "max-steps: 8\n" in file.read_text()
    refused = run("finetune", "--config", str(file))
    assert (refused.exit_code, "holds a run already; go on with it (--resume)" in refused.stderr) == (1, True)


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / recipe.FILE / "in the way").mkdir(parents=True)
    told: list[str] = []
    recipe.write(tmp_path, "finetune", {"model": "m"}, told.append)
    (said,) = told
    assert said.startswith(f"{tmp_path / recipe.FILE} cannot be written: ")


@pytest.mark.parametrize("verb", ["pretrain", "finetune", "dpo", "kto", "reward", "grpo"])
def test_a_key_of_run_yaml_is_an_option_that_can_be_typed(verb: str) -> None:
    """`ctx-size` of pretrain was none, and another one was suggested. Switches are true or false there."""
    for option in import_module(f"pronk.cli.{verb}").command.params:
        if isinstance(option, click.Option) and not option.is_flag:
            assert f"--{option.name.replace('_', '-')}" in option.opts, option.opts
