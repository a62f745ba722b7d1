"""What a server holds after many requests: blocks in use, and memory beside what it held after the first tenth.

    python bench/soak.py [--requests 10000] [--model MODEL] [--format q8] [--threads 2]

Thirty-two clients ask at once, with prompts and lengths of their own. A third leave at a random moment, a tenth ask for
JSON of a schema, of which there are a hundred. Memory is the server's own: RssAnon and VmSwap. The cache of prompts is
small enough to be full after the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import harness
import load
import models
import serve
from load import Asked, Client, Taken

AT_ONCE = 32


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))) * 1024 / 1e6


def gauges(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}  # summed over labels
    for name, value in re.findall(r"^(pronk_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def schema(number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"n{number % 100}": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": [f"n{number % 100}"],
        "additionalProperties": False,
    }


async def one(client: Client, number: int) -> Taken:
    numbers = random.Random(number)
    ids = [numbers.randrange(300, 40_000) for _ in range(numbers.choice((4, 16, 16, 64)))]
    if number % 10 == 0:
        client = Client(client.url, client.model, {"guided_json": schema(number // 10)})
    asking = client.ask(Asked(ids, numbers.randrange(2, 24)))
    if number % 3:
        return await asking
    try:
        return await asyncio.wait_for(asking, numbers.uniform(0.0, 1.5))
    except asyncio.TimeoutError:
        return Taken(0.0, failed="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", type=Path, help="default: the default model")
    parser.add_argument("--format", default="q8")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = options.model or models.gguf(models.SMOLLM2, "Q8_0" if options.format == "q8" else "F32")
    # However long the machine is given to somebody else meanwhile, nobody is refused for having waited.
    limits = ("--ctx-size", "1024", "--max-wait", "100000")
    with serve.served(model, options.format, options.threads, *limits) as (url, pid):
        client = Client(url, model.stem, {})
        counted = {"whole": 0, "left": 0, "failed": 0}

        async def ask(asked: Asked) -> Taken:
            taken = await one(client, asked.new)
            counted["left" if taken.failed == "left" else "failed" if taken.failed else "whole"] += 1
            if taken.failed not in ("", "left"):
                harness.say(f"    {taken.failed}")
            return taken

        held, begun = [], time.perf_counter()
        edges = [0, *(options.requests * tenth // 10 for tenth in range(1, 11))]
        for first, last in itertools.pairwise(edges):
            asyncio.run(load.closed(ask, [Asked("", number) for number in range(first, last)], AT_ONCE))
            held.append(memory_mb(pid))
            harness.say(f"  {last} requests: {held[-1]:.1f} MB, {time.perf_counter() - begun:.0f} s, {counted}")
        time.sleep(1)  # who left is seen by then
        after = gauges(url)
    results = {
        "machine": harness.machine("uvicorn"),
        "settings": {"requests": options.requests, "at_once": AT_ONCE, "model": model.name, "format": options.format},
        "counted": counted,
        "memory_mb": held,
        "growth": held[-1] / held[0],
        "gauges": {name: value for name, value in after.items() if not re.search(r"_bucket$|_created$", name)},
    }
    path = harness.save("soak", results, harness.RESULTS if options.requests >= 10_000 else models.FOLDER)
    print(json.dumps({name: results[name] for name in ("counted", "growth", "gauges")}, indent=1))
    harness.say(f"written to {path}")
    if counted["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
