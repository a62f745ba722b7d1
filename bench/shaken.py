"""A model as good as the default one whose weights lie on no grid: shaken, and taught by the original.

    python bench/shaken.py OUT [--tokens 200000] [--rate 0.0004] [--seed 0]

The default model's file holds 4-bit codes, so that 4 bits cost nothing there. Here every weight moves by uniform noise
of half a step of its block, which leaves no grid and a worse model. Then the original teaches it: the KL divergence
from the original's predictions is trained away, on texts that the original wrote itself at temperature 1, from a random
first token on (as in LLM-QAT, arXiv 2305.17888), and each of them once. No other text is read. OUT is a folder in f32.
"""

from __future__ import annotations

import argparse
import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pronk
from pronk import checkpoint
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.checkpoint.writers import write
from pronk.cpu_engine.backend import CpuBackend
from pronk.measure.divergence import divergence
from pronk.measure.windows import evaluation_text
from pronk.tokenizer.export import huggingface_files
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import Batches, MicroBatch
from pronk.train.data.examples import Example
from pronk.train.loop import Loop
from pronk.train.objectives.pretraining import Pretraining
from pronk.train.optimizers import make
from pronk.train.schedule import Schedule
from pronk.train.trainer import trained

LENGTH = 512  # tokens of a text that the original writes
WINDOWS = 12  # of 512 tokens, of the text that comes with pronk
FORMATS = ("q8", "llm-int8", "int8", "q4")


def shaken(original: Checkpoint, seed: int) -> Checkpoint:
    """Each stored block's weights, moved by uniform noise of up to half its scale to either side."""

    def lazy(tensor: LazyTensor) -> LazyTensor:
        if tensor.read_blocks is None:
            return tensor
        size = 4 * math.prod(tensor.shape)
        return LazyTensor(tensor.name, tensor.shape, "F32", size, partial(_moved, tensor, seed))

    tensors = {name: lazy(tensor) for name, tensor in original.tensors.items()}
    return replace(original, tensors=tensors, quantization=None)


def _moved(tensor: LazyTensor, seed: int) -> NDArray[np.float32]:
    assert tensor.read_blocks is not None
    kind, rows = gguf_blocks.BLOCK_TYPES[tensor.dtype], tensor.shape[0]  # Q4_1 and Q8_0: the scale stands first
    scales = tensor.read_blocks().reshape(rows, -1, kind.nbytes)[..., :2].copy().view("<f2").astype(np.float32)
    draw = np.random.Generator(np.random.PCG64([seed, zlib.crc32(tensor.name.encode())]))
    noise = draw.uniform(-0.5, 0.5, (rows, scales.shape[1], kind.elements)).astype(np.float32)
    moved: NDArray[np.float32] = tensor.read() + (noise * scales).reshape(tensor.shape)
    return moved


def written(llm: pronk.LLM, tokens: int, seed: int) -> list[Example]:
    """Texts by the model itself, `tokens` tokens in all."""
    draw = np.random.Generator(np.random.PCG64(seed))
    examples: list[Example] = []
    while (done := sum(map(len, examples))) < tokens:
        harness.say(f"{done} of {tokens} tokens written")
        first = draw.integers(llm.config.vocab_size, size=32)
        found = llm.generate(
            [[int(token)] for token in first],
            params=pronk.SamplingParams(
                max_new_tokens=LENGTH - 1, temperature=1.0, seed=int(draw.integers(1 << 31)), ignore_eos=True
            ),
        )
        assert isinstance(found, list)
        for token, generation in zip(first, found, strict=True):
            ids = np.array([token, *generation.tokens], np.int32)
            examples.append(Example(ids, np.arange(len(ids)) > 0))
    return examples


@dataclass(frozen=True)
class Distillation(Pretraining):
    """To predict as the teacher does: KL divergence from its distribution over the next token, in nats."""

    teacher: Llama

    def loss(self, model: Llama, batch: MicroBatch) -> tuple[Tensor, Mapping[str, float]]:
        with torch.no_grad():
            right = self.teacher(batch.batch).float().log_softmax(-1)  # [R, V]
        own = model(batch.batch).float().log_softmax(-1)
        each = (right.exp() * (right - own)).sum(-1)
        return each[batch.targets >= 0].sum(), {}


def taught(original: Checkpoint, source: Checkpoint, examples: list[Example], rate: float, seed: int) -> Checkpoint:
    """`source`'s matrices and norms, trained; its embedding, which is the head as well, stays."""
    teacher, model = (load_model(of, torch.device("cpu"), torch.float32) for of in (original, source))
    teacher.requires_grad_(False)
    model.requires_grad_(True)
    model.model.embed_tokens.requires_grad_(False)
    teacher = teacher.to(torch.bfloat16)
    batches = Batches([len(example) for example in examples], seed=seed)
    steps = len(examples)
    schedule = Schedule(rate, steps, warmup=steps // 10)
    loop = Loop(
        model, examples, batches, make(model, "adamw", rate, 0.0), schedule,
        objective=Distillation(teacher), precision="bf16",
    )  # fmt: skip
    begun = time.perf_counter()
    while not loop.done:
        step = loop.step()
        if step.step % 5 == 1 or loop.done:
            minutes = (time.perf_counter() - begun) / 60
            harness.say(f"step {step.step} of {steps}: KLD {step.loss:.4f}, {minutes:.1f} minutes")
    return trained(source, model)


def loaded(like: pronk.LLM, name: str, checkpoint: Checkpoint, quantize: Any = "f32") -> pronk.LLM:
    return pronk.LLM(name, checkpoint, like.tokenizer, CpuBackend.from_checkpoint(checkpoint, quantize=quantize))


def against(reference: pronk.LLM, name: str, checkpoint: Checkpoint, ids: list[int], quantize: Any = "f32") -> Any:
    found = divergence(reference, loaded(reference, name, checkpoint, quantize), ids, count=WINDOWS)
    kept = {key: found[key] for key in ("mean", "standard_error", "top1", "perplexity", "windows", "rows")}
    own, error = found["perplexity"]["own"], found["standard_error"]
    harness.say(f"{name}: mean KLD {found['mean']:.4g} ± {error:.2g} from {reference.name}, perplexity {own:.3f}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="of text that the original writes")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)

    original = pronk.load(hub.DEFAULT_MODEL, quantize="f32")
    ids = original.tokenizer.encode(evaluation_text())
    begun = shaken(original.checkpoint, options.seed)
    results: dict[str, Any] = {
        "machine": harness.machine("torch"),
        "settings": vars(options) | {"out": str(options.out)},
    }
    results["shaken"] = against(original, "shaken", begun, ids)
    examples = written(loaded(original, "writer", original.checkpoint, "auto"), options.tokens, options.seed)
    started = time.perf_counter()
    made = taught(original.checkpoint, begun, examples, options.rate, options.seed)
    results["training_s"] = time.perf_counter() - started
    files = huggingface_files(original.tokenizer)
    write.save(made, options.out, to="safetensors", dtype="f32", tokenizer_files=files, overwrite=True)
    made = checkpoint.open(options.out)
    results["taught"] = against(original, "taught", made, ids)
    reference = loaded(original, "taught", made)
    for name in FORMATS:
        results[name] = against(reference, name, made, ids, name)
    harness.say(f"written to {options.out}; figures to {harness.save('shaken', results)}")


if __name__ == "__main__":
    main()
