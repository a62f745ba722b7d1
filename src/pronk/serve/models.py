"""Models: the names that requests can ask for, loaded when they are first asked, and let go when memory lacks."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pronk
from pronk import checkpoint as checkpoints
from pronk import engines, system
from pronk.checkpoint import adapter_config
from pronk.checkpoint.hub import resolve as hub
from pronk.engine.backend import check_predicts
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import BadRequest, NotEnoughMemory, PronkError
from pronk.serve.failures import ApiError, log_failure
from pronk.session import Session

if TYPE_CHECKING:
    from pronk.engine.backend import Attached
    from pronk.llm import LLM

log = logging.getLogger("pronk.serve")
_SCORES = "a reward model's adapter, which gives texts scores and writes none"
_SHARE = 0.8  # of the free memory, where no bound is given


@dataclass
class Model:
    """One that can be asked for: what it is loaded from and how, and what there is of it."""

    name: str
    source: str
    loading: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    llm: LLM | None = None
    session: Session | None = None
    bytes: int = 0  # of weights, and of keys and values when its cache is full
    shape: dict[str, Any] = field(default_factory=dict)  # what its card says of it
    users: int = 0
    used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Leased:
    """A model that stays loaded while a request uses it. `name`: that it was asked for by. `owner`: who asks, by their
    key, whose prompts nobody else finds in the cache."""

    name: str
    llm: LLM
    session: Session
    adapter: Attached | None
    owner: int = 0


class Models:
    """`sources`: name -> what pronk.load takes. `adapters`: name -> folder, each of the first model that it fits.
    `adapters_folder`: each folder in it is one too, whenever it is put there. `loading`: options of pronk.load. `also`:
    formats in which each model is there once more, as NAME-FORMAT. `chat_template`: a file or a built-in one's name, in
    place of the models' own. Raises BadRequest for two of one name.

    `max_memory` bounds weights and caches of all loaded models together, in bytes; None: most of what is free.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        adapters: Mapping[str, Path],
        loading: Mapping[str, Any],
        *,
        adapters_folder: Path | None = None,
        also: Sequence[str] = (),
        max_sequences: int = 64,
        max_memory: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.models = {name: Model(name, source, loading) for name, source in sources.items()}
        for name, source in sources.items():
            for dtype in dict.fromkeys(also):
                other = Model(f"{name}-{dtype}", source, {**loading, "quantize": dtype})
                if self.models.setdefault(other.name, other) is not other:
                    raise BadRequest(f"two models would be called {other.name}; load one of them under a link")
        for name in adapters:
            if name in self.models:  # which would answer in its place
                raise BadRequest(f"an adapter and a model are both called {name}; give the adapter another NAME=FOLDER")
        self._adapters, self._folder = dict(adapters), adapters_folder
        self._chat_template = chat_template
        self._max_sequences = max_sequences
        free = engines.ENGINES[0].free_memory(None)
        self._max_memory = max_memory if max_memory is not None else int(_SHARE * (free or 1 << 62))
        self._loads = asyncio.Lock()  # one at a time, so that memory is counted once

    @property
    def names(self) -> list[str]:
        return [*self.models, *(name for name, folder in self.adapters.items() if not _problem(folder))]

    @property
    def adapters(self) -> dict[str, Path]:
        """Those that were named, and those that lie in the folder now."""
        found = dict(self._adapters)
        if self._folder is not None:
            for folder in sorted(self._folder.iterdir() if self._folder.is_dir() else ()):
                if (folder / adapter_config.CONFIG).is_file() and folder.name not in self.models:
                    found.setdefault(folder.name, folder)
        return found

    def absent(self, name: str) -> ApiError:
        known = ", ".join(map(repr, self.names))
        return ApiError(404, f"there is no model {name[:80]!r}; there are {known}", "model", "model_not_found")

    @property
    def loaded(self) -> list[Model]:
        return [model for model in self.models.values() if model.llm]

    @asynccontextmanager
    async def lease(self, name: str | None, owner: int = 0) -> AsyncIterator[Leased]:
        """The model of that name, which stays loaded meanwhile; None: the first. Raises ApiError where there is none,
        or none that can be used, and NotEnoughMemory."""
        name = next(iter(self.models)) if name is None else name
        folder = None if name in self.models else self.adapters.get(name)
        if name not in self.models and folder is None:
            raise self.absent(name)
        there = folder is not None and any(model.llm and name in model.llm.adapters for model in self.loaded)
        if folder is not None and not there and (problem := _problem(folder)):
            if problem == _SCORES:
                raise ApiError(400, f"{name!r} is {_SCORES}; ask `pronk score` for them", "model")
            log.warning("%s cannot be used: %s", name, problem)
            raise ApiError(404, f"{name!r} cannot be used; the server's log says why", "model", "model_not_found")
        model, adapter = self.models.get(name), None
        try:
            if folder is not None:
                model, adapter = await self._of_adapter(name, folder)
            else:
                assert model
                await self._load(model)
        except NotEnoughMemory:
            raise
        except PronkError as error:  # it names files, of which clients are to learn nothing
            log_failure(f"{name} cannot be used", error)
            message, headers = f"{name!r} cannot be used; the server's log says why", {"x-should-retry": "false"}
            told = ApiError(500, message, "model", headers=headers)
            told.logged = True
            raise told from error
        assert model
        assert model.llm
        assert model.session
        model.users += 1
        try:
            yield Leased(name, model.llm, model.session, adapter, owner)
        finally:
            model.users -= 1
            model.used = time.monotonic()

    async def load_all(self) -> None:
        """As many as memory has room for, so that the first request need not wait; the first must load."""
        first, *others = self.models.values()
        for name, folder in self._adapters.items():
            if not folder.is_file():
                adapter_config.read(folder)  # what is wrong with it is said before a model is loaded for it
            _check_writes(name, folder, first.source)
        await self._load(first)
        for name, folder in self._adapters.items():
            await self._of_adapter(name, folder)
        for name, folder in self.adapters.items():
            if problem := _problem(folder):
                log.warning("%s is left out: %s", name, problem)
        for model in others:
            log.info("%s is loaded when it is first asked for", model.name)

    def close(self) -> None:
        for model in self.loaded:
            self._unload(model)

    async def _of_adapter(self, name: str, folder: Path) -> tuple[Model, Attached | None]:
        problem: PronkError | None = None
        _check_writes(name, folder, next(iter(self.models.values())).source)
        for model in self.models.values():
            await self._load(model)
            assert model.llm
            model.users += 1  # it is not unloaded while the adapter is read
            try:
                async with model.lock:
                    if name not in model.llm.adapters:
                        await asyncio.to_thread(model.llm.add_adapter, folder, name)
                    return model, model.llm.adapters[name]
            except PronkError as error:
                problem = problem or error
            finally:
                model.users -= 1
        assert problem
        raise problem

    async def forget_dropped(self) -> None:
        """Let go of adapters whose folders are gone."""
        there = await asyncio.to_thread(lambda: self.adapters)
        for model in self.models.values():
            if not model.llm:
                continue
            model.users += 1  # it is not unloaded meanwhile
            try:
                async with model.lock:  # and what is added is not gone before it is taken
                    for name in [name for name in model.llm.adapters if name not in there]:
                        await asyncio.to_thread(model.llm.drop_adapter, name)
            finally:
                model.users -= 1

    async def _load(self, model: Model) -> None:
        if model.llm:
            return
        async with self._loads:
            if model.llm:
                return
            begun = time.perf_counter()
            weights, kv_a_token, ctx_size = await asyncio.to_thread(self._plan, model)
            self._make_room(model, weights + ctx_size * kv_a_token)  # of one text that is as long as can be
            left = self._max_memory - weights - sum(each.bytes for each in self.loaded)
            llm = await asyncio.to_thread(pronk.load, model.source, **model.loading)
            if self._chat_template is not None and llm.has_tokenizer:
                llm.tokenizer.chat_template = llm.template(self._chat_template)
            most = self._max_sequences * llm.ctx_size
            tokens = max(llm.ctx_size, min(most, left // max(1, kv_a_token) // 2))
            tokens = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE  # for the session counts whole blocks
            model.bytes = weights + tokens * kv_a_token
            model.session = Session(
                llm.backend,
                llm.tokenizer if llm.has_tokenizer else None,
                eos_ids=llm.eos_ids,
                max_sequences=self._max_sequences,
                max_kv_tokens=tokens,
                prefix_cache=min(tokens, 4 * llm.ctx_size),
                load_s=llm.load_s,
            )
            model.shape = {
                "dtype": llm.backend.dtype,
                "kv_dtype": llm.backend.kv_dtype,
                "weight_bytes": llm.backend.nbytes,
                "kv_bytes_a_token": kv_a_token,
                "layers": llm.config.num_hidden_layers,
                "heads": llm.config.num_attention_heads,
                "vocabulary": llm.config.vocab_size,
                "sampling": dict(llm.checkpoint.generation.sampling),
            }
            model.llm = llm
            log.info("loaded %s in %.2f s: up to %d tokens cached", model.name, time.perf_counter() - begun, tokens)

    def _plan(self, model: Model) -> tuple[int, int, int]:
        """Bytes of the weights, and of one token's keys and values; and how many tokens a text may have."""
        options = {name: model.loading.get(name) for name in ("quantize", *engines.OPTIONS)}
        opened = checkpoints.open(hub.resolve(model.source, revision=model.loading.get("revision"), progress=False))
        check_predicts(opened.config)
        engine = engines.named(engines.choose(model.loading.get("engine"), options))
        plan = engine.plan(opened, engines.options_for(engine, options))
        ctx_size = model.loading.get("ctx_size") or opened.config.max_position_embeddings
        return plan.weights + plan.besides, plan.kv_a_token, ctx_size

    def _make_room(self, model: Model, least: int) -> None:
        """Unload those that nobody uses, the least recently used first. Raises NotEnoughMemory."""
        idle = sorted((each for each in self.loaded if not each.users), key=lambda each: each.used)
        while sum(each.bytes for each in self.loaded) + least > self._max_memory:
            if not idle:
                problem = (
                    f"{model.name} takes {system.human_size(least)} at least, beside what is in use, and "
                    f"{system.human_size(self._max_memory)} is the most"
                )
                raise NotEnoughMemory(problem, "raise --max-memory, or lower --ctx-size, or --quantize to fewer bits")
            log.info("unloaded %s, to make room for %s", idle[0].name, model.name)
            self._unload(idle.pop(0))

    def _unload(self, model: Model) -> None:
        llm, session, model.llm, model.session, model.bytes = model.llm, model.session, None, None, 0
        if session:
            session.close()
        if llm:
            llm.close()


def _problem(folder: Path) -> str | None:
    """Why nothing can be written with what lies there, as far as its config says."""
    try:
        changed = (folder / adapter_config.CONFIG).stat().st_mtime_ns
    except OSError:  # a GGUF file, or gone meanwhile
        return None
    try:
        return _SCORES if _saves_score(folder, changed) else None
    except (PronkError, OSError) as error:
        return str(error)


@functools.lru_cache(maxsize=1024)
def _saves_score(folder: Path, changed: int) -> bool:
    """`changed`: when its config was. What is raised is not kept: it may pass."""
    return adapter_config.read(folder).saves_score


def _check_writes(name: str, folder: Path, base: str) -> None:
    if _problem(folder) == _SCORES:
        way_out = f"pronk score {base} --adapter {folder}"
        raise BadRequest(f"{name}: {_SCORES}; use {way_out}")


def names_of(sources: Iterable[str]) -> dict[str, str]:
    """A name for each: the one that it is known by, of a path the last part. Raises BadRequest for two alike."""
    found: dict[str, str] = {}
    for source in sources:
        path = system.expanded(source)
        there = system.named(path)
        name = (there.stem if path.is_file() else there.name) if path.exists() else source
        if found.get(name) == source:
            raise BadRequest(f"{source} is given twice; name it once, or serve it in another format with --also")
        if name in found:
            raise BadRequest(f"{source} and {found[name]} would both be called {name}; load one of them under a link")
        found[name] = source
    return found
