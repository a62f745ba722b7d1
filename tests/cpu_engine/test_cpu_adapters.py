"""Adapters beside packed weights: the bits of any company, several at once, and the product over what weights are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from adapters import random_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_bitwise import CONFIG, FORMATS, checkpoint, ids
from tiny import in_memory, random_weights, tiny_config

from pronk import _native
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint.adapter import TARGETS, Adapter, LowRank
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest

BLOCK = 64
# Of all modules, of some (only an up_proj without its gate; k without q), wider than a panel of 64 rows.
GIVEN = (
    random_adapter(CONFIG, rank=4, seed=1),
    random_adapter(CONFIG, rank=3, seed=2, targets=("k_proj", "up_proj", "down_proj")),
    random_adapter(CONFIG, rank=40, seed=3, targets=("q_proj", "v_proj", "o_proj", "gate_proj")),
)


def plain(format: str, isa: str | None = None, threads: int = 2) -> CpuBackend:
    quantize = "auto" if format == "q4_0" else format
    return CpuBackend.from_checkpoint(checkpoint(format), quantize=quantize, isa=isa, threads=threads)


@cache
def adapted(format: str, isa: str, threads: int) -> CpuBackend:
    backend = plain(format, isa, threads)
    assert [backend.attach(one) for one in GIVEN] == [1, 2, 3]
    return backend


def free(engine: CpuBackend, text: list[int], adapter: int | None = None) -> np.ndarray:
    return engine.forward(Batch.of([Run(text, logits="all", adapter=adapter)]), None)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_texts_of_several_adapters_have_the_bits_that_each_has_alone(
    format: str, isa: str, data: st.DataObject
) -> None:
    """Any chunks, beside texts of other adapters and of none, on one thread or two."""
    one, two = (adapted(format, isa, threads) for threads in (1, 2))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=5), label="lengths")
    chosen = [data.draw(st.integers(0, 3), label="adapter") for _ in lengths]
    texts = [ids(length, seed) for seed, length in enumerate(lengths)]
    tables = [range(3 * n, 3 * n + 3) for n in range(len(texts))]
    kv = two.new_kv(3 * len(texts), BLOCK)
    done, rows = [0] * len(texts), [[] for _ in texts]
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        steps = [(n, data.draw(st.integers(1, 90))) for n in range(len(texts)) if done[n] < lengths[n]]
        runs = [Run(texts[n][done[n] : done[n] + s], done[n], tables[n], "all", chosen[n]) for n, s in steps]
        logits = two.forward(Batch.of(runs), kv)
        for (n, _), run in zip(steps, runs, strict=True):
            rows[n].append(logits[: len(run.token_ids)])
            logits, done[n] = logits[len(run.token_ids) :], done[n] + len(run.token_ids)
    for text, adapter, found in zip(texts, chosen, rows, strict=True):
        assert (np.concatenate(found) == free(one, text, adapter)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_those_of_the_model_without_it(format: str) -> None:
    """Text without an adapter has the bits of a model that knows of none; with one it has others."""
    backend, text = adapted(format, _native.isas()[0], 2), ids(70, 0)
    expected = free(plain(format), text)
    assert (free(backend, text) == expected).all()
    assert (free(backend, text, 0) == expected).all()
    for number in (1, 2, 3):
        assert (free(backend, text, number) != expected).any(axis=1).all()


def merged(backend: CpuBackend, format: str, given: Adapter | None) -> CpuBackend:
    """The weights that the backend computes with, in float32, and the adapter's product added to them."""
    floats = backend.dequantized(checkpoint(format))
    return CpuBackend.from_checkpoint(adapters.applied(floats, given) if given else floats, quantize="f32")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_it_adds_its_product_to_what_the_weights_are(format: str, number: int) -> None:
    """As far from float32 as the format is without it, but for the roundings of the adapter's own factors."""
    backend, text = adapted(format, _native.isas()[0], 2), ids(64, 1)
    found, expected = free(backend, text, number), free(merged(backend, format, GIVEN[number - 1]), text)
    base = free(merged(backend, format, None), text)
    exact, does = format in ("f32", "f16"), np.std(found - base)
    noise = 1e-6 if exact else np.std(free(backend, text) - base)
    # Of the adapter's own product: its factors, and activations, are rounded to 2^-8 of their largest at most.
    assert np.std(found - expected) <= 1.5 * noise + (1e-5 if exact else 0.02) * does
    assert does > 5 * np.std(found - expected)  # inverse: without its product the text would be far away


def test_any_size_of_its_numbers_is_one_to_it() -> None:
    """Factors are kept in few bits around 1: huge and tiny ones, and scales, come to the same product."""
    product = {name: LowRank(p.a * 2.0**20, p.b * 2.0**-40, p.scale * 2.0**20) for name, p in GIVEN[0].products.items()}
    backend, text = plain("q4"), ids(20, 0)
    first, second = backend.attach(GIVEN[0]), backend.attach(replace(GIVEN[0], products=product))
    assert (free(backend, text, first) == free(backend, text, second)).all()


@pytest.mark.parametrize("format", ["q8", "int8", "bf16", "f32"])
def test_each_rank_may_have_a_size_of_its_own(format: str) -> None:
    """Second factors in bytes have a scale a row, which one large rank would take from all others."""
    product = {}
    for name, p in GIVEN[2].products.items():
        sizes = np.float32(2.0) ** (np.arange(len(p.a)) % 4)
        product[name] = LowRank(p.a / sizes[:, None], p.b * sizes, p.scale)
    backend, text = plain(format), ids(20, 0)
    first, second = backend.attach(GIVEN[2]), backend.attach(replace(GIVEN[2], products=product))
    assert (free(backend, text, first) == free(backend, text, second)).all()


@pytest.mark.parametrize("format", ["q4", "q8", "int8", "llm-int8"])
def test_small_rows_of_a_second_factor_are_as_exact_as_large_ones(format: str) -> None:
    """A scale of all rows, or ranks each brought to 1, would round rows by the largest: up to a third was lost."""
    small = {name: p for name, p in GIVEN[0].products.items() if "v_proj" in name}
    large = {}
    for name, p in small.items():
        b = p.b.copy()
        b[1] *= 512
        large[name] = replace(p, b=b)
    backend, text = plain(format), ids(20, 0)
    numbers = [0, *(backend.attach(replace(GIVEN[0], products=one)) for one in (small, large))]
    base, found, beside = (backend.activations(Batch.of([Run(text, adapter=n)]), None)[0, "o"] for n in numbers)
    # What attention makes of all rows of v but the large one, in each head.
    others = np.arange(base.shape[-1]) % CONFIG.head_dim != 1
    assert (beside != found).any()
    assert (beside == found)[..., others].all()
    assert (base != found).any()


@pytest.mark.parametrize("format", ["q4", "q8", "int8", "llm-int8"])
def test_a_small_rank_is_not_lost_beside_large_ones(format: str) -> None:
    """In bytes with a scale a row, less than 1/254 of the row's largest number was nothing, however large its u."""
    of_v = {name: p for name, p in GIVEN[0].products.items() if "v_proj" in name}

    def scaled(first: float, others: float) -> Adapter:
        products = {n: replace(p, b=p.b * np.where(np.arange(len(p.a)) == 0, first, others)) for n, p in of_v.items()}
        return replace(GIVEN[0], products={n: replace(p, b=p.b.astype(np.float32)) for n, p in products.items()})

    backend = CpuBackend.from_checkpoint(checkpoint(format), quantize=format, kv_dtype="f32")
    text = ids(20, 0)
    given = [0, *(backend.attach(scaled(*sizes)) for sizes in [(0.003, 0), (0.003, 1), (-0.003, 1)])]
    # What attention makes of the first layer's values is a sum of what ranks add to them.
    base, alone, plus, minus = (backend.activations(Batch.of([Run(text, adapter=n)]), None)[0, "o"] for n in given)
    assert np.std((plus - minus) / 2 - (alone - base)) < 0.02 * np.std(alone - base)


@pytest.mark.parametrize("isa", _native.isas())
def test_sums_of_many_ranks_fit(isa: str) -> None:
    """All ranks alike, the largest sums of bytes that there are: 32 bits hold those of 512, and not those of 600."""
    one = {name: LowRank(p.a[:1], p.b[:, :1], p.scale) for name, p in GIVEN[0].products.items()}

    def repeated(rank: int) -> Adapter:
        products = {
            name: LowRank(np.repeat(p.a, rank, axis=0), np.repeat(p.b, rank, axis=1), p.scale / rank)
            for name, p in one.items()
        }
        return replace(GIVEN[0], products=products)

    backend, text = plain("q8", isa), ids(20, 0)
    expected, most, more = (free(backend, text, backend.attach(repeated(rank))) for rank in (1, 512, 600))
    assert (most == expected).all()
    assert np.std(more - expected) < 0.03 * np.std(expected - free(backend, text))  # which is not in bytes


@pytest.mark.parametrize(("up", "down"), [(2.0**120, 2.0**-120), (2.0**-120, 2.0**120), (1.0, 2.0**-130)])
def test_no_power_of_two_overflows(up: float, down: float) -> None:
    """Numbers near the ends of float32's range once gave NaN, or others."""
    given = {
        name: LowRank(p.a * np.float32(up), p.b * np.float32(down), p.scale) for name, p in GIVEN[0].products.items()
    }
    backend, text = plain("f32"), ids(20, 0)
    found = free(backend, text, backend.attach(replace(GIVEN[0], products=given)))
    expected = free(backend, text, backend.attach(GIVEN[0])) if up * down == 1 else free(backend, text)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_product_of_infinite_scale_is_refused() -> None:
    given = {
        name: LowRank(p.a * np.float32(2.0**120), p.b * np.float32(2.0**20), p.scale)
        for name, p in GIVEN[0].products.items()
    }
    with pytest.raises(BadRequest, match="adapter: the product of an adapter's factors is too large; merge it"):
        plain("q8").attach(replace(GIVEN[0], products=given))


def test_numbers_that_differ_much_keep_their_own() -> None:
    """In 16 bits the smaller ones were lost beside one that is a million times as large."""
    products = {}
    for name, p in GIVEN[0].products.items():
        b, a = p.b.copy(), p.a.copy()
        b[0, 0], a[0] = 1e6, 0  # which does nothing itself
        products[name] = LowRank(a, b, p.scale)
    alike = {
        n: LowRank(p.a, np.where(np.abs(p.b) > 1e5, 0, p.b).astype(np.float32), p.scale) for n, p in products.items()
    }
    backend, text = plain("q8"), ids(20, 0)
    found, expected = (
        free(backend, text, backend.attach(replace(GIVEN[0], products=one))) for one in (products, alike)
    )
    assert np.std(found - expected) < 0.05 * np.std(expected)


def test_zeros_change_nothing() -> None:
    zeros = {name: replace(p, b=np.zeros_like(p.b)) for name, p in GIVEN[0].products.items()}
    backend, text = plain("int8"), ids(20, 0)
    assert (free(backend, text, backend.attach(replace(GIVEN[0], products=zeros))) == free(backend, text)).all()


def test_greedy_text_through_lookahead() -> None:
    """The pass that is begun ahead has the adapters of the runs that it goes on with, and is no other's."""
    config = tiny_config(vocab_size=40, max_position_embeddings=256)
    given = in_memory(config, random_weights(config))
    backends = [CpuBackend.from_checkpoint(given, quantize="q8", threads=threads) for threads in (1, 2)]
    for backend in backends:
        for seed in (1, 2):
            backend.attach(random_adapter(config, seed=seed, size=1.0))
    texts: list[list[list[int]]] = []
    for backend in backends:
        kv, tokens = backend.new_kv(3, BLOCK), [[1], [1], [1]]
        for step in range(60):
            # From time to time another one's turn at the same text and blocks.
            runs = [Run(t[-1:], len(t) - 1, [n], adapter=(n + step // 20) % 3) for n, t in enumerate(tokens)]
            for text, row in zip(tokens, backend.forward(Batch.of(runs), kv), strict=True):
                text.append(int(row.argmax()))
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert len({tuple(text[:20]) for text in texts[0]}) == 3


def test_attached_and_detached_while_the_model_is_used() -> None:
    backend, text = plain("q8"), ids(30, 0)
    before = backend.nbytes
    first = backend.attach(GIVEN[0])
    assert backend.nbytes > before
    with_first = free(backend, text, first)
    second = backend.attach(GIVEN[1])
    assert (free(backend, text, first) == with_first).all()
    backend.detach(first)
    third = backend.attach(GIVEN[0])  # in the place of the first
    assert len({first, second, third}) == 3, "a cache must not take one for another"
    assert (free(backend, text, third) == with_first).all()
    backend.detach(second)
    backend.detach(third)
    assert backend.nbytes == before
    assert not backend.model.nbytes - before


def test_runs_that_name_none_have_the_backend_s() -> None:
    backend, text = plain("q8"), ids(30, 0)
    base, backend.adapter = free(backend, text), backend.attach(GIVEN[0])
    assert (free(backend, text) == free(backend, text, 1)).all()
    assert (free(backend, text, 0) == base).all()
    mixed = backend.forward(Batch.of([Run(text, logits="all"), Run(text, logits="all", adapter=0)]), None)
    assert (mixed[: len(text)] == free(backend, text, 1)).all()
    assert (mixed[len(text) :] == base).all()


def test_embeddings_are_adapted_by_merging_alone() -> None:
    product = LowRank(np.ones((2, CONFIG.hidden_size), np.float32), np.ones((CONFIG.vocab_size, 2), np.float32), 1.0)
    given = Adapter(Path("mine"), {"model.embed_tokens": product}, {}, 0)
    with pytest.raises(BadRequest, match=r"mine: adapts model.embed_tokens, beside which nothing is kept; merge"):
        plain("q8").attach(given)
    model, beside = adapters.apart(checkpoint("f32"), replace(given, products={**given.products, **GIVEN[0].products}))
    assert beside.products == GIVEN[0].products
    embedding = checkpoint("f32").tensors["model.embed_tokens.weight"].read()
    np.testing.assert_allclose(model.tensors["model.embed_tokens.weight"].read(), embedding + 2, rtol=1e-6)


@pytest.mark.parametrize("format", ["f32", "q4"])
def test_taps_see_what_adapters_are_fed(format: str) -> None:
    """The activations of a pass with an adapter, whose rows are what its first factors multiply."""
    backend = adapted(format, _native.isas()[0], 2)
    text = ids(9, 4)
    seen, alone = (backend.activations(Batch.of([Run(text, adapter=number)]), None) for number in (1, 0))
    assert (seen[0, "qkv"] == alone[0, "qkv"]).all()
    assert (seen[0, "o"] != alone[0, "o"]).any()
    assert len(TARGETS) == 7
