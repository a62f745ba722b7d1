"""llm.look: probabilities beside numpy's on llm.logits, attention and lens through the cache, hostile arguments."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, save
from pictures import contained
from tiny import in_memory, random_weights, tiny_config
from tiny_folder import CHAT_TEMPLATE, save_tiny_chat_model

import pronk
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.engine.sampling import NotNumbers
from pronk.errors import BadRequest, ContextOverflow, NoTokenizer, PronkError
from pronk.llm import LLM
from pronk.look import Look, reading

TEXT = "Whoever looks inside a model sees a text, token by token, and what was likely where."
NEAR = 1e-5  # of rows from two shapes of one pass: a logit of 4 is off by parts in 2^24 of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return pronk.load(folder, engine="cpu", quantize="f32")


def engines(folder: Path) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{"engine": "cpu", "quantize": "q8", "kv_dtype": "int8"}]
    for quantize in ("f32", "absmax"):
        ways.append({"engine": "torch", "quantize": quantize, "device": "cpu"})
    return ways


def distributions(logits: np.ndarray) -> np.ndarray:
    """[T, V], in float64."""
    exps = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def check(look: Look, logits: np.ndarray, near: float) -> None:
    """Everything that is said of predictions, against sorts and sums of all of the logits."""
    p, ids = distributions(logits), look.ids.tolist()
    assert np.isnan(look.logprobs[0])
    assert np.isnan(look.bits[0])
    assert np.isnan(look.entropy[0])
    assert (look.ranks[0], look.top_ids[0].tolist()) == (0, [-1] * 5)
    came = p[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(look.logprobs[1:] - np.log(came)).max() < near
    assert np.abs(look.bits[1:] + np.log2(came)).max() < 2 * near
    assert np.abs(look.entropy[1:] + (p * np.log2(p)).sum(-1)[:-1]).max() < 20 * near
    top = np.take_along_axis(p[:-1], look.top_ids[1:], 1)
    assert np.abs(np.exp(look.top_logprobs[1:]) - top).max() < near
    assert np.abs(np.sort(p[:-1], axis=-1)[:, :-6:-1] - np.exp(look.top_logprobs[1:])).max() < near
    for t in range(1, len(ids)):
        ahead = (p[t - 1] > came[t - 1] * (1 + near)).sum(), (p[t - 1] > came[t - 1] * (1 - near)).sum()
        assert ahead[0] < look.ranks[t] <= ahead[1]
    assert [a.probability for a in look.next] == pytest.approx(np.sort(p[-1])[::-1][:5], abs=near)


def test_predictions_are_numpys_on_the_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.look(TEXT)
    check(whole, llm.logits(whole.ids), 1e-9)
    monkeypatch.setattr(reading, "LOGITS_BYTES", 4 * 259 * 7)  # seven rows at a time
    pieces = llm.look(TEXT)
    check(pieces, llm.logits(pieces.ids), 1e-9)
    assert np.array_equal(whole.top_logprobs, pieces.top_logprobs, equal_nan=True)


def test_other_engines_and_formats(folder: Path) -> None:
    for way in engines(folder):
        if way["engine"] == "torch":
            pytest.importorskip("torch")
        model = pronk.load(folder, **way)
        look = model.look(TEXT)
        check(look, model.logits(look.ids), NEAR)
        for token in (1, 64, 65, len(look)):
            lens = look.lens(token)
            last = look.next if token == len(look) else look[token].alternatives
            assert lens.probabilities[-1] == pytest.approx([a.probability for a in last], abs=NEAR)
        row = look.attention(70, 1)
        assert row.sum(-1) == pytest.approx(np.ones(8), abs=1e-3)


def test_it_says_of_an_answer_what_generation_said(llm: LLM) -> None:
    answer = llm.generate(TEXT, max_new_tokens=20, temperature=1.5, seed=3, logprobs=5, ignore_eos=True)
    assert not isinstance(answer, list)
    assert answer.logprobs
    for given in (answer, answer.tokens, np.array(answer.tokens)):
        look = llm.look(TEXT, answer=given)
        told = look.logprobs[look.prompt_tokens :]
        assert told == pytest.approx([entry.logprob for entry in answer.logprobs], abs=1e-5)
        for entry, token in zip(answer.logprobs, range(look.prompt_tokens, len(look)), strict=True):
            assert [a.id for a in look[token].alternatives] == [id_ for id_, _ in entry.top]


@pytest.mark.parametrize("first", ["attention", "lens", "predictions"])
def test_attention_and_lens_through_the_cache_are_those_of_one_pass(llm: LLM, first: str) -> None:
    """Whatever is asked first, and in whichever order: no look at a token takes anything from those behind it."""
    ids = np.random.default_rng(3).integers(3, 259, 150).tolist()
    look = llm.look(ids)
    if first == "predictions":
        _ = look.logprobs
    for token in (149, 0, 64, 63, 128, 5, 127, 149):
        text = Batch.of([Run(ids[: token + 1])])
        seen = llm.backend.inspect(text, None, [0, 1], lens=True)
        assert seen.lens is not None
        if first != "lens":
            for layer in (0, 1):
                rows = look.attention(token, layer)
                assert (rows.shape, rows.dtype) == ((8, 150), np.float32)
                assert np.array_equal(rows[:, : token + 1], seen.attention[layer])
                assert not rows[:, token + 1 :].any()
                assert rows.sum(-1) == pytest.approx(np.ones(8), abs=1e-6)
                assert np.array_equal(look.attention(token, layer, 3), rows[3])
        lens = look.lens(token + 1, k=4)
        p = distributions(seen.lens)
        assert lens.probabilities == pytest.approx(np.sort(p)[:, :-5:-1], abs=1e-12)
        assert np.take_along_axis(p, lens.ids, 1) == pytest.approx(lens.probabilities, abs=1e-12)
        if token + 1 < len(ids):
            came = p[:, ids[token + 1]]
            assert lens.came == ids[token + 1]
            assert lens.came_probabilities == pytest.approx(came, abs=1e-12)
            assert lens.came_ranks.tolist() == (1 + (p > came[:, None]).sum(-1)).tolist()
        else:
            assert lens.came is None
            assert np.isnan(lens.came_probabilities).all()
    check(look, llm.logits(ids), 1e-9)


def test_tokens_are_the_tokenizers(llm: LLM) -> None:
    look = llm.look("naïve")
    assert b"".join(look.bytes) == "naïve".encode()
    assert look.pieces == ["n", "a", "\\xc3", "\\xaf", "v", "e"]
    assert [token.piece for token in look] == look.pieces
    assert (len(look), look.prompt_tokens, look.template_text) == (6, 6, None)
    mute = in_memory(tiny_config(), random_weights(tiny_config()))
    ids = LLM("mute", mute, None, CpuBackend.from_checkpoint(mute)).look([5, 6])
    assert (ids.pieces, ids.bytes) == (["<5>", "<6>"], [b"", b""])
    with pytest.raises(NoTokenizer):
        LLM("mute", mute, None, CpuBackend.from_checkpoint(mute)).look("text")


def test_messages_show_what_the_template_made_of_them(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    look = llm.look(messages, answer="Good day")
    assert look.template_text == "<s>user:Hello</s><s>assistant:"
    assert look.ids[: look.prompt_tokens].tolist() == llm.chat_prompt(messages)
    assert b"".join(look.bytes[look.prompt_tokens :]) == b"Good day"
    assert CHAT_TEMPLATE
    assert llm.look(messages).to_dict()["template_text"] == look.template_text
    with pytest.raises(BadRequest, match="a chat template is for messages"):
        llm.look("text", chat_template="chatml")


def test_an_answer_in_words_is_cut_where_it_stands(llm: LLM) -> None:
    assert llm.look("Once upon", answer=" a time").ids.tolist() == llm.tokenizer.encode("Once upon a time")
    assert llm.look(llm.tokenizer.encode("Once"), answer=" more").ids.tolist() == llm.tokenizer.encode("Once more")
    alone = llm.look("Once", answer="")
    assert (len(alone), alone.prompt_tokens) == (4, 4)


def test_an_empty_text_is_the_token_that_begins_texts(llm: LLM) -> None:
    for empty in ("", []):
        look = llm.look(empty)
        assert look.ids.tolist() == [llm.tokenizer.bos_id]
        assert look[0].probability is None
        assert look.attention(0, 0).tolist() == [[1.0]] * 8
        assert len(look.next) == 5
        contained(look.svg())
        json.dumps(look.to_dict(), allow_nan=False)
        assert len(look._repr_html_()) > 100
    answered = llm.look("", answer="ab")
    assert (len(answered), answered.prompt_tokens) == (3, 1)
    checkpoint = in_memory(config := tiny_config(bos_token_id=None), random_weights(config))
    with pytest.raises(BadRequest, match="the prompt is empty"):
        LLM("without", checkpoint, None, CpuBackend.from_checkpoint(checkpoint)).look([])


def test_a_text_longer_than_the_context_is_refused(llm: LLM) -> None:
    whole = llm.look([5] * 512)
    assert len(whole.bits) == 512
    assert len(whole.lens(512).ids) == 3
    with pytest.raises(ContextOverflow, match="the text has 513 tokens and at most 512 fit"):
        llm.look([5] * 513)
    with pytest.raises(ContextOverflow, match="513"):
        llm.look([5] * 500, answer=[6] * 13)


def test_an_adapter_is_looked_at_by_name(folder: Path, tmp_path: Path) -> None:
    model = pronk.load(folder, engine="cpu", quantize="q8")
    name = model.add_adapter(save(tmp_path / "a", random_adapter(model.config, size=0.15, uneven=False)))
    answer = model.generate(TEXT, max_new_tokens=8, logprobs=0, adapter=name, ignore_eos=True)
    assert not isinstance(answer, list)
    assert answer.logprobs
    look = model.look(TEXT, answer=answer, adapter=name)
    assert look.logprobs[look.prompt_tokens :] == pytest.approx([e.logprob for e in answer.logprobs], abs=1e-5)
    plain = model.look(TEXT, answer=answer)
    assert np.abs(plain.logprobs[1:] - look.logprobs[1:]).max() > 0.01
    assert np.abs(plain.attention(9, 1) - look.attention(9, 1)).max() > 1e-4
    assert plain.lens(9).probabilities[-1] != pytest.approx(look.lens(9).probabilities[-1], abs=1e-4)
    model.drop_adapter(name)  # as long as it is looked at, it is kept
    assert look.lens(9).probabilities[-1] == pytest.approx([a.probability for a in look[9].alternatives], abs=1e-12)
    with pytest.raises(BadRequest, match="there is no adapter"):
        model.look(TEXT, adapter=name)


NOT_NUMBERS = (True, False, 1.0, "1", None, [1], -1, 10**30, float("nan"), np.bool_(True))


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_hostile_arguments_are_one_line(llm: LLM, value: Any) -> None:
    look = llm.look(TEXT)
    calls = {
        "token": lambda: (look[value], look.attention(value, 0), look.lens(value)),
        "layer": lambda: look.attention(0, value),
        "k": lambda: look.lens(1, value),
        "start": lambda: look.to_dict(value),
        "top": lambda: llm.look(TEXT, top=value),
    }
    if value is not None:
        calls["head"] = lambda: look.attention(0, 0, value)
        calls["stop"] = lambda: look.to_dict(0, value)
    for name, call in calls.items():
        with pytest.raises(BadRequest, match=rf"^{name} must be .*, not ") as problem:
            call()
        assert "\n" not in str(problem.value)


def test_places_out_of_range_are_named(llm: LLM) -> None:
    look = llm.look("abcdefghij")
    for call, problem in (
        (lambda: look[10], "token must be a whole number from 0 to 9, not 10"),
        (lambda: look.attention(10, 0), "token must be a whole number from 0 to 9, not 10"),
        (lambda: look.attention(0, 2), "layer must be a whole number from 0 to 1, not 2"),
        (lambda: look.attention(0, 0, 8), "head must be a whole number from 0 to 7, not 8"),
        (lambda: look.lens(11), "token must be a whole number from 0 to 10, not 11"),
        (lambda: look.lens(0), "nothing stands before token 0"),
        (lambda: look.lens(1, 101), "k must be a whole number from 1 to 100, not 101"),
        (lambda: look.to_dict(5, 4), "stop must be a whole number from 5 to 10, not 4"),
        (lambda: llm.look("a", top=0), "top must be a whole number from 1 to 100, not 0"),
        (lambda: llm.look([300]), "token id 300 is outside the vocabulary of 259"),
        (lambda: llm.look(["a"]), "token ids are whole numbers"),
        (lambda: llm.look(5), "token ids come as a list"),  # type: ignore[arg-type]
        (lambda: llm.look("a", answer=5), "token ids come as a list"),  # type: ignore[arg-type]
        (lambda: llm.look("a", answer=[-1]), "token id -1 is outside"),
        (lambda: llm.look([{"role": "nobody", "content": ""}]), "has the role 'nobody'"),
    ):
        with pytest.raises(BadRequest, match=problem):
            call()
    assert look[np.int64(9)].index == 9


def test_nothing_is_computed_before_it_is_asked_for(folder: Path) -> None:
    model = pronk.load(folder, engine="cpu", quantize="f32")
    forward, inspect, asked = model.backend.forward, model.backend.inspect, []
    model.backend.forward = lambda *given: (asked.append("forward"), forward(*given))[1]  # type: ignore[method-assign]
    model.backend.inspect = lambda *given, **more: (asked.append("inspect"), inspect(*given, **more))[1]  # type: ignore[method-assign]
    look = model.look(TEXT)
    assert (look.pieces[0], repr(look), asked) == (
        "W",
        f"<Look at {len(TEXT)} tokens, {len(TEXT)} of them the prompt's>",
        [],
    )
    look.attention(0, 0)
    assert asked == ["inspect"]
    _ = look.bits, look.entropy, look.next, look[3], look.to_dict()
    assert asked == ["inspect", "forward"]
    look.lens(50)
    assert asked == ["inspect", "forward", "inspect"]


def test_a_closed_model_and_another_backend_are_errors(folder: Path) -> None:
    model = pronk.load(folder, engine="cpu", quantize="f32")
    look, late = model.look(TEXT), model.look(TEXT)
    _ = look.bits
    model.backend = model.backend.perturbed()
    with pytest.raises(PronkError, match="another backend since this look was taken"):
        look.lens(3)
    assert look.bits[1] > 0  # is known
    model.close()
    with pytest.raises(PronkError, match="is closed"):
        _ = late.bits


def test_logits_that_are_no_numbers_are_an_error() -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["lm_head.weight"] *= np.float32(2e38)
    weights["model.layers.1.self_attn.k_proj.weight"] *= np.float32(2e38)
    checkpoint = in_memory(config, weights)
    look = LLM("broken", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, quantize="f32")).look([5, 6, 7])
    for ask in (lambda: look.bits, lambda: look.lens(2), lambda: look.attention(2, 1)):
        with pytest.raises(NotNumbers):
            ask()


def test_any_number_of_threads_look_and_generate(llm: LLM) -> None:
    look, again = llm.look(TEXT), llm.look(TEXT)
    alone = [(again.attention(t, t % 2), again.lens(t + 1).probabilities) for t in range(20)]
    text = llm.generate("abc", max_new_tokens=30, ignore_eos=True)
    found: dict[Any, Any] = {}

    def ask(t: int) -> None:
        found[t] = look.attention(t, t % 2), look.lens(t + 1).probabilities

    def write() -> None:
        found["text"] = llm.generate("abc", max_new_tokens=30, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(t,)) for t in range(20)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t, (row, lens) in enumerate(alone):
        assert np.array_equal(found[t][0], row)
        assert np.array_equal(found[t][1], lens)
    assert found["text"].tokens == text.tokens  # type: ignore[union-attr]


def test_the_json_form_says_it_all(llm: LLM) -> None:
    look = llm.look(TEXT, answer="!", top=2)
    told = json.loads(json.dumps(look.to_dict(), allow_nan=False))
    assert [token["id"] for token in told["tokens"]] == look.ids.tolist()
    assert bytes(told["tokens"][3]["bytes"]) == look.bytes[3]
    assert told["tokens"][0] | {"logprob": None, "bits": None, "rank": None, "top": []} == told["tokens"][0]
    assert [token["bits"] for token in told["tokens"][1:]] == look.bits[1:].tolist()
    assert [len(token["top"]) for token in told["tokens"]] == [0] + [2] * (len(look) - 1)
    assert (told["prompt_tokens"], told["length"], told["layers"], told["heads"]) == (len(TEXT), len(TEXT) + 1, 2, 8)
    part = look.to_dict(10, 12)
    assert (part["start"], [token["index"] for token in part["tokens"]]) == (10, [10, 11])
    for token in (7, len(look)):
        lens = json.loads(json.dumps(look.lens(token).to_dict(), allow_nan=False))
        assert [row["layer"] for row in lens["layers"]] == [-1, 0, 1]
        assert (lens["came"] is None) == (token == len(look))
        assert lens["layers"][2]["top"][0]["probability"] == look.lens(token).probabilities[2, 0]


def test_pictures_hold_what_is_in_them(llm: LLM) -> None:
    hostile = "<script>alert(1)</script> & \"'\x00\x1b[2J\u202e" + "\n\n\t wide" * 30 + "x" * 20
    look = llm.look(hostile)
    pictures = [look.svg(), look.attention_svg(40, 1), look.attention_svg(0, 0, 3), look.lens(9).svg()]
    for drawn in [*pictures, look.lens(len(look), k=20).svg()]:
        contained(drawn)
        assert "<script" not in drawn
    assert pictures == [look.svg(), look.attention_svg(40, 1), look.attention_svg(0, 0, 3), look.lens(9).svg()]
    for page in (look._repr_html_(), look.lens(3)._repr_html_()):
        assert "<script" not in page
        assert "data:image/svg+xml;base64," in page


def test_the_most_surprising_token_has_the_darkest_box(llm: LLM) -> None:
    look = llm.look(TEXT)
    boxes = [e for e in contained(look.svg()).iter() if e.get("class") == "token"]
    opacities = [float(e.get("style", "").rpartition(" ")[2]) for e in boxes[-len(TEXT) + 1 :]]
    told = np.minimum(look.bits[1:], 12) / 12 * 0.75
    assert opacities == pytest.approx(told, abs=0.006)


def test_long_texts_are_drawn_in_part(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.look import picture

    monkeypatch.setattr(picture, "MOST_TOKENS", 10)
    look = llm.look(TEXT)
    assert f"and {len(TEXT) - 10} more tokens" in look.svg()
    assert f"{len(TEXT) - 10} more tokens" in look._repr_html_()
