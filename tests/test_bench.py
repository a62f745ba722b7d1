"""What the figures rest on: turns, prompts, divergences, and the pages' tables, which are those of the results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from gguf_files import save_gguf
from tiny import in_memory, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

from pronk import checkpoint, tokenizer
from pronk.checkpoint import grid
from pronk.config import ModelConfig
from pronk.formats.quantize import quantize
from pronk.torch_engine.backend import load_model
from pronk.train.data.examples import Example

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program of bench/ by its name."""
    monkeypatch.syspath_prepend(str(BENCH))

    def program(name: str) -> ModuleType:
        return importlib.import_module(name)

    return program


def test_tables_are_those_of_the_results() -> None:
    subprocess.run([sys.executable, str(BENCH / "table.py"), "--check"], check=True)


def test_a_table_by_hand_is_found_and_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table: quality -->\n| by hand |\n<!-- end of table -->\nafter\n")
    found = {"mean_kld": 0.001, "standard_error": 0.0001, "top1": 0.955}
    (tmp_path / "quality.json").write_text(json.dumps({"measured": {"reference": found, "pronk q8": found}}))
    command = [sys.executable, str(BENCH / "table.py"), str(readme), "--results", str(tmp_path)]
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert checked.returncode == 1
    assert "quality" in checked.stderr
    subprocess.run(command, check=True, capture_output=True)
    assert "| pronk q8    | 0.001000 ± 0.000100 |           95.5% |" in readme.read_text()
    assert "by hand" not in readme.read_text()
    subprocess.run([*command, "--check"], check=True)


def test_what_calibrating_buys_is_held_against_llama_cpp(bench: Any) -> None:
    """Rows that were not measured leave their cells empty."""
    rows = {
        "smollm2-135m Q4_K_M llama.cpp": {"mean_kld": 0.08, "bits": 6.0},
        "smollm2-135m q4_k sized": {"mean_kld": 0.02, "bits": 5.99},
        "smollm2-135m q4_k 4.9bpw": {"mean_kld": 0.05, "bits": 4.89},
    }
    lines = bench("quality_tables").calibrated({"measured": rows}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ["SmolLM2-135M, Q4_K_M", "0.080 at 6.00", "0.020 at 5.99", "0.25", "", ""] in cells
    assert ["SmolLM2-135M, `--max-size 4.9bpw`", "", "0.050 at 4.89", "0.62", "", ""] in cells
    assert ["SmolLM2-135M, Q2_K", "", "", "", "", ""] in cells


def test_few_tokens_stand_beside_one_and_their_limit(bench: Any) -> None:
    one = {
        "machine": {"isa": "avx512-vnni"},
        "one_ms": {"median": 20.0},
        "ratios": {"2": {"median": 1.1}},
        "of_limit": {"1": {"median": 0.9}, "2": {"median": 0.75}},
    }
    table = bench("speed_tables").few_tokens({"measured": {"best": {"int8": one}, "avx2": {"q8": one}}})
    assert "| avx512-vnni, int8      | 20.0 ms (90%) | 1.10 (75%) |" in table
    assert "| avx2, q8 " in table


def test_speed_beside_bitsandbytes_stands_with_what_it_costs(bench: Any) -> None:
    rates = {"pronk": {"median": 210.0}, "bitsandbytes": {"median": 20.0}}
    ratio, memory = {"median": 10.5, "min": 10.0, "max": 11.0}, {"pronk": 215.0, "bitsandbytes": 1332.0}
    taken = {"tok_s": rates, "ratio": ratio, "peak_rss_mb": memory, "rss_mb": memory, "goal": 10.0}
    found = {"mean_kld": 0.0027, "standard_error": 0.0002, "top1": 0.977}
    results = {
        "settings": {"sizes": bench("tasks").QUICK.to_dict()},
        "measured": {"float16": {"tasks": {"decode": taken}}},
        "quality": {"reference": found, "pronk llm-int8": found},
    }
    table = bench("speed_tables").vs_bitsandbytes(results)
    assert "| llm-int8 vs load_in_8bit in float16, decode 16 |   210 |         20.0 | 10.50 (10.00 to 11.00) |" in table
    for text in (table, bench("vs_bitsandbytes").report({**results, "measured": {"float16": {"tasks": {}}}})):
        assert "| pronk llm-int8 | 0.002700 ± 0.000200 |" in text
        assert "reference" not in text


def test_training_beside_peft_stands_with_its_losses(bench: Any) -> None:
    rates = {
        "pronk": {"median": 284.2, "min": 265.0, "max": 303.4},
        "PEFT": {"median": 122.2, "min": 119.9, "max": 124},
    }
    memory = {"pronk": 2436.0, "PEFT": 9642.0}
    measured = {
        "tok_s": rates, "ratio": {"median": 2.33, "min": 2.13, "max": 2.53}, "peak_rss_mb": memory,
        "peak_while_training_mb": memory, "loss_difference": {"worst": 0.0003, "mean": 0.0001},
    }  # fmt: skip
    results = {"measured": {"f32 8x1": measured}}
    table = bench("speed_tables").vs_peft(results)
    assert (
        "| f32 8x1            |   284 |  122 | 2.33 (2.13 to 2.53) |     2436 / 9642 | -75% |               0.0001 |"
        in table
    )
    assert "-75%" in bench("vs_peft").report(results)


class FakeTrainer:
    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0

    def train(self, steps: int) -> dict[str, Any]:
        self.steps += steps
        return {"seconds": self.seconds, "losses": [2.0] * steps, "grad_norms": [1.0] * steps}


def test_tokens_of_training_are_those_of_the_steps_that_were_taken(bench: Any) -> None:
    side, found = FakeTrainer(2.0), []
    run = bench("vs_peft")._rate_of(side, [10, 20, 30, 40], 2, found)
    assert [run(), run()] == [15.0, 35.0]
    assert side.steps == 4
    assert [loss for one in found for loss in one["losses"]] == [2.0] * 4


def test_nobody_always_goes_first(bench: Any) -> None:
    turns: list[str] = []
    sides = {name: (lambda name=name: turns.append(name) or float(len(turns))) for name in "AB"}
    taken = bench("harness").interleave(sides, rounds=3)
    assert "".join(turns) == "AB" + "AB" + "BA" + "AB"
    assert taken == {"A": [3.0, 6.0, 7.0], "B": [4.0, 5.0, 8.0]}


class FakeSide:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def prepare(self, **room: int) -> None: ...

    def prefill(self, ids: list[int]) -> float:
        self.seen.append(tuple(ids))
        return 0.5

    def decode_batch(self, prompts: list[list[int]], new: int) -> float:
        self.seen.append(tuple(map(tuple, prompts)))
        return 2.0

    def memory(self) -> dict[str, float]:
        return {"peak": 1.0}


@pytest.mark.parametrize(("task", "rate"), [("prefill", 64 / 0.5), ("batch", 4 * 15 / 2.0)])
def test_both_sides_get_the_same_prompts_and_never_one_twice(bench: Any, task: str, rate: float) -> None:
    tasks, ours, theirs = bench("tasks"), FakeSide(), FakeSide()
    found = tasks.measure(task, ours, theirs, "peer", 1000, tasks.QUICK, rounds=3)
    assert ours.seen == theirs.seen
    assert len(set(ours.seen)) == 4  # the warm-up is a round too
    assert found["tok_s"]["pronk"]["median"] == rate
    assert found["ratio"]["median"] == 1.0


def test_a_side_answers_and_its_errors_arrive(bench: Any, tmp_path: Path) -> None:
    pipe = bench("sides.pipe")
    (tmp_path / "echo.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BENCH / 'sides')!r})\nfrom pipe import serve\n"
        "class Echo:\n    def double(self, number):\n        print('noise')\n        return 2 * number\nserve(Echo())\n"
    )
    with pipe.Side(str(tmp_path / "echo")) as side:
        assert side.double(number=21) == 42
        with pytest.raises(pipe.SideError, match="unsupported operand"):
            side.double(number=None)
        assert side.double(number=1) == 2


def test_peers_that_are_not_installed_are_named_with_the_way_out(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no .*/python; bench/README.md says how .* PRONK_BENCH_PYTHON"):
        bench("sides.pipe").Side("llama_cpp_side", str(tmp_path / "python"))


def test_divergence_agreement_and_perplexity(bench: Any) -> None:
    quality = bench("quality")
    true, own = np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), np.log([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])
    tally = quality.Tally()
    tally.add(quality.log_softmax(true.astype(np.float32) + 7), quality.log_softmax(own.astype(np.float32)), [1, 2])
    found = tally.summary()
    by_hand = 0.5 * np.log(2) + 0.3 * np.log(0.6) + 0.2 * np.log(0.8)
    assert found["mean_kld"] == pytest.approx(by_hand / 2, rel=1e-5)
    assert found["top1"] == 0.5
    assert found["perplexity"] == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-5)
    assert np.isnan(found["standard_error"])  # a window is one sample, however many its rows

    tally.add(quality.log_softmax(true.astype(np.float32)), quality.log_softmax(true.astype(np.float32)), [1, 2])
    assert tally.summary()["standard_error"] == pytest.approx(by_hand / 4, rel=1e-5)  # of 0 and by_hand / 2


def test_windows_are_spread_over_the_text(bench: Any) -> None:
    quality = bench("quality")
    ids = list(range(512 * 10 + 1))
    assert [window[0] for window in quality.windows(ids, 5)] == [0, 1024, 2048, 3072, 4096]
    assert {len(window) for window in quality.windows(ids, 50)} == {513}
    assert len(quality.windows(ids, 50)) == 10


def test_ways_of_rounding_make_files_of_one_size(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, model = bench("calibrated"), save_tiny_chat_model(tmp_path / "tiny")
    monkeypatch.setattr(bench("models"), "gguf", lambda *_: model)
    text, files = "The river was brown and slow. " * 20, {}
    for way, of_its_own in product(("plain", "calibrated", "autoround"), (0, 300)):
        path, seconds = program.made("smollm2-135m", way, "q4_0", tmp_path, text, of_its_own, steps=5)
        assert seconds > 0
        assert checkpoint.open(path).quantization == "Q4_0 x 14, Q4_1 x 2"
        files[way, of_its_own] = path.read_bytes()
    assert files["plain", 0] == files["plain", 300]
    assert len(set(files.values())) == len(files) - 1
    assert len(set(map(len, files.values()))) == 1


def test_rows_measured_before_keep_their_processor(bench: Any, tmp_path: Path) -> None:
    settings, rows = {"windows": 8}, {"old": {"bits": 4.5}, "of another": {"bits": 4.0, "cpu": "b"}}
    bench("harness").save("calibrated", {"machine": {"cpu": "a"}, "settings": settings, "measured": rows}, tmp_path)
    kept = bench("calibrated").kept(settings, tmp_path)
    assert kept == {"old": {"bits": 4.5, "cpu": "a"}, "of another": {"bits": 4.0, "cpu": "b"}}
    with pytest.raises(AssertionError):
        bench("calibrated").kept({"windows": 20}, tmp_path)


def test_random_models_are_models(bench: Any, tmp_path: Path) -> None:
    random_model = bench("random_model")
    config = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip
    for name in ("a.gguf", "b.gguf"):
        random_model.write_random(tmp_path / name, config, seed=3)
    assert (tmp_path / "a.gguf").read_bytes()[-4096:] == (tmp_path / "b.gguf").read_bytes()[-4096:]
    opened = checkpoint.open(tmp_path / "a.gguf")
    weights = opened.tensors["model.layers.0.self_attn.q_proj.weight"].read().astype(np.float32)
    assert weights.std() == pytest.approx(0.02, rel=0.1)
    assert opened.tokenizer
    assert tokenizer.load(opened.tokenizer).decode([259, 260]).strip() == "w0 w1"


def test_shaking_moves_each_weight_by_up_to_half_a_step_and_leaves_no_grid(bench: Any, tmp_path: Path) -> None:
    shaken = bench("shaken")
    config = tiny_config(vocab_size=512, hidden_size=256, head_dim=32, intermediate_size=256)
    path = save_gguf(
        tmp_path / "m.gguf", config, random_weights(config), dtype=lambda _, array: "Q4_1" if array.ndim == 2 else "F32"
    )
    original = checkpoint.open(path)
    moved = shaken.shaken(original, 1)
    assert grid.find(original)
    assert grid.find(moved) is None
    tensor = original.tensors["model.layers.1.mlp.up_proj.weight"]
    blocks = tensor.read_blocks().reshape(256, -1, 20)
    steps = np.repeat(blocks[..., :2].copy().view("<f2")[..., 0].astype(np.float32), 32, axis=1)
    change = (moved.tensors[tensor.name].read() - tensor.read()) / steps
    assert np.abs(change).max() < 0.501
    assert change.std() == pytest.approx(1 / np.sqrt(12), rel=0.02)


def test_what_the_shaken_model_is_taught_is_the_divergence(bench: Any) -> None:
    """Held against the definition, in float64; and 0 of a model from itself."""
    shaken, config = bench("shaken"), tiny_config()
    models = [in_memory(config, random_weights(config, seed)) for seed in (0, 1)]
    teacher, pupil = (load_model(of, torch.device("cpu"), torch.float32) for of in models)
    ids = np.arange(3, 20, dtype=np.int32)
    objective = shaken.Distillation(teacher)
    work = objective.collate([Example(ids, np.arange(len(ids)) > 0)], torch.device("cpu"))
    p, q = (oracle.logits(config, random_weights(config, seed), ids[:-1].tolist()) for seed in (0, 1))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    cost, _ = objective.loss(pupil, work)
    assert float(cost.detach()) == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-5)
    assert abs(float(objective.loss(teacher, work)[0].detach())) < 1e-4


def test_cases_of_a_server_are_added_to_those_measured_before(bench: Any, tmp_path: Path) -> None:
    harness, serve = bench("harness"), bench("serve")
    about = {"machine": {"cpu": "a", "load_1min": 0.5}, "settings": {"rounds": 5}}
    first = serve.merged({}, "q8", {"cases": {"16": {"x": 1, "when": "then"}}, "arrivals": [1], "steal_s": 0.0})
    harness.save("serve", {**about, "measured": {"q8": first}}, tmp_path)
    before = harness.before("serve", about, tmp_path)
    both = serve.merged(before, "q8", {"cases": {"16 long": {"x": 2}, "1": {"x": 3}}, "steal_s": 1.0})
    assert list(both["cases"]) == ["1", "16", "16 long"]
    old = both["cases"]["16"]
    assert (old["x"], old["when"], old["commit"], old["load_1min"]) == (1, "then", before["commit"], 0.5)
    assert (both["arrivals"], both["steal_s"]) == ([1], 1.0)
    assert serve.merged(before, "q8", {"cases": {"16": {"x": 4}}})["cases"]["16"] == {"x": 4}
    assert harness.before("serve", {**about, "settings": {"rounds": 2}}, tmp_path) == {}
    for machine in ({"cpu": "b"}, {"cpu": "a", "isa": "avx2"}):  # processors of several kinds have one name
        assert harness.before("serve", {**about, "machine": machine}, tmp_path) == {}
    assert harness.before("soak", about, tmp_path) == {}


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_codes_made_on_a_device_are_those_of_the_format_or_nearly(bench: Any, format: str) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32) * np.float32(0.02)
    weight[3, :32] = 0
    found = bench("gpu").codes_of(torch.from_numpy(weight), format).floats(slice(None)).numpy()
    best = quantize(weight, format).dequantize()
    if format == "q8":
        assert np.array_equal(found, best)
    assert np.square(found - weight).mean() <= 1.3 * np.square(best - weight).mean()


def test_the_operations_of_a_pass_are_those_of_its_matrices(bench: Any) -> None:
    gpu = bench("gpu")
    config, tokens = gpu.SHAPES["tiny"], 7
    of_layer = 2 * 128 * (128 + 2 * 64 + 128 + 3 * 384)
    attention = 4 * 128 * tokens * tokens / 2
    head = 2 * 128 * 512
    assert gpu.forward_flops(config, tokens) == 2 * (of_layer * tokens + attention) + head


def test_what_is_measured_on_a_gpu_is_computed_alike(bench: Any) -> None:
    """On the CPU, whose random weights all sides share: the likeliest next token is the same to each."""
    gpu, peers = bench("gpu"), bench("gpu_peers")
    model = gpu.random_model(gpu.SHAPES["tiny"])
    (ids,) = gpu.prompts(model.config, 1, 40, "one")
    expected = peers.read(peers.transformers(model), torch.tensor([ids])).float()
    for _, backend in gpu.backends(model, ["bf16", "llm-int8", "int8"]):
        logits = torch.from_numpy(gpu.as_llm(backend).logits(ids)[-1])
        assert (logits - expected[0, -1]).abs().max() < 0.1 * expected.std()
