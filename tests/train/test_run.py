"""A run as a whole: what it leaves in its folder, and that it goes on to the bit wherever it was stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import save_huggingface
from tiny import random_weights
from tiny_folder import save_tiny_chat_model
from training_runs import run_of as make
from training_runs import timeless, write_sums

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig, read_config
from pronk.engine.batch import Batch
from pronk.engine.batch import Run as Rows
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.train import state
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Example
from pronk.train.data.sources import shown
from pronk.train.folder import CHECKPOINTS, METRICS, MODEL, claimed, read_metrics
from pronk.train.recompute import recompute
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer

LORA = LoraConfig(rank=4, alpha=8, dropout=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "data.jsonl", lambda a, b: {"completion": f" {a + b}."})


def settings(model: Path, data: Path, **changes: Any) -> Settings:
    base = Settings(str(model), str(data), lora=LORA, max_steps=8, batch_size=2, accumulate=2, lr=1e-2, save_every=3)
    return replace(base, **{"eval_every": 3, **changes})


def trained_of(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}


# -- recomputed activations --


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("lora", [None, LORA])
def test_recomputed_activations_change_no_bit(
    model: Path, data: Path, tmp_path: Path, every: int, lora: LoraConfig | None
) -> None:
    """Dropout's random numbers included, which are drawn a second time as they were the first."""
    runs = [make(settings(model, data, lora=lora, recompute=k, max_steps=4), tmp_path / str(k)) for k in (0, every)]
    losses = []
    for run in runs:
        torch.manual_seed(5)
        losses.append([run.loop.step().loss for _ in range(4)])
    assert losses[0] == losses[1]
    plain, forgetful = map(trained_of, runs)
    assert all(torch.equal(plain[name], forgetful[name]) for name in plain)


def test_a_block_is_computed_twice_where_it_is_to_be(model: Path) -> None:
    for every, passes in ((0, [1, 1]), (1, [2, 2]), (2, [2, 1])):
        module = load_module(checkpoint.open(model))
        seen = [0, 0]
        for index, block in enumerate(module.model.layers):
            block.mlp.register_forward_pre_hook(lambda *_, i=index, seen=seen: seen.__setitem__(i, seen[i] + 1))
        recompute(module, every)
        module(TorchBatch.of(Batch.of([Rows([1, 5, 9], logits="all")]), torch.device("cpu"), None)).sum().backward()
        assert seen == passes
    with pytest.raises(BadRequest, match="recompute every block"):
        recompute(module, -1)


def test_what_is_trained_is_what_serves(model: Path) -> None:
    """The training forward, dropout off, is the cache-free forward that answers: to the bit, in a batch of several."""
    module = load_module(checkpoint.open(model)).eval()
    draw = np.random.default_rng(1)
    texts = [draw.integers(3, 259, n).astype(np.int32) for n in (5, 12)]
    micro = MicroBatch.of([Example(ids, np.arange(len(ids)) > 0) for ids in texts], torch.device("cpu"))
    runs = [micro.batch.token_ids[run.begin : run.end].tolist() for run in micro.batch.runs]
    assert [ids[: len(text) - 1] for ids, text in zip(runs, texts, strict=True)] == [ids[:-1].tolist() for ids in texts]
    served = TorchBatch.of(Batch.of([Rows(ids, logits="all") for ids in runs]), torch.device("cpu"), None)
    with torch.no_grad():
        trained = module.lm_head(module.hidden(micro.batch))
        assert torch.equal(trained[: micro.weight], module(served)[: micro.weight])


# -- data --


def test_what_is_held_out_is_not_trained_on(model: Path, data: Path, tmp_path: Path) -> None:
    ready = make(settings(model, data, eval_share=0.25), tmp_path / "run").data
    assert (len(ready.train), len(ready.held_out), len(ready.names)) == (15, 5, 15)
    texts = [{tuple(example.ids.tolist()) for example in part} for part in (ready.train, ready.held_out)]
    assert not texts[0] & texts[1]
    again = make(settings(model, data, eval_share=0.25), tmp_path / "run").data
    assert [e.ids.tolist() for e in again.held_out] == [e.ids.tolist() for e in ready.held_out]
    other = make(settings(model, data, eval_share=0.25, seed=1), tmp_path / "run").data
    assert [e.ids.tolist() for e in other.held_out] != [e.ids.tolist() for e in ready.held_out]
    assert ready.names[0].startswith(f"{data}: line ")


def test_held_out_data_of_its_own(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    ready = make(settings(model, data, eval_data=str(tmp_path / "other.jsonl")), tmp_path / "run").data
    assert (len(ready.train), len(ready.held_out)) == (20, 1)


@pytest.mark.parametrize("own", [False, True])
def test_exact_copies_are_never_on_both_sides(model: Path, data: Path, tmp_path: Path, own: bool) -> None:
    """Half of what was held out had been learned by heart."""
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines * 3))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*lines[:4], lines[0]]))
    ready = make(settings(model, data, eval_share=0.25, eval_data=str(other) if own else None), tmp_path / "run").data
    assert ready.duplicates == 45 if own else 40
    texts = [{tuple(example.ids.tolist()) for example in part} for part in (ready.train, ready.held_out)]
    assert not texts[0] & texts[1]
    assert (len(ready.train), len(ready.names)) == ((48, 48) if own else (45, 45))
    assert len(ready.held_out) == (5 if own else 15)


def test_several_files_each_with_a_weight(model: Path, data: Path, tmp_path: Path) -> None:
    other = write_sums(tmp_path / "other.jsonl", lambda a, b: {"completion": f" {a + b}, I think."})
    asked = settings(model, data, eval_share=0.2)
    both = (f"{data}=2", f"{other}=0.25")
    ready = make(replace(asked, data=both), tmp_path / "run").data
    assert len(ready.held_out) == 8
    (there, seen), (of_other, half) = ready.mixture.values()
    assert (there + of_other, seen, half) == (32, 2 * there, round(of_other / 4))
    counts = [sum(name.startswith(f"{path}: ") for name in ready.names) for path in (data, other)]
    assert counts == [seen, half]
    assert len(ready.train) == seen + half
    texts = [{tuple(example.ids.tolist()) for example in part} for part in (ready.train, ready.held_out)]
    assert not texts[0] & texts[1]
    assert len(texts[0]) == there + half  # each of one file, and as many different ones of the other
    again = make(replace(asked, data=both), tmp_path / "run").data
    assert list(again.names) == list(ready.names)
    for weight in ("0", "-1", "nan", "1e9"):
        with pytest.raises(BadRequest, match="the weight must be over 0 and at most 1000"):
            make(replace(asked, data=(f"{data}={weight}", str(other))), tmp_path / "run")
    with pytest.raises(BadRequest, match=r"jsonl=x: 'x' is no weight; give a number behind the ="):
        make(replace(asked, data=f"{data}=x"), tmp_path / "run")
    odd = data.rename(tmp_path / "lr=2")
    assert len(make(replace(asked, data=str(odd)), tmp_path / "run").data.train) == 16  # a file of that name is meant


def test_what_is_left_out_is_told_of_both(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "completion": "b", "id": 1}\n{"prompt": "a"}\n')
    ready = make(settings(model, data, eval_data=str(other), skip_bad=True), tmp_path / "run").data
    (problem,) = ready.skipped
    assert problem.startswith(f"{other}: line 2: has the keys")
    assert ready.unused == {"id": 1}


def test_few_records_are_all_trained_on(model: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    ready = make(settings(model, tmp_path / "few.jsonl", eval_share=0.5), tmp_path / "run").data
    assert (len(ready.train), len(ready.held_out)) == (9, 0)


def test_preferences_are_not_imitated(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(BadFile, match="line 1: chosen\\+rejected is what pronk dpo, kto and reward learn from"):
        make(settings(model, tmp_path / "pairs.jsonl"), tmp_path / "run")


def test_the_mask_can_be_shown(model: Path, data: Path, tmp_path: Path) -> None:
    run = make(settings(model, data), tmp_path / "run")
    opened = checkpoint.open(model)
    assert opened.tokenizer
    (tokens,) = shown(run.data.train[:1], tokenizer.load(opened.tokenizer))
    learned = "".join(text for text, counts in tokens if counts)
    assert learned.endswith(".</s>")
    assert "plus" not in learned


# -- a run, and going on with it --


@pytest.mark.parametrize(
    ("lora", "optimizer"),
    [(LORA, "adamw"), (LORA, "muon"), *[(None, kind) for kind in ("adamw", "adamw8bit", "adafactor", "muon", "sgd")]],
)
@pytest.mark.parametrize("stopped_after", [0, 4, 6])
def test_resumed_is_as_if_never_stopped(
    model: Path, data: Path, tmp_path: Path, lora: LoraConfig | None, optimizer: str, stopped_after: int
) -> None:
    """All weights have more numbers than adamw8bit leaves in 32 bits."""
    chosen = settings(model, data, lora=lora, optimizer=optimizer)
    whole = make(chosen, tmp_path / "whole")
    assert whole.train()

    first = make(chosen, tmp_path / "parts")
    calls = count()
    assert not first.train(stop=lambda: next(calls) == stopped_after)
    again = make(chosen, tmp_path / "parts")
    torch.manual_seed(77)  # another process has another state
    again.resume()
    assert again.loop.position.step == stopped_after
    assert again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    for name, parameter in trained_of(whole).items():
        assert torch.equal(parameter, trained_of(again)[name]), name
    results = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors")]
    assert results
    assert all((tmp_path / "parts" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes() for path in results)


def test_killed_between_checkpoints(model: Path, data: Path, tmp_path: Path) -> None:
    """Steps after the newest checkpoint are taken again, and stand in the metrics once; a torn line is no obstacle."""
    chosen = settings(model, data)
    whole = make(chosen, tmp_path / "whole")
    whole.train()

    class Killed(BaseException):
        pass

    def kill() -> bool:
        if first.loop.position.step == 5:
            raise Killed
        return False

    first = make(chosen, tmp_path / "parts")
    with pytest.raises(Killed):
        first.train(kill)
    with (tmp_path / "parts" / METRICS).open("a") as file:
        file.write('{"step": 6, "lo')
    again = make(chosen, tmp_path / "parts")
    again.resume()
    assert again.resumed_from == tmp_path / "parts" / CHECKPOINTS / "step-000003"
    again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def test_data_that_changed_under_its_name(model: Path, data: Path, tmp_path: Path) -> None:
    """One letter: as many records, as many tokens."""
    make(settings(model, data), tmp_path / "run").train(stop=lambda: True)
    data.write_text(data.read_text().replace("3 plus 4 is", "3 plus 5 is"))
    with pytest.raises(BadRequest, match="was made with other examples: what their name stands for has changed"):
        make(settings(model, data), tmp_path / "run").resume()


def test_weights_that_changed_under_their_name(data: Path, tmp_path: Path) -> None:
    """A tenth of a thousandth, in one tensor: the file has the same size, and may have the same date."""
    model = save_tiny_chat_model(tmp_path / "model")
    make(settings(model, data), tmp_path / "run").train(stop=lambda: True)
    make(settings(model, data), tmp_path / "run").resume()
    config = checkpoint.open(model).config
    weights = random_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"] *= np.float32(1.0001)
    save_huggingface(model, config, weights)
    with pytest.raises(BadRequest, match="was made with other weights: what their name stands for has changed"):
        make(settings(model, data), tmp_path / "run").resume()


@pytest.mark.parametrize("format", ["llm-int8", "q4"])
def test_beside_codes_resumed_is_uninterrupted(model: Path, data: Path, tmp_path: Path, format: str) -> None:
    chosen = settings(model, data, quantize=format, recompute=1)
    whole = make(chosen, tmp_path / "whole")
    whole.train()
    first = make(chosen, tmp_path / "parts")
    first.train(stop=lambda: first.loop.position.step == 4)
    again = make(chosen, tmp_path / "parts")
    again.resume()
    again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    assert all(torch.equal(p, trained_of(whole)[name]) for name, p in trained_of(again).items())
    floats = make(settings(model, data), tmp_path / "floats")
    floats.train()
    assert timeless(tmp_path / "floats") != timeless(tmp_path / "whole")  # 4 bits are not 32


def test_all_weights_are_floats(model: Path, data: Path) -> None:
    with pytest.raises(BadRequest, match="q4 is for weights that are frozen"):
        settings(model, data, lora=None, quantize="q4")


def test_nothing_to_resume(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no checkpoint to resume from"):
        make(settings(model, data), tmp_path / "run").resume()


def test_it_learns_and_keeps_the_best(model: Path, data: Path, tmp_path: Path) -> None:
    run = make(settings(model, data, max_steps=30, eval_every=10), tmp_path / "run")
    told = [(line["step"], line["held_out_loss"]) for line in run.metrics() if "held_out_loss" in line]
    assert [step for step, _ in told] == [0, 10, 20, 30]
    assert told[-1][1] < told[0][1] - 0.5
    assert run.loop.position.best == min(loss for _, loss in told[1:])
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 31))
    assert [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line] == told
    written, base = read_config(tmp_path / "run")
    assert (replace(written, target_modules=LORA.target_modules), base) == (LORA, str(model))


def test_it_stops_where_held_out_loss_no_longer_falls(model: Path, data: Path, tmp_path: Path) -> None:
    """Random answers cannot be foretold, only learned by heart."""
    draw = np.random.default_rng(0)
    records = [{"prompt": "x", "completion": "".join(map(chr, draw.integers(97, 123, 12)))} for _ in range(24)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = make(settings(model, data, lora=None, max_steps=200, eval_every=5, patience=2), tmp_path / "run")
    assert run.train()
    held_out = [line["held_out_loss"] for line in read_metrics(tmp_path / "run") if "held_out_loss" in line]
    assert run.loop.position.step < 200
    again = make(settings(model, data, lora=None, max_steps=200, eval_every=5, patience=2), tmp_path / "run")
    again.resume()
    assert again.finished  # and has nothing left to do
    assert list(again.metrics()) == []
    assert min(held_out) == held_out[-3]
    # What is in the folder is what did best, not what came last.
    best = load_module(checkpoint.open(tmp_path / "run" / MODEL))
    run.loop.model = best
    assert run.loop.evaluate(run.data.held_out).loss == pytest.approx(held_out[-3], abs=1e-6)


def test_all_weights_trained_make_a_model_that_loads(model: Path, data: Path, tmp_path: Path) -> None:
    run = make(settings(model, data, lora=None, eval_share=0.0), tmp_path / "run")
    assert run.trained_share == 1
    run.train()
    ids = [1, 40, 50, 60, 70]
    with torch.no_grad():
        batch = TorchBatch.of(Batch.of([Rows(ids, logits="all")]), torch.device("cpu"), None)
        expected = run.model.eval()(batch).numpy()
    for engine in ("torch", "cpu"):
        llm = pronk.load(tmp_path / "run" / MODEL, engine=engine)
        assert llm.has_tokenizer
        np.testing.assert_allclose(llm.logits(ids), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(pronk.load(model, engine="cpu").logits(ids), expected, atol=1e-2)  # it did learn


# -- folders --


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "run", resume=False),
        pytest.raises(PronkError, match="another run is at work here"),
        claimed(tmp_path / "run", resume=True),
    ):
        pass


def test_a_folder_that_is_another_s(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "letter.txt").write_text("mine")
    with pytest.raises(BadRequest, match=r"holds 'letter\.txt', which is no run's"), claimed(folder, resume=False):
        pass
    (folder / "letter.txt").unlink()
    make(settings(model, data), folder).train(stop=lambda: True)
    with pytest.raises(BadRequest, match="holds a run already; go on with it"), claimed(folder, resume=False):
        pass
    with claimed(folder, resume=True):
        pass
    assert state.checkpoints(folder / CHECKPOINTS)


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    """Which is said before data and weights are read for it."""
    (tmp_path / "mine.txt").touch()
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(BadRequest, match="no checkpoint to resume from"), claimed(folder, resume=True):
            pass
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.txt", ".lock"}


def test_an_empty_folder_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claimed(tmp_path / "run", resume=False):
        raise RuntimeError
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with claimed(tmp_path / "run", resume=False):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_half_written_work_of_a_dead_run_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "run" / CHECKPOINTS / ".step-000000.12.part").mkdir(parents=True)
    with claimed(tmp_path / "run", resume=False) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_run_that_died_before_its_first_checkpoint_does_not_block_its_folder(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run = make(settings(model, data), folder)
    monkeypatch.setattr(run, "save", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    (folder / "tensorboard").mkdir()
    assert [line["step"] for line in read_metrics(folder)] == [0]
    with claimed(folder, resume=False):
        assert not read_metrics(folder)  # of step 0 there would be two lines
    (folder / METRICS).write_text('{"step": 0}\n{"step": 1}\n')  # one that began, and lost its checkpoints
    with pytest.raises(BadRequest, match=r"holds 'metrics\.jsonl'"), claimed(folder, resume=False):
        pass


def test_what_looks_half_written_is_left_alone_where_no_run_was(tmp_path: Path) -> None:
    (tmp_path / ".adapter-drawings").mkdir()
    with pytest.raises(BadRequest), claimed(tmp_path, resume=False):
        pass
    assert (tmp_path / ".adapter-drawings").is_dir()


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PronkError, match="is no folder; make it first"), claimed(tmp_path / "no" / "run", resume=False):
        pass
    with pytest.raises(PronkError, match="cannot be written: File exists"), claimed(tmp_path / "file", resume=False):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval_share": 1.0}, "the share that is held out"),
        ({"warmup": 1.5}, "the warm-up is a share"),
        ({"precision": "f8"}, "precision must be one of"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"epochs": 0.0}, "epochs must be more than 0"),
        ({"epochs": float("nan")}, "epochs must be a number"),
        ({"epochs": 1e308}, "epochs must be a number from 0 to 1e"),  # no whole number of steps
        ({"lr": 1e300}, "lr must be a number from 0 to 1e"),  # no float32
        ({"lora": LoraConfig(alpha=1e300)}, "LoRA's rank is at most 1048576 and its alpha 1e"),
        ({"lora": LoraConfig(rank=10**20)}, "LoRA's rank is at most 1048576 and its alpha 1e.15, not 1000"),
        ({"seed": 1 << 64}, "seed must be from 0 to 18446744073709551615"),
    ],
)
def test_settings_out_of_range(model: Path, data: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        settings(model, data, **change)
    assert asdict(settings(model, data))["lora"]["rank"] == 4


@pytest.mark.parametrize("threads", [0, 1025, 10**12])
def test_threads_that_torch_would_die_of(model: Path, data: Path, tmp_path: Path, threads: int) -> None:
    with pytest.raises(BadRequest, match="threads must be from 1 to 1024"):
        make(settings(model, data), tmp_path / "run", threads=threads)


def test_memory_that_is_not_there_is_asked_for_before_anything_is_read(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.system.free_memory", lambda: 1 << 20)
    with pytest.raises(PronkError, match=r"training it needs .* and 1.0 MB are free; choose .* --recompute 1"):
        make(settings(model, data), tmp_path / "run")
    monkeypatch.setattr("pronk.system.free_memory", lambda: 1 << 27)
    make(settings(model, data), tmp_path / "run")


# -- longer than it was to be, and from where another ended --


def test_a_run_can_be_prolonged(model: Path, data: Path, tmp_path: Path) -> None:
    """It was refused: made with max_steps=4, and now it is 8. The longer run's schedule holds from there on."""
    short = settings(model, data, max_steps=4, eval_share=0.0)
    make(short, tmp_path / "run").train()
    longer = make(replace(short, max_steps=8), tmp_path / "run")
    longer.resume()
    assert (longer.loop.position.step, longer.prolonged_from) == (4, 4)
    assert longer.train()
    rates = [line["lr"] for line in read_metrics(tmp_path / "run")]
    expected = make(replace(short, max_steps=8), tmp_path / "whole").loop.schedule
    assert rates[4:] == [expected.at(step) for step in range(4, 8)]
    with pytest.raises(BadRequest, match="the run was of 8 steps, and now it is 6: it can be prolonged, not cut short"):
        make(replace(short, max_steps=6), tmp_path / "run").resume()
    with pytest.raises(BadRequest, match=r"made with lr=0\.01, and now it is 0\.02; resume with the same"):
        make(replace(short, max_steps=9, lr=0.02), tmp_path / "run").resume()
    same = make(replace(short, max_steps=8), tmp_path / "run")
    same.resume()
    assert same.prolonged_from is None
    # Resumed without it, a run of 9 steps went on for three epochs, of 81.
    with pytest.raises(BadRequest, match="the run was of max_steps=8; resume with it, or with more to prolong"):
        make(replace(short, max_steps=None), tmp_path / "run").resume()
    more = make(replace(short, max_steps=None, epochs=short.epochs + 9), tmp_path / "run")
    more.resume()
    assert more.prolonged_from == 8


def test_every_checkpoint_holds_an_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    """Ctrl-C before the first look at held-out data left none."""
    run = make(settings(model, data, eval_every=8), tmp_path / "run")
    run.train(stop=lambda: run.loop.position.step == 2)
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    newest = state.checkpoints(tmp_path / "run" / CHECKPOINTS)[-1]
    assert read_config(newest)[0].rank == LORA.rank
    ids = [1, 5, 9]
    with torch.no_grad():
        trained = run.model.eval()(
            TorchBatch.of(Batch.of([Rows(ids, logits="all")]), torch.device("cpu"), None)
        ).numpy()
    served = pronk.load(model, adapter=newest, engine="torch", device="cpu").logits(ids)
    np.testing.assert_allclose(served, trained, rtol=1e-4, atol=1e-5)
    assert not np.allclose(served, pronk.load(model, engine="torch", device="cpu").logits(ids), atol=1e-4)


def test_a_run_begins_from_an_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    first = make(settings(model, data, max_steps=4), tmp_path / "first")
    first.train()
    adapter = str(tmp_path / "first")
    second = make(settings(model, data, from_adapter=adapter), tmp_path / "second")
    begun = second.loop.evaluate(second.data.held_out).loss
    kept = min(line["held_out_loss"] for line in read_metrics(tmp_path / "first") if "held_out_loss" in line)
    assert begun == pytest.approx(kept, rel=1e-6)
    second.train(stop=lambda: second.loop.position.step == 2)
    (tmp_path / "first").rename(tmp_path / "gone")
    with pytest.raises(PronkError, match="no such folder"):
        make(settings(model, data, from_adapter=adapter), tmp_path / "second")
    other = settings(model, data, from_adapter=str(tmp_path / "gone"), lora=LoraConfig(rank=2))
    with pytest.raises(BadRequest, match="a run that begins from it has the same"):
        make(other, tmp_path / "third")
    with pytest.raises(BadRequest, match="merge it first"):
        settings(model, data, from_adapter=adapter, lora=None)
