"""The pack cache: what it gives is what packing gives, to the bit, or nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk import _native, system
from pronk import checkpoint as checkpoints
from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers.write import save as write
from pronk.cli import options
from pronk.cpu_engine import pack_cache, weights
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile

pytestmark = pytest.mark.skipif(not pack_cache._IS_THERE, reason="the pack cache is for Linux")
PROMPT = [1, 5, 7, 11, 3]


@dataclass
class Home:
    """Of a pack cache, and a model of which some tensors are tied, some have biases."""

    folder: Path
    model: Path
    packed: list[str] = field(default_factory=list)  # how each start came by its weights

    def start(self, quantize: str = "q8", path: Path | None = None, **more: Any) -> CpuBackend:
        given = {"pack_cache": True, "threads": 2} | more
        return CpuBackend.from_checkpoint(checkpoints.open(path or self.model), quantize=quantize, **given)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pack_cache, "LEAST", 0)
    config = tiny_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    found = Home(tmp_path / "home" / "packed", made(tmp_path / "model.gguf", in_memory(config, random_weights(config))))
    plain = weights.pack

    def noted(*given: Any, mounted: bool = False) -> None:
        found.packed.append("mounted" if mounted else "packed")
        plain(*given, mounted=mounted)

    monkeypatch.setattr(weights, "pack", noted)
    return found


def made(path: Path, checkpoint: Checkpoint) -> Path:
    write(checkpoint, path, to="gguf", dtype="f32", overwrite=True)
    return path


def logits(backend: CpuBackend) -> NDArray[np.float32]:
    return backend.forward(Batch.of([Run(PROMPT, 0, range(1))]), backend.new_kv(1, 64))


@pytest.mark.parametrize("quantize", ["f32", "bf16", "int8", "llm-int8", "q8", "q4"])
def test_a_second_start_maps_what_the_first_packed(home: Home, quantize: str) -> None:
    plain = home.start(quantize, pack_cache=False)
    first, second = home.start(quantize), home.start(quantize)
    assert home.packed == ["packed", "packed", "mounted"]
    assert logits(first).tobytes() == logits(second).tobytes() == logits(plain).tobytes()
    assert first.nbytes == second.nbytes == plain.nbytes


def test_who_makes_a_file_says_so(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    loading = dict.fromkeys(options.LOADING) | {"quantize": "q8", "pack_cache": True, "engine": "cpu"}
    options.load_model(str(home.model), {**loading}).close()
    said = rf"kept [\d.]+ kB of packed weights in {re.escape(str(home.folder))} for later starts"
    assert re.search(said, capsys.readouterr().err)
    options.load_model(str(home.model), {**loading}).close()
    assert "kept" not in capsys.readouterr().err


def test_processes_share_one_copy(home: Home) -> None:
    first, second = home.start(), home.start()
    (file,) = home.files
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    assert {line[4] for line in maps} == {str(file.stat().st_ino)}
    assert sorted(line[1] for line in maps) == [
        "r--s",
        "rw-s",
    ]  # who comes later never writes
    assert logits(first).tobytes() == logits(second).tobytes()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_damaged_file_is_packed_anew(home: Home, data: st.DataObject) -> None:
    right = logits(home.start())
    (file,) = home.files
    good = file.read_bytes()
    how = data.draw(st.sampled_from(["bit", "cut", "more", "empty", "moved"]))
    bad = bytearray(good)
    if how == "bit":
        bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del bad[data.draw(st.integers(0, len(good) - 1)) :]
    elif how == "more":
        bad += bytes(data.draw(st.integers(1, 5000)))
    elif how == "moved":
        bad[:64], bad[64:128] = good[64:128], good[:64]
    file.write_bytes(b"" if how == "empty" else bytes(bad))
    home.packed.clear()
    assert logits(home.start()).tobytes() == right.tobytes()
    assert home.packed == ["packed"]
    assert file.read_bytes() == good
    assert home.files == [file]


def test_without_the_sum_damage_would_be_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: it is the sum that the test before rests on."""
    right = logits(home.start())
    (file,) = home.files
    with file.open("r+b") as handle:
        handle.write(bytes(range(256)))
    monkeypatch.setattr(pack_cache, "_end", lambda memory, threads: file.read_bytes()[-pack_cache._END :])
    assert logits(home.start()).tobytes() != right.tobytes()


def test_what_another_user_packed_is_not_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to a shared PRONK_HOME can give a file the right name and the right sum."""
    home.start()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    home.start()  # root's is trusted, which is whose it may be here
    monkeypatch.setattr(pack_cache, "_ROOT", -1)
    monkeypatch.setattr(pack_cache, "_ours", lambda file: str(another) in file.name or not file.exists())
    home.start()
    assert home.packed[0] == home.packed[2] == "packed"
    assert home.packed[1] == ("mounted" if another == 1 else "packed")
    assert str(another) in home.files[0].name + home.files[-1].name  # beside the other's, which stays


def test_a_model_that_changed_is_packed_anew(home: Home) -> None:
    home.start()
    config = tiny_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    other = in_memory(config, random_weights(config, seed=1))
    times = home.model.stat()
    made(home.model, other)  # of the same size
    os.utime(home.model, ns=(times.st_atime_ns, times.st_mtime_ns))  # and the same time
    assert logits(home.start()).tobytes() == logits(home.start(pack_cache=False)).tobytes()
    assert home.packed == ["packed"] * 3
    os.utime(home.model)  # a change that the digest's pieces miss shows in the time alone
    home.start()
    assert home.packed[-1] == "packed"


def test_a_model_that_changes_while_it_is_packed_is_not_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights.pack

    def changing(*given: Any, **more: Any) -> None:
        plain(*given, **more)
        os.utime(home.model)

    monkeypatch.setattr(weights, "pack", changing)
    home.start()
    assert home.files == []


def test_formats_and_libraries_have_files_of_their_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.start("q8")
    home.start("q4")
    mixed = {"": "q8", "model.layers.0": "q4"}
    home.start(mixed)  # type: ignore[arg-type]
    other = home.folder / "library.so"
    other.write_bytes(b"built otherwise")
    monkeypatch.setattr(_native, "__file__", str(other))
    home.start("q8")
    assert home.packed == ["packed"] * 4
    assert len(home.files) == 4 + 1


def test_only_what_lies_in_the_files_is_kept(home: Home, tmp_path: Path) -> None:
    """What was changed since they were read has the files' digest."""
    opened = checkpoints.open(home.model)
    adapter = save(tmp_path / "adapter", random_adapter(opened.config, uneven=False))
    for model, given_to in (
        (opened, {"pack_cache": True}),
        (home.model, {"pack_cache": True, "adapter": adapter, "merge_adapter": True}),
        (home.model, {}),
    ):
        pronk.load(model, engine="cpu", quantize="q8", **given_to).close()  # type: ignore[arg-type]
        assert home.files == []
    pronk.load(home.model, adapter=adapter, engine="cpu", quantize="q8", pack_cache=True).close()
    pronk.load(home.model, engine="cpu", quantize="q8", pack_cache=True).close()
    assert home.packed[-2:] == ["packed", "mounted"]


def test_small_models_are_packed_each_time(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_cache, "LEAST", 1 << 28)
    home.start()
    home.start()
    assert home.files == []


def test_what_was_not_used_for_the_longest_time_makes_room(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.start("q8")
    (first,) = home.files
    monkeypatch.setattr(pack_cache, "MOST", 2 * first.stat().st_size)
    home.start("int8")
    (second,) = set(home.files) - {first}
    os.utime(first, (1, 1)), os.utime(second, (2, 2))
    home.start("q8")  # which was used now
    home.start("q4")
    assert first in home.files
    assert second not in home.files


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("problem", ["little room", "refused", "no folder"])
def test_where_the_disk_has_no_room_weights_are_packed_without(
    home: Home, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if problem == "little room":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    elif problem == "refused":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        home.folder.parent.mkdir(parents=True)
        home.folder.write_text("a file")
    assert logits(home.start()).tobytes() == logits(home.start(pack_cache=False)).tobytes()
    assert problem == "no folder" or home.files == []


def test_nothing_is_left_of_a_start_that_was_killed(home: Home) -> None:
    script = (
        "import os, signal, sys\n"
        "from pronk import checkpoint\n"
        "from pronk.cpu_engine import pack_cache, weights\n"
        "from pronk.cpu_engine.backend import CpuBackend\n"
        "pack_cache.LEAST = 0\n"
        "weights.pack = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "CpuBackend.from_checkpoint(checkpoint.open(sys.argv[1]), quantize='q8', pack_cache=True)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(home.model)], check=False)
    assert killed.returncode == -9
    assert len(home.files) == 2  # a part, and its writer's lock
    home.start("q4")
    assert [file.suffix for file in home.files] == [".packed"]


def test_nothing_is_left_of_a_file_that_cannot_be_packed(home: Home, tmp_path: Path) -> None:
    config = tiny_config()
    numbers = random_weights(config)
    numbers["model.layers.1.mlp.down_proj.weight"][3, 5] = np.inf
    bad = made(tmp_path / "bad.gguf", in_memory(config, random_weights(config)))
    raw = bytearray(bad.read_bytes())
    place = raw.find(numbers["model.layers.1.mlp.down_proj.weight"][4].tobytes())
    raw[place : place + 4] = np.float32(np.inf).tobytes()
    bad.write_bytes(raw)
    with pytest.raises(BadFile, match="not finite"):
        home.start(path=bad)
    assert home.files == []


def model() -> _native.Model:
    return _native.Model(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, threads=1,
    )  # fmt: skip


def line(size: int) -> NDArray[np.uint8]:
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size]


def refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_native_models_refuse_memory_that_does_not_fit() -> None:
    refused(lambda: model().lend(line(1000)[1:]), "begin on a line")
    refused(lambda: model().lend(line(0)), "begin on a line")
    small, lent, mounted, late = model(), model(), model(), model()
    small.lend(line(64 * 64))
    refused(lambda: small.allocate("embed_tokens", -1, "f32"), "too small")
    lent.lend(line(1 << 20))
    refused(lambda: lent.mount(line(1 << 20)), "once")
    mounted.mount(line(1 << 20))
    mounted.allocate("embed_tokens", -1, "f32")
    refused(lambda: mounted.pack("embed_tokens", -1, np.zeros((64, 256), np.uint8), "F32"), "as it was mounted")
    late.allocate("embed_tokens", -1, "f32")
    refused(lambda: late.lend(line(1 << 20)), "before anything is allocated")
    read_only = line(1 << 20)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        model().lend(read_only)
    model().mount(read_only)


def test_pipes_and_links_in_the_cache_hold_nobody_up(tmp_path: Path) -> None:
    """A pipe of a file's name was waited for, and a link that leads nowhere switched the cache off."""
    os.mkfifo(tmp_path / "a.packed")
    assert pack_cache.opened(tmp_path / "a.packed", 64, 1) is None
    (tmp_path / "b.packed").symlink_to(tmp_path / "nowhere")
    assert system.make_room(tmp_path, ".packed", 1, most=1 << 30, free=0)
