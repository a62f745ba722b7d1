"""Decoding on a GPU: one text at a time, and 64; pronk's formats beside transformers and bitsandbytes, turn by turn.

    python bench/gpu_decode.py [--shape 1.1B 8B] [--formats bf16 llm-int8 int8 q8 q4] [--batches 1 64] [--compiled]

Each side writes NEW tokens behind a prompt of PROMPT tokens, greedily; reading the prompt is not counted. pronk is
measured three times: as a user calls it (`llm`: scheduler, tokens on the host), as the scheduler calls the backend
(`pass`: each token read before the next pass), and with no token read back (`device`). `--compiled` adds transformers'
static cache under torch.compile, which takes a minute to be compiled.

The share of the ceiling is what a step must read, weights and keys and values of the mean length, by its time, over
what the memory was seen to deliver in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import gpu
import harness
from gpu import BLOCK, Budget

from pronk.engine.batch import Batch, Run
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask
from pronk.torch_engine.backend import TorchBackend

PROMPT, NEW = 128, 64
BATCHES = (1, 64)
LEVELS = ("llm", "pass", "device")
_SLOW_S = 0.8  # what a turn may take: slow sides write fewer tokens, at least LEAST
_LEAST = 12
_GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

Prompts = list[list[int]]
Decode = Callable[[Prompts, int], float]  # seconds for all tokens of `new` but each text's first


class Pronk:
    """One format, at three levels. The caches that a user's session keeps are kept from turn to turn."""

    def __init__(self, backend: TorchBackend, batch: int) -> None:
        self.backend, self.batch, self._kv = backend, batch, None
        # All prompts in one pass, so that no text decodes while others are read; and room for all texts between turns.
        room = batch * (-(-(PROMPT + NEW) // BLOCK) + 1) * BLOCK
        self.llm = gpu.as_llm(backend, max_batch_tokens=max(512, batch * PROMPT), prefix_cache=2 * room)

    def through_llm(self, prompts: Prompts, new: int) -> float:
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        begun, last, counted, started = 0.0, 0.0, 0, set[int]()
        for chunk in self.llm.session.stream(prompts, params):
            if len(started) < len(prompts):
                started.add(chunk.request)
                begun = time.perf_counter()
            else:
                counted += 1
                last = time.perf_counter()
        return (last - begun) / counted * len(prompts) * (new - 1)

    def through_passes(self, prompts: Prompts, new: int) -> float:
        kv, tables = self._prepared(prompts)
        tokens = self._drawn(self._read(prompts, kv, tables))
        begun = time.perf_counter()
        for at in range(PROMPT, PROMPT + new - 1):
            tokens = self._drawn(self.backend.predict(self._step(tokens, at, tables), kv))
        return time.perf_counter() - begun

    def on_device(self, prompts: Prompts, new: int) -> float:
        kv, tables = self._prepared(prompts)
        self._drawn(self._read(prompts, kv, tables))
        steps = [self._step([p[at % PROMPT] for p in prompts], at, tables) for at in range(PROMPT, PROMPT + new - 1)]
        gpu.finish()
        begun = time.perf_counter()
        for step in steps:
            self.backend.predict(step, kv)
        gpu.finish()
        return time.perf_counter() - begun

    def _prepared(self, prompts: Prompts) -> tuple[Any, list[range]]:
        each = -(-(PROMPT + NEW) // BLOCK)
        if self._kv is None:
            self._kv = self.backend.new_kv(each * len(prompts), BLOCK)
        return self._kv, [range(n * each, (n + 1) * each) for n in range(len(prompts))]

    def _read(self, prompts: Prompts, kv: Any, tables: list[range]) -> Any:
        runs = [Run(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)]
        return self.backend.predict(Batch.of(runs), kv)

    def _step(self, tokens: list[int], at: int, tables: list[range]) -> Batch:
        used = at // BLOCK + 1
        return Batch.of(Run([token], at, table[:used]) for token, table in zip(tokens, tables, strict=True))

    def _drawn(self, predictions: Any) -> list[int]:
        asks = [Ask(row, _GREEDY, lambda: 0.0) for row in range(self.batch)]
        return [one.token for one in predictions.draw(asks)]


def sides_of(
    backends: dict[str, TorchBackend], batch: int, peers: dict[str, Any], levels: list[str]
) -> dict[str, Decode]:
    sides: dict[str, Decode] = {}
    for format, backend in backends.items():
        own = Pronk(backend, batch)
        ways = {"llm": own.through_llm, "pass": own.through_passes, "device": own.on_device}
        sides |= {f"{format} {level}": ways[level] for level in levels}
    for name, (peer, how) in peers.items():
        import gpu_peers

        sides[name] = lambda prompts, new, peer=peer, how=how: gpu_peers.decode(peer, prompts, new, **how)[1]
    return sides


def settled(name: str, side: Decode, prompts: Prompts) -> tuple[int, int] | None:
    """How many tokens its turns write, and the memory that it takes beside its weights; None where it fails. What is
    compiled or captured is so afterwards."""
    try:
        begun = time.perf_counter()
        peak = gpu.peak_of(lambda: side(prompts, _LEAST))
        first, per_token = time.perf_counter() - begun, side(prompts, _LEAST) / (_LEAST - 1)
        new = max(_LEAST, min(NEW, int(_SLOW_S / per_token)))
        if new > _LEAST:
            side(prompts, new)
    except Exception as error:
        harness.say(f"FAILED {name}: {error!r:.500}")
        return None
    harness.say(f"  {name}: first {first:.1f} s, then {1e3 * per_token:.2f} ms a step; {new} tokens a turn")
    return new, peak


PEERS = ("transformers generate", "transformers static", "bitsandbytes generate")


def measure(
    batch: int,
    backends: dict[str, TorchBackend],
    peers: dict[str, Any],
    ceiling: float | None,
    options: argparse.Namespace,
    budget: Budget,
) -> dict[str, Any]:
    config = gpu.SHAPES[options.now]
    ready: dict[str, tuple[Decode, int, int]] = {}
    asked = gpu.prompts(config, batch, PROMPT, "warm-up")
    for name, side in sides_of(backends, batch, peers, options.levels).items():
        if not budget.spent(f"batch {batch}, {name}") and (found := settled(name, side, asked)):
            ready[name] = (side, *found)

    def turn(side: Decode, new: int) -> Callable[[int], float]:
        def run(number: int) -> float:
            return side(gpu.prompts(config, batch, PROMPT, f"round {number}"), new) / (new - 1)

        return run

    steps = gpu.in_turns({name: turn(side, new) for name, (side, new, _) in ready.items()}, options.rounds, budget)
    rates = {name: [1 / step for step in taken] for name, taken in steps.items()}
    measured: dict[str, Any] = {}
    for name, taken in steps.items():
        format, level = name.split(" ")
        _, new, peak = ready[name]
        step = gpu.summary(taken)
        one = {"step_s": step, "tok_s": batch / step["median"], "new": new, "beside_weights_bytes": peak}
        if backend := backends.get(format):
            beside = (*PEERS, f"bf16 {level}")
            one["over"] = {peer: gpu.ratios(rates[name], rates[peer]) for peer in beside if peer in rates}
            weights = gpu.weight_bytes(backend, batch)
            kv = batch * gpu.kv_bytes(config, PROMPT + (new + 1) / 2)
            one |= {"weights_bytes": backend.nbytes, "step_bytes": weights + kv, "step_kv_bytes": kv}
            if ceiling:
                rate = (weights + kv) / step["median"] / 1e9
                one |= {"gb_s": rate, "of_ceiling": rate / ceiling}
        else:
            import gpu_peers

            one["weights_bytes"] = gpu_peers.nbytes(peers[name][0])
        measured[name] = one
    return measured


def peers_of(model: Any, options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """By name: a transformers model, and how it generates."""
    found = {f"{name} generate": (peer, {}) for name, peer in gpu.peers(model, options.peers).items()}
    if shape in (options.compiled or ()):
        from transformers import CompileConfig

        how = {"cache_implementation": "static", "compile_config": CompileConfig(mode="reduce-overhead")}
        for peer in gpu.peers(model, ["transformers"]).values():
            found["transformers static"] = (peer, how)
    return found


def report(results: dict[str, Any]) -> str:
    header = ("decode", "tok/s", "ms/step (min-max)", "GB/step", "of ceiling", "GB in all", "x bf16", "x transf.",
              "x compiled", "x bnb")  # fmt: skip
    rows = []
    for shape, batches in results["measured"].items():
        for batch, sides in batches.items():
            for name, one in sides.items():
                step, over = one["step_s"], one.get("over", {})

                def times(peer: str, over: dict[str, Any] = over) -> str:
                    return f"{over[peer]['median']:.2f}" if over.get(peer) else ""

                level = name.split(" ")[1]
                rows.append([
                    f"{shape}, {batch} at once, {name}",
                    f"{one['tok_s']:.1f}",
                    f"{1e3 * step['median']:.3f} ({1e3 * step['min']:.3f}-{1e3 * step['max']:.3f})",
                    f"{one['step_bytes'] / 1e9:.2f}" if "step_bytes" in one else "",
                    f"{one['of_ceiling']:.1%}" if "of_ceiling" in one else "",
                    f"{(one['weights_bytes'] + one['beside_weights_bytes']) / 1e9:.2f}",
                    times(f"bf16 {level}"),
                    times("transformers generate"),
                    times("transformers static"),
                    times("bitsandbytes generate"),
                ])  # fmt: skip
    return harness.table(header, rows)


def main() -> None:
    parser = gpu.parser(__doc__, seconds=120, shapes=("1.1B", "8B"))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--peers", nargs="*", default=["transformers", "bitsandbytes"],
                        choices=["transformers", "bitsandbytes"])  # fmt: skip
    parser.add_argument("--peer-batches", nargs="+", type=int, help="in which peers are measured, too; all of them")
    parser.add_argument(
        "--compiled", nargs="*", metavar="SHAPE", help="beside transformers compiled, with these shapes"
    )
    options = parser.parse_args()
    if options.compiled == []:
        options.compiled = options.shape[:1]
    results: dict[str, Any] = {
        "conditions": gpu.conditions(),
        "settings": {"prompt": PROMPT, "new": NEW, "weights": "random", **vars(options)},
        "measured": {},
    }
    ceiling = (results["conditions"]["read_gb_s"] or {}).get("ceiling")
    harness.say(f"{results['conditions']}")
    budget = Budget(options.seconds)
    for at, shape in enumerate(options.shape):
        if budget.spent(shape):
            continue
        own, options.now = budget.share(len(options.shape) - at), shape
        model = gpu.random_model(gpu.SHAPES[shape])
        backends = dict(gpu.backends(model, options.formats))
        peers = peers_of(model, options, shape)
        for place, batch in enumerate(options.batches):
            harness.say(f"{shape}, {batch} at once ({own.left:.0f} s left)")
            beside = peers if batch in (options.peer_batches or options.batches) else {}
            found = measure(batch, backends, beside, ceiling, options, own.share(len(options.batches) - place))
            results["measured"].setdefault(shape, {})[str(batch)] = found
            gpu.save("gpu_decode", options, results)
        del model, backends, peers
        gpu.let_go()
    print(report(results))


if __name__ == "__main__":
    main()
