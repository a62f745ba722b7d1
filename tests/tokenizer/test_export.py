"""Tokenizers saved as Hugging Face's files: transformers and pronk read the same ids from them as from the source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

import pronk.checkpoint
import pronk.tokenizer
from pronk.measure.windows import evaluation_text
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.export import huggingface_files
from pronk.train.data import vocabulary

TEXTS = [
    "Hello, world",
    "  two  spaces\tand a tab\n\n",
    "naïve café 東京 🦙 e\u0301",
    "12345 6.7e-8",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>[INST] hi [/INST]",
    "",
]


def saved(folder: Path, tokenizer: Tokenizer) -> Path:
    for name, content in huggingface_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return folder


def same(ours: Tokenizer, source: Tokenizer) -> None:
    for text in TEXTS:
        assert ours.encode(text) == source.encode(text), text
    assert (ours.bos_id, ours.eos_ids[:1], ours.add_bos) == (source.bos_id, source.eos_ids[:1], source.add_bos)
    assert ours.chat_template == source.chat_template


def test_byte_level_bpe_out_of_gguf(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = pronk.checkpoint.open(smollm2).tokenizer
    assert source
    tokenizer = pronk.tokenizer.load(source)
    folder = saved(tmp_path, tokenizer)
    same(pronk.tokenizer.load(pronk.tokenizer.find(folder)), tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text), text
        assert theirs.decode(tokenizer.encode(text)) == text
    assert "hi<|im_end|>" in theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


@pytest.mark.parametrize("name", ["llama-tokenizers/llama2.tokenizer.bin", "stories260K/tok512.bin"])
def test_spm_out_of_llama2c(data: Path, tmp_path: Path, name: str) -> None:
    """Held against SentencePiece: transformers 5.23 reads Llama 2's own file otherwise where spaces double."""
    tokenizer = pronk.tokenizer.load(pronk.tokenizer.find(data / name))
    folder = saved(tmp_path, tokenizer)
    same(pronk.tokenizer.load(pronk.tokenizer.find(folder)), tokenizer)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert (reference.bos_id(), reference.eos_id(), reference.unk_id()) == (1, 2, 0)
    for text in TEXTS[:4]:
        assert [1, *reference.encode(text)] == tokenizer.encode(text), text


def test_a_vocabulary_of_one_s_own_loads_in_transformers_with_nothing_else(tmp_path: Path) -> None:
    """The folder of pretrain had a tokenizer.model alone, for which transformers wants SentencePiece."""
    script = """
import sys
sys.modules["sentencepiece"] = None  # as where it is not installed
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
import json
for text in json.loads(sys.argv[2]):
    ids = tokenizer(text)["input_ids"]
    print(json.dumps([ids, tokenizer.decode(ids, skip_special_tokens=True)]))
"""
    texts = [text for text in TEXTS if "<" not in text] + ["the llama and the alpaca", " once more", "a\nb"]
    own = vocabulary.train([evaluation_text()], 500)
    folder = saved(tmp_path, own)
    same(pronk.tokenizer.load(pronk.tokenizer.find(folder)), own)
    command = [sys.executable, "-c", script, str(folder), json.dumps(texts)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for text, line in zip(texts, lines, strict=True):
        assert json.loads(line) == [own.encode(text), text], text
