"""Adapters beside the weights, as people use them: on either engine, in any format, several at once; PEFT's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, save
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint.adapter import Adapter, LowRank
from pronk.checkpoint.writers import write
from pronk.engine.backend import Attached
from pronk.engine.params import SamplingParams
from pronk.errors import BadFile, BadRequest
from pronk.llm import LLM

IDS = list(range(3, 120))
WAYS: list[dict[str, Any]] = [
    {"engine": "cpu", "quantize": "f32"},
    {"engine": "cpu", "quantize": "q4"},
    {"engine": "cpu", "quantize": "int8"},
    {"engine": "torch", "quantize": "f32"},
    {"engine": "torch", "quantize": "bf16"},
    {"engine": "torch", "quantize": "int8"},
    {"engine": "torch", "quantize": "llm-int8", "compute_dtype": "bf16"},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['engine']}-{way['quantize']}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def given(model: Path) -> list[Adapter]:
    config = checkpoint.open(model).config
    return [random_adapter(config, seed=seed, size=0.15, uneven=False) for seed in (1, 2)]


@pytest.fixture(scope="module")
def folders(given: list[Adapter], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save(tmp_path_factory.mktemp("adapters") / name, a) for name, a in zip("ab", given, strict=True)]


def load(model: Path, way: dict[str, Any], **options: Any) -> LLM:
    if way["engine"] == "torch":
        pytest.importorskip("torch")
        options.setdefault("device", "cpu")
    return pronk.load(model, **way, **options)


def floats(llm: LLM, given: Adapter | None = None) -> checkpoint.Checkpoint:
    """What the model's weights are, in float32, and the adapter in them."""
    plain = llm.backend.dequantized(llm.checkpoint)
    return adapters.applied(plain, given) if given else plain


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # between PEFT and transformers
@every_way
def test_peft_s_product_over_what_the_weights_are(
    model: Path, given: list[Adapter], folders: list[Path], way: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    plain = load(model, way)
    write.save(floats(plain), tmp_path / "floats", to="safetensors", dtype="f32")

    def of_transformers(folder: Path | None) -> np.ndarray:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(theirs, folder) if folder else theirs
        with torch.no_grad():
            return theirs.eval()(torch.tensor([IDS])).logits[0].numpy()

    found = load(model, way, adapter=folders[0]).logits(IDS)
    expected, base = of_transformers(folders[0]), of_transformers(None)
    exact, does = way["quantize"] == "f32", np.std(expected - base)
    noise = np.std(plain.logits(IDS) - base)
    assert np.std(found - expected) <= 2 * noise + (1e-5 if exact else 0.03) * does
    assert does > 3 * np.std(found - expected)


@every_way
def test_weights_stay_as_they_are(model: Path, folders: list[Path], way: dict[str, Any]) -> None:
    llm, plain = load(model, way, adapter=folders[0]), load(model, way)
    assert llm.backend.dtype == plain.backend.dtype
    for name, tensor in floats(plain).tensors.items():
        assert (floats(llm).tensors[name].read() == tensor.read()).all(), name
    assert 0 < llm.backend.nbytes - plain.backend.nbytes < 200_000
    same = llm.generate(IDS[:40], max_new_tokens=8, adapter="none")
    assert same.tokens == plain.generate(IDS[:40], max_new_tokens=8).tokens
    assert same.tokens != llm.generate(IDS[:40], max_new_tokens=8).tokens


HELD = """
import sys
import pronk
from pronk import system
llm = pronk.load(sys.argv[1], adapter=sys.argv[2] or None, engine="cpu", quantize="q4")
llm.generate([1, 2, 3], max_new_tokens=2)
print(system.held_memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what a process holds")
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_it_takes_the_memory_of_its_numbers_in_16_bits(tmp_path: Path, stored: type) -> None:
    """And 10 MB at most. Its float32 numbers stayed beside what the engine had made of them, for `to_torch`: three
    times as much in all."""
    config = tiny_config(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    save_huggingface(tmp_path / "model", config, random_weights(config))
    given = random_adapter(config, rank=256, uneven=False)
    products = {n: replace(p, a=p.a.astype(stored), b=p.b.astype(stored)) for n, p in given.products.items()}
    folder = save(tmp_path / "adapter", replace(given, products=products))
    command = [sys.executable, "-c", HELD, tmp_path / "model"]
    without, beside = (
        int(subprocess.run([*command, name], check=True, capture_output=True).stdout) for name in ("", folder)
    )
    assert given.nbytes > 12e6
    assert beside - without < given.nbytes + 10e6


@every_way
def test_several_adapters_in_the_same_passes(model: Path, folders: list[Path], way: dict[str, Any]) -> None:
    """Texts of two adapters and of none, begun at once by threads, are what a model of that adapter alone gives."""
    llm = load(model, way)
    assert [llm.add_adapter(folder) for folder in folders] == ["a", "b"]
    alone = {"none": load(model, way), **{f.name: load(model, way, adapter=f) for f in folders}}
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"n": 2, "temperature": 1.0, "seed": 4},
        {"num_beams": 3},
        {"speculative": "ngram"},
    ]
    asked = [(name, option) for option in options for name in ("a", "none", "b")]
    begin = threading.Barrier(len(asked))

    def tokens(of: LLM, option: dict[str, Any], **adapter: Any) -> list[list[int]]:
        found = of.generate([IDS[:50]], max_new_tokens=12, ignore_eos="num_beams" not in option, **option, **adapter)
        assert isinstance(found, list)
        return [generation.tokens for generation in found]

    def together(request: tuple[str, dict[str, Any]]) -> list[list[int]]:
        begin.wait()
        return tokens(llm, request[1], adapter=request[0])

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(together, asked))
    expected = [tokens(alone[name], option) for name, option in asked]
    if llm.backend.batch_invariant:
        assert found == expected
    else:  # a rounding apart: most of them alike
        assert sum(f == e for f, e in zip(found, expected, strict=True)) >= 10
    assert found[0] != found[1] != found[2]


def test_what_is_cached_of_one_adapter_is_no_other_s(model: Path, folders: list[Path]) -> None:
    llm = load(model, WAYS[1])
    for folder in folders:
        llm.add_adapter(folder)
    uncached = load(model, WAYS[1], prefix_cache=0)
    for folder in folders:
        uncached.add_adapter(folder)
    for again in range(2):
        for name in ("a", "b", "none"):
            found = llm.generate(IDS, max_new_tokens=6, adapter=name)
            assert found.tokens == uncached.generate(IDS, max_new_tokens=6, adapter=name).tokens
            assert found.stats.cached_tokens == (64 if again else 0)
    # Another adapter in the place of one that was dropped finds nothing of it.
    llm.drop_adapter("a")
    assert llm.add_adapter(folders[1], "again") == "again"
    found = llm.generate(IDS, max_new_tokens=6, adapter="again")
    assert found.stats.cached_tokens == 0
    assert found.tokens == uncached.generate(IDS, max_new_tokens=6, adapter="b").tokens


def test_names(model: Path, folders: list[Path]) -> None:
    llm = load(model, WAYS[0], adapter=folders[0])
    assert list(llm.adapters) == [str(folders[0])]
    assert llm.add_adapter(str(folders[1]), name="second") == "second"
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: llm.generate("x", adapter="third"), r"no adapter 'third'; there are .*'second', 'none'"),
        (lambda: llm.stream("x", adapter="third"), r"no adapter 'third'"),
        (lambda: llm.add_adapter(folders[1], name="second"), "there is an adapter 'second' already"),
        (lambda: llm.add_adapter(folders[1], name="none"), "cannot be called 'none'"),
        (lambda: llm.drop_adapter(str(folders[0])), "was not added, and cannot be dropped"),
        (lambda: llm.drop_adapter("none"), "was not added"),
        (lambda: llm.drop_adapter("third"), "no adapter 'third'"),
        (lambda: llm.generate("x", adapter=["second"]), "no adapter \\['second'\\]"),
        (lambda: llm.add_adapter(folders[1], name=""), "cannot be called ''"),
        (lambda: llm.add_adapter(folders[1], name="a\nb"), "cannot be called"),
        (lambda: pronk.load(model, merge_adapter=True), "merge_adapter is for an adapter"),
    ]
    for call, problem in refused:
        with pytest.raises(BadRequest, match=problem):
            call()
    assert "".join(c.text for c in llm.stream("x", adapter="second", max_new_tokens=4)) == (
        llm.generate("x", adapter="second", max_new_tokens=4).text
    )


def test_chats_have_adapters(model: Path, folders: list[Path]) -> None:
    llm, messages = load(model, WAYS[0]), [{"role": "user", "content": "hello"}]
    llm.add_adapter(folders[0])
    found = llm.chat(messages, adapter="a", max_new_tokens=8)
    assert found.tokens == load(model, WAYS[0], adapter=folders[0]).chat(messages, max_new_tokens=8).tokens
    assert found.text == "".join(c.text for c in llm.stream_chat(messages, adapter="a", max_new_tokens=8))
    assert found.tokens != llm.chat(messages, max_new_tokens=8).tokens


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=["cpu", "torch"])
def test_one_that_is_at_work_is_dropped_when_its_texts_have_ended(
    model: Path, folders: list[Path], way: dict[str, Any]
) -> None:
    """Begun or not: a name that is given again is another adapter, and no other text ever fails for it."""
    llm = load(model, way)
    before = llm.backend.nbytes
    llm.add_adapter(folders[0])
    expected = llm.generate(IDS[:10], adapter="a", max_new_tokens=30, ignore_eos=True).tokens
    begun, late = (llm.stream(IDS[:10], adapter="a", max_new_tokens=30, ignore_eos=True) for _ in range(2))
    tokens = [next(begun).token]
    llm.drop_adapter("a")
    assert llm.add_adapter(folders[1], name="a") == "a"
    other = llm.generate(IDS[:10], adapter="a", max_new_tokens=30, ignore_eos=True).tokens
    tokens += [chunk.token for chunk in begun]
    assert tokens == [chunk.token for chunk in late] == expected != other
    llm.drop_adapter("a")
    del begun, late
    with pytest.raises(BadRequest, match="no adapter 'a'"):
        llm.generate("x", adapter="a")
    llm.generate("x", max_new_tokens=1)
    assert llm.backend.nbytes == before
    assert not llm.backend.attached


def test_added_and_dropped_by_threads_while_others_generate(model: Path, folders: list[Path]) -> None:
    llm = load(model, WAYS[1])
    llm.add_adapter(folders[0], name="stays")
    expected = {name: llm.generate(IDS[:30], max_new_tokens=12, adapter=name).tokens for name in ("stays", "none")}
    stop, won = threading.Event(), []

    def churn() -> None:
        while not stop.is_set():
            try:
                llm.add_adapter(folders[1], name="comes and goes")
                won.append(1)
                llm.generate(IDS[:5], max_new_tokens=2, adapter="comes and goes")
                llm.drop_adapter("comes and goes")
            except BadRequest:  # another thread was sooner
                pass

    def ask(name: str) -> None:
        for _ in range(15):
            assert llm.generate(IDS[:30], max_new_tokens=12, adapter=name).tokens == expected[name]

    with ThreadPoolExecutor(4) as pool:
        churning = [pool.submit(churn) for _ in range(2)]
        asking = [pool.submit(ask, name) for name in expected]
        try:
            for one in asking:
                one.result()
        finally:
            stop.set()
        for one in churning:
            one.result()
    if "comes and goes" in llm.adapters:
        llm.drop_adapter("comes and goes")
    assert won
    assert set(llm.backend.attached) == {llm.adapters["stays"].number}


def test_an_unknown_number_is_refused_at_once(model: Path) -> None:
    llm = load(model, WAYS[0])
    with pytest.raises(BadRequest, match="there is no adapter of the number 999"):
        llm.session.submit(IDS[:5], adapter=Attached(999))
    assert llm.generate(IDS[:5], max_new_tokens=2).tokens


def test_an_adapter_s_own_template_asks(model: Path, folders: list[Path], tmp_path: Path) -> None:
    """One that was added is asked through what it was trained through, as one that the model was loaded with is."""
    own = tmp_path / "own"
    shutil.copytree(folders[0], own)
    (own / "chat_template.jinja").write_text("{% for m in messages %}Q: {{ m.content }} A:{% endfor %}")
    llm, loaded = load(model, WAYS[0]), load(model, WAYS[0], adapter=own)
    llm.add_adapter(own)
    expected = loaded.generate("hello", chat=True, max_new_tokens=3)
    assert expected.stats.prompt_tokens == len("Q: hello A:")
    for found in (
        llm.generate("hello", chat=True, adapter="own", max_new_tokens=3),
        llm.chat([{"role": "user", "content": "hello"}], adapter="own", max_new_tokens=3),
    ):
        assert found.tokens == expected.tokens
        assert found.stats.prompt_tokens == expected.stats.prompt_tokens
    assert llm.generate("hello", chat=True, max_new_tokens=3).stats.prompt_tokens > expected.stats.prompt_tokens


def test_what_an_adapter_changes_of_all_texts_is_said(model: Path, given: list[Adapter], tmp_path: Path) -> None:
    """There is no model without it beside the one that was loaded with it, nor with another."""
    config = checkpoint.open(model).config
    head = LowRank(np.ones((4, config.hidden_size), np.float32), np.ones((config.vocab_size, 4), np.float32), 2.0)
    folder = save(tmp_path / "head", replace(given[0], products={**given[0].products, "lm_head": head}))
    llm, other = load(model, WAYS[1], adapter=folder), save(tmp_path / "other", given[1])
    for call in (lambda: llm.generate("x", adapter="none"), lambda: llm.add_adapter(other)):
        with pytest.raises(BadRequest, match="the model was loaded with an adapter that changes lm_head"):
            call()
    with pytest.raises(BadRequest, match="changes lm_head, of all texts; load the model with it"):
        load(model, WAYS[1]).add_adapter(folder)


def test_a_session_s_requests_have_adapters(model: Path, folders: list[Path]) -> None:
    llm = load(model, WAYS[1])
    attached = llm.adapters[llm.add_adapter(folders[0])]
    session, params = llm.session, SamplingParams(max_new_tokens=5, ignore_eos=True)
    with_it = session.submit(IDS[:20], params, adapter=attached)
    without = session.submit(IDS[:20], params)
    texts: dict[Any, list[int]] = {with_it: [], without: []}
    while session.has_work:
        for handle, chunk in session.step():
            texts[handle].append(chunk.token)
    assert texts[with_it] == llm.generate(IDS[:20], params=params, adapter="a").tokens
    assert texts[without] == llm.generate(IDS[:20], params=params).tokens
    assert texts[with_it] != texts[without]


@pytest.mark.parametrize("quantize", ["f32", "q8"])
def test_merged_where_that_is_asked_for(model: Path, given: list[Adapter], folders: list[Path], quantize: str) -> None:
    merged = load(model, {"engine": "cpu", "quantize": quantize}, adapter=folders[0], merge_adapter=True)
    assert not merged.adapters
    assert merged.backend.nbytes == load(model, {"engine": "cpu", "quantize": quantize}).backend.nbytes
    expected = pronk.load(adapters.applied(checkpoint.open(model), given[0]), engine="cpu", quantize=quantize)
    assert (merged.logits(IDS) == expected.logits(IDS)).all()


def test_an_adapter_that_changed_since_is_not_merged_into_the_module(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    """For its numbers are read once more."""
    pytest.importorskip("torch")
    folder = shutil.copytree(folders[0], tmp_path / "mine")
    llm = load(model, WAYS[0], adapter=folder)
    shutil.copy(folders[1] / adapters.WEIGHTS, folder)
    with pytest.raises(BadFile, match="has changed since the model was loaded with it; load it again"):
        llm.to_torch()


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3]], ids=["f32", "q4", "torch"])
def test_the_module_that_one_takes_away_has_it(model: Path, folders: list[Path], way: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    llm = load(model, way, adapter=folders[0])
    with torch.no_grad():
        found = llm.to_torch()(torch.tensor([IDS]))[0].numpy()
    plain = load(model, way)
    exact = way["quantize"] == "f32"
    noise = 0 if exact else np.std(plain.logits(IDS) - pronk.load(floats(plain), engine="cpu").logits(IDS))
    assert np.std(found - llm.logits(IDS)) <= 2 * noise + 0.03 * np.std(found) * (1e-3 if exact else 1)
    assert np.std(found - plain.logits(IDS)) > 0.1
