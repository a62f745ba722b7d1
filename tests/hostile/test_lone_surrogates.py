"""Issue 15, point 4. JSON can spell half of a character ("\\ud800"), and so does a path or an argument whose bytes are
not UTF-8: one line of PronkError, for whatever encodes it would end in a traceback.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny_folder import save_tiny_chat_model
from tokenizer.kinds import spm_json

import pronk
from pronk import checkpoint, strict_json
from pronk import tokenizer as tokenizers
from pronk.checkpoint import adapter
from pronk.checkpoint.containers.safetensors import read as tensors_of
from pronk.cli.conversation import Conversation
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.tokenizer import export
from pronk.train.data import records

HALF = "a\ud800"
ESCAPED = json.dumps(HALF)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of JSON that one may hold, and texts where they may stand."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    token = {"content": "<s>", "special": True}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"added_tokens_decoder": {"1": token}, "pad_token": "</s>", "chat_template": [
        {"name": "default", "template": settings["chat_template"]}
    ]}  # fmt: skip
    more = {
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {"eos_token": token | {"content": "</s>"}, "additional_special_tokens": ["<s>"]},
        "added_tokens.json": {"<s>": 1},
        "generation_config.json": {"eos_token_id": 2, "transformers_version": "5"},
        "chat_template.json": {"chat_template": "x"},
        adapter.CONFIG: {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": "b"},
    }
    for name, content in more.items():
        (folder / name).write_text(json.dumps(content))
    parts = {}
    for tensor, shape in checkpoint.open(folder).config.tensor_shapes().items():
        if (module := tensor.removesuffix(".weight")).endswith("q_proj"):
            parts[adapter.key(module, "lora_A")] = np.zeros((1, shape[1]), "f4")
            parts[adapter.key(module, "lora_B")] = np.zeros((shape[0], 1), "f4")
    safetensors.numpy.save_file(parts, folder / adapter.WEIGHTS)
    return folder


def spoiled(value: Any) -> Iterator[Any]:
    """`value` with one of its texts or keys lengthened by half a character, for each of them."""
    if isinstance(value, str):
        yield value + HALF
    elif isinstance(value, list):
        for i in range(min(len(value), 4)):
            yield from ([*value[:i], bad, *value[i + 1 :]] for bad in spoiled(value[i]))
    elif isinstance(value, dict):
        for key in [*value][:40]:
            rest = {k: v for k, v in value.items() if k != key}
            yield rest | {key + HALF: value[key]}
            yield from (rest | {key: bad} for bad in spoiled(value[key]))


def use(folder: Path) -> None:
    llm = pronk.load(folder, adapter=folder)
    llm.generate("ab", max_new_tokens=1)
    llm.chat([{"role": "user", "content": "ab"}], max_new_tokens=1)
    export.huggingface_files(llm.tokenizer)


def test_the_model_is_sound(model: Path) -> None:
    use(model)


@pytest.mark.parametrize(
    "name",
    """config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json generation_config.json
    chat_template.json adapter_config.json""".split(),
)
def test_in_every_text_of_every_file(name: str, model: Path, tmp_path: Path) -> None:
    """That of tokenizer_config.json was a UnicodeEncodeError, out of the library that was asked for the token."""
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    if name == "chat_template.json":  # is read where tokenizer_config.json has none
        (folder / "tokenizer_config.json").unlink()
    said: list[bytes] = []
    for bad in spoiled(json.loads((model / name).read_text())):
        (folder / name).write_text(json.dumps(bad))
        try:
            use(folder)
        except PronkError as error:
            said.append(str(error).encode())
    unread = name in ("added_tokens.json", "adapter_config.json")  # the latter may hold paths
    assert unread or any(b"lone surrogate" in line for line in said)


def test_of_the_header_of_a_container(tmp_path: Path) -> None:
    text = b'{"a\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(PronkError, match="lone surrogate"):
        tensors_of(tmp_path / "model.safetensors")


def test_pairs_are_characters(tmp_path: Path) -> None:
    text = b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": "\xf0\x9f\x98\x80"}'
    assert strict_json.parse(text, tmp_path) == {"a": "😀", "b": "\\ud800", "c": "😀"}
    with pytest.raises(BadFile, match=r"half of a character, in .*ude00"):
        strict_json.parse(b'{"a": ["\\ude00\\ud83d"]}', tmp_path)
    assert strict_json.parse(b'{"a": "\\ud800"}', tmp_path, paths=True) == {"a": "\ud800"}


@pytest.mark.parametrize("model_type", ["BPE", "Unigram"])
def test_in_a_tokenizer_json_of_another_kind(model_type: str, tmp_path: Path) -> None:
    raw = spm_json()
    if model_type == "Unigram":
        raw["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    for bad in spoiled(raw):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": bad.get("model"), **bad}))
        with pytest.raises(PronkError):
            tokenizers.load(tokenizers.find(tmp_path)).encode("a", bos=False)


def test_in_records(tmp_path: Path) -> None:
    lines = [f'{{"prompt": {ESCAPED}, "completion": "b"}}', '{"prompt": "a", "completion": "b", "x": {"y": 1}}']
    for name, text in (("lines.jsonl", "\n".join(lines)), ("list.json", f"[{','.join(lines)}]")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(BadFile, match=r"(line|record) 1: holds a lone surrogate"):
            records.read(path)
        found = records.read(path, skip_bad=True)
        assert [record.values["prompt"] for record in found.items] == ["a"]
        assert "lone surrogate" in str(found.skipped[0])


def test_in_what_callers_say(model: Path, tmp_path: Path) -> None:
    llm, template = pronk.load(model), tmp_path / "t.jinja"
    template.write_text(r"{{ '\ud800' }}")
    for said in (HALF, "\udcff", "x" * 1000 + "\udfff"):
        with pytest.raises(BadRequest, match="lone surrogate"):
            llm.generate(said)
        with pytest.raises(BadRequest, match="lone surrogate"):
            llm.chat([{"role": "user", "content": said}])
        with pytest.raises(BadRequest, match=r"message 0 has the role '[ -~]*; the roles are"):
            llm.chat([{"role": said, "content": "a"}])
        with pytest.raises(BadRequest, match="lone surrogate"):
            llm.chat([{"role": "user", "content": "a"}], chat_template=template)
        conversation = Conversation(said)
        with pytest.raises(BadRequest, match="lone surrogate"):
            conversation.save(tmp_path / "saved.json")
        assert not (tmp_path / "saved.json").exists()
    (tmp_path / "talk.json").write_text(f'[{{"role": "user", "content": {ESCAPED}}}]')
    with pytest.raises(BadFile, match="lone surrogate"):
        Conversation.read(tmp_path / "talk.json")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_on_the_command_line(model: Path, tmp_path: Path) -> None:
    """A prompt of such bytes is refused; a path of such bytes is as good as any, also where a file will name it."""
    place = bytes(tmp_path)
    shutil.copytree(bytes(model), place + b"/m\xff")

    def pronk_(*arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run([sys.executable, "-m", "pronk", *arguments], capture_output=True)
        assert b"Traceback" not in done.stderr
        return done

    done = pronk_("generate", "-m", model, "-n", "1", b"\xff")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"lone surrogate (U+DCFF)" in done.stderr
    done = pronk_("convert", place + b"/m\xff", place + b"/o\xff.gguf", "--to", "gguf")
    assert done.returncode == 0, done.stderr
    assert json.loads(pronk_("inspect", "--json", place + b"/o\xff.gguf").stdout)["format"] == "gguf"
