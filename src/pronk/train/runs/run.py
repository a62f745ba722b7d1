"""Run: what the training verbs do, and pronk.finetune, dpo, reward and pretrain, from opening files to the result."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from pronk.checkpoint.hub import upload
from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadRequest, NotEnoughMemory, PronkError, os_problem, out_of_memory
from pronk.tokenizer import Tokenizer
from pronk.torch_engine.backend import pick_device
from pronk.train import card, curves, distributed, memory
from pronk.train.data.sources import Data
from pronk.train.distributed import Group
from pronk.train.folder import claimed
from pronk.train.interrupt import closed_at_exit, unbroken
from pronk.train.logs import Logs
from pronk.train.memory import Plan
from pronk.train.rewards.process import refuse_in_reward_process
from pronk.train.runs import recipe, samples, task
from pronk.train.runs import result as results
from pronk.train.runs.options import Contradiction, How
from pronk.train.runs.result import Result
from pronk.train.runs.watcher import Watcher
from pronk.train.saved_settings import flat
from pronk.train.settings import Settings
from pronk.train.trainer import Metrics, Trainer


@dataclass(frozen=True)
class Prepared:
    """What a run is made of: the model as it begins, and its data."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    data: Data
    settings: Settings
    tokenizer_files: Mapping[str, bytes] | None  # to be put beside what is trained


class Run(ABC):
    """A run of training, which begins when it is iterated over, or with `run()`.

        run = pronk.finetune("smollm2:135m", "mine.jsonl", "mine")
        for metrics in run:
            print(metrics)
        print(run.result)

    What comes are the lines of the folder's metrics.jsonl: {"step", "epoch", "loss", "lr", "grad_norm", "tokens",
    "targets", "seconds", ...} after each step, {"step", "held_out_loss", ...} after each look at held-out data, the
    first of which is before the first step.

    Leaving the loop early stops the run as Ctrl-C stops its verb: a checkpoint is saved, from which a run with
    `resume=True` goes on to the same numbers. A run whose `max_time` is over ends likewise, and `out_of_time` is True.
    Ctrl-C in the midst of a step lets it end, saves, and raises KeyboardInterrupt. Under torchrun all
    processes are to leave after the same step, or to call `stop`, which need not be at the same time; only the first
    has a result.
    """

    less = memory.LESS  # options that take less memory

    def __init__(self, settings: Settings, how: How) -> None:
        self.settings, self.how, self.watcher = settings, how, Watcher()
        self.finished = False  # whether it came to its end
        self.out_of_time = False  # whether it was left because `max_time` was over
        self.recipe: tuple[str, Mapping[str, Any]] | None = None  # its verb, and what that was given
        self._begun = self._stopped = False
        self._result: Result | None = None

    def __repr__(self) -> str:
        state = "finished" if self.finished else "begun" if self._begun else "not begun"
        return f"<{type(self).__name__} of {self.settings.model} in {self.how.out}: {state}>"

    def __iter__(self) -> Iterator[Metrics]:
        return closed_at_exit(self._alone())

    def run(self) -> Result:
        """Train to the end."""
        for _ in self:
            pass
        return self.result

    def stop(self) -> None:
        """End after the step that is under way; a checkpoint is saved."""
        self._stopped = True

    @property
    def result(self) -> Result:
        """What it came to, or had come to when it was left. Raises BadRequest where it made no step."""
        if self._result is None:
            raise BadRequest("the run has no result: it made no step yet; iterate over it, or call run()")
        return self._result

    @property
    def data(self) -> Data:
        """The examples, which are read when they are first asked for. Raises BadFile."""
        return self.prepared.data

    def plan(self, device: str | None = None) -> Plan:
        """The memory that it will take, without beginning it. `device`: None: that of the run."""
        ready = self.prepared
        with self.watcher.progress("planning") as advance:
            advance("", 0, 1)
            return memory.plan(
                ready.checkpoint, ready.settings, ready.data.train, pick_device(device or self.how.device)
            )

    @cached_property
    @abstractmethod
    def prepared(self) -> Prepared:
        """Files opened and read."""

    def steps(self, group: Group) -> Generator[Metrics]:
        """The run, as one of the processes of `group`."""
        if self.how.out is None:
            raise Contradiction(lambda o: f"name a folder for what comes out: {o('out')}")
        if self._begun:
            raise BadRequest("this run has begun already; make another with resume=True, which goes on with it")
        refuse_in_reward_process()
        self._begun, folder, begun = True, self.how.out, monotonic()
        with ExitStack() as held:
            group.lead(lambda _: held.enter_context(claimed(folder, resume=self.how.resume)))
            held.enter_context(self._memory_suffices())
            ready = self.prepared
            self._note(ready)
            place = {"device": group.device or self.how.device, "threads": self.how.threads}
            if group.size > 1 and self.how.samples_at == "looks":
                raise Contradiction(lambda o: f"{o('samples_at')} looks is for one process; start without torchrun")
            judge = task.judge(ready, group) if ready.settings.early_stop_task else None
            before = group.lead(lambda _: self._before(place)) or []
            trainer = self._trainer(ready, group)
            trainer.judge = judge
            if self.how.resume:
                self._resume(trainer)
            try:
                yield from self._trained(trainer, begun)
            except GeneratorExit:
                self._end(trainer)
                raise
            self._end(trainer)
            del trainer  # what it kept best is read back, not what it ended with
            if self._result and self.finished:
                self._result = replace(self._result, samples=tuple(self._samples(before, place)))
                self._show(self._result)
                self._card(self._result, ready.data)
                self._push(folder)
            elif self._result and self.out_of_time:  # it has a report, too
                self._card(self._result, ready.data)

    def _alone(self) -> Generator[Metrics]:
        with distributed.joined(self.how.device) as group:
            yield from self.steps(group)

    def _trained(self, trainer: Trainer, begun: float) -> Generator[Metrics]:
        wanted = self.how.log_to if trainer.group.first else ()
        note, position = self.watcher.note, trainer.loop.position
        logs = Logs(wanted, trainer.folder, flat(trainer.settings), position.step, note)
        lines = unbroken(trainer.metrics(self._ending(trainer, begun), self.watcher.looking))
        with closing(logs) as trainer.listener, self.watcher.training(trainer), closing(lines):
            for number, line in enumerate(lines):
                if trainer.group.first:
                    self._keep(trainer, line, first=not number)
                yield line

    def _keep(self, trainer: Trainer, line: Metrics, *, first: bool) -> None:
        """What lies in the folder beside what is trained, when there is a checkpoint: else it would be no run's."""
        note, folder = self.watcher.note, trainer.folder
        if first and self.recipe:
            recipe.write(folder, *self.recipe, note)
        looked = "held_out_loss" in line
        if looked and self.how.samples_at == "looks" and (asked := self._prompts()[0]):
            samples.add(folder, samples.live(trainer, self.prepared, asked, self._prompts()[1], note), note)
        if looked or line["step"] % self.settings.save_every == 0:
            curves.refresh(folder, trainer.loop.schedule.steps, note, done=trainer.finished)

    def _ending(self, trainer: Trainer, begun: float) -> Callable[[], bool]:
        """Whether to end now. Each start makes a step at least: so one that is started again and again gets on."""
        first, most = trainer.loop.position.step, self.how.max_time

        def ending() -> bool:
            if most is not None:  # one process says when, and all must ask
                late = trainer.loop.position.step > first and monotonic() - begun >= most
                self.out_of_time = trainer.group.any(late)
            return self._stopped or self.out_of_time

        return ending

    def _trainer(self, ready: Prepared, group: Group) -> Trainer:
        assert self.how.out
        progress = self.watcher.progress
        with progress("planning") as planned, progress("loading") as loaded, progress("preparing", "examples") as told:

            def loading(name: str, done: int, total: int) -> None:
                planned("", 1, 1)
                loaded(name, done, total)

            planned("", 0, 1)
            return Trainer(
                ready.checkpoint,
                ready.data,
                ready.settings,
                self.how.out,
                tokenizer_files=ready.tokenizer_files,
                device=self.how.device,
                threads=self.how.threads,
                progress=loading,
                preparing=lambda done, total: told("", done, total),
                group=group,
            )

    def _end(self, trainer: Trainer) -> None:
        self.finished = trainer.finished
        if trainer.group.first and trainer.loop.position.step:
            self._result = self._told(results.of(trainer, self.watcher.note))
            curves.refresh(trainer.folder, trainer.loop.schedule.steps, self.watcher.note, done=True)

    def _card(self, found: Result, data: Data) -> None:
        assert self.how.out
        try:
            problem = card.write(self.how.out, found.to_dict(), self.settings, data)
        except OSError as error:  # what was trained is there
            problem = f"{self.how.out / card.CARD} cannot be written: {os_problem(error)}"
        if problem:
            self.watcher.note(problem)

    def _push(self, folder: Path) -> None:
        """Raises PronkError with the way to what is left to do: what was trained is there."""
        how = self.how
        if how.push_to_hub is None:
            return
        try:
            found = upload.push(folder, how.push_to_hub, private=how.private, progress=False)
        except PronkError as error:
            again = shlex.join(["pronk", "push", str(folder), how.push_to_hub, *([] if how.private else ["--public"])])
            raise PronkError(f"{error} (the run is finished: {again})") from None
        self.watcher.note(f"pushed to {found}")

    def _resume(self, trainer: Trainer) -> None:
        trainer.resume()
        for text in trainer.told:
            self.watcher.note(text)
        if trainer.group.first:
            all_again = self.how.samples_at == "ends"
            samples.forget(trainer.folder, after=-1 if all_again else trainer.loop.position.step)
        if trainer.prolonged_from:
            self.watcher.note(
                f"prolonged from {trainer.prolonged_from} to {trainer.loop.schedule.steps} steps; from step "
                f"{trainer.loop.position.step} on the learning rate is the longer run's"
            )

    def _note(self, ready: Prepared) -> None:
        """What is to be known before it takes time: here where a step holds more than all there is, which takes longer
        and teaches nothing more."""
        settings = ready.settings
        there = len(settings.batches(ready.data.train).epoch(0))
        if settings.accumulate > there:
            self.watcher.note(
                f"each step reads all the data {settings.accumulate / there:.1f} times: --accumulate is "
                f"{settings.accumulate}, and the micro-batches of an epoch are {there}; --accumulate 1, a larger --lr "
                "and more --epochs teach more of so little"
            )

    def _show(self, found: Result) -> None:
        """Samples of what was kept."""
        assert self.how.out
        kept = int(found.held_out_loss["kept_step"]) if found.held_out_loss else found.steps
        if lines := samples.ends(found.samples, kept, first=self.how.samples_at == "ends"):
            samples.add(self.how.out, lines, self.watcher.note)
            curves.refresh(self.how.out, found.planned_steps, self.watcher.note, done=True)

    def _prompts(self) -> tuple[Sequence[Sequence[int]], Mapping[str, Any]]:
        """What is asked at each look, and how answers are drawn."""
        return [], {}

    def _before(self, place: Mapping[str, Any]) -> list[str]:
        """Answers of the model as it is, on that device."""
        return []

    @abstractmethod
    def _told(self, found: Result) -> Result:
        """With what is to be told of such a run alone."""

    @abstractmethod
    def _samples(self, before: list[str], place: Mapping[str, Any]) -> list[dict[str, str]]:
        """Texts of the model as it has become."""

    @contextmanager
    def _memory_suffices(self) -> Iterator[None]:
        """Raises PronkError where it does not."""
        try:
            yield
        except NotEnoughMemory as error:
            if self.less is memory.LESS:  # which it says
                raise
            raise PronkError(f"{error.problem}; what takes less: {self.less}") from None
        except (MemoryError, RuntimeError, OSError) as error:
            if not out_of_memory(error):
                raise
            way_out = f"what takes less: {self.less} (a run that has begun goes on with --resume)"
            raise PronkError(f"out of memory; {way_out}") from None
