"""run(): the server from its first socket to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from errno import EADDRNOTAVAIL
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Scope

from pronk.errors import BadRequest, PronkError, os_problem
from pronk.serve import page
from pronk.serve.app import Server, application
from pronk.serve.engine import Engine
from pronk.serve.guard import LOOPBACK, Guard
from pronk.serve.http import Connection
from pronk.serve.metrics import Metrics
from pronk.serve.models import Models

log = logging.getLogger("pronk.serve")

MAX_SEQUENCES, MAX_WAITING, MAX_WAIT_S = 64, 256, 300.0
DRAIN_S = 60  # seconds that texts under way have to end in once the server is told to
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of a machine
_MAX_HEADERS = 64 << 10  # bytes


class Uvicorn(uvicorn.Server):
    """The first signal lets texts under way end, and takes no new ones; the second ends at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.engine.draining:
            self.force_exit = True
        self.engine.draining = self.should_exit = True
        # Not raised again when all is done: who asked for an orderly end has got it.

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Not where the signal is taken, which may be amid another line.
        if (texts := self.engine.texts) and not self.force_exit:
            some = f"{texts} text{'s' * (texts > 1)} under way"
            log.info("ending: %s, for %d seconds at most; the same once more ends at once", some, DRAIN_S)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Raises PronkError where that cannot be listened at."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with contextlib.ExitStack() as undone:
            bound = undone.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(2048)
            undone.pop_all()
    except (OSError, OverflowError, UnicodeError) as error:
        said = os_problem(error) if isinstance(error, OSError) else str(error)
        elsewhere = isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", 0) == EADDRNOTAVAIL
        way_out = "give a --host that is this machine's" if elsewhere else "choose another --port, 0 for any"
        raise PronkError(f"cannot listen at {host}:{port}: {said}; {way_out}") from None
    bound.setblocking(False)
    return bound


def run(
    models: Models,
    bound: socket.socket,
    *,
    keys: Sequence[str] = (),
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
    max_sequences: int = MAX_SEQUENCES,
    max_waiting: int = MAX_WAITING,
    max_wait_s: float = MAX_WAIT_S,
    ready: Callable[[str], None],
    made: Callable[[Uvicorn], None] = lambda server: None,
) -> None:
    """Serve until a signal comes. `bound`: where. `hosts`: names besides loopback's and the bound one's.

    `ready` is called with the address, when the first model is loaded, and `made` before with what ends the server from
    another thread: its `should_exit`. Raises what loading raises.
    """
    host, port = bound.getsockname()[:2]
    if not is_loopback(host) and not keys:
        raise BadRequest(f"at {host} others can reach this server; give an --api-key-file, or leave --host out")
    engine = Engine(max_sequences + max_waiting, max_wait_s)
    server = Server(engine, models, min(max_sequences, 128), Metrics(engine, models))
    problem: list[BaseException] = []

    async def start() -> None:
        try:
            await models.load_all()
        except Exception as error:
            problem.append(error)
            served.should_exit = True
            return
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{port}")

    names = {*LOOPBACK, host, *(name.lower() for name in hosts)}

    def refused(scope: Scope, status: int) -> None:
        server.note("refused", scope, status, time.perf_counter())

    guarded = Guard(
        application(server, start), names, tuple(origins), tuple(keys), page.PATHS, refused, host in EVERYWHERE
    )
    config = uvicorn.Config(
        guarded,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADERS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=2048,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it would say, pronk.serve says
    served = Uvicorn(config, engine)
    made(served)
    try:
        _run(served.serve([bound]))
    finally:
        bound.close()
    if problem:
        raise problem[0]


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """On uvloop, where it is installed: it takes a fifth of the loop's time of each token."""
    try:
        import uvloop
    except ImportError:  # as on Windows, which has none
        asyncio.run(serving)
    else:
        uvloop.run(serving)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")
