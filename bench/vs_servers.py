"""`pronk serve` beside other servers of OpenAI's API, in turns: the same texts to read, and as many tokens to write.

    python bench/vs_servers.py [--at-once 1 4 16] [--threads 2] [--rounds 5] [--quick]

llama-cpp-python's server (Q8_0) takes one request at a time; OpenVINO GenAI's continuous batching (Q8_0) stands behind
as little of a server as there can be, for its own is not on PyPI; `transformers serve` has the weights as
floats, and is tried with continuous batching as well. Prompts are words drawn anew in each round. The client shares the
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import load
import models
import serve
import speed_tables
from load import Asked, Client
from tasks import FIRST_PLAIN_ID

import pronk.tokenizer
from pronk import checkpoint

PROMPT, NEW = 128, 64
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """`options` begin with a command's arguments after Python's; {model}, {port} and {threads} are filled in."""

    name: str
    model: str  # a type of GGUF, or `hf`
    options: tuple[str, ...]
    extra: dict[str, Any]
    most: int = 64  # at once


_LLAMA_CPP = (
    "-m", "llama_cpp.server", "--model", "{model}", "--port", "{port}", "--n_ctx", "2048", "--n_threads", "{threads}",
    "--n_threads_batch", "{threads}", "--interrupt_requests", "false",
)  # fmt: skip
_TRANSFORMERS = (
    "-c", "import torch; torch.set_num_threads({threads}); from transformers.cli.transformers import main; main()",
    "serve", "{model}", "--port", "{port}", "--device", "cpu",
)  # fmt: skip
_OPENVINO = (str(Path(__file__).parent / "sides" / "openvino_server.py"), "{model}", "{port}", "{threads}")
_TO_THE_LENGTH = json.dumps({"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False})
PEERS = (
    Server("llama-cpp-python Q8_0", "Q8_0", _LLAMA_CPP, {"logit_bias": {"0": -100.0, "2": -100.0}}),
    Server("OpenVINO GenAI Q8_0", "Q8_0", _OPENVINO, {"ignore_eos": True}),
    Server("transformers", "hf", _TRANSFORMERS, {"generation_config": _TO_THE_LENGTH}, most=4),
    Server(
        "transformers, batched", "hf", (*_TRANSFORMERS, "--continuous-batching"), {"generation_config": _TO_THE_LENGTH}
    ),
)


@contextlib.contextmanager
def running(server: Server, threads: int) -> Iterator[Client]:
    model = models.huggingface(models.SMOLLM2) if server.model == "hf" else models.gguf(models.SMOLLM2, server.model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    filled = [option.format(model=model, port=port, threads=threads) for option in server.options]
    log = models.FOLDER / "server.log"
    with log.open("w") as out, subprocess.Popen([models.PEERS_PYTHON, *filled], stdout=out, stderr=out) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/openapi.json", process, server.name, log)
            yield Client(f"http://127.0.0.1:{port}", str(model), server.extra)
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[Any], name: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{name} does not answer:\n{log.read_text()[-2000:]}")


class Words:
    """Texts of so many tokens, of words that are a token each."""

    def __init__(self, path: Path) -> None:
        opened = checkpoint.open(path)
        assert opened.tokenizer
        tokenizer = pronk.tokenizer.load(opened.tokenizer)
        candidates = (tokenizer.decode([token]) for token in range(FIRST_PLAIN_ID, opened.config.vocab_size))
        self._words = [word for word in candidates if word[:1] == " " and word[1:].isascii() and word[1:].isalpha()]
        self.length = lambda text: len(tokenizer.encode(text))

    def text(self, seed: object, tokens: int = PROMPT) -> str:
        return "".join(random.Random(str(seed)).choices(self._words, k=tokens))


def measure(
    clients: dict[str, tuple[Client, int]], words: Words, at_once: int, rounds: int, waves: int = 1
) -> dict[str, Any]:
    taken: dict[str, list[load.Taken]] = {name: [] for name in clients}
    rounds_of = dict.fromkeys(clients, 0)

    def side(name: str) -> float:
        client, _ = clients[name]
        rounds_of[name] += 1
        wanted = [Asked(words.text((at_once, rounds_of[name], n)), NEW) for n in range(at_once * waves)]
        found = asyncio.run(load.closed(client.ask, wanted, at_once))
        if failed := [each.failed for each in found if each.failed]:
            raise RuntimeError(f"{name}: {failed[0]}")
        if any(each.new_tokens != NEW for each in found):
            raise RuntimeError(f"{name} ended before it had written {NEW} tokens")
        taken[name] += found
        return max(each.ended for each in found) - min(each.sent for each in found)

    sides = {name: functools.partial(side, name) for name, (_, most) in clients.items() if at_once <= most}
    seconds = harness.interleave(sides, rounds, note=lambda line: harness.say(f"    s: {line}"))
    tokens = sum(words.length(words.text((at_once, 1, n))) + NEW for n in range(at_once * waves))
    own = next(iter(clients))
    return {
        name: {
            "total_tok_s": harness.spread([tokens / s for s in seconds[name]]),
            "times_of_theirs": harness.ratios(seconds[name], seconds[own]),
            "first_s": load.percentiles([each.first_s for each in taken[name][at_once * waves :]]),
            "per_token_s": load.percentiles([each.per_token_s for each in taken[name][at_once * waves :]]),
        }
        for name in sides
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--formats", nargs="+", default=["int8", "q8", "f32"])
    parser.add_argument("--peers", nargs="*", default=[peer.name for peer in PEERS], choices=[p.name for p in PEERS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is kept in results/")
    options = parser.parse_args()
    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("uvicorn", "starlette"),
        "settings": {"threads": options.threads, "rounds": options.rounds, "prompt": PROMPT, "new": NEW},
        "left_out": {},
        "measured": {},
    }
    with contextlib.ExitStack() as stack:
        clients: dict[str, tuple[Client, int]] = {}
        for name in options.formats:
            model = models.gguf(models.SMOLLM2, "Q8_0" if name == "q8" else "F32")
            url, _ = stack.enter_context(serve.served(model, name, options.threads))
            clients[f"pronk {name}"] = Client(url, model.stem, {"ignore_eos": True}), 64
        for server in (peer for peer in PEERS if peer.name in options.peers):
            try:
                client = stack.enter_context(running(server, options.threads))
                asyncio.run(_once(client))
            except RuntimeError as error:
                results["left_out"][server.name] = str(error)[-300:]
                harness.say(f"{server.name} is left out: {error}")
                continue
            clients[server.name] = client, server.most
        words = Words(models.gguf(models.SMOLLM2, "F32"))
        for at_once in options.at_once:
            harness.say(f"  {at_once} at once:")
            results["measured"][str(at_once)] = measure(clients, words, at_once, 2 if options.quick else options.rounds)
    path = harness.save("vs_servers", results, *((models.FOLDER,) if options.quick else (harness.RESULTS,)))
    print(speed_tables.vs_servers(results))
    harness.say(f"written to {path}")


async def _once(client: Client) -> None:
    taken = await client.ask(Asked("The sea", NEW))
    if taken.failed:
        raise RuntimeError(taken.failed)


if __name__ == "__main__":
    main()
