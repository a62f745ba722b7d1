"""`pronk serve` under a crowd, in turns with the same Session without HTTP, and with llama.cpp's batched loop.

    python bench/serve.py [--formats int8 q8] [--threads 2] [--cases ...] [--no-llama-cpp] [--quick]

Every side is a process of its own that waits while another works. The client (load.py) is this process, on the same
cores: its processor time stands beside the rates. Prompts are random tokens, never the same twice, and texts go on to
their length. `shared`: prompts begin alike, as with a system prompt. llama.cpp is its `llama_decode` in a loop over all
sequences, with a search for the largest logit: more than a server on it can give. Cases that are not named stay in the
results as they were measured before, with the same settings, each beside its own time, commit and load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import harness
import load
import models
import speed_tables
from load import Asked, Client, Taken
from sides.pipe import Side
from tasks import FIRST_PLAIN_ID

LLAMA_CPP = {"int8": "Q8_0", "q8": "Q8_0", "q4": "Q4_0", "bf16": "BF16"}
MAX_SEQUENCES = 64
BOUNDS = {"first_s": 1.0, "per_token_s": 0.1}  # of goodput
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 1}


@dataclass(frozen=True)
class Case:
    """`waves`: requests, in multiples of those at once. `shared`: tokens that all prompts of a round begin with."""

    at_once: int
    prompt: int = 128
    new: int = 64
    shared: int = 0
    waves: int = 2
    sampled: bool = False
    beside: bool = True  # llama.cpp is measured, too

    @property
    def sampling(self) -> dict[str, Any]:
        return SAMPLED if self.sampled else GREEDY


CASES = {
    "1": Case(1, waves=4),
    "4": Case(4),
    "16": Case(16),
    "64": Case(64, waves=1),
    "16 sampled": Case(16, sampled=True, beside=False),
    "16 short": Case(16, prompt=32),
    "16 long": Case(16, prompt=1024, new=32, waves=1),
    "4 longest": Case(4, prompt=2048, new=32, waves=1),
    "16 shared": Case(16, prompt=32, shared=512),
}


@contextlib.contextmanager
def served(model: Path, quantize: str, threads: int, *options: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a server of our own."""
    command = [sys.executable, "-m", "pronk", "serve", "-m", str(model), "--quantize", quantize, "--port", "0"]
    command += ["--threads", str(threads), "--max-sequences", str(MAX_SEQUENCES), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        address = next(
            (found[1] for line in process.stderr if (found := re.search(r"serving .* at (http\S+)", line))), None
        )
        if address is None:
            sys.exit("pronk serve ended before it listened")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # nobody reads its log
        try:
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()
            drain.wait()


def prompts(case: Case, vocab_size: int, seed: object) -> list[list[int]]:
    numbers = random.Random(str(seed))

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(count)]

    first = tokens(case.shared)
    return [first + tokens(case.prompt) for _ in range(case.at_once * case.waves)]


def measure(
    case: Case, client: Client, session: Side, peer: Side | None, vocab_size: int, rounds: int
) -> dict[str, Any]:
    """Of each side the seconds a round took for the same prompts; of HTTP what each stream saw."""
    every: list[dict[str, Any]] = []
    streams: list[Taken] = []
    counts = {side: itertools.count() for side in ("http", "session", "llama.cpp")}
    sampling = {**client.extra, **case.sampling}
    client = Client(client.url, client.model, sampling)

    def http() -> float:
        wanted = [Asked(ids, case.new) for ids in prompts(case, vocab_size, next(counts["http"]))]
        cpu = time.process_time()
        taken = asyncio.run(load.closed(client.ask, wanted, case.at_once))
        every.append(load.summary(taken) | {"client_cpu_s": time.process_time() - cpu})
        streams.extend(taken)
        if failed := [each.failed for each in taken if each.failed]:
            raise RuntimeError(failed[0])
        assert all(each.new_tokens == case.new for each in taken)
        return float(every[-1]["seconds"])

    def alone() -> float:
        wanted = prompts(case, vocab_size, next(counts["session"]))
        return float(session.run(prompts=wanted, new=case.new, at_once=case.at_once, sampling=case.sampling)["seconds"])

    def theirs() -> float:
        assert peer
        wanted = prompts(case, vocab_size, next(counts["llama.cpp"]))
        waves = [wanted[at : at + case.at_once] for at in range(0, len(wanted), case.at_once)]
        return sum(float(peer.time_batch(prompts=wave, new=case.new, cache=True)["all_s"]) for wave in waves)

    sides = {"http": http, "session": alone}
    if peer and case.beside:
        tokens = case.shared + case.prompt + case.new
        peer.prepare(ctx=-(-tokens // 256) * 256, sequences=case.at_once)
        sides["llama.cpp"] = theirs
    seconds = harness.interleave(sides, rounds, note=lambda line: harness.say(f"    s: {line}"))
    per_round = case.at_once * case.waves * (case.shared + case.prompt + case.new)
    found: dict[str, Any] = {
        "case": asdict(case),
        "total_tok_s": {side: harness.spread([per_round / s for s in taken]) for side, taken in seconds.items()},
        "http_of_session": harness.ratios(seconds["session"], seconds["http"]),
        "streams": load.summary(streams[case.at_once * case.waves :]),
        "client_cpu_share": harness.spread([each["client_cpu_s"] / each["seconds"] for each in every[1:]]),
    }
    for rate in ("seconds", "requests_s", "new_tok_s", "total_tok_s"):
        del found["streams"][rate]  # over all rounds, other sides' turns included
    if "llama.cpp" in seconds:
        found["of_llama_cpp"] = harness.ratios(seconds["llama.cpp"], seconds["http"])
    return found


def overhead(client: Client, session: Side, vocab_size: int, rounds: int, new: int = 64) -> dict[str, Any]:
    """One stream over HTTP beside `LLM.stream`: the first token, and each after it."""
    firsts: dict[str, list[float]] = {"http": [], "stream": []}
    counts = {side: itertools.count() for side in firsts}

    def one(side: str) -> list[int]:
        # Short, so that reading it, which varies, does not hide what HTTP adds.
        return prompts(Case(1, 16, waves=1), vocab_size, f"overhead {next(counts[side])}")[0]

    def http() -> float:
        taken = client.ask_alone(Asked(one("http"), new))
        if taken.failed:
            raise RuntimeError(taken.failed)
        firsts["http"].append(taken.first_s)
        return (taken.pieces[-1] - taken.pieces[0]) / (new - 1)

    def stream() -> float:
        times = session.stream(ids=one("stream"), new=new, sampling=GREEDY)
        firsts["stream"].append(times[0])
        return float((times[-1] - times[0]) / (new - 1))

    taken = harness.interleave({"http": http, "stream": stream}, rounds, warmup=2)
    first = {side: values[2:] for side, values in firsts.items()}
    return {
        "first_ms": {side: harness.spread([1e3 * value for value in values]) for side, values in first.items()},
        "first_added_ms": harness.spread([1e3 * (a - b) for a, b in zip(first["http"], first["stream"], strict=True)]),
        "token_ms": {side: harness.spread([1e3 * value for value in values]) for side, values in taken.items()},
        "token_ratio": harness.ratios(taken["http"], taken["stream"]),
    }


def arrivals(client: Client, vocab_size: int, capacity: float, count: int) -> list[dict[str, Any]]:
    """Poisson arrivals at shares of the rate that 16 at once were answered at."""
    found = []
    for share in (0.5, 0.8, 1.1):
        numbers, at, wanted = random.Random(share), 0.0, []
        for ids in prompts(Case(count, waves=1), vocab_size, f"open {share}"):
            at += numbers.expovariate(share * capacity)
            wanted.append(Asked(ids, 64, at))
        taken = asyncio.run(load.opened(client.ask, wanted))
        found.append({"share": share, "rate_s": share * capacity} | load.summary(taken, BOUNDS))
        harness.say(f"    arrivals at {share} of capacity: goodput {found[-1]['goodput_s']:.2f}/s")
    return found


def beside_a_long_prompt(client: Client, vocab_size: int, rounds: int, length: int = 8000) -> dict[str, Any]:
    """Streams of four that decode, and 16-token prompts that come, while a long prompt is read.

    Each pass brings the four a token: between the sending of a short prompt and its first token these are counted.
    Seconds over the median pass say more where passes differ: they have the slowest ones in it.
    """
    shorts, gaps, quiet, longest = list[Taken](), list[float](), list[float](), list[float]()
    counts = list[float]()

    def asked(count: int, new: int, seed: object) -> Asked:
        return Asked(prompts(Case(1, count, waves=1), vocab_size, seed)[0], new)

    async def once(number: int) -> None:
        streams = [asyncio.create_task(client.ask(asked(32, 400, f"s {number} {n}"))) for n in range(4)]
        await asyncio.sleep(1.0)
        long = asyncio.create_task(client.ask(asked(length, 4, f"l {number}")))
        begun = time.perf_counter()
        await asyncio.sleep(0.2)
        n, its = 0, list[Taken]()
        while not long.done():
            its.append(await client.ask(asked(16, 2, f"q {number} {n}")))
            n += 1
        whole = await long
        longest.append(whole.first_s)
        its = [short for short in its if short.pieces[0] < whole.pieces[0]]  # the passes after it are short
        decoded = await asyncio.gather(*streams)
        for taken in decoded:
            for at, gap in zip(taken.pieces[1:], taken.gaps_s, strict=True):
                (gaps if begun < at < begun + longest[-1] else quiet).append(gap)
        late = load.percentiles(gaps)["p50"] / 4  # tokens of one pass do not come at one time
        last = max(decoded, key=lambda taken: taken.ended).pieces
        counts.extend(sum(short.sent < at <= short.pieces[0] + late for at in last) for short in its)
        shorts.extend(its)

    for number in range(rounds):
        asyncio.run(once(number))
    passes, firsts = load.percentiles(gaps), [short.first_s for short in shorts]
    return {
        "length": length,
        "long_first_s": harness.spread(longest),
        "short_first_s": load.percentiles(firsts) | {"count": len(shorts)},
        "short_first_passes": load.percentiles(counts),
        "gap_beside_s": passes,
        "gap_else_s": load.percentiles(quiet),
        "short_first_in_passes": {p: value / passes["p50"] for p, value in load.percentiles(firsts).items()},
    }


def of_format(name: str, options: argparse.Namespace) -> dict[str, Any]:
    ours = models.gguf(models.SMOLLM2, "Q8_0" if name == "q8" else "F32")
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Side("session_side"))
        kv_tokens = MAX_SEQUENCES * 512 + 4 * 8192
        loaded = session.load(
            path=str(ours), quantize=name, threads=options.threads, max_sequences=MAX_SEQUENCES, kv_tokens=kv_tokens
        )
        peer = None
        if not options.no_llama_cpp:
            peer = stack.enter_context(Side("llama_cpp_side", models.PEERS_PYTHON))
            theirs = models.gguf(models.SMOLLM2, LLAMA_CPP[name])
            peer.load(path=str(theirs), threads=options.threads)
        url, _ = stack.enter_context(served(ours, name, options.threads))
        client = Client(url, ours.stem, {"ignore_eos": True})
        vocab_size, rounds = loaded["vocab_size"], options.rounds
        cases: dict[str, Any] = {}
        for label in options.cases:
            harness.say(f"  {name}, {label} at once:")
            about = conditions()
            cases[label] = {**measure(CASES[label], client, session, peer, vocab_size, rounds), **about}
        found: dict[str, Any] = {"cases": cases}
        if not options.no_more:
            found["overhead"] = overhead(client, session, vocab_size, 3 if options.quick else 60)
            if "16" in cases:
                wave = CASES["16"]
                capacity = cases["16"]["total_tok_s"]["http"]["median"] / (wave.prompt + wave.new)
                found["arrivals"] = arrivals(client, vocab_size, capacity, 12 if options.quick else 60)
            found["beside_a_long_prompt"] = beside_a_long_prompt(client, vocab_size, 1 if options.quick else 3)
    return found


def conditions() -> dict[str, Any]:
    """Of a case, which may stand beside others of another day."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"when": now, "commit": harness.commit(), "load_1min": harness.machine()["load_1min"]}


def merged(before: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """What a format has measured now, and of cases and parts left out now what it had. `before`: a file, or {}."""
    had = before.get("measured", {}).get(name, {})
    then = {key: before[key] for key in ("when", "commit") if key in before}
    then |= {"load_1min": before["machine"]["load_1min"]} if before else {}
    cases = {label: {**then, **case} for label, case in had.get("cases", {}).items()} | found["cases"]
    return {**had, **found, "cases": {label: cases[label] for label in CASES if label in cases}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int8", "q8"], choices=list(LLAMA_CPP))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-llama-cpp", action="store_true")
    parser.add_argument("--no-more", action="store_true", help="cases alone: no overhead, arrivals or long prompt")
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is kept in results/")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("numpy", "uvicorn", "starlette"),
        "settings": {"threads": options.threads, "rounds": options.rounds, "max_sequences": MAX_SEQUENCES},
    }
    folder = models.FOLDER if options.quick else harness.RESULTS
    before = harness.before("serve", results, folder)
    results["measured"] = dict(before.get("measured", {}))
    for name in options.formats:
        stolen = harness.steal_s()
        found = of_format(name, options)
        results["measured"][name] = merged(before, name, found | {"steal_s": harness.steal_s() - stolen})
        path = harness.save("serve", results, folder)
    print(speed_tables.serve(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
