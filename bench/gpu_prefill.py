"""Reading a prompt on a GPU: 512, 2,048 and 8,192 tokens in one pass, beside transformers and bitsandbytes.

    python bench/gpu_prefill.py [--shape 1.1B 8B] [--formats bf16 llm-int8 int8 q8 q4] [--lengths 512 2048 8192]

Each length was read twice before, so that pronk replays a graph of up to 2,048 tokens, as of lengths that come again.
Of each side the pass is timed from the call until the likeliest next token is on the host; keys and values are kept,
and logits are made of the last token alone. TFLOP/s count 2 operations a weight and token and the half of attention
that is not masked; the share is of what a bf16 product of 8,192 x 8,192 matrices reached in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gpu
import harness
import torch
from gpu import BLOCK, DEVICE, Budget

from pronk.engine.batch import Batch, Run
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask
from pronk.torch_engine.backend import TorchBackend

LENGTHS = (512, 2048, 8192)
_ASK = Ask(0, SamplingParams(), lambda: 0.0)

Read = Callable[[list[int]], float]  # seconds


def pronk_side(backend: TorchBackend) -> Read:
    kept: dict[int, Any] = {}

    def read(ids: list[int]) -> float:
        blocks = -(-len(ids) // BLOCK)
        kv = kept.get(blocks) or kept.setdefault(blocks, backend.new_kv(blocks, BLOCK))
        batch = Batch.of([Run(ids, 0, range(blocks))])
        gpu.finish()
        begun = time.perf_counter()
        backend.predict(batch, kv).draw([_ASK])
        return time.perf_counter() - begun

    return read


def peer_side(peer: Any) -> Read:
    import gpu_peers

    def read(ids: list[int]) -> float:
        tokens = torch.tensor([ids], device=DEVICE)
        gpu.finish()
        begun = time.perf_counter()
        gpu_peers.read(peer, tokens)[0, -1].argmax().item()
        return time.perf_counter() - begun

    return read


def measure(
    shape: str, length: int, sides: dict[str, Read], weights: dict[str, int], peak: float | None, rounds: int,
    budget: Budget,
) -> dict[str, Any]:  # fmt: skip
    config = gpu.SHAPES[shape]
    (warm,) = gpu.prompts(config, 1, length, "warm-up")
    ready, beside = {}, {}
    for name, side in sides.items():
        if budget.spent(f"{length} tokens, {name}"):
            continue
        try:
            beside[name] = gpu.peak_of(lambda side=side: (side(warm), side(warm)))  # the second captures a graph
        except Exception as error:
            harness.say(f"FAILED {name}: {error!r:.500}")
            continue
        ready[name] = lambda number, side=side: side(gpu.prompts(config, 1, length, f"round {number}")[0])
    taken = gpu.in_turns(ready, rounds, budget)
    rates = {name: [length / seconds for seconds in values] for name, values in taken.items()}
    measured: dict[str, Any] = {}
    flops = gpu.forward_flops(config, length)
    for name, seconds in taken.items():
        spread = gpu.summary(seconds)
        one = {"seconds": spread, "tok_s": length / spread["median"], "tflop_s": flops / spread["median"] / 1e12}
        one |= {"weights_bytes": weights[name], "beside_weights_bytes": beside[name]}
        if peak:
            one["of_peak"] = one["tflop_s"] / peak
        one["over"] = {
            peer: gpu.ratios(rates[name], rates[peer]) for peer in ("bf16", *PEERS) if peer in rates and peer != name
        }
        measured[name] = one
    return measured


PEERS = ("transformers", "bitsandbytes")


def report(results: dict[str, Any]) -> str:
    header = ("prefill", "tok/s", "ms (min-max)", "TFLOP/s", "of the peak", "GB in all", "x bf16", "x transf.", "x bnb")
    rows = []
    for shape, lengths in results["measured"].items():
        for length, sides in lengths.items():
            for name, one in sides.items():
                taken = {key: 1e3 * one["seconds"][key] for key in ("median", "min", "max")}
                over = [one["over"].get(peer) for peer in ("bf16", *PEERS)]
                rows.append([
                    f"{shape}, {length} tokens, {name}",
                    f"{one['tok_s']:.0f}",
                    f"{taken['median']:.2f} ({taken['min']:.2f}-{taken['max']:.2f})",
                    f"{one['tflop_s']:.1f}",
                    f"{one['of_peak']:.1%}" if "of_peak" in one else "",
                    f"{(one['weights_bytes'] + one['beside_weights_bytes']) / 1e9:.2f}",
                    *(f"{ratio['median']:.2f}" if ratio else "" for ratio in over),
                ])  # fmt: skip
    return harness.table(header, rows)


def main() -> None:
    parser = gpu.parser(__doc__, seconds=40, shapes=("1.1B", "8B"))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "conditions": gpu.conditions(),
        "settings": {"weights": "random", "batch": 1, **vars(options)},
        "measured": {},
    }
    harness.say(f"{results['conditions']}")
    budget = Budget(options.seconds)
    for at, shape in enumerate(options.shape):
        if budget.spent(shape):
            continue
        own = budget.share(len(options.shape) - at)
        model = gpu.random_model(gpu.SHAPES[shape])
        backends = dict(gpu.backends(model, options.formats))
        sides = {name: pronk_side(backend) for name, backend in backends.items()}
        weights = {name: backend.nbytes for name, backend in backends.items()}
        for name, peer in gpu.peers(model, options.peers).items():
            import gpu_peers

            sides[name], weights[name] = peer_side(peer), gpu_peers.nbytes(peer)
        for place, length in enumerate(options.lengths):
            harness.say(f"{shape}, {length} tokens ({own.left:.0f} s left)")
            part = own.share(len(options.lengths) - place)
            found = measure(shape, length, sides, weights, results["conditions"]["bf16_tflop_s"], options.rounds, part)
            results["measured"].setdefault(shape, {})[str(length)] = found
            gpu.save("gpu_prefill", options, results)
        del model, backends, sides
        gpu.let_go()
    print(report(results))


if __name__ == "__main__":
    main()
