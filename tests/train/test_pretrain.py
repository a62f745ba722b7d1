"""From nothing: what a model begins as, that it learns, and that others read what comes out."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prose import PROSE
from run_c import RunCModel, RunCTokenizer, run_c
from tiny import random_weights

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint.writers import write
from pronk.engine.generation import Generation
from pronk.errors import BadFile, BadRequest
from pronk.tokenizer.export import huggingface_files
from pronk.train import pretrain
from pronk.train.folder import CHECKPOINTS, MODEL, read_metrics
from pronk.train.objectives.pretraining import Pretraining
from pronk.train.pretrain import Ready, Shape, prepare, tokens
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, ctx_size=48)
PROMPT = "The old man"


def settings(text: Path = PROSE, shape: Shape = SHAPE, **changes: Any) -> Settings:
    base = Settings(str(shape), str(text), lora=None, max_steps=80, lr=1e-2, pack=8 * 49, accumulate=1)
    usual = {"objective": Pretraining(), "weight_decay": 0.1, "eval_every": 40, "save_every": 40}
    return replace(base, **usual | changes)


def make(folder: Path, ready: Ready) -> Trainer:
    folder.mkdir(exist_ok=True)
    files = huggingface_files(ready.tokenizer)
    return Trainer(ready.checkpoint, ready.data, ready.settings, folder, tokenizer_files=files, device="cpu")


@pytest.fixture(scope="module")
def ready() -> Ready:
    return prepare(settings(), SHAPE, 360)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ready: Ready) -> Path:
    """A run's folder."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    assert make(folder, ready).train()
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in llama2.c's format, with its tokenizer.bin beside it."""
    opened = checkpoint.open(trained / MODEL)
    assert opened.tokenizer
    vocabulary = tokenizer.load(opened.tokenizer).vocabulary()
    destination = tmp_path_factory.mktemp("llama2c") / "model.bin"
    return write.save(opened, destination, to="llama2c", dtype="f32", vocabulary=vocabulary)


# -- what it begins as --


def test_weights_at_first(ready: Ready) -> None:
    """GPT-2's: 0.02, and less by the root of 2 x layers for what is added to the residual stream."""
    config = replace(ready.checkpoint.config, hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=8)
    drawn = {name: tensor.read() for name, tensor in pretrain.initial(config, 3).tensors.items()}
    assert drawn.keys() == random_weights(config).keys()
    for name, array in drawn.items():
        assert (array.dtype, array.shape) == (np.float32, config.tensor_shapes()[name])
        if array.ndim == 1:
            assert (array == 1).all()
            continue
        expected = 0.02 / (4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
        off = 5 * expected / math.sqrt(2 * array.size)  # five standard errors of a standard deviation
        assert array.std() == pytest.approx(expected, abs=off), name
        assert abs(array.mean()) < 5 * expected / math.sqrt(array.size), name
    again, other = (pretrain.initial(config, seed).tensors for seed in (3, 4))
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(again[name].read(), drawn[name])
    assert not np.array_equal(other[name].read(), drawn[name])
    assert not np.array_equal(drawn["model.layers.1.mlp.up_proj.weight"], drawn[name])


def test_a_shape_s_proportions() -> None:
    config = Shape(hidden=128, layers=4, heads=4, ctx_size=256).config(512)
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (352, 32, 4)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 10000.0, True)
    rates = [Shape(hidden=hidden, heads=1).usual_lr for hidden in (64, 128, 768, 1024, 2048)]
    assert rates == [3e-3, 3e-3, 5e-4, 4e-4, 2e-4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 100, "heads": 3}, "a hidden size of 100 is no multiple of 3 heads"),
        ({"hidden": 12, "heads": 4}, "head_dim must be even"),
        ({"heads": 4, "kv_heads": 3}, "is no multiple of num_key_value_heads"),
        ({"kv_heads": 0}, "num_key_value_heads must be a whole number from 1"),
        ({"layers": 0}, "num_hidden_layers must be"),
        ({"heads": 0}, "no multiple of 0 heads"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Shape(**changes)


def test_an_untrained_model_guesses(ready: Ready, tmp_path: Path) -> None:
    """Every token is about as likely as any other."""
    loss = make(tmp_path / "run", ready).loop.evaluate(ready.data.held_out).loss
    assert loss == pytest.approx(math.log(360), abs=0.1)


# -- data --


def test_the_text_s_end_is_held_out_and_has_no_say_in_the_vocabulary(ready: Ready, tmp_path: Path) -> None:
    train, held_out = ready.train_bytes, ready.held_out_bytes
    assert train + held_out == PROSE.stat().st_size - 1  # but for its last newline
    assert 0.05 < held_out / (train + held_out) <= 0.1
    (tmp_path / "begin.txt").write_bytes(PROSE.read_bytes()[:train])
    alone = prepare(settings(tmp_path / "begin.txt", eval_share=0.0), SHAPE, 360)
    assert alone.tokenizer.vocabulary() == ready.tokenizer.vocabulary()
    assert not alone.data.held_out
    elsewhere = prepare(settings(tmp_path / "begin.txt", eval_data=str(PROSE)), SHAPE, 360)
    assert elsewhere.held_out_bytes == train + held_out


def test_bits_a_byte(ready: Ready) -> None:
    """A model that finds all 2^8 bytes equally likely takes 8 bits for each, however long its tokens are."""
    nats = 8 * math.log(2) * ready.held_out_bytes / tokens(ready.data.held_out)
    assert ready.bits_a_byte(nats) == pytest.approx(8)


def test_ten_looks_where_nothing_else_is_asked_for() -> None:
    for changes, every in (({}, 8), ({"max_steps": None, "epochs": 2.0}, 9), ({"max_steps": 3}, 1)):
        found = prepare(settings(eval_every=None, **changes), SHAPE, 360).settings.eval_every
        assert found == every, changes


def test_what_is_held_out_unasked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "HELD_OUT", 1000)
    assert 500 < prepare(settings(), SHAPE, 360).held_out_bytes <= 1000


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("", {}, "holds no text"),
        ("one", {}, "too short to hold some of it out; give more text, or --eval-share 0"),
        ("a b c d\n" * 4, {}, r"too short: \d+ tokens to train on are not one sequence of 48"),
        ("a b c d\n" * 400, {"vocabulary": 512}, "too short for a vocabulary of 512 tokens; it supports"),
    ],
)
def test_texts_that_are_too_short(tmp_path: Path, text: str, changes: dict[str, int], message: str) -> None:
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(BadFile, match=message):
        prepare(settings(tmp_path / "text.txt"), SHAPE, changes.get("vocabulary", 265))


# -- a run --


def test_it_learns(trained: Path) -> None:
    metrics = read_metrics(trained)
    held_out = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 80
    assert held_out[-1] < held_out[1] < held_out[0] - 1
    assert max(losses[-10:]) < losses[0] - 1


def test_resumed_is_as_if_never_stopped(trained: Path, tmp_path: Path) -> None:
    """Text, vocabulary and first weights are made anew, and come out the same; the weights at the end, to the bit."""
    calls = count()
    assert not make(tmp_path / "run", prepare(settings(), SHAPE, 360)).train(stop=lambda: next(calls) == 25)
    again = make(tmp_path / "run", prepare(settings(), SHAPE, 360))
    again.resume()
    assert again.loop.position.step == 25
    assert again.train()
    for path in (trained / MODEL).iterdir():
        assert (tmp_path / "run" / MODEL / path.name).read_bytes() == path.read_bytes(), path.name
    timeless = [[{**line, "seconds": 0} for line in read_metrics(folder)] for folder in (trained, tmp_path / "run")]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("change", ["vocabulary", "shape", "text"])
def test_another_run_s_checkpoint_is_refused(trained: Path, tmp_path: Path, change: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROSE.read_text(encoding="utf-8").replace("boat", "goat"), encoding="utf-8")
    shape = replace(SHAPE, heads=8) if change == "shape" else SHAPE
    other = prepare(
        replace(settings(shape=shape), data=str(text if change == "text" else PROSE)),
        shape,
        370 if change == "vocabulary" else 360,
    )
    run = make(tmp_path / "run", other)
    shutil.copytree(trained / CHECKPOINTS, tmp_path / "run" / CHECKPOINTS)
    with pytest.raises(BadRequest, match="or begin in another folder"):
        run.resume()


def test_transformers_reads_it(trained: Path) -> None:
    """Equal ids, equal logits."""
    transformers = pytest.importorskip("transformers")
    llm = pronk.load(trained / MODEL, engine="cpu")
    ids = llm.tokenizer.encode("The ferry, 1999:\n\n\tOda's crossing…")
    theirs = transformers.AutoTokenizer.from_pretrained(trained / MODEL)
    assert theirs("The ferry, 1999:\n\n\tOda's crossing…").input_ids == ids
    assert theirs.decode(ids, skip_special_tokens=True).lstrip() == "The ferry, 1999:\n\n\tOda's crossing…"
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / MODEL, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(llm.logits(ids), expected, rtol=1e-4, atol=1e-4)
    assert model.config.eos_token_id == model.config.bos_token_id == theirs.eos_token_id == 1


def test_llama2_c_reads_it(trained: Path, exported: Path) -> None:
    """The program's own reading of the file, in float64: the same ids, logits and text, to the end of a document."""
    llm = pronk.load(trained / MODEL, engine="cpu")
    codec, program = RunCTokenizer(exported.with_name("tokenizer.bin")), RunCModel(exported)
    for text in (PROMPT, "", " ", "1843: Zoë — 🚂\n\n  x", PROSE.read_text(encoding="utf-8")[:300]):
        assert codec.encode(text) == llm.tokenizer.encode(text, special=False), text
    ids = llm.tokenizer.encode(PROMPT)
    theirs = np.stack([program.forward(token, position) for position, token in enumerate(ids)])
    np.testing.assert_allclose(llm.logits(ids), theirs, rtol=1e-4, atol=1e-4)
    said = run_c(exported, exported.with_name("tokenizer.bin"), PROMPT, SHAPE.ctx_size - 1).decode()
    for model in (trained / MODEL, exported):
        goes_on = pronk.load(model, engine="cpu").generate(PROMPT, max_new_tokens=SHAPE.ctx_size - len(ids))
        assert isinstance(goes_on, Generation)
        assert PROMPT + goes_on.text == said
    assert len(said) > len(PROMPT) + 20
