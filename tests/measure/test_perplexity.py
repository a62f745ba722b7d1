"""Perplexity is that of transformers, of a float64 LLaMA, and of llama.cpp's own loop, whichever way a text is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from peers import hugging_face
from tiny import byte_tokenizer, in_memory, random_weights, tiny_config

from pronk import tokenizer as tokenizers
from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.slots import Wish
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure import perplexity as module
from pronk.measure.perplexity import beside, perplexity
from pronk.measure.windows import Window, windows

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
IDS = [(31 * n * n + 7 * n) % CONFIG.vocab_size for n in range(250)]


def llm(quantize: Wish = "f32") -> LLM:
    checkpoint = in_memory(CONFIG, WEIGHTS)
    return LLM("tiny", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, quantize=quantize, threads=1))


def log_probabilities(ids: Sequence[int]) -> np.ndarray:
    """[T, V], by the float64 oracle."""
    logits = oracle.logits(CONFIG, WEIGHTS, ids)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("ctx", [50, 33])
def test_llama_cpps_protocol(ctx: int) -> None:
    """Its loop, in its own terms: rows n_ctx / 2 to n_ctx - 2 of every chunk, each for the token after it."""
    nll, count, means = 0.0, 0, []
    for chunk in range(len(IDS) // ctx):
        tokens, first, before = IDS[chunk * ctx : (chunk + 1) * ctx], ctx // 2, nll
        rows = log_probabilities(tokens)
        for row in range(first, ctx - 1):
            nll -= rows[row, tokens[row + 1]]
        count += ctx - first - 1
        means.append((nll - before) / (ctx - first - 1))
    found = perplexity(llm(), IDS, ctx=ctx)
    value = math.exp(nll / count)
    assert found["value"] == pytest.approx(value, rel=1e-6)
    assert found["standard_error"] == pytest.approx(value * np.std(means, ddof=1) / len(means) ** 0.5, rel=1e-5)
    assert (found["rows"], found["windows"], found["ctx"], found["stride"]) == (count, len(IDS) // ctx, ctx, None)
    assert found["protocol"].startswith("llama.cpp's")


@pytest.mark.parametrize(("ctx", "stride"), [(50, 20), (64, 64), (250, 100)])
def test_hugging_faces_protocol(ctx: int, stride: int) -> None:
    """transformers' own loss with its guide's labels."""
    peer, previous = hugging_face(CONFIG, WEIGHTS), 0
    nll, count = 0.0, 0
    whole = torch.tensor([IDS])
    for begin in range(0, len(IDS), stride):
        end = min(begin + ctx, len(IDS))
        labels = whole[:, begin:end].clone()
        labels[:, : -(end - previous)] = -100
        rows = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            nll += rows * peer(whole[:, begin:end], labels=labels).loss.item()
        count, previous = count + rows, end
        if end == len(IDS):
            break
    context = perplexity_of_any_length(ctx, stride)
    assert context["value"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert context["rows"] == count
    assert context["protocol"].startswith("Hugging Face's")


def perplexity_of_any_length(ctx: int, stride: int) -> dict:
    checkpoint = in_memory(CONFIG, WEIGHTS)
    engine = CpuBackend.from_checkpoint(checkpoint, threads=1, ctx_size=256)
    return perplexity(LLM("tiny", checkpoint, None, engine), IDS, ctx=ctx, stride=stride)


def test_targets_that_are_a_token_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = perplexity(llm(), IDS, ctx=50)["value"]

    def shifted(*arguments: object, **options: object) -> list[Window]:
        return [Window(w.ids, w.first, [w.ids[w.first], *w.targets[:-1]]) for w in windows(*arguments, **options)]

    monkeypatch.setattr(module, "windows", shifted)
    assert perplexity(llm(), IDS, ctx=50)["value"] != pytest.approx(right, rel=0.01)


def test_windows_begin_as_texts_do(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=259)
    checkpoint = in_memory(config, random_weights(config))
    codec = tokenizers.load(tokenizers.find(byte_tokenizer(tmp_path / "tokenizer.bin")))
    assert codec.add_bos
    with_bos = LLM("tiny", checkpoint, codec, CpuBackend.from_checkpoint(checkpoint, threads=1))
    without = LLM("tiny", checkpoint, None, with_bos.backend)
    ids = codec.encode("A text of a few windows, each of which begins with the token that begins a text. " * 2)
    replaced = [codec.bos_id if n % 40 == 0 else token for n, token in enumerate(ids)]
    found = perplexity(with_bos, ids, ctx=40)
    assert found["value"] == perplexity(without, replaced, ctx=40)["value"] != perplexity(without, ids, ctx=40)["value"]
    assert f"replaced by token {codec.bos_id}" in found["protocol"]
    # Hugging Face's windows are left as they are.
    assert perplexity(with_bos, ids, ctx=40, stride=20)["value"] == perplexity(without, ids, ctx=40, stride=20)["value"]


def test_fewer_windows_and_progress() -> None:
    told: list[tuple[str, int, int]] = []
    found = perplexity(llm(), IDS, ctx=50, count=2, progress=lambda *t: told.append(t))
    assert (found["windows"], found["rows"]) == (2, 48)
    assert told == [("reading", 0, 98), ("reading", 49, 98), ("reading", 98, 98)]
    assert perplexity(llm(), IDS, ctx=50, count=1)["standard_error"] is None


def test_two_models_on_one_text_are_compared_window_by_window() -> None:
    """Their figures differ by far less than the errors of the two, which are those of the text: a paired difference is
    sure where the figures alone, compared as of two texts, say nothing."""
    base = perplexity(llm(), IDS, ctx=50)
    own = perplexity(llm("q8"), IDS, ctx=50)
    found = beside(base, own)
    by_hand = []
    for at in range(0, len(IDS), 50):  # from logits, by torch
        sides = []
        for model in (llm("q8"), llm()):
            logits = torch.from_numpy(model.logits(IDS[at : at + 50])).double()[25:-1]
            sides.append(torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[at + 26 : at + 50])))
        by_hand.append(float(sides[0] - sides[1]))
    assert found["log_ratio"] == pytest.approx(np.mean(by_hand), rel=1e-9)
    assert found["log_ratio"] == pytest.approx(math.log(own["value"] / base["value"]), rel=1e-9)
    assert found["standard_error"] == pytest.approx(np.std(by_hand, ddof=1) / 5**0.5, rel=1e-9)
    apart = math.hypot(*(one["standard_error"] / one["value"] for one in (base, own)))
    assert found["standard_error"] < apart / 10
    # As much again for every window is no error at all, however different windows are.
    shifted = [value + 0.01 for value in base["per_window"]["surprise"]]
    worse = {**base, "per_window": {**base["per_window"], "surprise": shifted}}
    assert beside(base, worse)["clear"]
    assert beside(base, base) == {"log_ratio": 0, "standard_error": 0, "clear": False}
    one = perplexity(llm(), IDS, ctx=50, count=1)
    assert beside(one, one)["clear"] is None
    with pytest.raises(BadRequest, match="same windows"):
        beside(base, one)


def test_a_text_shorter_than_a_window() -> None:
    with pytest.raises(BadRequest, match="has 250 tokens, and a window takes 512"):
        perplexity(llm(), IDS)
