"""Runs whose files are damaged, or that meet what is no number: told in one line, and nothing lost by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model
from training_runs import run_of, timeless

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import WEIGHTS as ADAPTER
from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.train import state
from pronk.train.data.sources import prepare
from pronk.train.folder import CHECKPOINTS, METRICS, MODEL, claimed
from pronk.train.runs import result
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    pairs = [{"prompt": f"{n} and one is", "completion": f" {n + 1}."} for n in range(10)]
    path.write_text("".join(json.dumps(record) + "\n" for record in pairs))
    return path


def make(model: Path, data: Path, folder: Path, **changes: Any) -> Trainer:
    chosen = Settings(str(model), str(data), **{"max_steps": 4, "eval_every": 2, "save_every": 2} | changes)
    return run_of(chosen, folder)


def test_no_checkpoint_is_written_over_by_its_like(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes in a step which is saved anyway; and a run that is stopped as soon as it is resumed."""
    written = []
    save = state.save

    def noted(*arguments: Any, **more: Any) -> Path:
        written.append(save(*arguments, **more).name)
        return tmp_path

    monkeypatch.setattr(state, "save", noted)
    first = make(model, data, tmp_path / "run")
    assert not first.train(stop=lambda: first.loop.position.step == 2)
    again = make(model, data, tmp_path / "run")
    again.resume()
    assert not again.train(stop=lambda: True)
    assert written == ["step-000000", "step-000002"]


def test_a_damaged_checkpoint_names_the_one_before(model: Path, data: Path, tmp_path: Path) -> None:
    make(model, data, tmp_path / "run").train()
    newest = state.checkpoints(tmp_path / "run" / CHECKPOINTS)[-1]
    (newest / "position.json").unlink()
    again = make(model, data, tmp_path / "run")
    with pytest.raises(BadFile, match="is absent; without step-000004, --resume goes on from step-000002"):
        again.resume()


def test_a_share_that_leaves_nothing_to_train_on(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="has 10 examples, and all would be held out; give a smaller --eval-share"):
        make(model, data, tmp_path / "run", eval_share=0.99)


def test_records_that_cannot_be_encoded_are_bad_ones(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may refuse what a record's form allows; what is too long is another option's."""
    monkeypatch.setattr("pronk.train.data.containers.half_character", lambda *_: None)  # which would refuse it sooner
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "", "completion": "\ud800"}) + "\n")
    with pytest.raises(BadFile, match=r"data.jsonl: line 11: .*lone surrogate"):
        make(model, data, tmp_path / "run")
    found = make(model, data, tmp_path / "run", skip_bad=True).data
    assert len(found.train) + len(found.held_out) == 10
    assert "line 11: character 0" in found.skipped[0]
    with pytest.raises(BadFile, match="line 1 and 8 more, to line 9: takes 16 tokens"):
        make(model, data, tmp_path / "run", skip_bad=True, max_length=4)
    data.write_text(json.dumps({"prompt": "", "completion": "\ud800"}))
    with pytest.raises(BadFile, match="all of its 1 records are bad; the first: line 1: character 0"):
        make(model, data, tmp_path / "run", skip_bad=True)


def test_reading_shows_how_far_it_is(model: Path, data: Path) -> None:
    """100,000 records take a minute."""
    opened, told = checkpoint.open(str(model)), []
    assert opened.tokenizer
    codec, settings = tokenizer.load(opened.tokenizer), Settings(str(model), str(data))
    prepare(settings, codec, 100, lambda *how_far: told.append(how_far))
    assert told == [("", number, 10) for number in range(1, 11)]


@pytest.mark.parametrize("lora", [LoraConfig(), None])
def test_the_best_so_far_is_missed(model: Path, data: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    """A resumed run would end without it, unless it did better still."""
    first = make(model, data, tmp_path / "run", lora=lora)
    first.train(stop=lambda: first.loop.position.step == 2)
    product = tmp_path / "run" / ("adapter_model.safetensors" if lora else "model")
    product.rename(tmp_path / "elsewhere")
    with pytest.raises(BadRequest, match=f"{product.name}, the best so far, is gone"):
        make(model, data, tmp_path / "run", lora=lora).resume()
    (tmp_path / "elsewhere").rename(product)
    make(model, data, tmp_path / "run", lora=lora).resume()


def test_a_best_model_that_was_being_replaced_is_brought_back(model: Path, data: Path, tmp_path: Path) -> None:
    """kill -9 between the two renames leaves it under its old name. That was taken away with what is half written, and
    --resume said that the best so far is gone."""
    folder = tmp_path / "run"
    first = make(model, data, folder, lora=None)
    first.train(stop=lambda: first.loop.position.step == 2)
    best = (folder / MODEL / "model.safetensors").read_bytes()
    (folder / MODEL).rename(folder / ".model.7.0.old")
    (folder / ".model.7.0.part").mkdir()
    (folder / ".model.7.0.lock").touch()
    with claimed(folder, resume=True):
        make(model, data, folder, lora=None).resume()
    assert (folder / MODEL / "model.safetensors").read_bytes() == best
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".model")]


@pytest.mark.parametrize("lora", [LoraConfig(), None])
def test_a_best_that_no_checkpoint_knows_of_is_sought_anew(
    model: Path, data: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    """A run that died between a best and its checkpoint left it under the position of an older one, and the report of
    a run that went on otherwise named the older step."""
    changes: dict[str, Any] = {"lora": lora, "eval_every": 1, "save_every": 2, "max_steps": 6, "lr": 1e-2}
    whole = make(model, data, tmp_path / "whole", **changes)
    whole.train()
    first = make(model, data, tmp_path / "run", **changes)
    with pytest.raises(ZeroDivisionError):
        first.train(stop=lambda: bool(first.loop.position.step == 3 and 1 / 0))
    again = make(model, data, tmp_path / "run", **changes)
    again.resume()
    made = ADAPTER if lora else f"{MODEL}/model.safetensors"
    (told,) = again.told
    assert f"{Path(made).parts[0]} is not what was the best when step 2 was saved" in told
    assert told.endswith("the best is sought anew")
    assert (again.loop.position.best, again.loop.position.kept) == (None, None)
    assert result.of(again, pytest.fail).held_out_loss is None
    assert result._made(again) == ((str(again.newest), None) if lora else (None, None))
    again.train()
    assert (tmp_path / "run" / made).read_bytes() == (tmp_path / "whole" / made).read_bytes()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    assert result.of(again, pytest.fail).held_out_loss == result.of(whole, pytest.fail).held_out_loss


@pytest.mark.parametrize("lora", [LoraConfig(), None])
def test_a_best_that_is_damaged_is_not_taken_for_it(
    model: Path, data: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    """It was only looked for: garbage in its place outlived --resume, and was reported as what did best."""
    folder = tmp_path / "run"
    made = folder / (ADAPTER if lora else f"{MODEL}/model.safetensors")
    first = make(model, data, folder, lora=lora)
    first.train(stop=lambda: first.loop.position.step == 2)
    made.write_bytes(b"garbage")
    again = make(model, data, folder, lora=lora)
    again.resume()
    assert again.told
    assert again.train()
    assert made.stat().st_size > 1000
    assert result.of(again, pytest.fail).held_out_loss == {"kept_step": 4} | {
        name: again.loop.position.best if name != "first" else pytest.approx(5, abs=5)
        for name in ("first", "last", "kept")
    }
    made.write_bytes(b"garbage")
    with pytest.raises(BadRequest, match="is not what was the best when step 4 was saved; bring that back"):
        make(model, data, folder, lora=lora).resume()


def test_a_run_of_a_pronk_that_saved_no_digest_goes_on(model: Path, data: Path, tmp_path: Path) -> None:
    first = make(model, data, tmp_path / "run")
    first.train(stop=lambda: first.loop.position.step == 2)
    for position in (tmp_path / "run").glob(f"{CHECKPOINTS}/*/position.json"):
        raw = json.loads(position.read_text())
        del raw["position"]["kept"]
        position.write_text(json.dumps(raw))
    again = make(model, data, tmp_path / "run")
    again.resume()
    assert again.told == []
    assert result.of(again, pytest.fail).held_out_loss == result.of(first, pytest.fail).held_out_loss


DAMAGES: list[tuple[Callable[[list[str]], list[str]], str]] = [
    (lambda lines: [lines[0], '{"step": \n', *lines[2:]], "1 line is left out, 1 of 2 steps are lost"),
    (lambda lines: lines[1:], "the look before the first step is lost"),
    (lambda lines: [], "2 of 2 steps are lost, the look before the first step is lost"),
    (lambda lines: [*lines, *lines], "4 lines are left out"),
    (lambda lines: ['{"step": 0, "loss": null}\n', *lines], "1 line is left out"),
    (lambda lines: ['{"step": -5, "loss": 1}\n', '{"step": 1}\n', *lines], "2 lines are left out"),
    (lambda lines: ["[" * 10**6 + "\n", *lines], "1 line is left out"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_metrics_are_told_of_and_the_report_is_right(
    model: Path, data: Path, tmp_path: Path, damage: Callable[[list[str]], list[str]], words: str
) -> None:
    """Without a word the report counted fewer steps, or some twice, and had another best, or none; a loss of null ended
    in a TypeError where the curve is drawn."""
    folder, metrics = tmp_path / "run", tmp_path / "run" / METRICS

    def begun(folder: Path) -> Trainer:
        run = make(model, data, folder, eval_every=1)
        run.judge = lambda run: -abs(run.loop.position.step - 2)  # what did best comes early
        return run

    whole = begun(tmp_path / "whole")
    whole.train()
    first = begun(folder)
    first.train(stop=lambda: first.loop.position.step == 2)
    lines = metrics.read_text().splitlines(keepends=True)[:-1]  # with the look after step 2 goes the best
    assert len(lines) == 4
    metrics.write_text("".join(damage(lines)))
    again = begun(folder)
    again.resume()
    assert again.told == [f"{metrics} is damaged: {words}; what is told of the run is of the others"]
    assert again.train()
    found, right = result.of(again, pytest.fail), result.of(whole, pytest.fail)
    assert (found.steps, found.finished) == (4, True)
    assert found.held_out_loss
    assert right.held_out_loss
    assert (found.held_out_task or {})["kept"] == 0
    assert right.held_out_loss["kept_step"] == 2
    for name in ("last", "kept", "kept_step"):
        assert found.held_out_loss[name] == right.held_out_loss[name]
    if "lost" not in words:
        lost = [line for line in timeless(tmp_path / "whole") if line["step"] == 2 and "loss" not in line]
        assert timeless(folder) == [line for line in timeless(tmp_path / "whole") if line not in lost]


def test_a_torn_last_line_is_no_damage(model: Path, data: Path, tmp_path: Path) -> None:
    first = make(model, data, tmp_path / "run")
    first.train(stop=lambda: first.loop.position.step == 2)
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('{"step": 3, "lo')
    again = make(model, data, tmp_path / "run")
    again.resume()
    assert again.told == []


def test_a_run_whose_metrics_are_gone_is_told_in_one_line(model: Path, data: Path, tmp_path: Path) -> None:
    done = make(model, data, tmp_path / "run")
    done.train()
    (tmp_path / "run" / METRICS).unlink()
    with pytest.raises(PronkError, match=f"{METRICS} is gone or damaged"):
        result.of(done, pytest.fail)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 9, "loss": 1.0},  # and nothing else
        {"step": 9, "loss": None, "seconds": 1.0, "tokens": 5, "epoch": 0.5},
        {"step": 9, "loss": 1.0, "seconds": None, "tokens": 5, "epoch": 0.5},
        {"step": 9, "held_out_loss": None},
    ],
)
def test_a_report_of_damaged_metrics_is_refused_in_one_line(
    model: Path, data: Path, tmp_path: Path, line: dict[str, Any]
) -> None:
    done = make(model, data, tmp_path / "run")
    done.train()
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(PronkError, match=f"{METRICS} is gone or damaged"):
        result.of(done, pytest.fail)


def test_the_model_is_named_before_what_follows_from_it(model: Path, data: Path, tmp_path: Path) -> None:
    """pronk pretrain settles from the text how often to look at held-out data."""
    make(model, data, tmp_path / "run").train(stop=lambda: True)
    with pytest.raises(BadRequest, match="was made with batch_size=1, and now it is 2"):
        make(model, data, tmp_path / "run", batch_size=2, accumulate=4, eval_every=3, clip=2.0).resume()


def test_metrics_that_are_a_folder_are_told_in_one_line(model: Path, data: Path, tmp_path: Path) -> None:
    """It ended in a traceback."""
    (tmp_path / "run" / METRICS).mkdir(parents=True)
    with pytest.raises(PronkError, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        pronk.finetune(model, data, tmp_path / "run", max_steps=1, samples=0, device="cpu").run()
