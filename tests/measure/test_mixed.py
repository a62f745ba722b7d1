"""Mixed precision: the order of steps against all combinations, the budget on made-up harms and on a tiny model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from formats import save_huggingface
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk.calibrate.knapsack import Part, in_order
from pronk.cpu_engine.backend import CpuBackend
from pronk.errors import BadRequest
from pronk.formats.quantize import quantize
from pronk.llm import LLM
from pronk.measure import recording as recordings
from pronk.measure import windows as windows_module
from pronk.measure.divergence import divergence
from pronk.measure.mixed import (
    Formats,
    Measures,
    Whole,
    after,
    choose,
    chosen_by,
    parts_of,
    sixteen_bits,
    split,
)
from pronk.measure.noise import Mean
from pronk.measure.recording import Recording, Yardstick
from pronk.measure.windows import Reader, windows

CONFIG = tiny_config(num_hidden_layers=3, vocab_size=128)
WEIGHTS = random_weights(CONFIG)
CHECKPOINT = in_memory(CONFIG, WEIGHTS)
PARTS = ["model.embed_tokens.", *(f"model.layers.{n}." for n in range(3)), "lm_head."]


# -- parts and their steps --


def test_parts_are_the_embedding_the_layers_and_the_head() -> None:
    parts = parts_of(CHECKPOINT)
    assert [part.name for part in parts] == PARTS
    assert parts[0].nbytes == {"bf16": 128 * 64 * 2, "f16": 128 * 64 * 2, "q8": 128 * 2 * 34, "q4": 128 * 2 * 20}
    matrices = sum(array.size for array in WEIGHTS.values() if array.ndim == 2)
    assert sum(part.nbytes["bf16"] for part in parts) == 2 * matrices
    tied = in_memory(tied_config := tiny_config(tie_word_embeddings=True), random_weights(tied_config))
    assert [part.name for part in parts_of(tied)] == ["model.embed_tokens.", "model.layers.0.", "model.layers.1."]


def test_sixteen_bits_are_the_files_own() -> None:
    def stored(dtype: type) -> str:
        return sixteen_bits(in_memory(CONFIG, {name: w.astype(dtype) for name, w in WEIGHTS.items()}))

    assert (stored(np.float16), stored(np.float32)) == ("f16", "bf16")


@pytest.mark.parametrize("seed", range(6))
def test_wherever_the_steps_end_no_smaller_model_does_as_little_harm(seed: int) -> None:
    """Against all combinations. Among the harms are some below nothing, and some of 4 bits below those of 8. (A step
    that does no harm is always taken with the one before it.)"""
    rng = np.random.default_rng(seed)
    parts = [
        Part(str(n), {"bf16": 64 * size, "q8": 34 * size, "q4": 20 * size}) for n, size in enumerate((1, 3, 3, 7, 20))
    ]
    harms = {part.name: {"q8": rng.normal(1, 1), "q4": rng.normal(3, 2)} for part in parts}
    counted = {name: {"bf16": 0.0, **{f: max(h, 0.0) for f, h in of.items()}} for name, of in harms.items()}

    def model(formats: Mapping[str, str]) -> tuple[int, float]:
        chosen = [(part, formats.get(part.name, "bf16")) for part in parts]
        return sum(p.nbytes[f] for p, f in chosen), sum(counted[p.name][f] for p, f in chosen)

    every = [model(dict(zip("01234", formats, strict=True))) for formats in product(("bf16", "q8", "q4"), repeat=5)]
    steps = in_order(parts, "bf16", harms)
    sizes = []
    for count in range(len(steps) + 1):
        nbytes, harm = model(after(steps[:count], "bf16"))
        assert harm == pytest.approx(sum(step.harm for step in steps[:count]))
        assert nbytes == 64 * 34 - sum(step.saved for step in steps[:count])
        if count == len(steps) or steps[count].harm > 0:
            assert nbytes == min(size for size, other in every if other <= harm + 1e-9)
        sizes.append(nbytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == min(sizes) == 20 * 34


def test_a_part_that_loses_nothing_in_4_bits_never_has_8() -> None:
    part = Part("a", {"bf16": 64, "q8": 34, "q4": 20})
    assert [step.format for step in in_order([part], "bf16", {"a": {"q8": 0.0, "q4": 0.0}})] == ["q4"]
    assert [step.format for step in in_order([part], "bf16", {"a": {"q8": 0.0, "q4": 1e-3}})] == ["q8", "q4"]


# -- the budget --

HARMS = {name: {"q8": 1e-4 * 2**n, "q4": 1e-3 * 2**n} for n, name in enumerate(PARTS)}


def made_up(held_out: float = 1.0, together: float = 1.0, floor: float = 1e-4, error: float = 0.0) -> Measures:
    """Harms that add up, and do `together` times as much, and `held_out` times as much on the other text."""

    def total(formats: Formats) -> float:
        return sum(HARMS[part][format] for part, format in formats.items() if part)

    def whole(formats: Formats) -> Whole:
        mean = floor + together * total(formats)
        return Whole(Mean(mean, error), Mean(held_out * mean, held_out * error))

    return Measures(lambda formats: Mean(total(formats), error), whole)


@pytest.mark.parametrize("ways", [{}, {"held_out": 1.5}, {"together": 3.0}, {"together": 0.2}, {"error": 2e-4}])
def test_the_budget_is_kept_and_a_larger_one_never_gives_a_larger_model(ways: Mapping[str, float]) -> None:
    measures = made_up(**ways)
    sizes = []
    for max_kld in np.geomspace(6e-4, 0.2, 25):
        choice = chosen_by(measures, CHECKPOINT, max_kld)
        assert measures.whole(choice.formats).upper <= max_kld
        assert choice.measured_kld == measures.whole(choice.formats).held_out.value
        assert len(choice.tries) <= 6
        sizes.append(choice.nbytes["after"])
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[8] > sizes[-1] == sum(part.nbytes["q4"] for part in parts_of(CHECKPOINT))


def test_one_more_step_would_break_it() -> None:
    for max_kld in (1e-3, 3e-3, 0.01):
        choice = chosen_by(made_up(), CHECKPOINT, max_kld)
        steps = in_order(parts_of(CHECKPOINT), "bf16", HARMS)
        assert len(choice.steps) < len(steps)
        assert made_up().whole(after(steps[: len(choice.steps) + 1], "bf16")).upper > max_kld


def test_what_is_worse_on_the_windows_held_out_gets_more_bits() -> None:
    easy, hard = (chosen_by(made_up(held_out=h), CHECKPOINT, 0.01) for h in (1.0, 4.0))
    assert hard.nbytes["after"] > easy.nbytes["after"]
    assert hard.measured_kld == pytest.approx(4 * hard.chosen_kld)


def test_a_choice_says_why() -> None:
    choice = chosen_by(made_up(), CHECKPOINT, 0.004)
    assert [row["part"] for row in choice.parts] == PARTS
    assert {row["part"]: row["harms"] for row in choice.parts} == HARMS
    for row in choice.parts:
        assert row["format"] == choice.formats.get(row["part"], "bf16")
    assert choice.nbytes["before"] - choice.nbytes["after"] == sum(row["saved"] for row in choice.parts)
    assert choice.floor_kld == 1e-4
    prices = [step["harm"] / step["saved"] for step in choice.steps]
    assert prices == sorted(prices)
    assert choice.tries[-1]["predicted"] == pytest.approx(choice.tries[-1]["chosen"])


@pytest.mark.parametrize(
    ("max_kld", "message"),
    [(5e-5, r"with all weights in bf16 the mean KL divergence is already 0.0001 .* allow more"),
     (0.0, "a budget of KL divergence must be a number over 0, not 0.0"), (float("nan"), "a number over 0")],
)  # fmt: skip
def test_a_budget_that_cannot_be_kept(max_kld: float, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chosen_by(made_up(), CHECKPOINT, max_kld)


def test_windows_to_choose_on_and_to_confirm_on_share_nothing() -> None:
    choosing, confirming = split(list(range(5000)))
    assert (len(choosing), len(confirming)) == (4 * 128, 8 * 128)
    assert not set(choosing) & set(confirming)
    assert max(choosing) > 3500 < max(confirming)  # from all over the text
    assert [len(ids) for ids in split(list(range(4 * 128)))] == [256, 256]
    with pytest.raises(BadRequest, match="takes a text of 512 tokens at least"):
        split(list(range(511)))


# -- a tiny model --


@pytest.fixture(scope="module")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that 4 bits hold nearly exactly, but for those of the middle layer."""
    weights = {
        name: quantize(array, "q4").dequantize() if array.ndim == 2 and ".1." not in name else array
        for name, array in WEIGHTS.items()
    }
    folder = tmp_path_factory.mktemp("mixed") / "model"
    save_huggingface(folder, CONFIG, weights)
    return folder


IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 1200).tolist()


def test_a_budget_holds_on_a_model_and_its_sensitive_layer_gets_the_bits(sensitive: Path) -> None:
    told: list[tuple[str, int, int]] = []
    loading = {"engine": "cpu", "threads": 1}
    loose = choose(sensitive, max_kld=10.0, ids=IDS, loading=loading, progress=lambda *t: told.append(t))
    assert set(loose.formats.values()) == {"bf16", "q4"}  # bf16 of "", which nothing is left to
    harms = {row["part"]: row["harms"]["q4"] for row in loose.parts}
    assert max(harms, key=harms.__getitem__) == "model.layers.1."
    assert told[0] == ("measuring each part", 0, 11)
    assert {done == total for name, done, total in told if "whole" in name} == {False, True}

    budget = (loose.floor_kld + loose.measured_kld) / 3
    tight = choose(sensitive, max_kld=budget, ids=IDS, loading=loading)
    bits = {"q4": 4, "q8": 8, "bf16": 16}
    of = {row["part"]: bits[row["format"]] for row in tight.parts}
    assert of["model.layers.1."] > min(of["model.layers.0."], of["model.layers.2."])
    assert loose.nbytes["after"] < tight.nbytes["after"] < tight.nbytes["before"]

    # What was said is what anybody measures who loads the model so.
    reference, own = (pronk.load(sensitive, **loading, quantize=q) for q in ("f32", tight.formats))
    again = divergence(reference, own, split(IDS)[1], ctx=128)
    assert (again["mean"], again["standard_error"]) == (tight.measured_kld, tight.standard_error)
    assert again["mean"] + again["standard_error"] <= budget


def test_a_budget_below_the_floor_is_refused_before_anything_is_measured(sensitive: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with pytest.raises(BadRequest, match="with all weights in bf16"):
        choose(sensitive, max_kld=1e-9, ids=IDS, loading={"engine": "cpu"}, progress=lambda *t: told.append(t))
    assert told == [("measuring each part", 0, 11)]


# -- recordings --


def test_a_recording_gives_the_same_logits_again_and_again_and_of_no_other_window() -> None:
    reader = Reader(CpuBackend.from_checkpoint(CHECKPOINT, threads=1), 128)
    texts = windows(IDS, 128, count=3)
    logits = np.concatenate([logits for window in texts for logits, _ in reader.read(window)])
    recording = Recording(texts, logits, reader.shares_scales)
    for window in [*texts, *reversed(texts)]:
        for (a, targets), (b, others) in zip(recording.read(window), reader.read(window), strict=True):
            assert np.array_equal(a, b)
            assert targets == others
    with pytest.raises(ValueError, match="differs from the one that was recorded"):
        next(recording.read(replace(texts[1], ids=texts[0].ids)))


def test_a_recording_in_a_file_is_of_its_windows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.logits"
    backends = (CpuBackend.from_checkpoint(CHECKPOINT, threads=1, quantize=q) for q in ("f32", "q4"))
    one, other = (LLM("tiny", CHECKPOINT, None, backend) for backend in backends)
    monkeypatch.setattr(windows_module, "LOGITS_BYTES", 9 * 4 * CONFIG.vocab_size)  # nine rows a piece
    recordings.record(one, path, IDS, ctx=128, count=3)
    expected = divergence(one, other, IDS, ctx=128, count=3)
    assert recordings.divergence_from(other, path, IDS, ctx=128, count=3) == expected
    whole = path.read_bytes()
    for ids, count, held in ((IDS[::-1], 3, whole), (IDS, 2, whole), (IDS, 3, whole[:-1])):
        path.write_bytes(held)
        with pytest.raises(BadRequest, match="holds no logits of these"):
            recordings.divergence_from(other, path, ids, ctx=128, count=count)


def test_a_yardstick_measures_the_same_whether_or_not_it_keeps_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def llm(quantize: str) -> LLM:
        return LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, threads=1, quantize=quantize))

    others, expected = [llm(q) for q in ("q8", "q4")], []
    for other in others:
        expected.append(divergence(llm("f32"), other, IDS, ctx=128, count=3))
    for kept in (recordings.KEPT, 0):
        monkeypatch.setattr(recordings, "KEPT", kept)
        yardstick = Yardstick(llm("f32"), IDS, ctx=128, count=3)
        assert [yardstick.divergence(other) for other in others] == expected


def test_a_yardstick_lets_the_reference_go_before_there_is_another_model() -> None:
    model = LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, threads=1))
    own, told = weakref.ref(model.backend), list[tuple[str, int, int]]()
    yardstick = Yardstick(model, IDS, ctx=128, count=2, progress=lambda *t: told.append(t))
    del model
    gc.collect()
    assert own() is None
    assert told[-1] == ("reading", 2 * 127, 2 * 127)
    other = LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, threads=1))
    assert yardstick.divergence(other)["mean"] == 0
