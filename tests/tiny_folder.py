"""A tiny random chat model in a folder, as Hugging Face would hold it: for tests of what people type."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from formats import save_huggingface
from tiny import random_weights, tiny_config

# The gist of ChatML, in few tokens: the tiny model's every byte is one.
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def save_tiny_chat_model(folder: Path, max_position_embeddings: int = 1024) -> Path:
    """259 tokens: <unk>, <s>, </s> and the 256 bytes. Its text is noise, and the same noise each time."""
    config = tiny_config(vocab_size=259, max_position_embeddings=max_position_embeddings)
    save_huggingface(folder, config, random_weights(config))
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*specials, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
