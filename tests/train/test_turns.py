"""What is learned of a conversation, found by rendering: against transformers' masks, where templates mark answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny_folder import save_tiny_chat_model

from pronk import tokenizer as tokenizers
from pronk.errors import BadRequest
from pronk.tokenizer import Tokenizer
from pronk.train.data.examples import Encoder

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
    found = Encoder(codec, 1 << 20).conversation(messages)
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
    ids, mask = learned(codec, TEMPLATES[name], messages)
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
    found = Encoder(codec, 1000).conversation(GREETED)
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
