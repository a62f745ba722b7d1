"""Verification tells rounding from bugs: sound engines pass in every type, each planted bug is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from planted import values_scaled
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import KVStorage
from pronk.engine.batch import Batch
from pronk.llm import LLM
from pronk.measure.verify import compare, verify
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.kv import LayerKV

CONFIG = tiny_config(num_hidden_layers=4)
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))


def llm(dtype: str = "f32", attn: str = "flash") -> LLM:
    backend = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu", quantize=dtype, attn=attn)
    return LLM("tiny", CHECKPOINT, None, backend)


@pytest.mark.parametrize("attn", ["flash", "math"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_sound_engine_passes(dtype: str, attn: str) -> None:
    found = verify(llm(dtype, attn))
    assert found["verdict"] in ("identical", "rounding"), found
    assert [path["path"] for path in found["paths"]] == ["cached", "chunked", "batched"]
    assert found["last_token_only"]["max_abs_difference"] > 100 * found["noise_floor"] * (dtype == "f32")


def forget_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    read = LayerKV.read

    def forgetful(self: LayerKV, run: object) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = read(self, run)  # type: ignore[arg-type]
        return keys.index_fill(0, torch.tensor([0]), 0.0), values

    monkeypatch.setattr(LayerKV, "read", forgetful)


@pytest.mark.parametrize("plant", [forget_first_key, values_scaled])
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = llm()
    plant(monkeypatch)
    found = verify(sound)
    assert found["verdict"] == "bug"
    assert all(path["verdict"] == "bug" for path in found["paths"])


@pytest.mark.parametrize("quantize", ["f32", "bf16", "int8", "q4"])
def test_where_equal_bits_are_promised_the_last_place_is_a_bug(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, quantize=quantize, threads=1))
    assert verify(sound)["verdict"] == "identical"
    forward = CpuBackend.forward

    def a_place_off(self: CpuBackend, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        logits = forward(self, batch, kv)
        return np.nextafter(logits, np.float32(np.inf)) if kv else logits

    monkeypatch.setattr(CpuBackend, "forward", a_place_off)
    assert verify(sound)["verdict"] == "bug"


def test_compare_measures_what_a_type_costs() -> None:
    ids = list(range(40))
    same = compare(llm(), llm(), ids)
    assert same == {
        "tokens": 40,
        "max_abs_difference": 0.0,
        "worst_rms_difference": 0.0,
        "first_greedy_divergence": None,
    }
    half, brain = compare(llm(), llm("f16"), ids), compare(llm(), llm("bf16"), ids)
    assert 0 < half["max_abs_difference"] < brain["max_abs_difference"]


def test_progress_is_of_all_the_passes() -> None:
    told: list[tuple[str, int, int]] = []
    found = verify(llm(), progress=lambda *t: told.append(t))
    assert found["engine"] == "torch"
    assert told[0] == ("verifying", 0, 8 * 96)
    assert told[-1] == ("verifying", 8 * 96, 8 * 96)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
