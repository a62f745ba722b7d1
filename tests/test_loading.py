"""load(): names and paths that lead nowhere, and tokenizers that are another model's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from formats import save_huggingface
from tiny import byte_tokenizer, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import loading
from pronk.checkpoint import Checkpoint
from pronk.checkpoint.hub import resolve as hub
from pronk.errors import BadFile, BadRequest, ModelNotFound


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("name", ["model", "tokenizer", "device", "compute_dtype", "revision"])
def test_an_empty_name_is_not_the_default(model: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} is empty"):
        pronk.load(**{"model": model, name: ""})
    with pytest.raises(BadRequest, match=f"{name} must be a name or a path, not int"):
        pronk.load(**{"model": model, name: 3})


def test_a_long_name_is_quoted_in_part() -> None:
    with pytest.raises(ModelNotFound) as raised:
        pronk.load("x" * 5000)
    assert len(str(raised.value)) < 250


def test_homes_of_nobody_are_paths_that_lead_nowhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "~no-such-user/model"
    for options in ({"model": nobody}, {"model": Path(nobody)}, {"model": model, "tokenizer": nobody}):
        with pytest.raises(ModelNotFound, match=nobody):
            pronk.load(**options)
    with pytest.raises(ModelNotFound, match=nobody):
        pronk.checkpoint.open(nobody)
    monkeypatch.setenv("PRONK_HOME", nobody)
    assert all(found.path is None for found in hub.cached()[:1])


def test_a_tokenizer_at_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model))
    assert pronk.load(model, tokenizer="~/tokenizer.json", device="cpu").tokenizer.vocab_size == 259


def widened(model: Path, folder: Path, piece: str, *, special: bool) -> Path:
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([piece])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_with_more_tokens_than_the_model(model: Path, tmp_path: Path) -> None:
    foreign = widened(model, tmp_path, "word", special=False)
    with pytest.raises(BadRequest, match="a tokenizer of 260 tokens is another model's") as raised:
        pronk.load(model, tokenizer=foreign)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_less_than_half_of_the_model_s_tokens(model: Path, tmp_path: Path) -> None:
    """It wrote characters of no language, without a word; embeddings that are padded by less are common."""
    few, opened = byte_tokenizer(tmp_path / "t.bin"), pronk.checkpoint.open(model)

    def of(tokens: int) -> Checkpoint:
        return replace(opened, config=replace(opened.config, vocab_size=tokens))

    with pytest.raises(BadRequest, match=r"a tokenizer of 259 tokens is another model's: .* knows 519"):
        loading.tokenizer_of(of(519), few)
    assert loading.tokenizer_of(of(518), few)


def test_what_is_written_with_another_model_s_tokenizer_is_refused_first(tmp_path: Path) -> None:
    """`convert` wrote all of it, and then said that it cannot be measured; `quantize` said nothing."""
    config = tiny_config(vocab_size=600)
    save_huggingface(tmp_path / "large", config, random_weights(config))
    with pytest.raises(BadRequest, match="a tokenizer of 259 tokens is another model's"):
        loading.open_source(str(tmp_path / "large"), str(byte_tokenizer(tmp_path / "t.bin")))


def test_a_file_that_is_no_tokenizer(model: Path, tmp_path: Path) -> None:
    """It was said to be no model, which nobody had called it."""
    text = tmp_path / "text.txt"
    text.write_text("hello")
    with pytest.raises(BadFile, match=r"text\.txt: is neither a tokenizer nor a model that brings one"):
        pronk.load(model, tokenizer=text)


def test_a_folder_whose_tokenizer_is_damaged(model: Path, tmp_path: Path) -> None:
    """It was told that it has no model, which nobody had said of it."""
    with pytest.raises(ModelNotFound, match=r"no tokenizer in .*: it has no tokenizer\.json, tokenizer\.model or"):
        pronk.load(model, tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"broken')
    for config in (None, "{}", '{"cut', (model / "config.json").read_text()):
        if config:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(BadFile, match=r"tokenizer\.json: not a tokenizer\.json"):
            pronk.load(model, tokenizer=tmp_path)


def test_special_tokens_may_lie_beyond_the_embedding(model: Path, tmp_path: Path) -> None:
    """As the padding token that fine-tuning often adds; it cannot be a prompt's."""
    llm = pronk.load(model, tokenizer=widened(model, tmp_path, "<pad>", special=True), device="cpu")
    assert llm.generate("hi", max_new_tokens=2).stats.new_tokens <= 2
    with pytest.raises(BadRequest, match="259"):
        llm.generate("hi<pad>", max_new_tokens=2)


def test_another_kind_of_tokenizer_of_the_same_size(model: Path, tmp_path: Path) -> None:
    assert pronk.load(model, tokenizer=byte_tokenizer(tmp_path / "t.bin"), device="cpu").tokenizer.vocab_size == 259


def test_a_download_is_quiet_unless_progress_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def resolve(name: str, *, revision: str | None, progress: bool) -> Path:
        asked.append(progress)
        return model

    monkeypatch.setattr(hub, "resolve", resolve)
    pronk.load("owner/name", device="cpu")
    pronk.load("owner/name", device="cpu", progress=lambda *_: None)
    assert asked == [False, True]


def test_the_public_names_are_listed() -> None:
    script = "import pronk; print(*dir(pronk))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [
        "LLM",
        "ModelConfig",
        "SamplingParams",
        "Structure",
        "__version__",
        "dpo",
        "finetune",
        "grpo",
        "kto",
        "load",
        "pretrain",
        "push",
        "reward",
    ]
