"""OpenVINO GenAI behind a server: `ContinuousBatchingPipeline` on a GGUF file, asked by OpenAI's streamed completions.

    python openvino_server.py MODEL.gguf PORT THREADS

Its own, OpenVINO Model Server, is not on PyPI: it comes as a container or an archive. This one does as
little as a server can: a thread that steps the pipeline, and an event a token. What it reads is trusted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import openvino_genai

CACHE_GB, AT_ONCE = 4, 64
Told = Callable[[list[int], bool], None]  # new tokens, and whether they are the last


class Engine(threading.Thread):
    def __init__(self, path: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, AT_ONCE
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._loop, self._numbers = loop, itertools.count()
        self._changed, self._new = threading.Condition(), list[tuple[Any, Any, Told]]()

    def ask(self, ids: Any, new: int, ignore_eos: bool, told: Told) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, ignore_eos, False
        with self._changed:
            self._new.append((ids, config, told))
            self._changed.notify()

    def run(self) -> None:
        handles: list[tuple[Any, Told]] = []
        while True:
            with self._changed:
                while not self._new and not handles:
                    self._changed.wait()
                for ids, config, told in self._new:
                    handles.append((self._pipeline.add_request(next(self._numbers), ids, config), told))
                self._new.clear()
            self._pipeline.step()
            for handle, told in handles:
                if handle.can_read():
                    (output,) = handle.read().values()
                    ended = output.finish_reason != openvino_genai.GenerationFinishReason.NONE
                    self._loop.call_soon_threadsafe(told, list(output.generated_ids), ended)
            running = openvino_genai.GenerationStatus.RUNNING
            handles = [(handle, told) for handle, told in handles if handle.get_status() == running]


class Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if head.startswith("POST"):
            await self._complete(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode(asked["prompt"]).input_ids
        coming: asyncio.Queue[tuple[list[int], bool]] = asyncio.Queue()
        new = asked["max_tokens"]
        self._engine.ask(ids, new, asked.get("ignore_eos", False), lambda *told: coming.put_nowait(told))
        taken, ended = 0, False
        while not ended:
            tokens, ended = await coming.get()
            taken += len(tokens)
            choice = {"index": 0, "text": tokenizer.decode(tokens), "finish_reason": None}
            if ended:
                choice["finish_reason"] = "length" if taken == new else "stop"
            told = {"object": "text_completion", "choices": [choice]}
            if ended:
                told["usage"] = {"prompt_tokens": ids.shape[1], "completion_tokens": taken}
            writer.write(b"data: " + json.dumps(told).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")


async def main(path: str, port: str, threads: str) -> None:
    engine = Engine(path, int(threads), asyncio.get_running_loop())
    engine.start()
    server = await asyncio.start_server(Server(engine).answer, "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
