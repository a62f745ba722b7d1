"""Windows are those of llama.cpp and of Hugging Face's guide, to the token; a Reader gives what one pass would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import KVStorage
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest, PronkError
from pronk.measure import windows as module
from pronk.measure.noise import over_windows
from pronk.measure.windows import Reader, Window, evaluation_text, windows
from pronk.torch_engine.backend import TorchBackend

IDS = list(range(100, 200))


def test_llama_cpps_windows() -> None:
    found = windows(IDS, 10)
    assert len(found) == 10
    # llama.cpp: n_ctx - 1 - n_ctx / 2 rows from n_ctx / 2 on, each predicting its next token.
    assert found[3] == Window(ids=[*range(130, 139)], first=5, targets=[136, 137, 138, 139])
    assert len(windows([*IDS, 200, 201], 10)) == 10  # what is left over is dropped
    assert windows(IDS, 11)[1] == Window([*range(111, 121)], 5, [117, 118, 119, 120, 121])
    assert len(windows(list(range(512)), 512)[0].targets) == 255


def test_the_token_that_texts_begin_with_replaces_the_first() -> None:
    assert windows(IDS, 10, bos=1)[3] == Window([1, *range(131, 139)], 5, [136, 137, 138, 139])


def test_fewer_windows_are_spread_over_the_text() -> None:
    assert [window.ids[0] for window in windows(IDS, 10, count=4)] == [100, 120, 150, 170]
    assert len(windows(IDS, 10, count=99)) == 10
    assert [window.ids[0] for window in windows(IDS, 10, 5, count=2)] == [100, 145]


def guide(length: int, ctx: int, stride: int) -> Iterator[tuple[range, range]]:
    """The loop of transformers' guide to perplexity: what each pass reads, and whose tokens count in it."""
    previous = 0
    for begin in range(0, length, stride):
        end = min(begin + ctx, length)
        counted = end - previous
        yield range(begin, end), range(max(end - counted, begin + 1), end)  # the labels are shifted by one inside
        previous = end
        if end == length:
            break


@pytest.mark.parametrize(
    ("length", "ctx", "stride"), [(100, 10, 5), (100, 10, 10), (97, 16, 3), (16, 16, 4), (17, 16, 16)]
)
def test_strided_windows_are_those_of_the_guide(length: int, ctx: int, stride: int) -> None:
    found = windows(range(length), ctx, stride)
    expected = [(read, counted) for read, counted in guide(length, ctx, stride) if counted]
    assert [[*window.ids, window.targets[-1]] for window in found] == [list(read) for read, _ in expected]
    # Where strides are as long as windows, the guide's labels lose the first token of each; so do ours.
    assert [list(window.targets) for window in found] == [list(counted) for _, counted in expected]
    for window in found:
        assert len(window.ids) - window.first == len(window.targets)
    if stride < ctx:
        assert [token for window in found for token in window.targets] == list(range(1, length))


@pytest.mark.parametrize(
    ("length", "options", "word"),
    [
        (9, {"ctx": 10}, "has 9 tokens, and a window takes 10"),
        (0, {"ctx": 10}, "has 0 tokens"),
        (100, {"ctx": 3}, "ctx must be"),
        (100, {"ctx": 10, "stride": 0}, "stride must be"),
        (100, {"ctx": 10, "stride": 11}, "would skip"),
        (100, {"ctx": 10, "count": 0}, "count must be"),
        (100, {"ctx": 10.0}, "ctx must be"),
    ],
)
def test_what_no_window_can_be_made_of(length: int, options: dict, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        windows(range(length), **options)


CONFIG = tiny_config()
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))
TEXT = [(31 * n * n + 7 * n) % CONFIG.vocab_size for n in range(600)]


def backend(**options: str) -> CpuBackend:
    return CpuBackend.from_checkpoint(CHECKPOINT, threads=1, ctx_size=600, **options)


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_a_reader_gives_the_logits_of_one_pass(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_BYTES", 7 * 4 * CONFIG.vocab_size)  # seven rows
    engine = backend(kv_dtype=kv_dtype)
    reader = Reader(engine, 300)
    for window in windows(TEXT, 300):  # two: the second overwrites what the first left
        whole = engine.forward(Batch.of([Run(window.ids, logits="all")]), None)
        pieces, targets = zip(*reader.read(window), strict=True)
        assert max(map(len, pieces)) == 7
        assert list(map(len, targets)) == list(map(len, pieces))
        assert [token for part in targets for token in part] == window.targets
        np.testing.assert_array_equal(np.concatenate(pieces), whole[window.first :])


@pytest.mark.parametrize("scheme", ["absmax", "zeropoint", "absmax-row"])
def test_a_window_is_one_batch_for_schemes_whose_tokens_share_a_scale(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shared a scale was as many rows as LOGITS_BYTES made of a window: a divergence of 0.15 was one of 0.7."""
    engine = TorchBackend.from_checkpoint(CHECKPOINT, quantize=scheme, device="cpu", ctx_size=600)
    assert engine.shares_scales == (scheme != "absmax-row")
    first, second = windows(TEXT, 300)
    whole = engine.forward(Batch.of([Run(second.ids, logits="all")]), None)[second.first :]
    for rows in (7, 60, 1000):
        monkeypatch.setattr(module, "LOGITS_BYTES", rows * 4 * CONFIG.vocab_size)
        reader = Reader(engine, 300)
        list(reader.read(first))
        pieces, targets = zip(*reader.read(second), strict=True)
        assert max(map(len, pieces)) == min(rows, 149)
        assert [token for part in targets for token in part] == second.targets
        # No more than float32's own rounding: an activation on another side of two codes would be off by a step.
        np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4 if engine.shares_scales else 0.05)
    reader.shares_scales = False  # the inverse: read in pieces, it is something else
    pieces, _ = zip(*reader.read(second), strict=True)
    if scheme != "absmax-row":
        assert np.abs(np.concatenate(pieces) - whole).max() > 0.01


def test_a_window_beyond_the_context_is_refused() -> None:
    with pytest.raises(BadRequest, match="and the context has 600"):
        Reader(backend(), 601)


def test_logits_that_are_no_numbers_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuBackend.forward

    def broken(self: CpuBackend, batch: Batch, kv: KVStorage | None) -> np.ndarray:
        logits = forward(self, batch, kv)
        logits[-1:, 3] = np.nan
        return logits

    monkeypatch.setattr(CpuBackend, "forward", broken)
    with pytest.raises(PronkError, match="not numbers"):
        list(Reader(backend(), 64).read(windows(TEXT, 64)[0]))


def standard_error(values: np.ndarray, ends: list[int]) -> float | None:
    """Of a number for each prediction, in windows that end at `ends`."""
    means = [part.mean() for part in np.split(values, ends[:-1])]
    return over_windows(means, np.diff([0, *ends]).tolist()).error


def test_the_standard_error_is_over_windows() -> None:
    rng = np.random.default_rng(0)
    # Rows that say the same thing 50 times over: forty windows are forty samples, not two thousand.
    values = np.repeat(rng.normal(size=40), 50)
    found = standard_error(values, list(range(50, 2001, 50)))
    assert found == pytest.approx(values[::50].std(ddof=1) / 40**0.5)
    assert found > 6 * values.std(ddof=1) / len(values) ** 0.5
    assert standard_error(values, [2000]) is None
    # Windows of unequal length: a mean of all rows, whose error a simulation gives.
    ends = np.cumsum(rng.integers(1, 100, size=60))
    lengths = np.diff([0, *ends])
    draws = [np.repeat(rng.normal(size=60), lengths) for _ in range(2000)]
    errors = [standard_error(draw, list(ends)) for draw in draws]
    assert np.mean(errors) == pytest.approx(np.std([draw.mean() for draw in draws]), rel=0.1)


def test_the_text_that_ships() -> None:
    words = evaluation_text().split()
    assert 3500 <= len(words) <= 5500
    assert all(character.isprintable() or character == "\n" for character in evaluation_text())
