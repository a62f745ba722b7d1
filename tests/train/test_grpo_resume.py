"""Runs of GRPO that are interrupted or killed, and go on: to the same bytes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_folder import save_tiny_chat_model
from training_runs import signalled, timeless

import pronk
from pronk.errors import BadRequest, PronkError
from pronk.train import curves
from pronk.train.objectives.rollouts import FILE
from pronk.train.rollouts.page import PAGE

STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
QUICK: dict[str, Any] = {
    "accumulate": 2, "batch_size": 2, "num_generations": 4, "max_new_tokens": 6, "lr": 1e-2, "samples": 0,
    "device": "cpu", "threads": 1, "save_every": 1,
    "reward_timeout": 600.0,  # by the clock, which a busy machine does not heed
}  # fmt: skip
LORA: dict[str, Any] = {"lora_rank": 4, "kl_coef": 0.1}
HARD: dict[str, Any] = {"num_iterations": 2, "dynamic_sampling": True, "max_steps": 5}
REWARD = """
def vowels(prompt, completion, record):
    return sum(letter in "aeiou" for letter in completion)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a} and {b}"}) + "\n" for a in range(4) for b in range(5)))
    return path


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARD)
    return f"{path}:vowels"


def contents(folder: Path) -> dict[str, bytes]:
    """What comes out, and what was written on the way; but for the page of curves, which has the clock's."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".safetensors", ".jsonl", ".html")
        and "checkpoints" not in path.parts
        and path.name != curves.PAGE
    }
    page = found[PAGE].replace(f"{folder.name}: rollouts".encode(), b"")
    return found | {"metrics.jsonl": json.dumps(timeless(folder)).encode(), PAGE: page}


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_interrupted_it_goes_on_to_the_same_bytes(
    folder: Path, data: Path, reward: str, tmp_path: Path, number: int
) -> None:
    options = {**QUICK, **LORA, **HARD, "reward": reward, "eval_every": 2}
    pronk.grpo(folder, data, tmp_path / "whole", **options).run()
    with signalled(number, at=3), pytest.raises(KeyboardInterrupt):
        pronk.grpo(folder, data, tmp_path / "parts", **options).run()
    with (tmp_path / "parts" / FILE).open("a") as file:
        file.write('{"step": 4, "prompt": "half a')  # of a step that a power cut took
    pronk.grpo(folder, data, tmp_path / "parts", resume=True, **options).run()
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    with pytest.raises(BadRequest, match=r"made with kl_coef=0\.1, and now it is 0\.2"):
        pronk.grpo(folder, data, tmp_path / "parts", resume=True, **{**options, "kl_coef": 0.2}).run()


def test_a_reward_that_has_changed_is_told_of(
    folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not refused: a function that failed is mended, and the run goes on."""
    pairs = "".join(json.dumps({"prompt": "a", "chosen": f"b{n}", "rejected": f"c{n}"}) + "\n" for n in range(4))
    (tmp_path / "pairs.jsonl").write_text(pairs)

    def scorer(seed: int) -> None:
        shutil.rmtree(tmp_path / "rm", ignore_errors=True)
        usual: dict[str, Any] = {"lora_rank": 2, "max_steps": 1, "samples": 0, "device": "cpu", "threads": 1}
        pronk.reward(folder, tmp_path / "pairs.jsonl", tmp_path / "rm", seed=seed, **usual).run()

    mine, schema, out = tmp_path / "mine.py", tmp_path / "form.json", tmp_path / "run"
    rewards = [f"{mine}:vowels", f"schema:{schema}", str(tmp_path / "rm"), "length:3"]

    def go_on(steps: int) -> str:
        caplog.clear()
        options = {**QUICK, "lora_rank": 4, "reward": rewards, "schedule": "constant", "max_steps": steps}
        with caplog.at_level("INFO", "pronk.train"):
            pronk.grpo(folder, data, out, resume=steps > 1, **options).run()
        return " ".join(note for note in caplog.messages if "has changed" in note)

    mine.write_text(REWARD)
    schema.write_text('{"type": "object"}')
    scorer(0)
    assert [go_on(1), go_on(2)] == ["", ""]
    mine.write_text(REWARD.replace("aeiou", "aei"))
    assert go_on(3) == "the reward vowels has changed since step 2 was saved; the run goes on by what it gives now"
    schema.write_text('{"type": "array"}')
    scorer(1)
    assert re.findall("the reward (.*?) has changed since step 3", go_on(4)) == ["schema", "rm"]
    assert go_on(5) == ""
    for line in out.glob("checkpoints/*/position.json"):  # of a pronk that kept no such digests
        line.write_text(json.dumps({k: v for k, v in json.loads(line.read_text()).items() if k != "loose"}))
    mine.write_text(REWARD)
    assert go_on(6) == ""


def test_the_best_is_sought_anew_where_a_reward_has_changed(
    folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A best by the old reward stayed, which nothing by a smaller one surpasses."""
    mine, out = tmp_path / "mine.py", tmp_path / "run"
    options = {**QUICK, "lora_rank": 4, "reward": f"{mine}:vowels", "eval_every": 1, "schedule": "constant"}
    mine.write_text(REWARD.replace("return ", "return 1000 + "))
    pronk.grpo(folder, data, out, max_steps=2, **options).run()
    before = (out / "adapter_model.safetensors").read_bytes()
    mine.write_text(REWARD)
    with caplog.at_level("INFO", "pronk.train"):
        found = pronk.grpo(folder, data, out, resume=True, max_steps=4, **options).run()
    notes = [note for note in caplog.messages if "sought anew" in note]
    assert notes == [
        "what held-out data gave until now does not compare with what it will give: the best is sought anew"
    ]
    looks = {line["step"]: line["held_out_loss"] for line in timeless(out) if "held_out_loss" in line}
    kept = min((3, 4), key=lambda step: looks[step])
    assert found.held_out_loss
    assert (found.held_out_loss["kept_step"], found.held_out_loss["kept"]) == (kept, looks[kept])
    assert (out / "adapter_model.safetensors").read_bytes() != before


def test_damaged_rollouts_are_told_of_and_no_others_dropped(
    folder: Path, data: Path, reward: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All lines behind a damaged one went without a word, and what stood there twice was kept."""
    options: dict[str, Any] = {**QUICK, **LORA, "reward": reward, "eval_share": 0, "schedule": "constant"}
    pronk.grpo(folder, data, tmp_path / "run", max_steps=2, **options).run()
    lines = (tmp_path / "run" / FILE).read_bytes().splitlines(keepends=True)
    broken = [*lines[:3], lines[3].replace(b'"reward": ', b'"reward": 1e400, "x": ', 1), *lines[4:]]
    of_last = [line for line in lines if b'"step": 2' in line]
    for damaged, kept, words in (
        (broken, [*lines[:3], *lines[4:]], "1 line is left out"),
        ([*lines, *lines], lines, f"{len(lines)} lines are left out"),
        (of_last, of_last, "completions of 1 of 2 steps are lost"),
        ([], [], "completions of 2 of 2 steps are lost"),
        ([*lines[:-1], lines[-1].rstrip(b"\n")], lines, None),
    ):
        out = tmp_path / "damaged"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "run", out)
        (out / FILE).write_bytes(b"".join(damaged))
        caplog.clear()
        with caplog.at_level("INFO", "pronk.train"):
            pronk.grpo(folder, data, out, resume=True, max_steps=3, **options).run()
        said = [note for note in caplog.messages if "is damaged" in note]
        assert said == (
            [f"{out / FILE} is damaged: {words}; what is told of the run is of the others"] if words else []
        )
        found = (out / FILE).read_bytes().splitlines(keepends=True)
        assert found[: len(kept)] == kept
        assert {json.loads(line)["step"] for line in found[len(kept) :]} == {3}


def test_rollouts_that_cannot_be_read(folder: Path, data: Path, reward: str, tmp_path: Path) -> None:
    """A folder in their place ended in an IsADirectoryError, in going on as in showing them."""
    options: dict[str, Any] = {**QUICK, **LORA, "reward": reward, "eval_share": 0}
    pronk.grpo(folder, data, tmp_path / "run", **options, max_steps=1).run()
    (tmp_path / "run" / FILE).unlink()
    (tmp_path / "run" / FILE).mkdir()
    again = pronk.grpo(folder, data, tmp_path / "run", **options, max_steps=2, resume=True)
    for begin in (again.run, again.rollouts):
        with pytest.raises(PronkError, match=r"rollouts\.jsonl: cannot be read: Is a directory"):
            begin()


def test_a_reward_may_be_given_more_time(folder: Path, data: Path, reward: str, tmp_path: Path) -> None:
    """A function that took too long stops a run, which was to go on from its checkpoint, and was refused: \"made with
    objective.reward_timeout=600.0, and now it is 900.0\"."""
    options = {**QUICK, "reward": reward, "schedule": "constant", "eval_share": 0}
    pronk.grpo(folder, data, tmp_path / "out", max_steps=1, **options).run()
    more = {**options, "reward_timeout": 900.0}
    (line,) = pronk.grpo(folder, data, tmp_path / "out", resume=True, max_steps=2, **more)
    assert line["step"] == 2


def test_more_epochs_than_micro_batches_of_its_steps(folder: Path, tmp_path: Path) -> None:
    """With one prompt each round of dynamic sampling is an epoch: nine a step. Its checkpoints were said to be of no
    run: \"its position is no number of steps of this run\"."""
    (tmp_path / "prompt.jsonl").write_text('{"prompt": "a"}\n')
    options = {
        **QUICK, "accumulate": 1, "batch_size": 1, "max_new_tokens": 2, "dynamic_sampling": True,
        "reward": "length:1000", "schedule": "constant",
    }  # fmt: skip
    for steps in (1, 2):
        run = pronk.grpo(
            folder, tmp_path / "prompt.jsonl", tmp_path / "out", resume=steps > 1, max_steps=steps, **options
        )
        (line,) = run
        assert (line["step"], line["prompts"]) == (steps, 9)


def killed(given: dict[str, Any], kills: Sequence[tuple[str, int]], out: Path) -> list[str]:
    """A run that goes on after each kill. Gives the checkpoints that it had come to, each time."""
    asked = out.with_suffix(".json")
    asked.write_text(json.dumps({**given, "out": str(out), "kills": kills}))
    program = [sys.executable, str(Path(__file__).with_name("killed.py")), str(asked)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    ends = json.loads(done.stdout)
    assert [end for end, _ in ends] == [-signal.SIGKILL] * len(kills) + [0], done.stderr
    return [step for _, step in ends]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_twenty_times_it_comes_to_the_same_bytes(reward: str, tmp_path: Path) -> None:
    """kill -9 at random: while files are written, those of a checkpoint among them, and between any two calls of a
    step. No clock decides at which."""
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    begun = [
        f"Once there was a {what} called {name}" for what in ("cat", "dog") for name in ("Tom", "Mia", "Ben", "Sue")
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in begun))
    options = {
        **QUICK, **LORA, **HARD, "reward": reward, "tokenizer": str(STORIES / "tok512.bin"), "eval_share": 0.25,
        "eval_every": 2, "max_steps": 80, "lr": 1e-3,
    }  # fmt: skip
    given = {"model": str(STORIES / "stories260K.bin"), "data": str(tmp_path / "prompts.jsonl"), "options": options}
    draw = np.random.default_rng(7)
    kills = [("writes", int(draw.integers(1, 100))) for _ in range(12)]  # a step's are 46
    kills += [("calls", int(10 ** draw.uniform(3, 6.2))) for _ in range(8)]  # the first step's are a million
    draw.shuffle(kills)
    killed(given, [], tmp_path / "whole")
    steps = killed(given, kills, tmp_path / "killed")
    assert len(set(steps)) > 5  # it came further between most of them
    found = contents(tmp_path / "killed")
    assert found == contents(tmp_path / "whole")
    assert {PAGE, FILE, "adapter_model.safetensors"} < found.keys()


@pytest.mark.timeout(900)
def test_killed_while_all_weights_are_trained(folder: Path, data: Path, reward: str, tmp_path: Path) -> None:
    """The optimizer's state is of all weights then, and what writes is packed anew after each start: a completion says
    whether it was from the same weights. Kills are at writes, before the first step and later, and within a step."""
    options = {**QUICK, **HARD, "reward": reward, "full": True, "lr": 1e-3, "eval_every": 2, "max_steps": 4}
    given = {"model": str(folder), "data": str(data), "options": options}
    kills = [("writes", 3), ("writes", 70), ("calls", 20_000), ("writes", 50)]
    pronk.grpo(folder, data, tmp_path / "whole", **options).run()
    steps = killed(given, kills, tmp_path / "killed")
    assert len(set(steps)) > 2
    found = contents(tmp_path / "killed")
    assert found == contents(tmp_path / "whole")
    assert {PAGE, FILE, "model/model.safetensors"} < found.keys()
    assert found["model/model.safetensors"] != (folder / "model.safetensors").read_bytes()
