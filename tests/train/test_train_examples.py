"""Records as tokens: what is read, what is learned, and that nothing is cut unasked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_folder import save_tiny_chat_model

from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, BadRequest, Unsupported
from pronk.tokenizer import Tokenizer
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Example, Pair
from pronk.train.data.records import Record, parse
from pronk.train.data.sources import Data, prepare
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.sft import SFT, alpaca_prompt
from pronk.train.settings import Settings

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    source = tokenizers.find(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))
    assert source
    return tokenizers.load(source)


def encode(codec: Tokenizer, raw: Any, objective: SFT | None = None, **options: Any) -> Example:
    (found,) = (objective or SFT()).encode(parse(raw, "line 1"), Encoder(codec, max_length=1000, **options))
    return found


def texts(codec: Tokenizer, example: Example) -> tuple[str, str]:
    """All of it, and what is learned, a bar wherever something lies between."""
    pieces = [codec.token_text(int(token)) for token in example.ids]
    learned, last = "", 0
    for at in np.flatnonzero(example.loss_mask):
        learned += "|" * bool(learned and at != last + 1) + pieces[at]
        last = at
    return "".join(pieces), learned


@pytest.mark.parametrize("most", [2, 3, 5, 8])
@pytest.mark.parametrize("begins", [True, False])
def test_a_long_text_is_split(codec: Tokenizer, monkeypatch: pytest.MonkeyPatch, most: int, begins: bool) -> None:
    """Each token but the first is learned, once; each piece begins as the text does, or with the token before it."""
    record = parse({"text": "Once upon a time there was"}, "line 1")
    (whole,) = SFT().encode(record, Encoder(codec, 1000))
    monkeypatch.setattr(codec, "bos_id", int(whole.ids[0]) if begins else None)
    encoder = Encoder(codec, most, too_long="split")
    pieces = SFT().encode(record, encoder)
    assert len(pieces) > 2
    assert all(2 <= len(piece) <= most and piece.targets == len(piece) - 1 for piece in pieces)
    learned = [int(token) for piece in pieces for token in piece.ids[piece.loss_mask]]
    assert learned == whole.ids[1:].tolist()
    firsts = [int(piece.ids[0]) for piece in pieces]
    before = [int(whole.ids[0]), *(int(piece.ids[-1]) for piece in pieces[:-1])]
    assert firsts == (before[:1] * len(pieces) if begins else before)
    assert (encoder.cut, encoder.skipped) == (0, 0)
    assert len(SFT().encode(record, Encoder(codec, len(whole), too_long="split"))) == 1
    with pytest.raises(BadRecord, match="takes 9 tokens"):
        SFT().encode(parse({"prompt": "Say:", "completion": " a b"}, "line 1"), Encoder(codec, 4, too_long="split"))


def test_only_the_answer_and_its_end_are_learned(codec: Tokenizer) -> None:
    example = encode(codec, {"prompt": "2+2=", "completion": "4"})
    assert texts(codec, example) == ("2+2=4</s>", "4</s>")
    assert example.targets == 2


def test_the_prompt_too_where_that_was_asked_for(codec: Tokenizer) -> None:
    example = encode(codec, {"prompt": "2+2=", "completion": "4"}, SFT(train_on_prompt=True))
    assert texts(codec, example)[1] == "+2=4</s>"  # nothing foretells the first


def test_all_of_a_plain_text_is_learned(codec: Tokenizer) -> None:
    assert texts(codec, encode(codec, {"text": "Once."})) == ("Once.</s>", "nce.</s>")


@pytest.mark.parametrize("raw", [{"text": "Once.</s>"}, {"prompt": "2+2=", "completion": "4</s>"}])
def test_a_text_that_ends_already_gets_no_second_end(codec: Tokenizer, raw: Any) -> None:
    assert texts(codec, encode(codec, raw))[0].count("</s>") == 1
    assert texts(codec, encode(codec, {"text": "Once</s>."}))[0] == "Once</s>.</s>"  # the inverse


def test_of_a_conversation_what_the_assistant_says(codec: Tokenizer) -> None:
    whole, learned = texts(codec, encode(codec, {"messages": TALK}))
    assert whole == "<s>user:Hi</s><s>assistant:Yes?</s><s>user:Bye</s><s>assistant:So long</s>"
    assert learned == "Yes?</s>|So long</s>"


def test_what_a_template_puts_behind_the_end_of_a_turn_is_not_learned(codec: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "chatml.jinja"
    template.write_text(
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    example = encode(codec, {"messages": TALK[:2]}, template=str(template))
    assert texts(codec, example)[1] == "Yes?</s>"


def test_the_default_model_is_asked_as_it_is_when_it_chats(codec: Tokenizer) -> None:
    """The learned part begins exactly where generation would begin."""
    encoder = Encoder(codec, 1000)
    example = encoder.conversation({"messages": TALK[:2]})
    assert encoder._chat
    prompt = codec.encode(encoder._chat.render(TALK[:1]), bos=False)
    assert example.ids[: len(prompt)].tolist() == prompt
    assert not example.loss_mask[: len(prompt)].any()
    assert example.loss_mask[len(prompt) :].all()


def test_alpaca_has_two_templates(codec: Tokenizer) -> None:
    without = alpaca_prompt({"instruction": "Sing.", "input": "  "})
    with_input = alpaca_prompt({"instruction": "Add {both}.", "input": "2, 2"})
    assert without.endswith("### Instruction:\nSing.\n\n### Response:")
    assert "### Instruction:\nAdd {both}.\n\n### Input:\n2, 2\n\n### Response:" in with_input
    example = encode(codec, {"instruction": "Sing.", "output": "La"}, SFT(instructions="alpaca"))
    assert texts(codec, example) == (without + "La</s>", "La</s>")


def test_instructions_go_through_the_chat_template_where_there_is_one(
    codec: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alpaca's, which a chat model has never seen, was the default, and its answers nothing."""
    raw = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    expected = ("<s>user:Add.\n\n2, 2</s><s>assistant:4</s>", "4</s>")
    assert texts(codec, encode(codec, raw)) == texts(codec, encode(codec, raw, SFT(instructions="chat"))) == expected
    asked = {"system": "Be brief.", "question": "2+2?", "answer": "4"}
    assert texts(codec, encode(codec, asked))[0] == "<s>system:Be brief.</s><s>user:2+2?</s><s>assistant:4</s>"
    monkeypatch.setattr(codec, "chat_template", None)
    assert texts(codec, encode(codec, raw))[0] == alpaca_prompt(raw) + "4</s>"
    encoder = Encoder(codec, 1000)
    SFT().encode(parse(asked, ""), encoder)
    assert encoder.unused == {"system": 1}
    with pytest.raises(Unsupported, match="--chat-template"):
        encode(codec, raw, SFT(instructions="chat"))
    with pytest.raises(BadRequest, match="instructions must be one of auto, chat, alpaca"):
        SFT(instructions="llama")  # type: ignore[arg-type]


@pytest.mark.parametrize("talks", [False, True])
def test_a_preference_is_two_examples_of_one_prompt(codec: Tokenizer, talks: bool) -> None:
    raw: dict[str, Any] = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    if talks:
        raw = {key: [{"role": "user" if key == "prompt" else "assistant", "content": raw[key]}] for key in raw}
    (pair,) = DPO().encode(parse(raw, ""), Encoder(codec, 1000))
    assert isinstance(pair, Pair)
    assert texts(codec, pair.chosen)[1] == "4</s>"
    assert texts(codec, pair.rejected)[1] == "five</s>"
    prompt = pair.chosen.ids[~pair.chosen.loss_mask]
    assert np.array_equal(prompt, pair.rejected.ids[~pair.rejected.loss_mask])


@pytest.fixture
def prepared(codec: Tokenizer, tmp_path: Path) -> Callable[..., Data]:
    """Records in a file, as a run reads them."""

    def prepared(*raw: Any, **options: Any) -> Data:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in raw))
        return prepare(Settings("tiny", str(path), **options), codec, 1000)

    return prepared


def test_what_does_not_fit_is_an_error_unless_a_cut_was_asked_for(
    codec: Tokenizer, prepared: Callable[..., Data]
) -> None:
    long, short = {"prompt": "2+2=", "completion": "four"}, {"prompt": "1", "completion": "2"}
    with pytest.raises(BadFile, match=r"data.jsonl: line 2: takes 9 tokens, and 6 is the most; raise --max-length"):
        prepared(short, long, max_length=6)
    beyond = {"prompt": "2" * 1000, "completion": "four"}
    with pytest.raises(
        BadFile, match=r"line 1: takes 1005 tokens, and the model's context has 1000; say with --too-long"
    ):
        prepared(beyond, max_length=6)  # which could not be raised so far
    cutting = prepared(short, long, max_length=6, too_long="cut")
    _, cut = cutting.train
    assert isinstance(cut, Example)
    assert texts(codec, cut) == ("2+2=fo", "fo")
    assert (cutting.cut, cutting.too_long) == (1, 0)
    skipping = prepared(short, long, max_length=6, too_long="skip")
    assert len(skipping.train) == 1
    assert (skipping.cut, skipping.too_long) == (0, 1)


def test_a_cut_that_takes_the_answer_takes_the_record(codec: Tokenizer, prepared: Callable[..., Data]) -> None:
    record = {"prompt": "2+2=", "completion": "4"}
    with pytest.raises(BadFile, match=r"no record fits into 4 tokens \(1 were skipped\)"):
        prepared(record, max_length=4, too_long="cut")
    encoder = Encoder(codec, 4, too_long="cut")
    assert SFT().encode(parse(record, ""), encoder) == []
    assert (encoder.cut, encoder.skipped) == (0, 1)


def test_a_template_that_drops_the_answer_is_seen(prepared: Callable[..., Data], tmp_path: Path) -> None:
    template = tmp_path / "deaf.jinja"
    template.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadFile, match="line 1: the chat template leaves nothing of message 1"):
        prepared({"messages": TALK}, chat_template=str(template))


def test_a_chat_template_that_is_not_there_although_no_record_needs_it(codec: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template at"):
        Encoder(codec, 1000, template=str(tmp_path / "absent.jinja"))


def test_a_model_without_a_chat_template(codec: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "chat_template", None)
    with pytest.raises(Unsupported, match="--chat-template"):
        SFT().encode(Record("messages", {"messages": TALK}, ""), Encoder(codec, 1000))
