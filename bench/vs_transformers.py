"""Prefill and decode beside transformers: the same weights, threads and process, turn by turn.

    python bench/vs_transformers.py [--model smollm2:135m] [--threads 2] [--rounds 7] [--dtypes f32 bf16]

pronk is measured from the outside, through `LLM.stream`: tokenizer, scheduler and text included. The other side is
transformers' faster way on this machine: `model.generate`, or a bare loop over the module that does nothing but greedy
decoding. Both build their model from pronk's own checkpoint tensors. In float32 all three must give the same tokens, so
that nobody skips work; in every type the largest difference between logits stands beside the speed, and the peak of
memory of each side is taken in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import tasks
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import pronk
from pronk import checkpoint, system
from pronk.checkpoint.hub import resolve as hub
from pronk.torch_engine.backend import DTYPES, to_torch

PREFILL, PROMPT, NEW = 512, 32, 128
TEXT = """The river came down from the hills in spring and brought with it branches, mud and, once, a boat that nobody
in the village had ever seen. It was painted green, and its oars were missing. The children said that it belonged to a
king; the miller, who had been to the coast, said that it belonged to a fisherman, and that he would want it back."""

Step = tuple[list[int], float, float]  # new tokens, seconds to the first one, seconds from the first to the last


class Pronk:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self.llm = pronk.load(model, engine="torch", device="cpu", quantize=dtype, threads=threads, prefix_cache=0)

    def stream(self, ids: list[int], new: int) -> Step:
        begun, first, last, tokens = time.perf_counter(), 0.0, 0.0, []
        for chunk in self.llm.stream(ids, max_new_tokens=new, ignore_eos=True):
            last = time.perf_counter()
            first = first or last
            tokens.append(chunk.token)
        return tokens, first - begun, last - first


class Transformers:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        opened = checkpoint.open(hub.resolve(model))
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**opened.config.to_dict()))
        state = {n: to_torch(t.read(), torch.device("cpu"), DTYPES[dtype]) for n, t in opened.tensors.items()}
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        # Not among the weights, so the meta device left it empty.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config)
        assert not any(p.is_meta for p in self.model.parameters())
        self.model.eval().requires_grad_(False)

    @torch.inference_mode()
    def generate(self, ids: list[int], new: int) -> Step:
        prompt, watch = torch.tensor([ids]), _Watch()
        begun = time.perf_counter()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=watch,
        )
        return out[0, len(ids) :].tolist(), watch.times[1] - begun, watch.times[-1] - watch.times[1]

    @torch.inference_mode()
    def loop(self, ids: list[int], new: int) -> Step:
        begun, first, last, tokens = time.perf_counter(), 0.0, 0.0, []
        cache, step = DynamicCache(config=self.model.config), torch.tensor([ids])
        for _ in range(new):
            logits = self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(step))
            last = time.perf_counter()
            first = first or last
        return tokens, first - begun, last - first

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()


class _Watch(BaseStreamer):  # type: ignore[misc]
    """`generate` hands it the prompt first, then token after token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def compare(model: str, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    ours, theirs = Pronk(model, dtype, threads), Transformers(model, dtype, threads)
    text = ours.llm.tokenizer.encode(TEXT)
    long = (text * (PREFILL // len(text) + 1))[:PREFILL]
    ways: dict[str, Callable[[list[int], int], Step]] = {
        "pronk": ours.stream,
        "generate": theirs.generate,
        "loop": theirs.loop,
    }
    tokens = {name: way(text[:PROMPT], NEW)[0] for name, way in ways.items()}
    assert all(len(t) == NEW for t in tokens.values()), "a side stopped early"
    same = tokens["pronk"] == tokens["generate"] == tokens["loop"]
    if dtype == "f32" and not same:
        raise SystemExit(f"not the same work: greedy tokens differ: {tokens}")
    difference = float((torch.from_numpy(ours.llm.logits(long)) - theirs.logits(long)).abs().max())

    measured: dict[str, Any] = {"greedy_tokens_equal": same, "max_logit_difference": difference}
    for task, run, count in (
        ("prefill", lambda way: way(long, 1)[1], PREFILL),
        ("decode", lambda way: way(text[:PROMPT], NEW)[2], NEW - 1),
    ):
        harness.say(f"{dtype} {task}, tokens/s:")
        sides = {name: (lambda way=way, run=run, count=count: count / run(way)) for name, way in ways.items()}
        rates = harness.interleave(sides, rounds, note=lambda line: harness.say("  " + line))
        peer = max(("generate", "loop"), key=lambda name: harness.spread(rates[name])["median"])
        measured[task] = {
            "tokens": count,
            "tok_s": {name: harness.spread(values) | {"rounds": values} for name, values in rates.items()},
            "peer": peer,
            "ratio": harness.ratios(rates["pronk"], rates[peer]),
        }
    return measured


def peak_memory(side: str, model: str, dtype: str, threads: int) -> float:
    """MB, of a process that loads the model, reads a long prompt and decodes; Python and torch included."""
    command = [sys.executable, __file__, "--peak-of", side, "--model", model, "--threads", str(threads)]
    done = subprocess.run([*command, "--dtypes", dtype], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def use_memory(side: str, model: str, dtype: str, threads: int) -> None:
    way = Pronk(model, dtype, threads).stream if side == "pronk" else Transformers(model, dtype, threads).loop
    way([1 + i % 100 for i in range(PREFILL)], NEW)
    print((system.peak_memory() or 0) / 1e6)


def report(results: dict[str, Any]) -> str:
    rows = []
    for dtype, measured in results["measured"].items():
        for task in ("prefill", "decode"):
            rates, peer, ratio = measured[task]["tok_s"], measured[task]["peer"], measured[task]["ratio"]
            cells = [tasks.with_spread(rates[side]) for side in ("pronk", peer)]
            rows.append([f"{dtype} {task}", *cells, peer, tasks.with_spread(ratio, 2)])
    header = ("tok/s: median (min-max)", "pronk", "transformers", "its way", "ratio")
    lines = [harness.table(header, rows), ""]
    for dtype, measured in results["measured"].items():
        peak = measured["peak_rss_mb"]
        lines.append(
            f"{dtype}: max |logit difference| {measured['max_logit_difference']:.2e} over {PREFILL} positions, greedy "
            f"tokens {'equal' if measured['greedy_tokens_equal'] else 'not equal'}; peak RSS "
            f"{peak['pronk']:.0f} MB (pronk), {peak['transformers']:.0f} MB (transformers)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--peak-of", choices=["pronk", "transformers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        return use_memory(options.peak_of, options.model, options.dtypes[0], options.threads)

    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("torch", "transformers", "numpy"),
        "settings": {
            "model": options.model,
            "threads": options.threads,
            "rounds": options.rounds,
            "warmup_rounds": 1,
            "batch": 1,
            "prefill_tokens": PREFILL,
            "decode": f"{NEW} tokens after a prompt of {PROMPT}",
            "attention": "SDPA on both sides",
        },
        "measured": {},
    }
    for dtype in options.dtypes:
        measured = compare(options.model, dtype, options.threads, options.rounds)
        measured["peak_rss_mb"] = {
            side: peak_memory(side, options.model, dtype, options.threads) for side in ("pronk", "transformers")
        }
        results["measured"][dtype] = measured
    path = harness.save("vs_transformers", results)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
