"""Where texts part and how much they repeat themselves, against counts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.llm import LLM
from pronk.measure import texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path, quantize: str) -> LLM:
    return pronk.load(folder, engine="cpu", quantize=quantize, threads=1, prefix_cache=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "parts"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),  # one ended earlier
        ([], [], None),
        ([], [5], 0),
    ],
)
def test_first_divergence(a: list[int], b: list[int], parts: int | None) -> None:
    assert texts.first_divergence(a, b) == texts.first_divergence(b, a) == parts


def test_distinct() -> None:
    assert texts.distinct([1, 1, 1, 1], 1) == 0.25
    assert texts.distinct([1, 2, 1, 2, 1], 2) == 0.5  # 12, 21, 12, 21
    assert texts.distinct([1], 2) is None


def test_a_loop_repeats_itself_and_a_series_does_not() -> None:
    loop, series = [1, 2, 3, 4] * 8, list(range(32))
    assert texts.variety([series])["repetition"] == 0
    assert texts.variety([loop])["repetition"] == pytest.approx(1 - 4 / 29)
    assert texts.variety([loop, series])["repetition"] == pytest.approx((1 - 4 / 29) / 2)
    assert texts.variety([[1, 2]]) == {"distinct_1": 1.0, "distinct_2": 1.0, "repetition": None}


def test_pairs_are_compared_place_by_place() -> None:
    def of(*tokens: list[int]) -> list[dict[str, object]]:
        return [{"tokens": one, "text": ""} for one in tokens]

    found = texts.compared(of([1, 2, 3, 4], [5, 6], [7, 8]), of([1, 2, 9, 4], [5, 6], [0, 8, 1]))
    assert found["first_divergences"] == [2, None, 0]
    assert found["first_divergence"] == 2  # of 2, 2 (to the end) and 0
    assert found["identical"] == 1
    assert found["equal_share"] == (3 + 2 + 1) / (4 + 2 + 3)


def test_a_model_writes_what_it_writes(folder: Path) -> None:
    prompts = ["Hello", "The old"]
    one, other = (texts.write(load(folder, "f32"), prompts, new_tokens=12) for _ in range(2))
    for mode in texts.MODES:
        found = texts.compared(one[mode], other[mode])
        assert (found["equal_share"], found["identical"], found["first_divergences"]) == (1, 2, [None, None])
        assert found["reference"] == {key: found[key] for key in found["reference"]}
    table = texts.side_by_side(prompts, {"reference": one, "own": other})
    assert [(row["mode"], row["prompt"]) for row in table] == [
        (mode, prompt) for mode in ("greedy", "seeded") for prompt in prompts
    ]
    alone = load(folder, "f32").generate("Hello", max_new_tokens=12)
    assert not isinstance(alone, list)
    assert table[0]["outputs"] == {"reference": alone.text, "own": alone.text}


def test_fewer_bits_part_sooner(folder: Path) -> None:
    """The inverse of the test above: what differs is seen to differ."""
    told: list[tuple[str, int, int]] = []
    wide, fine, coarse = (
        texts.write(load(folder, kind), new_tokens=16, progress=lambda *t: told.append(t))["seeded"]
        for kind in ("f32", "bf16", "q4")
    )
    assert texts.compared(wide, coarse)["equal_share"] < texts.compared(wide, fine)["equal_share"]
    assert told == [("writing", n, 2) for n in (0, 1)] * 3
