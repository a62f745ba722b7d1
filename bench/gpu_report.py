"""A model of Llama-2-7B's shape on a GPU: latency, memory and divergence of each format; with and without a cache.

    python bench/gpu_report.py [--shape 7B] [--formats bf16 llm-int8 int8 q8 q4] [--batches 1 8 16] [--only cache]

Weights are random: latency and memory do not depend on what they say. Divergence does, and here says little: logits of
such a model are nearly flat, and outliers, which trained models have, are few. It is mean KL divergence from bf16 and
how often both have one likeliest token, over windows of random tokens; `floor` is bf16 beside itself with every token
embedding off by one unit in its last place. Without a cache a token costs a pass over all of its text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import harness
import torch
from gpu import Budget

from pronk.engine.batch import Batch, Run
from pronk.torch_engine.backend import TorchBackend

PROMPT, NEW = 256, 32
BATCHES = (1, 8, 16)
WINDOWS, WINDOW = 8, 256  # of which divergence is taken
PEERS = ("transformers", "bitsandbytes")
PARTS = ("divergence", "cache")

Times = tuple[float, float]  # seconds until every text has its first token, and from there to the last of all


def pronk_side(backend: TorchBackend) -> Callable[[list[list[int]], bool], Times]:
    llm = gpu.as_llm(backend, max_batch_tokens=max(BATCHES) * (PROMPT + NEW), prefix_cache=1 << 14)

    def run(prompts: list[list[int]], cache: bool) -> Times:
        done = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, cache=cache)
        stats = [one.stats for one in done]
        first = max(s.ttft_s for s in stats)
        return first, max(s.ttft_s + (s.new_tokens - 1) / s.decode_tok_s for s in stats) - first

    return run


def peer_side(peer: Any) -> Callable[[list[list[int]], bool], Times]:
    import gpu_peers

    return lambda prompts, cache: gpu_peers.decode(peer, prompts, NEW, use_cache=cache)


def with_and_without_a_cache(
    shape: str, sides: dict[str, Any], options: argparse.Namespace, budget: Budget
) -> dict[str, Any]:
    """By batch, then "cached" or "uncached", then side."""
    config = gpu.SHAPES[shape]
    measured: dict[str, Any] = {}
    for count in options.batches:
        for cache in (True, False):
            which = "cached" if cache else "uncached"
            if budget.spent(f"{count} at once, {which}"):
                continue
            harness.say(f"{count} at once, {which} ({budget.left:.0f} s left)")
            warm = gpu.prompts(config, count, PROMPT, f"warm-up {count} {cache}")
            beside: dict[str, int] = {}
            firsts: dict[str, list[float]] = {}
            for name, side in sides.items():
                try:
                    beside[name] = gpu.peak_of(partial(side, warm, cache))
                except Exception as error:
                    harness.say(f"FAILED {name}: {error!r:.500}")

            def turn(name: str, count: int, cache: bool, firsts: dict[str, list[float]], number: int) -> float:
                asked = gpu.prompts(config, count, PROMPT, f"round {number} {count} {cache}")
                first, rest = sides[name](asked, cache)
                firsts.setdefault(name, []).append(first)
                return rest

            turns = {name: partial(turn, name, count, cache, firsts) for name in beside}
            rests = gpu.in_turns(turns, options.rounds if cache else min(2, options.rounds), budget)
            measured.setdefault(str(count), {})[which] = {
                name: {
                    "first_s": gpu.summary(firsts[name]),
                    "rest_s": gpu.summary(rest),
                    "decode_tok_s": count * (NEW - 1) / gpu.summary(rest)["median"],
                    "beside_weights_bytes": beside[name],
                }
                for name, rest in rests.items()
            }
    return measured


@torch.no_grad()
def divergence(shape: str, backends: dict[str, TorchBackend]) -> dict[str, Any]:
    config, base = gpu.SHAPES[shape], backends["bf16"]
    texts = gpu.prompts(config, WINDOWS, WINDOW, "windows")
    others = {"floor": base.perturbed(), **{name: one for name, one in backends.items() if name != "bf16"}}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in others}  # KL, its square, same likeliest token
    for text in texts:
        expected = _log_softmax(base, text)
        for name, backend in others.items():
            found = _log_softmax(backend, text)
            kl = (expected.exp() * (expected - found)).sum(-1).double()
            same = (expected.argmax(-1) == found.argmax(-1)).double()
            sums[name] += torch.stack((kl.sum(), kl.square().sum(), same.sum())).cpu()
    count, told = WINDOWS * WINDOW, {}
    for name, (kl, squares, same) in sums.items():
        mean = float(kl) / count
        error = max(0.0, float(squares) / count - mean * mean) ** 0.5 / count**0.5
        told[name] = {"mean_kld": mean, "standard_error": error, "top1": float(same) / count}
    return {"tokens": count, "formats": told}


def _log_softmax(backend: TorchBackend, text: list[int]) -> torch.Tensor:
    logits = backend.forward(Batch.of([Run(text, logits="all")]), None)
    return torch.from_numpy(logits).to(gpu.DEVICE).log_softmax(-1)


def report(results: dict[str, Any]) -> str:
    texts = []
    for shape, measured in results["measured"].items():
        weights, found = measured["weights_bytes"], measured.get("divergence", {}).get("formats", {})
        cached = measured.get("cache", {}).get("1", {}).get("cached", {})
        rows = []
        for name, nbytes in weights.items():
            one, off = cached.get(name), found.get(name)
            rows.append([
                f"{shape}, {name}",
                f"{nbytes / 1e9:.2f}",
                f"{(nbytes + one['beside_weights_bytes']) / 1e9:.2f}" if one else "",
                f"{1e3 * one['first_s']['median']:.1f}" if one else "",
                f"{1e3 * one['rest_s']['median'] / (NEW - 1):.2f}" if one else "",
                f"{off['mean_kld']:.2e} ± {off['standard_error']:.0e}" if off else "",
                f"{off['top1']:.1%}" if off else "",
            ])  # fmt: skip
        header = ("one text", "GB of weights", "GB in all", f"first token after {PROMPT}, ms", "ms a token",
                  "mean KLD from bf16", "same top token")  # fmt: skip
        texts.append(harness.table(header, rows))
        if "floor" in found:
            texts.append(f"KLD of bf16 beside itself, nudged: {found['floor']['mean_kld']:.2e}")
        rows = []
        for count, ways in measured.get("cache", {}).items():
            names = dict.fromkeys(name for way in ways.values() for name in way)
            for name in names:
                both = [ways.get(way, {}).get(name) for way in ("cached", "uncached")]
                whole = [one["first_s"]["median"] + one["rest_s"]["median"] if one else None for one in both]
                rows.append([
                    f"{shape}, {count} at once, {name}",
                    *(f"{one['decode_tok_s']:.1f}" if one else "" for one in both),
                    *(f"{seconds:.3f}" if seconds else "" for seconds in whole),
                    f"{whole[1] / whole[0]:.2f}" if all(whole) else "",
                ])  # fmt: skip
        header = (f"{PROMPT} tokens in, {NEW} out", "tok/s with cache", "without", "s in all with", "without", "times")
        texts.append(harness.table(header, rows))
    return "\n\n".join(texts)


def main() -> None:
    parser = gpu.parser(__doc__, seconds=120, shapes=("7B",))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "conditions": gpu.conditions(),
        "settings": {"prompt": PROMPT, "new": NEW, "weights": "random", **vars(options)},
        "measured": {},
    }
    harness.say(f"{results['conditions']}")
    budget = Budget(options.seconds)
    for shape in options.shape:
        model = gpu.random_model(gpu.SHAPES[shape])
        backends = dict(gpu.backends(model, options.formats))
        measured = results["measured"][shape] = {
            "weights_bytes": {name: backend.nbytes for name, backend in backends.items()}
        }
        if "divergence" in options.only and "bf16" in backends:
            measured["divergence"] = divergence(shape, backends)
            harness.say(f"{measured['divergence']}")
            gpu.save("gpu_report", options, results)
        if "cache" in options.only:
            sides = {name: pronk_side(backend) for name, backend in backends.items()}
            for name, peer in gpu.peers(model, options.peers).items():
                import gpu_peers

                sides[name], measured["weights_bytes"][name] = peer_side(peer), gpu_peers.nbytes(peer)
            measured["cache"] = with_and_without_a_cache(shape, sides, options, budget)
            gpu.save("gpu_report", options, results)
        del model, backends
        gpu.let_go()
    print(report(results))


if __name__ == "__main__":
    main()
