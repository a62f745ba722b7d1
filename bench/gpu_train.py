"""Training on a GPU: seconds a step, share of the card's peak, memory against --plan; beside transformers with PEFT.

    python bench/gpu_train.py [--cases lora full] [--quick] [--profile] [--alone]

Weights are random, drawn on the device in the type that a run has them in, and so is the text: examples of one length.
pronk's side is the run's own loop (train/loop.py) with the settings of a user's run. The peer's step is what Trainer
does by default: autocast, SDPA, AdamW fused, gradients clipped; it has the largest micro-batch that fits, without
checkpointing, and what does not fit is said. Memory is the most that torch had given out since the model was there.

Model FLOPs of a token: 6 of each weight of a product, or 4 where those are frozen, and attention's; what LoRA adds is
not counted, nor is anything computed twice. The peak is that of an 8192^3 product in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu
import harness
import numpy as np
import torch
from gpu import DEVICE, ON_GPU, SHAPES

from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.torch_engine.model import Llama, RMSNorm
from pronk.train import lora
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.loop import Loop
from pronk.train.memory import plan
from pronk.train.settings import Settings

PEER = "transformers"
WARMUP = 2
RANK, ALPHA, RATE, DECAY = 16, 32, 1e-4, 0.0
GOALS = {"lora": 0.45, "full": 0.50, "plan": 0.08, "speed": 1.5, "memory": 0.8}


@dataclass(frozen=True)
class Case:
    shape: str
    lora: bool
    batch_size: int  # examples of a micro-batch
    length: int = 2048
    accumulate: int = 1
    checkpointing: bool = False  # the peer's
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        return self.batch_size * self.accumulate * self.length

    @property
    def said(self) -> str:
        return f"{self.batch_size} x {self.accumulate} of {self.length}" + ", checkpointing" * self.checkpointing


CASES = {"lora": Case("8B", True, 4), "full": Case("1.1B", False, 8)}
QUICK = {"lora": Case("tiny", True, 2, 48), "full": Case("tiny", False, 4, 48)}


def flops(case: Case) -> float:
    """Of a token."""
    of = SHAPES[case.shape]
    weights = gpu.matrix_weights(of) + of.vocab_size * of.hidden_size
    attention = 6 * case.length * of.num_attention_heads * of.head_dim * of.num_hidden_layers  # half of the square
    return float((4 if case.lora else 6) * weights + attention)


def examples(case: Case, steps: int) -> list[Example]:
    draw = np.random.default_rng(0)
    size, length = case.batch_size * case.accumulate * steps, case.length + 1  # the last token is foretold, not read
    ids = draw.integers(3, SHAPES[case.shape].vocab_size, (size, length), dtype=np.int32)
    return [Example(row, np.arange(length) > 0) for row in ids]


def settings(case: Case, steps: int) -> Settings:
    return Settings(
        model="random",
        data="random",
        lora=LoraConfig(rank=RANK, alpha=ALPHA, dropout=0.0) if case.lora else None,
        batch_size=case.batch_size,
        accumulate=case.accumulate,
        max_steps=steps,
        optimizer=case.optimizer,
        lr=RATE,
        weight_decay=DECAY,
        precision="bf16",
    )


# -- pronk --


@torch.no_grad()
def model_of(case: Case) -> Llama:
    """As a run has it: frozen matrices in bf16, all else in float32."""
    with torch.device("meta"):
        model = Llama(SHAPES[case.shape])
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            narrow = case.lora and isinstance(module, torch.nn.Linear)
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16 if narrow else torch.float32, device=DEVICE)
            weight = weight.fill_(1) if isinstance(module, RMSNorm) else weight.normal_(0, 0.02)
            setattr(module, name, torch.nn.Parameter(weight))
    model.tie_weights()
    return model


def loop_of(case: Case, steps: int) -> Loop:
    how, read = settings(case, steps), examples(case, steps)
    model = model_of(case)
    if how.lora:
        lora.add(model, how.lora)
    batches = Batches([len(example) for example in read], case.batch_size)
    return Loop.of(how, model, read, batches, accumulate=case.accumulate)


def ours(case: Case, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    loop = loop_of(case, WARMUP + steps)
    return measured(case, lambda: loop.step().loss, steps)


def foretold(case: Case) -> dict[str, Any]:
    """What --plan says of the very same run, whose checkpoint is in bf16."""

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(name, shape, "BF16", 2 * math.prod(shape), lambda: np.zeros(shape, np.float32))

    config = SHAPES[case.shape]
    tensors = {name: lazy(name, shape) for name, shape in config.tensor_shapes().items()}
    begun = time.perf_counter()
    found = plan(Checkpoint(Path("random"), "random", config, tensors), settings(case, 1), examples(case, 1), DEVICE)
    return {
        "in_a_step": found.in_a_step,
        "at_peak": dict(found.at_peak),
        "loading": found.loading,
        "seconds": round(time.perf_counter() - begun, 1),
    }


# -- the peer --


def theirs(case: Case, steps: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    of = SHAPES[case.shape]
    config = LlamaConfig(**of.to_dict(), attn_implementation="sdpa")
    config.use_cache = False
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if case.lora else torch.float32).to_empty(device=DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(DEVICE)  # which the meta device left empty
    if case.lora:
        import peft

        leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        how = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=leaves, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, how)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.lora:
            model.enable_input_require_grads()
    model.train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    read = iter(examples(case, WARMUP + steps))

    def step() -> float:
        total = 0.0
        for _ in range(case.accumulate):
            rows = np.stack([next(read).ids for _ in range(case.batch_size)]).astype(np.int64)
            ids, following = (torch.from_numpy(part.copy()).to(DEVICE) for part in (rows[:, :-1], rows[:, 1:]))
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, shift_labels=following).loss
            (loss / case.accumulate).backward()
            total += float(loss.detach()) / case.accumulate
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return measured(case, step, steps)


def fitting(case: Case) -> Iterator[Case]:
    """The same step in smaller micro-batches, the largest first."""
    size = case.batch_size
    while size:
        yield replace(case, batch_size=size, accumulate=case.accumulate * case.batch_size // size)
        size //= 2


def largest(case: Case, steps: int, failed: list[str]) -> tuple[Case, dict[str, Any]]:
    for one in fitting(case):
        if (found := in_memory(lambda one=one: theirs(one, steps))) is not None:
            return one, found
        failed.append(one.said)
        harness.say(f"  {PEER} {one.said}: does not fit")
    raise MemoryError("no micro-batch fits")


# -- measuring --


def in_memory(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """None where it does not fit; all is let go afterwards."""
    gpu.let_go()
    try:
        return work()
    except torch.OutOfMemoryError:
        return None
    finally:
        gpu.let_go()


def measured(case: Case, step: Callable[[], float], steps: int) -> dict[str, Any]:
    gpu.finish()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    taken, losses = [], []
    for number in range(WARMUP + steps):
        begun = time.perf_counter()
        losses.append(step())
        gpu.finish()
        if number >= WARMUP:
            taken.append(time.perf_counter() - begun)
    return {
        "batch": case.said,
        "step_s": {**harness.spread(taken), "all": [round(one, 4) for one in taken]},
        "tokens_s": case.tokens / statistics.median(taken),
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
        "losses": losses,
    }


def judged(case: Case, found: dict[str, Any], peak: float | None) -> dict[str, Any]:
    rate = flops(case) * found["tokens_s"] / 1e12
    return {**found, "model_tflop_s": rate, "of_peak": rate / peak if peak else None}


@contextmanager
def noted(what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    harness.say(f"  {what}: {time.perf_counter() - begun:.1f} s")


def measure(case: Case, steps: int, peak: float | None, alone: bool) -> dict[str, Any]:
    results: dict[str, Any] = {"case": asdict(case), "flops_a_token": flops(case), "does_not_fit": []}
    with noted("pronk"):
        ours_case, found = case, None
        for one in fitting(case):
            if (found := in_memory(lambda one=one: ours(one, steps))) is not None:
                ours_case = one
                break
            results["does_not_fit"].append(f"pronk {one.said}")
        assert found, "no micro-batch fits"
    results["pronk"] = judged(case, found, peak)
    harness.say(line("pronk", results["pronk"]))
    with noted("plan"):
        results["plan"] = foretold(ours_case)
    if found["peak_bytes"]:
        results["plan"]["of_measured"] = results["plan"]["in_a_step"] / found["peak_bytes"]
        harness.say(f"  plan / measured: {results['plan']['of_measured']:.3f}")
    if alone:
        return results
    failed: list[str] = []
    with noted(PEER):
        one, found = largest(case, steps, failed)
    results["does_not_fit"] += [f"{PEER} {said}" for said in failed]
    results[PEER] = judged(case, found, peak)
    harness.say(line(PEER, results[PEER]))
    if failed:  # else the first try was the same
        with noted(f"{PEER}, checkpointing"):
            other = in_memory(lambda: theirs(replace(case, checkpointing=True), steps))
        if other:
            results[f"{PEER}, checkpointing"] = judged(case, other, peak)
            harness.say(line("checkpointing", results[f"{PEER}, checkpointing"]))
    if one != ours_case:
        with noted(f"pronk as {PEER}"):
            same = in_memory(lambda: ours(one, steps))
        results["pronk, same micro-batch"] = same and judged(case, same, peak)
        harness.say(line("pronk", results["pronk, same micro-batch"]))
    best = max((results[name]["tokens_s"] for name in results if name.startswith(PEER)), default=math.nan)
    alike = results.get("pronk, same micro-batch") or results["pronk"]
    results["ratios"] = {
        "tokens_s": results["pronk"]["tokens_s"] / best,
        "tokens_s, same micro-batch": alike["tokens_s"] / results[PEER]["tokens_s"],
        "memory, same micro-batch": ON_GPU and alike["peak_bytes"] / results[PEER]["peak_bytes"],
    }
    return results


def line(name: str, found: dict[str, Any]) -> str:
    share = "" if found["of_peak"] is None else f", {found['of_peak']:.1%} of the peak"
    memory = "" if found["peak_bytes"] is None else f", {found['peak_bytes'] / 1e9:.1f} GB"
    return (
        f"  {name} ({found['batch']}): {found['step_s']['median']:.4f} s a step, {found['tokens_s']:.0f} tokens/s, "
        f"{found['model_tflop_s']:.1f} TFLOP/s{share}{memory}; "
        f"losses {found['losses'][0]:.3f} {found['losses'][-1]:.3f}"
    )


def profile(case: Case) -> None:
    """One step, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    loop = loop_of(case, WARMUP + 2)
    for _ in range(WARMUP):
        loop.step()
    gpu.finish()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    begun = time.perf_counter()
    loop.step()
    gpu.finish()
    harness.say(f"a step: {time.perf_counter() - begun:.4f} s")
    with recorded(activities=activities) as seen:
        loop.step()
        gpu.finish()
    by = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    averages = seen.key_averages()
    kernels = sorted((one for one in averages if getattr(one, by)), key=lambda one: -getattr(one, by))
    if ON_GPU:  # kernels alone: an operator's own time is theirs
        kernels = [one for one in kernels if one.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(getattr(one, by) for one in kernels)
    print(f"{case.shape}, {'LoRA' if case.lora else 'full'}: {total / 1e3:.1f} ms in kernels")
    for one in kernels[:25]:
        took = getattr(one, by)
        print(f"{took / 1e3:9.2f} ms {took / total:6.1%} {one.count:6d} x {took / one.count:8.1f} us  {one.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--batch-size", type=int, help="examples of a micro-batch, instead of the cases'")
    parser.add_argument("--quick", action="store_true", help="a tiny model, on a CPU as well; nothing kept in results/")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--profile", action="store_true", help="the most expensive kernels of a step, and nothing else")
    options = parser.parse_args()
    cases = {name: (QUICK if options.quick else CASES)[name] for name in options.cases}
    if options.batch_size:
        cases = {name: replace(case, batch_size=options.batch_size) for name, case in cases.items()}
    if options.profile:
        for case in cases.values():
            profile(case)
            gpu.let_go()
        return
    conditions = gpu.conditions()
    peak = conditions["bf16_tflop_s"]
    results: dict[str, Any] = {
        "conditions": conditions,
        "settings": {
            "rank": RANK, "alpha": ALPHA, "rate": RATE, "warmup_steps": WARMUP, "steps": options.steps, "goals": GOALS,
        },
        "measured": {},
    }  # fmt: skip
    for name, case in cases.items():
        harness.say(f"{name}: {case.shape}, {case.said}")
        results["measured"][name] = measure(case, options.steps, peak, options.alone)
        gpu.save("gpu_train" + "_quick" * options.quick, argparse.Namespace(name=None), results)


if __name__ == "__main__":
    main()
