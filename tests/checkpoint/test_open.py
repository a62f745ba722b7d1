"""open() finds the format by content, and says what it looked for where there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from formats import save_huggingface, save_meta
from gguf_files import save_gguf
from llama2c_files import save_llama2c
from tiny import random_weights, tiny_config

from pronk import checkpoint
from pronk.errors import BadFile, ModelNotFound

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)


def gguf(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return save_gguf(path, CONFIG, WEIGHTS)


def llama2c(path: Path, version: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_llama2c(path, CONFIG, WEIGHTS, version)
    return path


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "consolidated.00.pth", "model.safetensors", "x"])
def test_a_gguf_of_any_name(tmp_path: Path, name: str) -> None:
    path = gguf(tmp_path / "folder" / name)
    assert checkpoint.open(path).format == "gguf"
    assert checkpoint.open(str(path)).format == "gguf"
    assert checkpoint.open(tmp_path / "folder").format == "gguf"


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "x"])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_llama2c_file_of_any_name(tmp_path: Path, name: str, version: int) -> None:
    path = llama2c(tmp_path / "folder" / name, version)
    assert checkpoint.open(path).format == "llama2c"
    assert checkpoint.open(tmp_path / "folder").format == "llama2c"


def test_folders_and_the_files_in_them(tmp_path: Path) -> None:
    hf = save_huggingface(tmp_path / "hf", CONFIG, WEIGHTS)
    torch_hf = save_huggingface(tmp_path / "bin", CONFIG, WEIGHTS, container="bin")
    meta = save_meta(tmp_path / "meta", CONFIG, WEIGHTS, 2)
    for path in (hf, hf / "model.safetensors", torch_hf, torch_hf / "pytorch_model.bin"):
        assert checkpoint.open(path).format == "huggingface"
    for path in (meta, meta / "consolidated.00.pth", meta / "consolidated.01.pth"):
        assert checkpoint.open(path).format == "meta"


def test_a_home_folder_is_spelled_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    gguf(tmp_path / "x.gguf")
    assert checkpoint.open("~/x.gguf").format == "gguf"


def test_the_parts_of_one_split_model(tmp_path: Path) -> None:
    save_gguf(tmp_path / "x.gguf", CONFIG, WEIGHTS, tensors_a_part=8)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 1
    assert checkpoint.open(tmp_path).files == tuple(parts)


def test_several_models_are_listed(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf")
    gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFound, match=r"several models in this folder: a\.gguf, b\.gguf; give the path of one"):
        checkpoint.open(tmp_path)
    save_huggingface(tmp_path, CONFIG, WEIGHTS)
    save_meta(tmp_path, CONFIG, WEIGHTS)
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf, Hugging Face weights, Meta weights"):
        checkpoint.open(tmp_path)
    for name, found in (("a.gguf", "gguf"), ("model.safetensors", "huggingface"), ("consolidated.00.pth", "meta")):
        assert checkpoint.open(tmp_path / name).format == found
    two = tmp_path / "two"
    two.mkdir()
    for name in "ab":
        llama2c(two / name, 1)
    with pytest.raises(ModelNotFound, match="several models in this folder: a, b;"):
        checkpoint.open(two)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        checkpoint.open(tmp_path / "absent")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises((ModelNotFound, BadFile)):
        checkpoint.open(tmp_path / "circle")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"no model in this folder; looked for config\.json"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"x", b"hello\n" * 100, b"\0" * 5000, b"GGU", b"\x7fELF" + b"\1" * 999])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BadFile, match=r"is not a model: neither GGUF, safetensors, a torch archive nor llama2\.c"):
        checkpoint.open(tmp_path / "x.gguf")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(BadFile, match=r"x\.gguf: is empty"):
        checkpoint.open(tmp_path / "x.gguf")


def test_a_file_of_llama2c_that_is_cut_short_is_named_as_that(data: Path, tmp_path: Path) -> None:
    """Without a magic number it was said to be no model at all."""
    whole = (data / "stories260K" / "stories260K.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:500_000])
    problem = f"is cut short, if it is llama2.c's: its header calls for {len(whole)} bytes, but it has 500000"
    with pytest.raises(BadFile, match=re.escape(problem)):
        checkpoint.open(tmp_path / "cut.bin")
    (tmp_path / "longer.bin").write_bytes(whole + bytes(4))
    with pytest.raises(BadFile, match="is not a model"):
        checkpoint.open(tmp_path / "longer.bin")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(BadFile, match="neither a file nor a folder"):
        checkpoint.open(tmp_path / "x")
    with pytest.raises(ModelNotFound, match="no model in this folder"):
        checkpoint.open(tmp_path)


def test_weights_without_a_config(tmp_path: Path) -> None:
    for container in ("safetensors", "bin"):
        folder = save_huggingface(tmp_path / container, CONFIG, WEIGHTS, container=container)  # type: ignore[arg-type]
        (folder / "config.json").unlink()
        weights = next(folder.iterdir())
        with pytest.raises(BadFile, match=r"no config\.json \(Hugging Face\) or params\.json \(Meta\)"):
            checkpoint.open(weights)
        with pytest.raises(ModelNotFound):
            checkpoint.open(folder)


def test_a_config_without_weights(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path / "hf", CONFIG, WEIGHTS)
    (folder / "model.safetensors").write_bytes(b"\0\0")
    with pytest.raises(BadFile, match=r"model\.safetensors: neither a safetensors file nor a torch archive"):
        checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadFile, match=r"holds a config\.json and no weights"):
        checkpoint.open(folder)
    (folder / "config.json").rename(folder / "params.json")
    with pytest.raises(BadFile, match=r"holds a params\.json and no consolidated\.00\.pth"):
        checkpoint.open(folder)


def test_a_gguf_beside_a_config_is_the_model(tmp_path: Path) -> None:
    """Repositories of GGUF files often carry the original's config.json."""
    folder = save_huggingface(tmp_path / "hf", CONFIG, WEIGHTS)
    (folder / "model.safetensors").unlink()
    gguf(folder / "model.gguf")
    assert checkpoint.open(folder).format == "gguf"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = gguf(tmp_path / "x.gguf")
    path.chmod(0)
    with pytest.raises(BadFile, match="cannot be read: Permission denied"):
        checkpoint.open(path)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path / "x.gguf")
    real = Path.open

    def failing(self: Path, *arguments: object, **options: object) -> object:
        if self == path:
            raise OSError(5, "Input/output error", str(path))
        return real(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(BadFile, match=r"x\.gguf: cannot be read: Input/output error"):
        checkpoint.open(path)


def test_opening_imports_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    paths = [
        save_huggingface(tmp_path / "hf", CONFIG, WEIGHTS),
        save_huggingface(tmp_path / "bin", CONFIG, WEIGHTS, container="bin"),
        save_meta(tmp_path / "meta", CONFIG, WEIGHTS, 2),
        gguf(tmp_path / "x.gguf"),
        llama2c(tmp_path / "x.bin", 1),
    ]
    program = (
        "import sys; from pronk import checkpoint\n"
        "for path in sys.argv[1:]:\n"
        "    for tensor in checkpoint.open(path).tensors.values(): tensor.read()\n"
        "print(sorted({'torch', 'safetensors', 'gguf', 'transformers'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_real_models(data: Path, tmp_path: Path) -> None:
    assert checkpoint.open(data / "stories260K" / "stories260K.bin").format == "llama2c"
    shutil.copy(data / "stories260K" / "stories260K.bin", tmp_path / "model.gguf")
    shutil.copy(data / "stories260K" / "tok512.bin", tmp_path / "tokenizer.bin")
    assert checkpoint.open(tmp_path).format == "llama2c"


def test_what_training_made_and_is_no_model(tmp_path: Path) -> None:
    """`pronk generate -m mine` where mine is what `pronk finetune --out mine` or `pronk pretrain --out mine` made."""
    (tmp_path / "mine").mkdir()
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "smollm2:135m"}
    (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps(config))
    beside = r"an adapter, no model by itself; --adapter .*mine puts it beside "
    with pytest.raises(ModelNotFound, match=beside + r"'smollm2:135m', and pronk merge '.*' .*mine DST makes"):
        checkpoint.open(tmp_path / "mine")
    (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ModelNotFound, match=beside + "the model that it was trained on, and pronk merge BASE "):
        checkpoint.open(tmp_path / "mine")
    save_huggingface(tmp_path / "full" / "model", CONFIG, WEIGHTS)
    with pytest.raises(ModelNotFound, match=r"full: a training run; its model is .*full.model$"):
        checkpoint.open(tmp_path / "full")
