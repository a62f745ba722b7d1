"""Verdicts of reports: as certain as the errors of what was measured allow."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pronk.measure.report import verdict
from pronk.measure.report.variants import tables


def judged(mean: float, error: float, floor: float | None = 1e-4) -> verdict.Verdict:
    quality = {"divergence": {"mean": mean, "standard_error": error, "top1": 0.9},
               "noise_floor": {"mean": floor}}  # fmt: skip
    return verdict.verdict({"name": "x", "quality": quality}, None, [], "f32")


@pytest.mark.parametrize(("mean", "error", "badge"), [
    (0.0, 0.0, "equal to f32"), (2e-4, 1e-6, "indistinguishable"), (2.9e-4, 1e-5, "indistinguishable or very close"),
    (3.2e-4, 1e-6, "very close"), (0.0048, 1e-5, "very close"), (0.0048, 2e-4, "very close or close"),
    (0.01, 1e-4, "close"), (0.03, 1e-3, "visibly different"), (0.079, 1e-3, "visibly different or clearly different"),
    (0.3, 0.01, "clearly different"),
])  # fmt: skip
def test_verdicts_are_as_certain_as_their_errors_allow(mean: float, error: float, badge: str) -> None:
    assert judged(mean, error).badge == badge
    assert ("More text would settle" in judged(mean, error).text) == (" or " in badge)


def test_nothing_is_indistinguishable_without_a_noise_floor() -> None:
    assert judged(1e-6, 1e-8, None).badge == "very close"
    assert "no noise floor" in judged(1e-6, 1e-8, None).text


def test_a_coarse_model_is_not_excused_by_its_own_noise() -> None:
    def of(name: str, mean: float, floor: float) -> dict[str, Any]:
        return {"name": name, "quality": {"divergence": {"mean": mean, "standard_error": 1e-5},
                                          "noise_floor": {"mean": floor}}}  # fmt: skip

    original, coarse = of("bf16", 1.3e-4, 1.2e-4), of("q2", 0.2, 0.1)
    assert verdict.verdict(coarse, original, [], "f32").badge == "clearly different"
    assert verdict.verdict(original, original, [], "f32").badge == "indistinguishable"


@pytest.mark.parametrize(("found", "said"), [
    ({"log_ratio": 0.0061, "standard_error": 0.0018, "clear": True}, r"(+1.00% ± 0.18%): more than chance."),
    ({"log_ratio": 0.0061, "standard_error": 0.004, "clear": False}, "less than a text of this length can show."),
    (None, "(+1.00%)."),  # of a report that has no windows: nothing is claimed
])  # fmt: skip
def test_perplexities_are_judged_by_their_paired_difference(found: Any, said: str) -> None:
    """q8 was "less than a text of this length can show", by errors that are the text's."""
    base = {"value": 24.97, "standard_error": 2.8}
    original, own = (
        {"name": "x", "quality": {"perplexity": one}}
        for one in (base, {**base, "value": 25.2197, "beside_original": found})
    )
    assert said in verdict.verdict(own, original, [], "f32").text


def test_a_report_has_one_noise_floor_for_a_variant_and_says_whose() -> None:
    """A verdict said "22 times the noise floor", bf16's, beside a column whose own floor was twelve times as high."""
    variants = [
        {"name": name, "original": name == "bf16", "options": {},
         "quality": {"divergence": {"mean": mean, "standard_error": 1e-5, "top1": 0.96},
                     "noise_floor": {"mean": floor, "top1": 0.97}}}
        for name, mean, floor in (("bf16", 1.3e-4, 1.31e-4), ("q8", 0.0029, 0.00156), ("f16", 2e-6, 1e-6))
    ]  # fmt: skip
    notes = {}
    for name, table in tables({"variants": variants, "settings": {"reference": "f32"}}).items():
        for label, cells in table.lines if table else ():
            if cells and "mean" in label:
                notes[name, label] = [cell.notes[-1] for cell in cells]
    for whose in notes.values():
        assert whose == [
            f"noise floor {one}" for one in ("0.000131 (bf16's)", "0.000131 (bf16's)", "0.00000100 (f16's)")
        ]
    assert len(notes) == 2
    said = [verdict.verdict(one, variants[0], variants, "f32").text for one in variants]
    assert "under 3 times the noise floor (bf16's, 0.000131)" in said[0]
    assert "22 times the noise floor (bf16's, 0.000131)" in said[1]


def test_no_multiple_of_next_to_nothing_is_told() -> None:
    """It once read "10,919,660,596 times the noise floor"."""
    text = judged(0.26, 0.01, 2.4e-11).text
    assert "far over the noise floor (x's, 2.40e-11)" in text
    assert "times" not in text
    assert "910 times the noise floor" in judged(0.091, 1e-4, 1e-4).text


def test_pinsker_bounds_what_the_verdict_says() -> None:
    """The share of sampled tokens that can differ is the total variation: never over sqrt(KLD / 2)."""
    import numpy as np

    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(50, 0.3), 200)
    q = 0.7 * p + 0.3 * rng.dirichlet(np.full(50, 0.3), 200)
    kld = (p * np.log(p / q)).sum(1).mean()
    assert 0.5 * np.abs(p - q).sum(1).mean() <= (kld / 2) ** 0.5
    bound = re.search(r"at most ([\d.]+)%", judged(float(kld), 0.0).text)
    assert bound
    assert float(bound[1]) == pytest.approx(100 * (kld / 2) ** 0.5, abs=0.06)
