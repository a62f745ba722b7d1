"""Divergence is what the formula says, at a bounded cost, with an error that knows of windows."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure import divergence as module
from pronk.measure import windows as window_module
from pronk.measure.divergence import EDGES, divergence, noise_floor, with_floors
from pronk.measure.noise import Mean, standing
from pronk.measure.windows import windows

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
CHECKPOINT = in_memory(CONFIG, WEIGHTS)
IDS = [(31 * n * n + 7 * n) % CONFIG.vocab_size for n in range(330)]


def llm(quantize: str = "f32", **options: Any) -> LLM:
    return LLM(
        quantize, CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, quantize=quantize, threads=1, **options)
    )


def by_torch(reference: LLM, own: LLM, ctx: int) -> dict[str, Any]:
    """The same, all at once, by torch's own functions in float64."""
    found = []
    for at in range(0, len(IDS) - ctx + 1, ctx):
        ids = IDS[at : at + ctx]
        p, q = (torch.from_numpy(m.logits(ids)).double().log_softmax(-1)[ctx // 2 : -1] for m in (reference, own))
        targets = torch.tensor(ids[ctx // 2 + 1 :])[:, None]
        kld = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        right = [side.gather(-1, targets)[:, 0] for side in (p, q)]
        found.append(torch.stack([kld, (p.argmax(-1) == q.argmax(-1)).double(), *right]))
    means = torch.stack([part[0].mean() for part in found])
    kld, same, true, mine = torch.cat(found, -1)
    return {
        "mean": kld.mean(),
        "standard_error": means.std() / len(found) ** 0.5,  # windows of one size
        "median": kld.quantile(0.5),
        "p99": kld.quantile(0.99),
        "max": kld.max(),
        "top1": same.mean(),
        "rms_dp": (mine.exp() - true.exp()).square().mean().sqrt(),
        "perplexity": {
            "reference": (-true.mean()).exp(),
            "own": (-mine.mean()).exp(),
            "log_ratio": (true - mine).mean(),
            "standard_error": torch.stack([(part[2] - part[3]).mean() for part in found]).std() / len(found) ** 0.5,
        },
        "rows": len(kld),
    }


@pytest.mark.parametrize("quantize", ["bf16", "int8", "q4"])
def test_it_is_what_the_formula_says(quantize: str) -> None:
    reference, own = llm(), llm(quantize)
    found = divergence(reference, own, IDS, ctx=66)
    assert {key: found[key] for key in ("rows", "windows", "ctx")} == {"rows": 5 * 32, "windows": 5, "ctx": 66}
    expected = by_torch(reference, own, 66)
    for key, value in expected.pop("perplexity").items():
        assert found["perplexity"][key] == pytest.approx(float(value), rel=1e-9)
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-9), key
    assert found["mean"] > 0


def test_a_model_does_not_diverge_from_itself() -> None:
    found = divergence(llm(), llm(), IDS, ctx=66)
    assert (found["mean"], found["max"], found["rms_dp"], found["top1"]) == (0, 0, 0, 1)
    assert found["histogram"]["counts"][0] == found["rows"]


def test_more_bits_diverge_less() -> None:
    means = [divergence(llm(), llm(name), IDS, ctx=66)["mean"] for name in ("q4", "int8", "bf16", "f32")]  # type: ignore[arg-type]
    assert means == sorted(means, reverse=True)
    assert means[-1] == 0


def test_keys_and_values_in_8_bits_are_seen() -> None:
    """The cost of an int8 KV cache: the same weights, and a divergence all the same."""
    assert 0 < divergence(llm(), llm(kv_dtype="int8"), IDS, ctx=66)["mean"] < 0.1


def test_targets_that_are_a_token_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that has learned to repeat one text: it knows the next token, and none that comes two later."""
    sure = in_memory(CONFIG, {**WEIGHTS, **_copying()})
    own = LLM("sure", sure, None, CpuBackend.from_checkpoint(sure, threads=1))
    ids = [n % CONFIG.vocab_size for n in range(330)]
    assert divergence(own, own, ids, ctx=66)["perplexity"]["own"] < 1.01

    def shifted(*arguments: Any, **options: Any) -> list[window_module.Window]:
        return [
            window_module.Window(w.ids, w.first, [(target + 1) % CONFIG.vocab_size for target in w.targets])
            for w in windows(*arguments, **options)
        ]

    monkeypatch.setattr(module, "windows", shifted)
    assert divergence(own, own, ids, ctx=66)["perplexity"]["own"] > 100


def _copying() -> dict[str, np.ndarray]:
    """Layers that add nothing, and a head that finds in each embedding the token after it."""
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(CONFIG.vocab_size, CONFIG.hidden_size)).astype(np.float32)
    silent = {name: np.zeros_like(array) for name, array in WEIGHTS.items() if "o_proj" in name or "down_proj" in name}
    return {
        **silent,
        "model.norm.weight": np.ones(CONFIG.hidden_size, np.float32),
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": np.roll(embeddings, 1, axis=0),
    }


def test_the_histogram_counts_every_row() -> None:
    kld = np.array([0.0, 1e-300, 1e-12, 10**-0.9, 0.11, 3.0, 1e9])
    counts = module.histogram(kld)["counts"]
    assert sum(counts) == len(kld)
    assert counts[0] == 3
    assert counts[-1] == 1
    assert counts[int(np.searchsorted(EDGES, -0.9, "right")) - 1] == 2


def test_the_noise_floor_is_far_below_a_quantization() -> None:
    floor = noise_floor(llm(), IDS, ctx=66)
    assert floor["batch_invariant"]
    assert "last place" in floor["how"]
    assert 0 < floor["mean"] < divergence(llm(), llm("bf16"), IDS, ctx=66)["mean"] / 100


def test_floors_come_with_a_divergence_at_the_price_of_one_more_reading() -> None:
    reference, own = llm(), llm("int8")
    found = with_floors(reference, own, IDS, ctx=66)
    assert found == {
        "divergence": divergence(reference, own, IDS, ctx=66),
        "reference_floor": noise_floor(reference, IDS, ctx=66),
        "own_floor": noise_floor(own, IDS, ctx=66),
    }
    assert beside_its_floor(found) == "above"
    assert beside_its_floor(with_floors(reference, llm(), IDS, ctx=66)) == "within"


def beside_its_floor(found: dict[str, Any]) -> str:
    figure, floor = (
        Mean(found[name]["mean"], found[name]["standard_error"]) for name in ("divergence", "reference_floor")
    )
    return standing(figure, [floor])


def test_progress_is_of_the_text() -> None:
    told: list[tuple[str, int, int]] = []
    divergence(llm(), llm("q8"), IDS, ctx=66, count=2, progress=lambda *t: told.append(t))
    assert told == [("reading", 0, 130), ("reading", 65, 130), ("reading", 130, 130)]


def test_other_vocabularies_and_short_texts_are_refused() -> None:
    config = tiny_config(vocab_size=95)
    checkpoint = in_memory(config, random_weights(config))
    other = LLM("other", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, threads=1))
    with pytest.raises(BadRequest, match="f32 predicts 96 tokens and other 95"):
        divergence(llm(), other, IDS, ctx=66)
    with pytest.raises(BadRequest, match="has 330 tokens, and a window takes 512"):
        divergence(llm(), llm(), IDS)
    with pytest.raises(BadRequest, match="and the context has 128"):
        divergence(llm(), llm(), IDS, ctx=200)


class Wide:
    """A backend with the vocabulary of Llama 3, whose logits cost nothing to make."""

    config, ctx_size, shares_scales = SimpleNamespace(vocab_size=128256), 4096, False

    def __init__(self) -> None:
        self.row = np.random.default_rng(0).normal(size=self.config.vocab_size).astype(np.float32)

    def new_kv(self, blocks: int, size: int) -> None: ...

    def forward(self, batch: Batch, kv: None) -> np.ndarray:
        assert len(batch.logits_rows) * self.config.vocab_size * 4 <= 16 << 20
        return np.broadcast_to(self.row, (len(batch.logits_rows), len(self.row))).copy()


def test_a_large_vocabulary_takes_bounded_memory() -> None:
    wide: Any = SimpleNamespace(backend=Wide(), config=Wide.config, name="wide", has_tokenizer=False)
    tracemalloc.start()
    found = divergence(wide, wide, list(range(320)), ctx=320)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["rows"] == 159
    # Both models' logits in pieces of 16 MiB, and the next of one; and 8 rows of float64, a few times over.
    assert peak < 3 * (16 << 20) + 8 * 8 * 8 * 128256
