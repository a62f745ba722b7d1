"""Outliers are counted as numpy counts them in what the torch engine's products are fed, however the text is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import Backend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure import outliers as module
from pronk.measure.outliers import ColumnTally, Survey, outliers
from pronk.measure.windows import evaluation_text
from pronk.torch_engine.backend import TorchBackend

CONFIG = tiny_config(num_hidden_layers=3)
THRESHOLD = 1.5
TEXTS = [np.random.default_rng(n).integers(0, CONFIG.vocab_size, size).tolist() for n, size in enumerate((70, 33))]


def llm() -> LLM:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    return LLM("tiny", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, threads=1))


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, str], NDArray[np.float32]]:
    """What the torch engine's products are fed, of both texts, one after the other."""
    backend = TorchBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), device="cpu")
    each = [backend.activations(Batch.of([Run(text)]), None) for text in TEXTS]
    assert not any(module._forward_pre_hooks for module in backend.model.modules())
    return {key: np.concatenate([seen[key] for seen in each]) for key in each[0]}


@pytest.mark.parametrize("piece", [1 << 27, 1 << 14])  # whole texts, and a few tokens at a time
def test_counts_are_those_of_the_torch_engine(
    piece: int, expected: dict[tuple[int, str], NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    told: list[tuple[str, int, int]] = []
    found = outliers(llm(), TEXTS, THRESHOLD, progress=lambda *t: told.append(t))
    # Nothing lies so near the threshold that another order of sums could take it across.
    assert min(np.abs(np.abs(x) - THRESHOLD).min() for x in expected.values()) > 2e-6
    assert set(found.tallies) == set(expected)
    for key, x in expected.items():
        over, tally = np.abs(x) > THRESHOLD, found.tallies[key]
        assert np.array_equal(tally.passes, over.sum(0)), key
        assert (tally.tokens, tally.touched) == (103, over.any(1).sum()), key
        np.testing.assert_allclose(tally.largest, np.abs(x).max(0), rtol=1e-4, err_msg=str(key))
    assert told[-1][1:] == (103, 103)
    assert len(told) == 2 if piece == 1 << 27 else len(told) > 5

    whole, layers = found.as_dict(), [x for (layer, _), x in expected.items() if layer >= 0]
    assert whole["activations"] == sum(x.size for x in layers)
    assert whole["outliers"] == sum((np.abs(x) > THRESHOLD).sum() for x in layers) > 0
    assert whole["columns"] == sum((np.abs(x) > THRESHOLD).any(0).sum() for x in layers)
    assert whole["top"][0]["largest"] == max(float(t.largest.max()) for t in found.tallies.values())
    hidden = sum((np.abs(expected[1, fed]) > THRESHOLD).sum(0) for fed in ("qkv", "gate_up"))
    assert np.array_equal(found.counts("hidden")[1], hidden)
    assert np.array_equal(found.counts("down")[2], (np.abs(expected[2, "down"]) > THRESHOLD).sum(0))


def test_a_higher_threshold_never_finds_more() -> None:
    model = llm()
    counts = [outliers(model, TEXTS, threshold).as_dict()["outliers"] for threshold in (0, 0.5, 1, 2, 4, float("inf"))]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0 == counts[-1]


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_a_threshold_that_is_none(threshold: float) -> None:
    with pytest.raises(BadRequest, match="threshold must be a number"):
        outliers(llm(), TEXTS, threshold)


def survey(passes: dict[tuple[int, str], list[int]], tokens: int = 100) -> Survey:
    tallies = {}
    for key, counts in passes.items():
        tallies[key] = ColumnTally(len(counts))
        tallies[key].tokens, tallies[key].passes = tokens, np.array(counts)
        tallies[key].largest = np.where(np.array(counts) > 0, 7.0, 1.0).astype(np.float32)
    return Survey(6.0, tokens, tallies)


def test_outlier_features_are_in_a_quarter_of_the_layers_and_at_6_percent_of_the_positions() -> None:
    """8 layers of 2 hidden states and 100 tokens: 1600 positions, of which 96 are 6%; 2 layers are a quarter.

    Column 0: 96 positions in two layers. 1: one position fewer. 2: as many as 0, but in one layer. 3: in two layers, in
    one of them before the MLP alone. 4: every position of `o` and `down`, which are no hidden states.
    """
    nothing = [0, 0, 0, 0, 0]
    passes = {(layer, fed): nothing for layer in range(8) for fed in ("qkv", "gate_up")}
    passes |= {(0, "qkv"): [48, 48, 96, 90, 0], (1, "qkv"): [48, 47, 0, 0, 0], (1, "gate_up"): [0, 0, 0, 70, 0]}
    passes |= {(layer, fed): [0, 0, 0, 0, 100] for layer in range(8) for fed in ("o", "down")}
    found = survey(passes).as_dict()["features"]["columns"]
    assert [feature["column"] for feature in found] == [3, 0]
    assert found[1] == {"column": 0, "layers": 0.25, "positions": 0.06, "largest": 7.0}


def test_columns_come_most_often_passed_first() -> None:
    entry = survey({(0, "qkv"): [0, 5, 9], (0, "gate_up"): [0, 0, 0]}).as_dict()["inputs"][0]
    assert [(c["column"], c["share_of_tokens"]) for c in entry["passing"]] == [(2, 0.09), (1, 0.05)]
    assert (entry["columns"], entry["width"]) == (2, 3)


def test_both_engines_find_the_same() -> None:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    model = LLM("tiny", checkpoint, None, TorchBackend.from_checkpoint(checkpoint, device="cpu"))
    ours, others = outliers(llm(), TEXTS, THRESHOLD).as_dict(), outliers(model, TEXTS, THRESHOLD).as_dict()
    for one in (ours, others):
        one["places"] = [(entry["layer"], entry["input"], entry["columns"]) for entry in one.pop("inputs")]
        one["top"] = [(column["layer"], column["input"], column["column"]) for column in one["top"]]
        one["features"] = [column["column"] for column in one["features"]["columns"]]
    assert ours == others
    assert ours["features"]


def test_an_engine_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm()
    monkeypatch.setattr(CpuBackend, "activations", Backend.activations)
    with pytest.raises(BadRequest, match="the cpu engine does not show its activations"):
        outliers(model, TEXTS)


@pytest.mark.slow
def test_the_default_model_has_one_outlier_feature_and_multiplies_999_of_1000_activations_in_8_bits(
    smollm2: Path,
) -> None:
    """The paper's share, more than 99.9%; and what docs/how-it-works/eight-bits.md says of this model."""
    model = pronk.load(smollm2, engine="cpu", quantize="f32", threads=2)
    ids = model.tokenizer.encode(evaluation_text())
    found = outliers(model, [ids[at : at + 511] for at in range(0, 2048, 512)]).as_dict()
    assert [feature["column"] for feature in found["features"]["columns"]] == [247]
    assert 5e-4 < found["share_of_activations"] < 1e-3
    massive = found["top"][0]
    assert (massive["layer"], massive["input"]) == (11, "down")
    assert massive["largest"] > 2000
    assert massive["share_of_tokens"] == pytest.approx(1 / 511)  # the first of each text
