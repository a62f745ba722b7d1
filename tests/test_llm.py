"""The facade: what goes in and comes out of LLM, over a tiny model on the torch engine and a tokenizer of bytes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, in_memory, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk.tokenizer
from pronk.engine.generation import Generation
from pronk.errors import BadRequest, ContextOverflow, NoTokenizer, PronkError
from pronk.llm import LLM
from pronk.tokenizer.hf import HfTokenizer
from pronk.torch_engine.backend import TorchBackend


def make(tmp: Path | None, **changes) -> LLM:
    config = tiny_config(**{"vocab_size": 259, "max_position_embeddings": 64, **changes})
    checkpoint = in_memory(config, random_weights(config))
    source = pronk.tokenizer.find(byte_tokenizer(tmp / "tokenizer.bin")) if tmp else None
    tokenizer = pronk.tokenizer.load(source) if source else None
    return LLM("tiny", checkpoint, tokenizer, TorchBackend.from_checkpoint(checkpoint, device="cpu"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def mute() -> LLM:
    return make(None)


def one(result: Generation | list[Generation]) -> Generation:
    assert isinstance(result, Generation)
    return result


def test_stream_generate_and_both_cache_paths_agree(llm: LLM) -> None:
    whole = one(llm.generate("abc", max_new_tokens=20, ignore_eos=True))
    chunks = list(llm.stream("abc", max_new_tokens=20, ignore_eos=True))
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.token for c in chunks] == whole.tokens
    assert [c.finish_reason for c in chunks] == [None] * 19 + ["length"]
    assert one(llm.generate("abc", max_new_tokens=20, ignore_eos=True, cache=False)).tokens == whole.tokens
    stats = chunks[-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.new_tokens) == (whole.prompt_tokens, 20)
    assert stats.ttft_s > 0
    assert stats.decode_tok_s is not None


def test_greedy_is_the_argmax_of_logits(llm: LLM) -> None:
    found = one(llm.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True, logprobs=2))
    ids = [5, 6, 7, *found.tokens]
    logits = llm.logits(ids).astype(np.float64)
    assert logits[2:-1].argmax(-1).tolist() == found.tokens
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert found.logprobs is not None
    for row, entry in zip(logprobs[2:-1], found.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()


def test_requests_are_the_same_alone_and_in_a_list(llm: LLM) -> None:
    prompts = ["", "a", "some longer text", [9] * 30]
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    together = llm.generate(prompts, **options)
    assert [g.tokens for g in together] == [one(llm.generate(p, **options)).tokens for p in prompts]


def test_samples_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    first = llm.generate("x", n=3, temperature=1.0, max_new_tokens=10, seed=3, ignore_eos=True)
    assert isinstance(first, list)
    assert len({tuple(g.tokens) for g in first}) == 3
    again = llm.generate("x", n=3, temperature=1.0, max_new_tokens=10, seed=3, ignore_eos=True)
    assert [g.tokens for g in again] == [g.tokens for g in first]
    drawn = one(llm.generate("x", temperature=1.0, max_new_tokens=10))
    assert one(llm.generate("x", temperature=1.0, max_new_tokens=10, seed=drawn.seed)).tokens == drawn.tokens


def test_beams_come_best_first(llm: LLM) -> None:
    found = llm.generate("abc", num_beams=4, num_return_sequences=3, max_new_tokens=6)
    assert isinstance(found, list)
    scores = [g.score for g in found]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(g.tokens) for g in found}) == 3
    for g in found:  # all tokens come at the end: a rate between the first and the last would be nonsense
        assert g.stats.decode_tok_s == pytest.approx(len(g.tokens) / g.stats.ttft_s, rel=0.5)


def test_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    free = one(llm.generate("abc", max_new_tokens=30, ignore_eos=True))
    stop = free.text[4:7]
    found = one(llm.generate("abc", max_new_tokens=30, ignore_eos=True, stop=[stop]))
    assert found.text == free.text.partition(stop)[0]
    assert found.finish_reason == "stop"
    assert len(found.tokens) < 30


def test_the_token_that_ends_a_text_counts_in_its_rate(llm: LLM) -> None:
    """One token and a stop token are two steps: a rate, and not 0."""
    first, second = one(llm.generate("abc", max_new_tokens=2, ignore_eos=True)).tokens
    assert first != second
    found = one(llm.generate("abc", max_new_tokens=10, ignore_eos=True, stop_token_ids=[second]))
    assert found.tokens == [first]
    assert found.stats.decode_tok_s is not None
    assert found.stats.decode_tok_s > 0


def test_stop_token_is_no_part_of_the_text(llm: LLM) -> None:
    free = one(llm.generate("abc", max_new_tokens=10, ignore_eos=True))
    last = free.tokens[5]
    found = one(llm.generate("abc", max_new_tokens=10, ignore_eos=True, stop_token_ids=(last,)))
    assert found.tokens == free.tokens[: free.tokens.index(last)]
    assert found.finish_reason == "stop"
    assert found.stats.new_tokens == len(found.tokens)


def test_chat_renders_answers_and_adds_no_bos_of_its_own(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    ids = llm.chat_prompt(messages, chat_template=template)
    assert ids == llm.tokenizer.encode("s:x;u:hi;", bos=False)
    template.write_text("{{ bos_token }}hi")
    assert llm.chat_prompt(messages, chat_template=template) == llm.tokenizer.encode("hi", bos=True)
    answer = one(llm.chat(messages, chat_template=template, max_new_tokens=5, ignore_eos=True))
    streamed = llm.stream_chat(messages, chat_template=template, max_new_tokens=5, ignore_eos=True)
    assert answer.text == "".join(chunk.text for chunk in streamed)


def test_an_empty_prompt_begins_with_bos(llm: LLM, mute: LLM) -> None:
    assert one(llm.generate("", max_new_tokens=5)).tokens == one(llm.generate([1], max_new_tokens=5)).tokens
    assert next(iter(mute.generate([[]], max_new_tokens=5))).tokens == one(mute.generate([1], max_new_tokens=5)).tokens
    with pytest.raises(BadRequest, match="prompt is empty"):
        make(None, bos_token_id=None).generate([[]])


def test_no_prompts_give_no_texts(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate(()) == llm.generate(np.empty(0, int)) == []
    with pytest.raises(BadRequest, match="top_k"):  # all the same
        llm.generate([], top_k=-1)


def test_an_overlong_prompt_is_an_error_or_a_stated_cut(llm: LLM) -> None:
    """The error's ways out are Python's; they were options of the command line."""
    ids = [1, *range(10, 110)]
    with pytest.raises(
        ContextOverflow, match=r"101 tokens and at most 63 fit; .* ctx_size, .*truncate='left'"
    ) as caught:
        llm.generate(ids)
    assert "--" not in str(caught.value)
    with pytest.raises(
        ContextOverflow, match=r"the text has 101 tokens and at most 64 fit; shorten it or raise ctx_size$"
    ):
        llm.logits(ids)
    left = one(llm.generate(ids, truncate="left", max_new_tokens=14, ignore_eos=True))
    kept = [1, *range(61, 110)]  # the beginning-of-text token stays, and there is room for 14
    assert (left.prompt_tokens, left.truncated_tokens) == (50, 51)
    assert left.tokens == one(llm.generate(kept, max_new_tokens=14, ignore_eos=True)).tokens
    right = one(llm.generate(ids, truncate="right", max_new_tokens=14, ignore_eos=True))
    assert right.tokens == one(llm.generate(ids[:50], max_new_tokens=14, ignore_eos=True)).tokens
    assert one(llm.generate(ids[:60], max_new_tokens=50, ignore_eos=True)).finish_reason == "length"
    streamed = list(llm.stream(ids, truncate="left", max_new_tokens=14, ignore_eos=True))
    assert [c.token for c in streamed] == left.tokens
    assert streamed[-1].truncated_tokens == 51
    for prompt in (ids, "fits"):
        with pytest.raises(BadRequest, match="truncate"):
            llm.generate(prompt, truncate="middle")  # type: ignore[arg-type]


def test_a_cache_that_is_neither_on_nor_off_is_refused_by_name(llm: LLM) -> None:
    """It was a KeyError, since it chose between two sessions."""
    for cache in (None, "no", 5):
        for call in (llm.generate, llm.stream):
            with pytest.raises(BadRequest, match="cache must be True or False"):
                call("fits", cache=cache)  # type: ignore[arg-type]


def test_a_cut_needs_no_beginning_of_text() -> None:
    bare = make(None, bos_token_id=None)
    ids = list(range(10, 110))
    found = one(bare.generate(ids, truncate="left", max_new_tokens=14, ignore_eos=True))
    assert found.tokens == one(bare.generate(ids[-50:], max_new_tokens=14, ignore_eos=True)).tokens


def test_logits_are_the_same_through_the_cache(llm: LLM) -> None:
    ids = list(range(3, 40))
    free = llm.logits(ids)
    assert free.shape == (37, 259)
    assert free.dtype == np.float32
    for chunk in (None, 5, 100):
        assert np.abs(llm.logits(ids, cache=True, chunk=chunk) - free).max() < 2e-5
    long = make(None, max_position_embeddings=200)
    ids = list(range(3, 150))  # three blocks of the cache
    assert np.abs(long.logits(ids, cache=True, chunk=9) - long.logits(ids)).max() < 2e-5
    with pytest.raises(ContextOverflow):
        llm.logits(list(range(65)))


def test_without_a_tokenizer_ids_flow_and_text_is_refused(mute: LLM) -> None:
    found = one(mute.generate([5, 6], max_new_tokens=4, ignore_eos=True))
    assert found.text == ""
    assert len(found.tokens) == 4
    for call in (lambda: mute.generate("text"), lambda: mute.generate([5], stop=["x"]), lambda: mute.tokenizer):
        with pytest.raises(NoTokenizer, match="--tokenizer"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean temperature"),
        ({"max_new_token": 1}, "did you mean max_new_tokens"),
        ({"max_tokens": 1}, "max_new_tokens= is its name here"),
        ({"zzz": 1}, "unknown option 'zzz'; SamplingParams lists"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_options_are_refused_by_name(llm: LLM, options: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.generate("abc", **options)


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for ids in ([259], [-1]):
        with pytest.raises(BadRequest, match="outside the vocabulary of 259"):
            llm.generate(ids)
        with pytest.raises(BadRequest, match="outside the vocabulary of 259"):
            llm.logits(ids)


def test_ids_that_are_no_whole_numbers_are_refused(llm: LLM) -> None:
    for ids in ([1, 2.7], [1, "a"], [None], "ab", b"ab", None, 3, {1: 2}, np.float32([1, 2]), np.int64(3)):
        with pytest.raises(BadRequest, match="whole numbers"):
            llm.logits(ids)  # type: ignore[arg-type]


def test_logits_of_nothing_and_chunks_that_are_none(llm: LLM) -> None:
    for options in ({}, {"cache": True}):
        with pytest.raises(BadRequest, match="no tokens"):
            llm.logits([], **options)
    for chunk in (0, -1, 1.5, True):
        with pytest.raises(BadRequest, match="chunk must be"):
            llm.logits([5, 6], cache=True, chunk=chunk)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="chunk=5 is for the KV cache"):
        llm.logits([5, 6], chunk=5)


@pytest.mark.parametrize(
    "prompt", [None, 5, [None], [[None]], [5, None], {"prompt": "a"}, {}, {5}, b"abc", iter("abc")]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(BadRequest, match=r"a prompt|token ids"):
            call(prompt)  # type: ignore[operator]


def test_arrays_and_tensors_are_prompts(llm: LLM) -> None:
    options = {"max_new_tokens": 4, "ignore_eos": True}
    expected = one(llm.generate([5, 6], **options)).tokens
    for ids in (np.array([5, 6]), torch.tensor([5, 6]), (5, 6), [torch.tensor(5), np.int16(6)]):
        assert one(llm.generate(ids, **options)).tokens == expected
    for rows in (np.array([[5, 6]]), torch.tensor([[5, 6]]), [np.array([5, 6])]):
        several = llm.generate(rows, **options)
        assert isinstance(several, list)
        assert [found.tokens for found in several] == [expected]
    with pytest.raises(BadRequest, match="whole numbers"):
        llm.generate(torch.tensor([0.5]))


@pytest.mark.parametrize("messages", ["hi", None, [], ["hi"], [{}], {"role": "user"}, [{"content": "hi"}]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(BadRequest, match="messages must be a list"):
        llm.chat(messages, chat_template="llama3")  # type: ignore[arg-type]


def test_what_is_no_chat_template_is_refused(llm: LLM) -> None:
    for template in (3, b"llama3", "nowhere", "~no-such-user/x"):
        with pytest.raises(BadRequest, match=r"chat.template"):
            llm.chat([{"role": "user", "content": "hi"}], chat_template=template)  # type: ignore[arg-type]


def test_params_are_sampling_params(llm: LLM) -> None:
    for params in ({}, {"temperature": 1.0}, "greedy"):
        with pytest.raises(BadRequest, match="params must be SamplingParams"):
            llm.generate("abc", params=params)  # type: ignore[arg-type]


def test_progress_counts_the_prompts_tokens(llm: LLM) -> None:
    long = make(None, max_position_embeddings=2000)
    told: list[tuple[str, int, int]] = []
    for chunk in long.stream([7] * 1100, max_new_tokens=2, ignore_eos=True, progress=lambda *told_: told.append(told_)):
        assert told[-1][1] == 1100, chunk  # all of it before the first token
    assert told == [("reading the prompt", done, 1100) for done in (0, 512, 1024, 1100)]
    told.clear()
    llm.generate([[5] * 10, [6] * 20], n=2, temperature=1.0, max_new_tokens=2, progress=lambda *t: told.append(t))
    assert told[0] == ("reading the prompt", 0, 30)
    assert told[-1] == ("reading the prompt", 30, 30)


@pytest.mark.parametrize("cache", [True, False])
def test_progress_counts_the_steps_of_a_beam_search(llm: LLM, cache: bool) -> None:
    told: list[tuple[str, int, int]] = []
    options = {"num_beams": 2, "max_new_tokens": 4, "ignore_eos": True}
    found = one(llm.generate([5, 6, 7], cache=cache, progress=lambda *t: told.append(t), **options))
    assert found.tokens == one(llm.generate([5, 6, 7], **options)).tokens
    assert told[:3] == [("reading the prompt", 0, 3), ("reading the prompt", 3, 3), ("beam search", 2, 4)]
    assert told[-1] == ("beam search", 4, 4)


def test_an_llm_tells_what_it_is(llm: LLM) -> None:
    parameters = sum(int(np.prod(shape)) for shape in llm.config.tensor_shapes().values())
    assert repr(llm) == f"<LLM tiny: {parameters:,} parameters, f32 on cpu, context of 64 tokens>"


def test_closing_a_stream_early_is_quiet(llm: LLM) -> None:
    stream = llm.stream("abc", max_new_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert one(llm.generate("abc", max_new_tokens=2)).tokens


@pytest.mark.timeout(240)  # once, this waited for itself
def test_a_signal_handler_may_encode_what_the_call_it_interrupts_encodes(tmp_path: Path) -> None:
    save_tiny_chat_model(tmp_path)
    tokenizer = pronk.tokenizer.load(pronk.tokenizer.find(tmp_path))
    assert isinstance(tokenizer, HfTokenizer)
    text = "<s>a</s>"
    wanted = {special: tokenizer.encode(text, special=special) for special in (True, False)}
    assert wanted[True] != wanted[False]
    library, inner = tokenizer._library, []

    class Interrupted:
        """The library, where a signal comes between the choice of special tokens and the first call that uses it."""

        encode_special_tokens = property(
            lambda self: library.encode_special_tokens,
            lambda self, value: setattr(library, "encode_special_tokens", value),
        )

        def encode(self, text: str, **options: bool) -> Any:
            tokenizer._library = library
            inner.append(tokenizer.encode(text, special=False))
            return library.encode(text, **options)

    tokenizer._library = Interrupted()  # type: ignore[assignment]
    assert tokenizer.encode(text) == wanted[True]
    assert inner == [wanted[False]]


def test_a_text_asked_as_a_question(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    llm.tokenizer.chat_template, before = template, llm.tokenizer.chat_template
    try:
        how: Any = {"max_new_tokens": 3, "ignore_eos": True}
        asked = llm.tokenizer.encode("system:Be brief.user:Hi", bos=False)
        expected = one(llm.generate(asked, **how)).tokens
        assert one(llm.generate("Hi", chat=True, system="Be brief.", **how)).tokens == expected
        several = llm.generate(["Hi", "Hi"], chat=True, system="Be brief.", **how)
        assert isinstance(several, list)
        assert [each.tokens for each in several] == [expected, expected]
        with pytest.raises(BadRequest, match="a system prompt is for chat=True"):
            llm.generate("Hi", system="Be brief.")
        with pytest.raises(BadRequest, match="chat=True is for texts"):
            llm.generate([1, 2], chat=True)
    finally:
        llm.tokenizer.chat_template = before


def test_close_ends_what_is_under_way_and_all_that_follows(tmp_path: Path) -> None:
    llm = make(tmp_path)
    kept = llm.stream("x", max_new_tokens=50, ignore_eos=True)
    assert next(kept).token is not None
    backend = weakref.ref(llm.backend)
    llm.close()
    llm.close()
    with pytest.raises(PronkError, match="closed"):
        list(kept)
    for call in (llm.generate, llm.stream, lambda text: llm.logits([1]), lambda text: llm.session):
        with pytest.raises(PronkError, match=r"tiny is closed; load it again with pronk\.load"):
            call("x")
    assert repr(llm).endswith("closed, context of 64 tokens>")
    del kept
    gc.collect()
    assert backend() is None  # the weights are gone


def test_with_closes(tmp_path: Path) -> None:
    with make(tmp_path) as llm:
        assert one(llm.generate("x", max_new_tokens=3)).tokens
    with pytest.raises(PronkError, match="closed"):
        llm.generate("x")
    with pytest.raises(ZeroDivisionError), make(tmp_path) as llm:
        raise ZeroDivisionError
    with pytest.raises(PronkError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_pickling_says_what_to_do_instead(llm: LLM, copied: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled.*; call pronk\.load\('.*'\) in each process"):
        copied(llm)


@pytest.mark.parametrize("name", ["num_samples", "n", "num_return_sequences"])
def test_python_takes_num_samples(llm: LLM, name: str) -> None:
    sampled = {"max_new_tokens": 4, "temperature": 1.0, "seed": 3}
    found = llm.generate("x", **{name: 2}, **sampled)
    assert [one.tokens for one in found] == [one.tokens for one in llm.generate("x", n=2, **sampled)]
    assert len(found) == 2
    with pytest.raises(BadRequest, match=f"{name} must be a whole number from 1 to 65536, not 0"):
        llm.generate("x", **{name: 0})


def test_minus_one_new_tokens_fill_the_context(llm: LLM) -> None:
    found = one(llm.generate([5] * 10, max_new_tokens=-1, ignore_eos=True))
    assert (len(found.tokens), found.finish_reason) == (54, "length")
