"""What is learned of a conversation, found by rendering: against transformers' masks, where templates mark answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny_folder import save_tiny_chat_model

from pronk import tokenizer as tokenizers
from pronk.errors import BadRequest
from pronk.tokenizer import Tokenizer
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder
from pronk.train.data.records import parse
from pronk.train.objectives.sft import SFT

# Templates in the ways of published ones, with their answers marked. What is marked is what the model is to write.
SAID = "{% generation %}{{ m.content }}</s>{% endgeneration %}"
TRIMMED = "{% generation %}{{ m.content | trim }}</s>{% endgeneration %}"
TEMPLATES = {
    "plain": "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}" + SAID
    + "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}",
    "default system prompt": "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<s>system\nYou are a helpful assistant</s>\n{% endif %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}" + SAID
    + "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "default that needs a message": "<s>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}Be kind{% endif %}</s>{% for m in messages if m.role != 'system' %}<s>{{ m.role }}\n\n"
    "{% if m.role == 'assistant' %}" + TRIMMED + "{% else %}{{ m.content | trim }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n\n{% endif %}",
    "system prompt in the last question": "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}<s>"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last or loop.nextitem is defined and loop.revindex <= 2 %}{{ ns.system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %}{% generation %}{{ m.content | trim }}</s>{% endgeneration %}{% endif %}"
    "{% endfor %}",
    "thoughts before the last": "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] | trim }}"
    "</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "a prompt that begins to think": "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}" + TRIMMED
    + "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n<think>\n"
    "{% endif %}",
    "another name for the assistant": "<s>{% for m in messages %}<t>{{ 'model' if m.role == 'assistant' else m.role }}"
    "\n{% if m.role == 'assistant' %}" + TRIMMED + "{% else %}{{ m.content | trim }}<e>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<t>model\n{% endif %}",
    "words for roles": "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT:{% generation %} {{ m.content }}"
    "</s>{% endgeneration %}{% else %}USER: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
}  # fmt: skip
WORDS = ["Hi", "\n", " ", "a", "assistant\n", "<s>", "</s>", "<think>\n", "[/INST]", "é", ":", "\ue000", "Yes?"]
MESSAGES = st.lists(
    st.builds(
        lambda role, words: {"role": role, "content": "".join(words) + "."},
        st.sampled_from(["system", "user", "assistant"]),
        st.lists(st.sampled_from(WORDS), max_size=4),
    ),
    min_size=1,
    max_size=5,
).filter(lambda messages: any(message["role"] == "assistant" for message in messages))
GREETED = [{"role": role, "content": text} for role, text in
           (("assistant", "Hello."), ("user", "Hi."), ("assistant", "Yes?"))]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def codec(folder: Path) -> Tokenizer:
    source = tokenizers.find(folder)
    assert source
    return tokenizers.load(source)


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def learned(codec: Tokenizer, template: str, messages: Any) -> tuple[list[int], list[bool]]:
    codec.chat_template = template
    found = Encoder(codec, 1 << 20).conversation({"messages": messages})
    return found.ids.tolist(), found.loss_mask.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=MESSAGES)
@example(messages=GREETED)
@settings(max_examples=40, deadline=None)
def test_the_mask_is_what_templates_mark(name: str, codec: Tokenizer, hugging_face: Any, messages: Any) -> None:
    """A conversation that began with the assistant learned the template's default system prompt and its header."""
    expected = hugging_face.apply_chat_template(
        messages, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    opened = name == "a prompt that begins to think"  # and the marks do not say so
    assume(not (opened and any(message["content"].lstrip().startswith("<think>\n") for message in messages)))
    try:
        ids, mask = learned(codec, TEMPLATES[name], messages)
    except BadRecord as error:  # rightly: what is dropped stands nowhere
        found = re.fullmatch("the chat template leaves nothing of message (.*), of 'system'", str(error))
        assert found
        said = codec.encode(messages[int(found[1])]["content"].strip(), bos=False)
        assert str(said)[1:-1] not in str(expected["input_ids"])
        return
    assert ids == expected["input_ids"]
    assert mask[1:] == [bool(bit) for bit in expected["assistant_masks"]][1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_others_say_is_not_learned(name: str, codec: Tokenizer) -> None:
    """The case of the report, in words: four tokens of the answers, not the 28 of a default before them."""
    ids, mask = learned(codec, TEMPLATES[name], GREETED)
    text = codec.decode([token for token, bit in zip(ids, mask, strict=True) if bit], skip_special=True)
    assert text.replace("<think>\n\n</think>\n\n", "").split() in (["Hello.Yes?"], ["Hello.", "Yes?"])


def test_the_default_model_s_own_template(smollm2: Path) -> None:
    from pronk import checkpoint

    source = checkpoint.open(smollm2).tokenizer
    assert source
    codec = tokenizers.load(source)
    found = Encoder(codec, 1000).conversation({"messages": GREETED})
    said = "".join(codec.token_text(int(token)) for token in found.ids[found.loss_mask])
    assert said == "Hello.<|im_end|>Yes?<|im_end|>"


def test_a_template_that_refuses_what_it_is_given_is_heard(codec: Tokenizer) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATES["plain"]
    with pytest.raises(BadRequest, match="user first"):
        learned(codec, template, GREETED)
    ids, mask = learned(codec, template, GREETED[1:])
    assert sum(mask) == len("Yes?") + 1 < len(ids)


def test_what_the_prompt_opens_is_not_asked_of_the_model(codec: Tokenizer) -> None:
    talk = [GREETED[1], {"role": "assistant", "content": "<think>\nwell</think>Yes"}]
    ids, mask = learned(codec, TEMPLATES["a prompt that begins to think"], talk)
    assert codec.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == "well</think>Yes"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "Four"},
]
OF_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'tool' %}[{{ m.content }}]</s>"
    "{% elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def test_calls_of_tools_are_learned_as_answers_are(codec: Tokenizer, hugging_face: Any) -> None:
    """tools and tool_calls were dropped in silence."""
    tools = [CALL["function"]]
    expected = hugging_face.apply_chat_template(
        CALLED, tools=tools, chat_template=OF_TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    codec.chat_template = OF_TOOLS
    encoder = Encoder(codec, 1 << 20)
    (found,) = SFT().encode(parse({"messages": CALLED, "tools": json.dumps(tools)}, ""), encoder)
    assert found.ids.tolist() == expected["input_ids"]
    assert found.loss_mask.tolist() == [bool(bit) for bit in expected["assistant_masks"]]
    assert encoder.unused == {"name of messages": 1}


def test_what_the_template_does_not_write_is_counted_or_refused(codec: Tokenizer) -> None:
    codec.chat_template = TEMPLATES["plain"]
    encoder = Encoder(codec, 1 << 20)
    talk = [{**GREETED[1], "name": "Ann"}, {**GREETED[2], "tool_calls": [CALL]}]
    for _ in range(2):
        SFT().encode(parse({"messages": talk, "tools": [CALL], "id": 7}, ""), encoder)
    assert encoder.unused == {"name of messages": 2, "tool_calls of messages": 2, "tools": 2}
    with pytest.raises(BadRecord, match="leaves nothing of message 1, the assistant's"):
        SFT().encode(parse({"messages": CALLED[:2]}, ""), encoder)
    with pytest.raises(BadRecord, match=r"'usr', a role that the .* not name; give a template that does: --chat-"):
        SFT().encode(parse({"messages": [{**GREETED[1], "role": "usr"}, GREETED[2]]}, ""), encoder)


def test_what_has_no_weight_is_not_learned(codec: Tokenizer) -> None:
    """OpenAI's "weight": 0 was ignored, and what the user had left out was learned."""
    codec.chat_template = TEMPLATES["plain"]
    talk = [GREETED[1], {**GREETED[2], "weight": 0}, GREETED[1], {**GREETED[0], "weight": 1}]
    (found,) = SFT().encode(parse({"messages": talk}, ""), encoder := Encoder(codec, 1 << 20))
    assert codec.decode(found.ids[found.loss_mask].tolist()) == "Hello."
    assert not encoder.unused
    plain = [{key: it for key, it in message.items() if key != "weight"} for message in talk]
    assert found.ids.tolist() == learned(codec, TEMPLATES["plain"], plain)[0]


def test_trl_s_prompt_and_completion_of_messages(codec: Tokenizer) -> None:
    """Of what stands in the prompt nothing is learned, the assistant's own words neither."""
    codec.chat_template = TEMPLATES["default system prompt"]
    (found,) = SFT().encode(parse({"prompt": GREETED[:2], "completion": GREETED[2:]}, ""), Encoder(codec, 1 << 20))
    assert codec.decode(found.ids[found.loss_mask].tolist()) == "Yes?"
