"""Memory is counted before the work begins, and what does not fit is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk import system
from pronk.cpu_engine import weights
from pronk.cpu_engine.backend import CpuBackend, load_native
from pronk.cpu_engine.slots import slots
from pronk.engine.batch import Batch, Run
from pronk.errors import NotEnoughMemory, PronkError

CONFIG = tiny_config(vocab_size=5000)


def unreadable() -> np.ndarray:
    raise AssertionError("read, though it cannot fit")


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_memory", lambda: 1_000_000)
    plain = in_memory(CONFIG, random_weights(CONFIG))
    checkpoint = replace(plain, tensors={n: replace(t, read=unreadable) for n, t in plain.tensors.items()})
    with pytest.raises(PronkError, match=r"needs [\d.]+ MB of memory, and 1.0 MB are free; .*quantize='q4'"):
        CpuBackend.from_checkpoint(checkpoint)
    with pytest.raises(
        PronkError, match=r"free; choose a smaller model$"
    ):  # what is small already is not to be made so
        CpuBackend.from_checkpoint(checkpoint, quantize="q4")


def test_a_context_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_memory", lambda: 50_000_000)
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    CpuBackend.from_checkpoint(checkpoint)
    with pytest.raises(PronkError, match="are free; give a smaller ctx_size"):
        CpuBackend.from_checkpoint(checkpoint, ctx_size=1 << 20)


def test_a_cache_that_does_not_fit_is_refused_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)))
    kv = engine.new_kv(1, 64)
    batch = Batch.of([Run([1, 2, 3], 0, (0,))])
    before = engine.forward(batch, kv)
    monkeypatch.setattr(system, "free_memory", lambda: 1_000_000)
    for grow in (lambda: kv.resize(10_000), lambda: engine.new_kv(10_000, 64)):
        with pytest.raises(PronkError, match=r"KV cache of 640000 tokens needs .* 1.0 MB are free; .*kv_dtype='q4'"):
            grow()
    assert kv.num_blocks == 1
    assert np.array_equal(engine.forward(batch, kv), before)


def test_a_pass_longer_than_a_schedulers_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a long text are most of it; what a pass as long took before stays with the model."""
    engine = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)))
    batch = Batch.of([Run([1] * 600)])
    before = engine.forward(batch, None)
    longer = Batch.of([Run([1] * 2000, logits="all")])
    for free, fits in ((40_000_000, False), (45_000_000, True)):  # 4 * 2000 * 5000 are logits
        monkeypatch.setattr(system, "free_memory", lambda free=free: free)
        if not fits:
            with pytest.raises(NotEnoughMemory, match=r"a pass over 2000 tokens needs 4\d\.\d MB of memory.*KV cache"):
                engine.forward(longer, None)
        else:
            engine.forward(longer, None)
    monkeypatch.setattr(system, "free_memory", lambda: 800_000)  # for keys and values of a layer
    assert np.array_equal(engine.forward(batch, None), before)


def test_memory_that_runs_out_in_a_pass_is_a_clean_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of the address space, which is not seen before."""
    engine = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)))

    class Starved:
        def forward(self, **_: object) -> None:
            raise MemoryError("std::bad_alloc")

        activations = forward

        def set_rope(self, *_: object) -> None:
            pass

    kv = engine.new_kv(1, 64)
    monkeypatch.setattr(engine, "model", Starved())
    for call in (engine.forward, engine.activations):
        with pytest.raises(NotEnoughMemory, match="memory ran out in a pass over 3 tokens; take fewer"):
            call(Batch.of([Run([1, 2, 3], 0, (0,))]), kv)


def test_the_count_is_what_packing_takes() -> None:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    for quantize in ("f32", "bf16", "int8", "llm-int8", "q8", "q4"):
        counted = weights.packed_bytes(load_native().packed_bytes, checkpoint, slots(checkpoint, quantize))
        taken = CpuBackend.from_checkpoint(checkpoint, quantize=quantize).model.nbytes
        assert counted <= taken <= counted + 64 * 1024  # norms


def test_the_least_limit_of_the_groups_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's cached files can be dropped; its parents' limits are its own."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit, current, files in ((inner, "max", "500", 0), (inner.parent, "1000", "700", 50)):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(current + "\n")
        (folder / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file {files}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:      8000 kB\n")
    (tmp_path / "cgroup").write_text("12:cpu:/elsewhere\n0::/outer/inner\n")
    places = {"/proc/meminfo": tmp_path / "meminfo", "/proc/self/cgroup": tmp_path / "cgroup"}
    read = system._read
    monkeypatch.setattr(system, "_read", lambda path: read(places.get(str(path), path)))
    monkeypatch.setattr(system, "_CGROUPS", tmp_path)
    assert system.free_memory() == 1000 - 700 + 100
    (inner / "memory.max").write_text("600\n")
    assert system.free_memory() == 100
    (tmp_path / "cgroup").write_text("12:cpu:/elsewhere\n")
    assert system.free_memory() == 8000 * 1024
    (tmp_path / "meminfo").write_text("")
    assert system.free_memory() is None


def test_limits_of_groups_of_version_1_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen as version 2's only, they let a process that did not fit be killed."""
    inner = tmp_path / "memory" / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit, usage in ((inner, 2**63 - 4096, 500), (inner.parent, 1000, 700)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text("active_file 9\ntotal_active_file 40\ntotal_inactive_file 60\n")
    cgroup = tmp_path / "cgroup"
    read = system._read
    monkeypatch.setattr(system, "_read", lambda path: read(cgroup if str(path) == "/proc/self/cgroup" else path))
    monkeypatch.setattr(system, "_CGROUPS", tmp_path)
    cgroup.write_text("9:name=systemd:/\n4:memory:/outer/inner\n1:cpu:/outer\n0::/\n")
    assert system.free_memory() == 1000 - 700 + 100
    cgroup.write_text("4:memory:/of/a/host\n0::/\n")  # as a container may see it, which has its own at the root
    for name, number in (("limit", 600), ("usage", 100)):
        (tmp_path / "memory" / f"memory.{name}_in_bytes").write_text(f"{number}\n")
    assert system.free_memory() == 500
