"""Trainer: a checkpoint, data and settings made into an adapter or a model, in a folder of its own (folder.py).

With held-out data the folder holds what did best on it; without, what training ended with. There is a checkpoint from
before the first step on, so that a run that died can be resumed whenever it did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronk.checkpoint.digest import digest
from pronk.checkpoint.tensors import Checkpoint, LazyTensor, Progress
from pronk.checkpoint.writers import write
from pronk.errors import BadFile, BadRequest, PronkError, os_problem
from pronk.system import expanded, replacing
from pronk.tokenizer.export import beside_adapter
from pronk.tokenizer.source import TEMPLATE
from pronk.torch_engine.backend import load_model, pick_device
from pronk.torch_engine.model import Llama
from pronk.train import adapter, best, codes, frozen, lora, optimizers, saved_settings, sharding, state
from pronk.train.data.examples import content
from pronk.train.data.sources import Data
from pronk.train.data.store import Picked
from pronk.train.distributed import Group, Whole
from pronk.train.folder import CHECKPOINTS, MODEL, forget_metrics, to_resume, write_metrics
from pronk.train.loop import Loop
from pronk.train.memory import plan
from pronk.train.recompute import recompute
from pronk.train.saved_settings import DIGEST, flat
from pronk.train.settings import Settings

Metrics = dict[str, Any]  # a line of metrics.jsonl
TASK = "held_out_task"  # in it, the score of a task that judges
_MOST_THREADS = 1024  # the engines' bound: torch dies of too many without a word


class Trainer:
    """`prepared` data and a model in training; `train` does it, and may be told to stop between two steps."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        data: Data,
        settings: Settings,
        folder: Path,
        *,
        tokenizer_files: Mapping[str, bytes] | None = None,
        device: str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        preparing: Callable[[int, int], None] | None = None,
        group: Group | None = None,
    ) -> None:
        """`tokenizer_files`: for the adapter's folder; or for that of a trained model, where `checkpoint` has none to
        copy (write.save).

        `threads` is torch's, and holds for the whole process. `preparing` is told how many examples the objective is
        done with before the first step, and of how many. `group`: the processes that share the run; each makes a
        Trainer of the same, on the device that the group gives it.
        """
        self.group = group = group or Group()
        if threads is not None:
            if not 1 <= threads <= _MOST_THREADS:
                raise BadRequest(f"threads must be from 1 to {_MOST_THREADS}, not {threads!r}")
            torch.set_num_threads(threads)
        torch.manual_seed(settings.seed)
        self._tokenizer_files = tokenizer_files
        self.checkpoint, self.data, self.settings, self.folder = checkpoint, data, settings, folder
        if group.size > 1 and (what := optimizers.UNCUT.get(settings.optimizer)):
            raise BadRequest(f"{what} not cut among processes; take adamw, or one process")
        where = pick_device(group.device or device)
        # Before the fingerprint, for which a new model's weights are drawn.
        group.lead(lambda _: plan(checkpoint, settings, data.train, where).check(group.here, group.size))
        group.agree(self._fingerprint(), "settings or data")
        self.model = self._load(where, progress)
        recompute(self.model, settings.recompute)
        group.seed(settings.seed)
        batches = settings.batches(data.train)
        self.epoch_steps = len(batches.epoch(0)) / settings.accumulate
        how: dict[str, Any] = {"accumulate": settings.accumulate, "names": data.names, "group": group}
        self.loop = Loop.of(settings, self.model, data.train, batches, **how)
        self.resumed_from: Path | None = None
        self.prolonged_from: int | None = None  # how many steps it was to have
        self.loose: Mapping[str, str] = {}  # digests of what may become another between two starts, by its name
        self.changed: list[str] = []  # what of it has
        self.told: list[str] = []  # what there is to say of the run that was resumed
        self._saved: int | None = None  # the step of the newest checkpoint
        self.listener: Callable[[Mapping[str, Any]], None] = lambda line: None  # hears what metrics.jsonl is told
        self.judge: Callable[[Trainer], float] | None = None  # of looks, instead of held-out loss: the more, the better
        self.loop.prepare(Picked([data.train, data.held_out]), preparing)

    @property
    def trained_share(self) -> float:
        every = list(self.model.parameters())
        return sum(p.numel() for p in every if p.requires_grad) / frozen.count(self.model)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or looks have not been better for as long as was to be waited."""
        patience = self.settings.patience
        return self.loop.done or (patience is not None and self.loop.position.waited >= patience)

    @property
    def newest(self) -> Path | None:
        """Checkpoint."""
        return None if self._saved is None else self.folder / CHECKPOINTS / state.name_of(self._saved)

    def resume(self) -> None:
        """From the newest checkpoint. Raises BadRequest where there is none, settings differ or its product is gone."""
        found = to_resume(self.folder)
        try:
            usual = saved_settings.defaults(self.settings)
            state.load(self.loop, found[-1], self._fingerprint(), usual, self._lasted)
        except BadFile as error:
            if len(found) < 2:
                raise
            way = f"without {found[-1].name}, --resume goes on from {found[-2].name}"
            raise BadFile(error.path, f"{error.problem}; {way}", field=error.field, offset=error.offset) from None
        self.resumed_from, self.changed = found[-1], state.changed(found[-1], self.loose)
        self.told = best.know_again(self)
        self._saved = self.loop.position.step
        looked = bool(self.data.held_out)
        self.told += self.group.lead(lambda _: forget_metrics(self.folder, self._saved or 0, looked=looked)) or []

    def _lasted(self, length: Mapping[str, Any]) -> None:
        before, now = replace(self.settings, **length).steps(self.loop.batches), self.loop.schedule.steps
        if length["max_steps"] and not self.settings.max_steps and length["epochs"] == self.settings.epochs:
            # Nobody asked for more: the usual number of epochs would go on for hours.
            raise BadRequest(f"the run was of max_steps={before}; resume with it, or with more to prolong the run")
        if now < before:
            raise BadRequest(f"the run was of {before} steps, and now it is {now}: it can be prolonged, not cut short")
        self.prolonged_from = before if now > before else None

    def train(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Whether it came to its end; where it was told to stop, a checkpoint is there to go on from."""
        for _ in self.metrics(stop):
            pass
        return self.finished

    def metrics(
        self, stop: Callable[[], bool] = lambda: False, looking: Callable[[int, int], None] | None = None
    ) -> Generator[Metrics]:
        """Train; what comes are the lines of metrics.jsonl, those of a step when all is done that was due after it.
        Whoever closes it, or has it stop, finds a checkpoint to go on from.

        `looking` is told how many held-out examples have been read, and of how many.
        """
        try:
            if self.resumed_from is None:
                first = [self._evaluate(looking)] if self.data.held_out else []
                self.save()
                yield from first
            while not (self.finished or self.group.any(stop())):
                yield from self._step(looking)
        except GeneratorExit:
            self._leave()
            raise
        self._leave()

    def _step(self, looking: Callable[[int, int], None] | None) -> list[Metrics]:
        """One, and what is due after it."""
        settings, loop = self.settings, self.loop
        every = settings.eval_every or max(1, round(self.epoch_steps))
        line = asdict(loop.step())
        found = [self._note(line | line.pop("seen"))]
        step = loop.position.step
        if self.data.held_out and (step % every == 0 or loop.done):
            found.append(self._evaluate(looking))
        if step % settings.save_every == 0 or self.finished:
            self.save()
        return found

    def _leave(self) -> None:
        self.save()
        if self.finished and not self.data.held_out:
            self.write()

    def save(self) -> None:
        """A checkpoint, unless there is one of this step: whoever dies while it is replaced would have none."""
        if self._saved != self.loop.position.step:
            beside = self._write_adapter if self.settings.lora else None
            state.save(self.loop, self.folder / CHECKPOINTS, self._fingerprint(), beside=beside, loose=self.loose)
            self._saved = self.loop.position.step

    def write(self) -> None:
        """What has been trained, as it is now, into the folder."""
        self.group.lead(self._write, self.model)

    def _write(self, whole: Whole) -> None:
        if not self.settings.lora:
            write.save(
                trained(self.checkpoint, self.model, whole),
                self.folder / MODEL,
                to="safetensors",
                dtype="f32",
                tokenizer_files=self._tokenizer_files,
                overwrite=(self.folder / MODEL).exists(),
            )
            if self.data.template is not None:
                with replacing(self.folder / MODEL / TEMPLATE) as fresh:
                    fresh.write_bytes(self.data.template.encode())
            return
        try:
            self._write_adapter(self.folder, whole)
        except OSError as error:
            raise PronkError(f"{self.folder}: cannot be written: {os_problem(error)}") from None

    def _write_adapter(self, folder: Path, whole: Whole) -> None:
        assert self.settings.lora
        adapter.save(self.model, self.settings.lora, self.settings.model, folder, whole, self._beside)

    @cached_property
    def _beside(self) -> dict[str, bytes]:
        """An adapter."""
        template = self.data.template
        if self._tokenizer_files:
            return beside_adapter(self._tokenizer_files, template)
        return {} if template is None else {TEMPLATE: template.encode()}

    def _load(self, where: torch.device, progress: Progress | None) -> Llama:
        """What is trained, and what it is trained beside."""
        settings = self.settings
        if settings.from_adapter and self.group.size > 1:
            raise BadRequest("a run of several processes does not begin from an adapter; merge it first, or take one")
        tensors = self.checkpoint.tensors.values()
        in_codes = settings.lora and any(codes.format_of(tensor, settings.quantize) for tensor in tensors)
        if self.group.size > 1 and not in_codes:
            return sharding.load(self.checkpoint, self.group, settings.lora, settings.precision, progress)
        kept = frozen.linear(self.checkpoint, settings.quantize, where) if settings.lora else None
        model = load_model(self.checkpoint, where, torch.float32, progress=progress, linear=kept)
        if settings.lora:
            lora.add(model, settings.lora)
        if settings.from_adapter:
            adapter.fill(model, settings.lora, expanded(settings.from_adapter))
        if self.group.size > 1:  # codes stay whole in every process
            sharding.cut(model, self.group, settings.precision)
        return model

    def _note(self, line: Metrics) -> Metrics:
        if self.group.first:
            write_metrics(self.folder, line)
            self.listener(line)
        return line

    def _evaluate(self, looking: Callable[[int, int], None] | None) -> Metrics:
        """The model as it was before is no rival: what is written is the best of what was trained."""
        step = self.loop.position.step
        found = self.loop.evaluate(self.data.held_out, looking)
        shown = {f"held_out_{name}": value for name, value in found.seen.items()}
        judged = {} if self.judge is None else {TASK: self.judge(self)}
        line = self._note({"step": step, "held_out_loss": found.loss, **shown, **judged})
        if step and self.loop.improved(-judged[TASK] if judged else found.loss):
            self.write()
            self.loop.position.kept = best.written(self, line)
        return line

    def _fingerprint(self) -> dict[str, Any]:
        """The settings, and what data and weights came to: a file may have changed under its name."""
        digests = {"examples": self._examples, "weights": self._origin}
        return flat(self.settings) | {DIGEST + what: digest for what, digest in digests.items()}

    @cached_property
    def _examples(self) -> str:
        found = hashlib.sha256()
        for example in chain(self.data.train, self.data.held_out):
            found.update(content(example))
        return found.hexdigest()[:16]

    @cached_property
    def _origin(self) -> str:
        return digest(self.checkpoint)


def trained(checkpoint: Checkpoint, model: Llama, whole: Whole = lambda weight: weight) -> Checkpoint:
    """The model's own weights in the place of the checkpoint's, each gathered by `whole` when it is read."""
    weights = dict(model.named_parameters())

    def lazy(name: str, tensor: LazyTensor) -> LazyTensor:
        read = partial(_array, weights[name], whole)
        return LazyTensor.made(name, tensor.shape, read)

    tensors = {name: lazy(name, tensor) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, quantization=None)


def _array(parameter: torch.Tensor, whole: Whole) -> NDArray[np.float32]:
    array: NDArray[np.float32] = whole(parameter).detach().float().cpu().numpy()
    return array
