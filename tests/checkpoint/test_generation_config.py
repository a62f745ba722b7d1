"""generation_config.json: the sampling it advises, held against transformers; what is not there, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from pronk.checkpoint import generation_config
from pronk.errors import BadFile


def read(folder: Path, **said: Any) -> generation_config.GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return generation_config.read(folder)


def test_without_the_file_nothing_is_said(tmp_path: Path) -> None:
    assert generation_config.read(tmp_path) == generation_config.GenerationConfig()
    assert read(tmp_path, eos_token_id=[1, 2], transformers_version="5").sampling == {}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),  # Llama 3
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 40}, {"temperature": 0.6, "top_p": 0.9, "top_k": 40}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"temperature": 0.0}),
        ({"temperature": 0, "top_k": 5}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": 0, "top_p": None}, {}),
        ({"temperature": 1, "top_k": -1}, {"temperature": 1}),
        ({"min_p": 0.1, "temperature": 1.5}, {"temperature": 1.5, "min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_what_it_says_of_sampling(tmp_path: Path, said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert read(tmp_path, **said).sampling == meant


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Where do_sample is there; top-k apart, of which transformers has one of its own."""
    for draws in (True, False):
        said = {"do_sample": draws, "temperature": 0.6, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2}
        ours = read(tmp_path, **said).sampling
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
        assert (ours["temperature"] > 0) == theirs.do_sample
        assert ours["repetition_penalty"] == theirs.repetition_penalty
        if draws:
            assert {key: ours[key] for key in ("temperature", "top_p", "top_k")} == {
                key: getattr(theirs, key) for key in ("temperature", "top_p", "top_k")
            }


def test_what_is_not_here_is_named(tmp_path: Path) -> None:
    asked = read(tmp_path, typical_p=0.9, no_repeat_ngram_size=3, num_beams=1, epsilon_cutoff=0.0, temperature=0.5)
    assert asked.absent == ("typical_p=0.9", "no_repeat_ngram_size=3")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", True), ("top_k", 0.5), ("top_p", [0.9]), ("do_sample", "yes")],
)
def test_what_is_wrong_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(BadFile, match=rf"generation_config\.json: {field}: must be "):
        read(tmp_path, **{field: value})
