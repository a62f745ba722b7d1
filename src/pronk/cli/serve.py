"""`pronk serve`: models over HTTP."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pronk import engines
from pronk.cli import console, options, text_files
from pronk.cli.parameter_types import NAME, Bytes, Number
from pronk.cli.verb import verb
from pronk.errors import BadRequest, PronkError, short


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.note(self.format(record))


class _Key(click.types.StringParamType):
    def split_envvar_value(self, rv: str) -> list[str]:
        """One a line, as in a file. Click would make each word a key, by which a phrase is soon guessed."""
        return _in_lines(rv)


@verb(
    epilog="""\b
Examples:
  pronk serve -m ./my-model
  pronk serve -m smollm2:135m --quantize q8 --port 0
  pronk serve -m ./my-model --also int8
  pronk serve -m ./my-model --adapter poet=./poet --adapter lawyer=./lawyer
  pronk serve -m ./my-model --host 0.0.0.0 --api-key-file key.txt --allowed-host llm.example.org

The server speaks OpenAI's API, and Anthropic's, at /v1: give a client its address, and any key unless you set one
with --api-key. A browser finds a page at it. Beside these there are /health and /metrics. Ctrl-C, or SIGTERM, takes
no new requests and lets those under way end; a second one ends at once."""
)
@options.together(
    click.option("-m", "--model", "models", type=NAME, multiple=True, metavar="MODEL",
                 help="Serve this model: a name, a Hugging Face repository (owner/name), a file or a folder. "
                 f"Repeatable: others than the first are loaded when they are first asked for.  "
                 f"[default: {options.DEFAULT_MODEL}]"),
    click.option("--adapter", "adapters", multiple=True, metavar="NAME=FOLDER",
                 help="Serve the LoRA adapter in FOLDER as a model of its own, called NAME, on the first model that it "
                 "fits. Repeatable."),
    click.option("--adapters", "adapters_folder", type=NAME, metavar="FOLDER",
                 help="Serve each adapter that lies in FOLDER, also one that is put there later."),
    click.option("--also", type=click.Choice(engines.FORMATS), multiple=True, metavar="FORMAT",
                 help="Serve each model in FORMAT as well, as NAME-FORMAT; the page shows both side by side. "
                 "Repeatable."),
    click.option("--chat-template", type=NAME, metavar="FILE|NAME",
                 help="Use this chat template, not the models': a Jinja file, llama2 or llama3. An adapter's own "
                 "stays."),
    heading=options.LOADED,
)  # fmt: skip
@options.loading_options
@options.together(
    click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
                 help="Listen at this address; any other than loopback's needs a key."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, metavar="N",
                 help="Listen at this port; 0: at any that is free."),
    click.option("--api-key", "api_keys", type=_Key(), multiple=True, metavar="KEY", envvar="PRONK_API_KEY",
                 help="Answer only who gives this key. Repeatable. Others on this machine can read it; better is a "
                 "file, or the environment variable PRONK_API_KEY."),
    click.option("--api-key-file", type=NAME, metavar="FILE", help="Take keys from FILE, one a line."),
    click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                 help="Answer requests to this host name, beside localhost and the address of --host. Repeatable."),
    click.option("--allowed-origin", "allowed_origins", multiple=True, metavar="ORIGIN",
                 help="Let pages of this origin ask, as https://example.org. Repeatable."),
    heading="Network",
)  # fmt: skip
@options.together(
    click.option("--max-sequences", type=click.IntRange(1, 1024), default=64, show_default=True, metavar="N",
                 help="Compute at most N texts at once; the rest wait."),
    click.option("--max-waiting", type=click.IntRange(0, 100_000), default=256, show_default=True, metavar="N",
                 help="Let at most N texts wait; one more is refused (429)."),
    click.option("--max-wait", type=Number(0, min_open=True), default=300.0, show_default=True,
                 metavar="SECONDS", help="Refuse a request that has waited SECONDS and was not "
                 "begun: with 429, or with an error event in a stream that has its status already."),
    click.option("--max-memory", type=Bytes(), metavar="SIZE",
                 help="Hold models and their caches in SIZE at most: 12GB, 1.5GiB, or a number of bytes. Models that "
                 "nobody uses are unloaded to make room; what still does not fit is refused (503).  "
                 "[default: most of what is free]"),
    heading="Limits",
)  # fmt: skip
def command(
    models: tuple[str, ...],
    adapters: tuple[str, ...],
    adapters_folder: str | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    api_key_file: str | None,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    max_sequences: int,
    max_waiting: int,
    max_wait: float,
    max_memory: int | None,
    also: tuple[str, ...],
    chat_template: str | None,
    **loading: Any,
) -> None:
    """Serve models over HTTP to OpenAI's and Anthropic's clients."""
    try:
        from pronk.serve import run
        from pronk.serve.models import Models, names_of
    except ImportError as error:
        raise PronkError(f"pronk serve needs {error.name}; pip install 'pronk[serve]'") from None
    from pronk.system import expanded, share_memory
    from pronk.tokenizer import chat

    if chat_template is not None:
        chat.named(chat_template)  # before loading, which may take a while
    keys = [*map(str.strip, api_keys), *_keys(api_key_file)]
    if not keys and "PRONK_API_KEY" in os.environ:  # which somebody set who wanted one
        raise click.UsageError("PRONK_API_KEY holds no key; give it one, or unset it")
    if "" in keys:
        raise click.UsageError("a key is empty")
    for origin in allowed_origins:
        _check_origin(origin)
    for name in allowed_hosts:
        _check_host(name)
    if "/" in host:
        raise click.UsageError(f"--host is a name or an address of this machine, such as 127.0.0.1; not {short(host)}")
    folder = expanded(adapters_folder) if adapters_folder else None
    if folder and not folder.is_dir():
        raise PronkError(f"{adapters_folder}: no such folder; --adapters wants one that holds adapters, now or later")
    loading["ctx_size"] = loading["ctx_size"] or None
    found = Models(
        names_of(models or (options.DEFAULT_MODEL,)),
        _adapters(adapters),
        loading,
        adapters_folder=folder,
        also=also,
        chat_template=chat_template,
        max_sequences=max_sequences,
        max_memory=max_memory,
    )
    if not run.is_loopback(host) and not keys:
        raise click.UsageError(f"at {host} others can reach this server; give an --api-key-file, or leave --host out")
    _log_to_stderr()
    share_memory()
    bound = run.listen(host, port)
    console.note(f"loading {next(iter(found.models))}")
    with _told_to_end():
        run.run(
            found,
            bound,
            keys=keys,
            hosts=allowed_hosts,
            origins=allowed_origins,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_wait_s=max_wait,
            ready=lambda address: console.note(f"serving {', '.join(found.names)} at {address}"),
        )


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """Who tells the process to end before the server heeds it, or when that has let go of it, gets code 0, too."""
    before: dict[int, Any] = {}
    if callable(signal.getsignal(signal.SIGTERM)):  # as main left it; in a test, or a program of others, it is theirs
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, lambda *_: os._exit(0))
    try:
        yield
    except BaseException:
        _heed(before)
        raise
    # Python puts handlers of its own back amid its end, and ignores only what is ignored by then.
    atexit.register(_heed, dict.fromkeys(before, signal.SIG_IGN))


def _heed(handlers: Mapping[int, Any]) -> None:
    for each, handler in handlers.items():
        signal.signal(each, handler)


def _check_origin(given: str) -> None:
    """Browsers compare it letter by letter with what they send, so that another form would allow nobody."""
    scheme, _, host = given.partition("://")
    if given != "null" and (not scheme or not host or "/" in host or given != given.lower()):
        raise click.UsageError(
            f"--allowed-origin {given!r} is no origin; write it as https://example.org, with no path"
        )


def _check_host(given: str) -> None:
    """What a request asks for is held against it without its port."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(given)
        return
    if not re.fullmatch(r"[\w.-]+", given):
        raise click.UsageError(f"--allowed-host {given!r} is no host's name; write it as llm.example.org, with no port")


def _adapters(given: tuple[str, ...]) -> dict[str, Path]:
    from pronk.system import expanded, named

    found: dict[str, Path] = {}
    for one in given:
        name, _, folder = one.rpartition("=")
        if not folder:  # which would be the folder that one is in
            raise click.UsageError(f"--adapter {one!r} names no folder; write it as NAME=FOLDER")
        path = expanded(folder)
        name = name or named(path).name
        if name in found:
            raise click.UsageError(f"two adapters are called {name}; give another NAME=FOLDER")
        found[name] = path
    for one in given:
        folder = one.rpartition("=")[2]
        if not expanded(folder).exists():  # as it was typed: a path is told without its "./", and looks like a NAME
            raise PronkError(f"{folder}: no such folder; --adapter takes [NAME=]FOLDER, the folder of an adapter")
    return found


def _keys(file: str | None) -> list[str]:
    if file is None:
        return []
    keys = _in_lines(text_files.read_file(file))
    if not keys:
        raise BadRequest(f"{file}: holds no key")
    return keys


def _in_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _log_to_stderr() -> None:
    log = logging.getLogger("pronk.serve")
    log.addHandler(_Lines())
    log.setLevel(logging.INFO)
    log.propagate = False
