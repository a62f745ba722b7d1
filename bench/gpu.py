"""What programs that measure a GPU share: its conditions and ceilings, models of random weights made on it, turns.

Nothing is loaded: weights are drawn in bf16 on the device, in seconds, and everybody measured has the same ones. Speed
does not depend on what weights say but for outliers: every token has six, in the same six features, as models of 6.7
billion parameters and more have them (arXiv 2208.07339). On a CPU the shape "tiny" tries programs out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import math
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from pronk.checkpoint.tensors import Checkpoint
from pronk.config import ModelConfig
from pronk.formats import GROUP
from pronk.formats.int8 import SCHEMES, Outliers, Scheme
from pronk.llm import LLM
from pronk.measure import machine
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.codes import Codes
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.model import Llama, RMSNorm
from pronk.torch_engine.quantized import Int8Linear, weight_codes

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAPERS = "llm-int8-paper"  # whose outliers are what is above the threshold, as in bitsandbytes, and no others
INVARIANT = "bf16-invariant"  # to the batch, to the bit
FORMATS = ("bf16", "llm-int8", PAPERS, "int8", "q8", "q4")
BLOCK = 64  # tokens of a KV block
OUTLIERS, OUTLIER = 6, 20.0  # features, and how much larger they are than the others
_FIRST_PLAIN_ID = 3


def _shape(
    hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocabulary: int, theta: float
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


SHAPES = {
    "tiny": _shape(128, 384, 2, 4, 2, 512, 10000.0),
    "1.1B": _shape(2048, 5632, 22, 32, 4, 32000, 10000.0),  # TinyLlama's
    "7B": _shape(4096, 11008, 32, 32, 32, 32000, 10000.0),  # Llama 2's
    "8B": _shape(4096, 14336, 32, 32, 8, 128256, 500000.0),  # Llama 3's
}


# -- the card --


def conditions() -> dict[str, Any]:
    """Card, driver and versions; clocks and temperature, idle and under load; what memory and matrix units can do."""
    found: dict[str, Any] = {
        **{key: value for key, value in machine.machine().items() if key != "load"},
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers", "bitsandbytes", "peft")},
        "pronk_commit": machine.commit(Path(__file__).parent),
    }
    if not ON_GPU:
        return found | {"card": None, "read_gb_s": None, "copy_gb_s": None, "bf16_tflop_s": None}
    of = torch.cuda.get_device_properties(0)
    found |= {
        "card": of.name,
        "multiprocessors": of.multi_processor_count,
        "memory_bytes": of.total_memory,
        "cuda": torch.version.cuda,
        "before": _smi(),
    }
    with torch.no_grad():
        found |= {"copy_gb_s": _copy(), "read_gb_s": _reading()}
        found["bf16_tflop_s"], found["under_load"] = _product()
    torch.cuda.empty_cache()
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi() -> dict[str, str]:
    asked = (
        "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit"
    )
    try:
        out = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"gave nothing: {error}"}
    return dict(zip(asked.split(","), (word.strip() for word in out.strip().split(",")), strict=False))


def seconds_of(work: Callable[[], object], times: int = 10) -> float:
    """Median, by events on the device; two runs go before."""
    for _ in range(2):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    taken = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return taken[len(taken) // 2] / 1e3


def _copy(nbytes: int = 4 << 30) -> float:
    """Bytes read and written a second."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return round(2 * nbytes / seconds_of(lambda: target.copy_(source)) / 1e9, 1)


def _reading(nbytes: int = 4 << 30) -> dict[str, float]:
    """Bytes read a second where next to nothing is written, by several ways; the best of them is the ceiling."""
    x = torch.empty(nbytes // 4, dtype=torch.float32, device=DEVICE).normal_()
    ways: dict[str, Callable[[], object]] = {"sum": lambda: x.sum(), "max": lambda: x.amax()}
    rows = x.view(torch.bfloat16).view(-1, 8192)
    vector = torch.randn(8192, 1, device=DEVICE, dtype=torch.bfloat16)
    ways["bf16 matrix by vector"] = lambda: rows @ vector
    try:
        from gpu_read import read
    except ImportError:
        pass
    else:
        ways["triton"] = lambda: read(x)
    found: dict[str, float] = {}
    for name, way in ways.items():
        try:
            found[name] = round(nbytes / seconds_of(way) / 1e9, 1)
        except Exception as error:  # a way that does not run is no ceiling, and no reason to measure nothing
            harness.say(f"reading by {name} failed: {error!r:.200}")
    return {**found, "ceiling": max(found.values())}


def _product(n: int = 8192) -> tuple[float, dict[str, str]]:
    """TFLOP/s of a bf16 product of random matrices, and what the card says of itself while it is at it."""
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * n**3 / seconds_of(lambda: torch.mm(a, b, out=out), 20) / 1e12
    for _ in range(400):  # half a second
        torch.mm(a, b, out=out)
    said = _smi()
    torch.cuda.synchronize()
    return round(rate, 1), said


# -- models --


@torch.no_grad()
def random_model(config: ModelConfig, seed: int = 0) -> Llama:
    """bf16, on the device. Norms are ones, matrices normal: what each makes of numbers of the size 1 is half as large,
    and what a block adds to its input is a tenth, so that the outliers go through all layers."""
    model = _empty(config).to(torch.bfloat16).to_empty(device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, RMSNorm):
            weight.fill_(1)
        elif isinstance(module, torch.nn.Embedding):
            weight.normal_(0, 1, generator=generator)
            weight[:, :: -(-weight.shape[1] // OUTLIERS)] = OUTLIER
        elif isinstance(weight, Tensor):
            share = 0.1 if name.endswith(("o_proj", "down_proj")) else 0.5
            weight.normal_(0, share * weight.shape[1] ** -0.5, generator=generator)
    return model.eval().requires_grad_(False)


def _empty(config: ModelConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


@torch.no_grad()
def made(model: Llama, format: str) -> TorchBackend:
    """A backend of the model with the matrices of its layers in a format; all else is shared, but for what is
    INVARIANT, which joins matrices anew."""
    if format in ("bf16", INVARIANT):
        return TorchBackend(model, batch_invariant=format == INVARIANT)
    other = _empty(model.config)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, torch.nn.Linear) and (kept := _format_of(owner, format)):
            other.set_submodule(owner, _coded(module.weight, kept))
        else:
            setattr(other.get_submodule(owner), leaf, parameter)
    other.tie_weights()
    return TorchBackend(other.eval().requires_grad_(False))


def _format_of(owner: str, format: str) -> str | None:
    """Of a matrix, as the engine has it: schemes of 8 bits leave the head in floats, and q4 and q8 make it q8."""
    return format if owner.startswith("model.layers.") else None if format in (*SCHEMES, PAPERS) else "q8"


def _coded(weight: Tensor, format: str) -> torch.nn.Module:
    if format == PAPERS:
        return Int8Linear(weight_codes(weight.float(), "llm-int8"), None, "llm-int8", Outliers(least=0))
    if format in SCHEMES:
        scheme: Scheme = format
        return Int8Linear(weight_codes(weight.float(), scheme), None, scheme, Outliers())
    return CodesLinear(codes_of(weight, format), None, format)


def codes_of(weight: Tensor, format: str) -> Codes:
    """[N, K], K a multiple of 32. q8's are those of pronk.formats.quantize; q4's lie on the grid from a group's least
    weight to its largest, where that looks for a better one: their squared error is an eighth more."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # [N, G, 32]
    if format == "q8":
        exact = groups.abs().amax(-1) / groups.new_full((), 127)
        scale = exact.half()
        scale = torch.where(scale.float() < exact, (scale.view(torch.int16) + 1).view(torch.float16), scale)
        q = (groups / scale.float().unsqueeze(-1)).clamp(-127, 127).nan_to_num(0).round()
        return Codes(weight.shape[1], q.to(torch.int8), scale)
    least = groups.amin(-1).half()
    scale = ((groups.amax(-1) - least.float()) / 15).half()
    q = (groups - least.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
    q = q.nan_to_num(0).round().clamp(0, 15).to(torch.uint8)
    first, second = q.chunk(2, dim=-1)
    return Codes(weight.shape[1], first | second << 4, scale, least)


def backends(model: Llama, formats: Sequence[str]) -> Iterator[tuple[str, TorchBackend]]:
    for format in formats:
        begun = time.perf_counter()
        try:
            backend = made(model, format)
        except Exception as error:  # one that does not load must not cost the others their figures
            harness.say(f"SKIPPED {format}: {error!r:.300}")
            continue
        finish()
        harness.say(f"{format}: {backend.nbytes / 1e9:.2f} GB, made in {time.perf_counter() - begun:.1f} s")
        yield format, backend


def peers(model: Llama, names: Sequence[str]) -> dict[str, Any]:
    """Modules of transformers, by name: of those that can be made."""
    import gpu_peers

    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = getattr(gpu_peers, name)(model)
        except Exception as error:
            harness.say(f"SKIPPED {name}: {error!r:.300}")
    return found


def as_llm(backend: TorchBackend, **options: Any) -> LLM:
    """What a user calls; prompts are token ids, for there is no tokenizer."""
    checkpoint = Checkpoint(Path("random"), "random", backend.config, {})
    return LLM("random", checkpoint, None, backend, **options)


def prompts(config: ModelConfig, count: int, length: int, name: str) -> list[list[int]]:
    """Of random tokens; the same for the same name."""
    numbers = random.Random(name)
    return [[numbers.randrange(_FIRST_PLAIN_ID, config.vocab_size) for _ in range(length)] for _ in range(count)]


# -- what a step must move, and compute --


def weight_bytes(backend: TorchBackend, rows: int = 1) -> int:
    """Read for a step of so many tokens: every weight, but of an untied embedding the tokens' rows."""
    table = backend.model.model.embed_tokens.weight
    apart = 0 if backend.config.tie_word_embeddings else (len(table) - rows) * table.shape[1] * table.element_size()
    return backend.nbytes - apart


def kv_bytes(config: ModelConfig, tokens: float, width: int = 2) -> float:
    """Of keys and values of that many tokens."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width * tokens


def matrix_weights(config: ModelConfig) -> int:
    """Of the layers, without embedding and head."""
    return sum(
        math.prod(shape)
        for name, shape in config.tensor_shapes().items()
        if name.startswith("model.layers.") and len(shape) == 2
    )


def forward_flops(config: ModelConfig, tokens: int, logits: int = 1) -> float:
    """Of reading a text: 2 a weight and token, causal attention (half of the square), and the head of some rows."""
    attention = 2 * tokens * tokens * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 2.0 * matrix_weights(config) * tokens + attention + 2.0 * config.vocab_size * config.hidden_size * logits


# -- measuring --


def finish() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def let_go() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of the device that a piece of work takes at its most, beside what is there."""
    let_go()
    if not ON_GPU:
        work()
        return 0
    finish()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    finish()
    return torch.cuda.max_memory_allocated() - before


class Budget:
    """Seconds that a program may take: nothing new begins after them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def share(self, of: int) -> Budget:
        """What is left, divided evenly among so many."""
        return Budget(self.left / of)

    def spent(self, what: str) -> bool:
        if self.left > 0:
            return False
        harness.say(f"LEFT OUT, the time is up: {what}")
        return True


def in_turns(sides: Mapping[str, Callable[[int], float]], rounds: int, budget: Budget) -> dict[str, list[float]]:
    """What each side measures in each round, A B, then B A; at least one round. A side that fails has no more turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    alive = dict(sides)
    for number in range(rounds):
        if number and budget.spent(f"rounds from {number + 1} on"):
            break
        for name in list(alive) if number % 2 == 0 else list(reversed(alive)):
            try:
                taken[name].append(alive[name](number))
            except Exception as error:
                harness.say(f"FAILED {name}: {error!r:.500}")
                del alive[name]
    return {name: values for name, values in taken.items() if values}


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {**harness.spread(values), "rounds": [round(value, 5) for value in values]}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """Round by round, as far as both have them."""
    count = min(len(ours), len(theirs))
    return harness.ratios(ours[:count], theirs[:count]) if count else None


def parser(about: str | None, *, seconds: float, shapes: Sequence[str]) -> argparse.ArgumentParser:
    of = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    of.add_argument("--shape", nargs="+", default=list(shapes) if ON_GPU else ["tiny"], choices=list(SHAPES))
    of.add_argument("--formats", nargs="*", default=list(FORMATS), choices=[*FORMATS, INVARIANT])
    of.add_argument("--rounds", type=int, default=5)
    of.add_argument("--seconds", type=float, default=seconds, help="after these nothing new begins")
    of.add_argument("--name", help="of the file in results/, instead of the program's")
    return of


def save(program: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """In results/, where there is a GPU."""
    if ON_GPU:
        harness.say(f"written to {harness.save(options.name or program, results)}")
