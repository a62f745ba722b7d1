"""Reinforcing: a run on prompts, in which the model writes completions and learns from what they are worth."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from pronk import cpu_engine
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint.adapter import WEIGHTS
from pronk.checkpoint.adapter_config import CONFIG, read_config
from pronk.checkpoint.digest import digest
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.backend import Backend
from pronk.errors import BadRequest, ContextOverflow, PronkError, os_problem
from pronk.grammar.compiled import Compiler
from pronk.grammar.structure import Structure
from pronk.llm import LLM
from pronk.loading import load, open_source
from pronk.system import expanded, processors
from pronk.train.data.examples import Prompt
from pronk.train.distributed import Group
from pronk.train.memory import Plan
from pronk.train.objectives.grpo import GRPO
from pronk.train.objectives.rollouts import ALIKE, FILE, Rollouts, lines_of
from pronk.train.rewards.names import check_model, labels, parse
from pronk.train.rewards.process import InProcess
from pronk.train.rewards.scorer import Exact, Length, Schema, Scorer, Text
from pronk.train.rollouts import page
from pronk.train.rollouts.lines import raw_lines, read
from pronk.train.rollouts.sampler import EngineSampler, ExactSampler, Sampler
from pronk.train.runs.options import Contradiction, How
from pronk.train.runs.run import Prepared
from pronk.train.runs.tuning import Tuning
from pronk.train.settings import Settings
from pronk.train.trainer import Metrics, Trainer


class Reinforcing(Tuning):
    worse = "held-out reward never rose above MODEL's own: take another --lr, more steps, or another reward"
    less = (
        "--recompute 1, fewer --num-generations or --max-new-tokens, a smaller --batch-size, --precision bf16, LoRA "
        "alone (without --full) with weights in fewer bits (--quantize q4), --optimizer adamw8bit or adafactor"
    )

    def __init__(self, settings: Settings, how: How) -> None:
        super().__init__(settings, how)
        objective = settings.objective
        assert isinstance(objective, GRPO)
        self._own: GRPO = objective
        for name in objective.reward:
            check_model(name)
        if objective.kl_coef and (settings.lora is None or settings.from_adapter):
            raise Contradiction(
                lambda o: (
                    f"{o('kl_coef')} holds the model against what it is without its adapter: train LoRA, and not "
                    f"{o('from_adapter')}; or leave it out"
                )
            )
        if settings.lora and settings.lora.dropout:
            raise Contradiction(
                lambda o: f"{o('lora_dropout')} would make what is trained another model than what writes; leave it out"
            )
        if settings.neftune_alpha:
            raise Contradiction(
                lambda o: f"{o('neftune_alpha')} trains another model than what writes, by its noise; leave it out"
            )
        if settings.too_long in ("cut", "split"):
            raise Contradiction(
                lambda o: f"{o('too_long')} {settings.too_long} would ask half a question; give error or skip"
            )

    def plan(self, device: str | None = None) -> Plan:
        """With reward models, and with the engine that writes: its weights, and keys and values of all completions of a
        step, or of a look at held-out data."""
        found, settings, own = super().plan(device), self.settings, self._own
        beside = sum(_held(of) for kind, of, _ in map(parse, own.reward) if kind == "model")
        if own.rollout == "engine":
            engine = cpu_engine.ENGINE.plan(self.prepared.checkpoint, {"quantize": self._format})
            longest = max(len(prompt.ids) + prompt.room for prompt in chain(self.data.train, self.data.held_out))
            prompts = max(settings.batch_size * settings.accumulate, len(self.data.held_out))
            sequences = min(128, prompts * own.num_generations)
            beside += engine.weights + engine.besides + engine.kv_a_token * longest * sequences
        return replace(found, process=found.process + beside)

    def rollouts(self) -> list[dict[str, Any]]:
        """The newest step's in the run's folder; of a run that has not begun those that it would begin with, which
        changes nothing."""
        if self.how.out is not None and (there := _newest(self.how.out / FILE)):
            return there
        ready, _ = self.prepared, self._rewards  # before the model is loaded
        sampler = EngineSampler(self._backend, ready.checkpoint, self._ends)
        if self.settings.from_adapter:
            sampler.adopt(adapters.open(expanded(self.settings.from_adapter), ready.checkpoint))
        batches = self.settings.batches(ready.data.train).epoch(0)[: self.settings.accumulate]
        prompts = [ready.data.train[index] for indices in batches for index in indices]
        writer = self._rollouts(sampler, Path())
        return lines_of(0, writer.first(prompts))

    @cached_property
    def _ends(self) -> list[int]:
        ready = self.prepared
        return list(dict.fromkeys((*ready.checkpoint.config.eos_token_ids, *ready.tokenizer.eos_ids)))

    @property
    def _format(self) -> str:
        """Of the weights that write."""
        chosen = self._own.rollout_quantize
        return self.settings.quantize or "auto" if chosen == "auto" else chosen

    def _backend(self, checkpoint: Checkpoint) -> Backend:
        with self.watcher.progress("loading") as advance:
            return cpu_engine.ENGINE.load(checkpoint, quantize=self._format, threads=self.how.threads, progress=advance)

    def _rollouts(self, sampler: Sampler, folder: Path, group: Group | None = None) -> Rollouts:
        codec, seed = self.prepared.tokenizer, self.settings.seed
        return Rollouts(self._own, sampler, self._rewards, codec, seed, folder, group)

    @cached_property
    def _rewards(self) -> Mapping[str, Scorer]:
        """By what they are called in the log."""
        names = self._own.reward
        return {label: self._reward(label, name) for label, name in zip(labels(names), names, strict=True)}

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of what rewards are that stand in files, by what they are called in the log."""
        found = {}
        for name, (label, scorer) in zip(self._own.reward, self._rewards.items(), strict=True):
            kind, of, file = parse(name)
            if isinstance(scorer, Scored):
                found[label] = scorer.digest
            elif kind in ("function", "schema"):
                found[label] = _of_file(file or of)
        return found

    def _reward(self, label: str, name: str) -> Scorer:
        kind, of, file = parse(name)
        seconds = self._own.reward_timeout
        if kind == "function":
            return InProcess.function(label, file, of, seconds)
        if kind == "regex":
            return InProcess.pattern(label, of, seconds)
        if kind == "exact":
            return Exact(of)
        if kind == "length":
            return Length(int(of))
        if kind == "schema":
            try:
                schema = expanded(of).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror or "cannot be read" if isinstance(error, OSError) else "it is no text"
                raise BadRequest(f"{of}, a reward's schema: {problem}") from None
            ready = self.prepared
            compiler = Compiler(ready.tokenizer, ready.checkpoint.config.vocab_size, self._ends)
            try:
                return Schema(compiler.compile(Structure.json_schema(schema)))
            except BadRequest as error:
                raise BadRequest(f"{of}, a reward's schema: {error}") from None
        return _scorer(of, self.how.threads)

    def _trainer(self, ready: Prepared, group: Group) -> Trainer:
        """What writes is loaded first, so that what training needs is held against what is left."""
        if group.size > 1 and self.how.threads is None:  # engines share what torchrun's processes share
            self.how = replace(self.how, threads=max(1, processors() // group.here))
        _ = self._rewards
        sampler: Sampler
        if self._own.rollout == "engine":
            sampler = EngineSampler(self._backend, ready.checkpoint, self._ends, group)
            trainer = super()._trainer(ready, group)
        else:
            trainer = super()._trainer(ready, group)
            sampler = ExactSampler(trainer.loop.objective.collate, self._ends, group)
        trainer.loop.writer = self._rollouts(sampler, trainer.folder, group)
        trainer.loose = self._digests
        return trainer

    def _trained(self, trainer: Trainer, begun: float) -> Generator[Metrics]:
        """After each look at held-out data, and each checkpoint, there is a page of what was written."""
        drawn, every = 0, self.settings.save_every
        alike: list[float] = []  # of each step, the part of its groups that tell nothing
        with closing(super()._trained(trainer, begun)) as lines:
            for line in lines:
                step = line["step"]
                if ALIKE in line:
                    alike.append(line[ALIKE])
                if step > drawn and ("held_out_loss" in line or step % every == 0):
                    self._draw(trainer)
                    drawn = step
                yield line
        if alike and min(alike) == 1 and not self._own.kl_coef:
            self.watcher.note(
                "no reward was learned from: in each step all completions of a prompt had the same. Take a reward that "
                "tells them apart, or prompts that are answered well and badly"
            )

    def _end(self, trainer: Trainer) -> None:
        super()._end(trainer)
        if trainer.loop.position.step:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if trainer.group.first:
            page.refresh(trainer.folder, trainer.folder / FILE, self.watcher.note)

    def _resume(self, trainer: Trainer) -> None:
        super()._resume(trainer)
        writer, step = trainer.loop.writer, trainer.loop.position.step
        assert isinstance(writer, Rollouts)
        for text in trainer.group.lead(lambda _: writer.forget(after=step)) or []:
            self.watcher.note(text)
        for reward in trainer.changed:  # no refusal: a function that failed is mended, and the run goes on
            self.watcher.note(
                f"the reward {reward} has changed since step {step} was saved; the run goes on by what it gives now"
            )

    @cached_property
    def _asked(self) -> tuple[list[list[int]], list[dict[str, str]]]:
        prompts: Sequence[Prompt] = self.data.held_out[: self.how.samples]
        return [prompt.ids.tolist() for prompt in prompts], [{} for _ in prompts]


class Scored:
    """What a reward model says of a prompt with its completion."""

    def __init__(self, name: str, llm: LLM, digest: str) -> None:
        self._name, self._llm, self.digest = name, llm, digest

    def of(self, texts: Sequence[Text]) -> list[float]:
        whole: list[Any] = [
            one.prompt.said + one.text if isinstance(one.prompt.said, str)
            else [*one.prompt.said, {"role": "assistant", "content": one.text}]
            for one in texts
        ]  # fmt: skip
        try:
            found = self._llm.score(whole)
        except ContextOverflow as error:
            raise PronkError(
                f"the reward model {self._name} reads a prompt with its completion as one text: {error.problem}; "
                "write less (--max-new-tokens), or leave long prompts out"
            ) from None
        return found if isinstance(found, list) else [found]


def _scorer(name: str, threads: int | None) -> Scored:
    """A reward model, or an adapter of one beside the model that it names."""
    folder = expanded(name)
    options: dict[str, Any] = {"threads": threads, "prefix_cache": 0}
    if (folder / CONFIG).is_file():
        config, base = read_config(folder)
        llm = load(base, adapter=folder, merge_adapter=config.dora, **options)
        beside = _of_file(folder / WEIGHTS)
    else:
        llm, beside = load(name, **options), ""
    if not llm.config.num_labels:
        raise BadRequest(f"{name} is no reward model, and none of the rewards that pronk has: pronk reward makes one")
    return Scored(name, llm, digest(llm.checkpoint) + beside)


def _held(name: str) -> int:
    """Bytes of a reward model, which an adapter is a small part of; DoRA's is merged, in more bits than its base."""
    folder = expanded(name)
    if (folder / CONFIG).is_file():
        config, base = read_config(folder)
        model = open_source(base, None)
        if config.dora:
            model = adapters.applied(model, adapters.open(folder, model))
    else:
        model = open_source(name, None)
    engine = cpu_engine.ENGINE.plan(model, {})
    return engine.weights + engine.besides


def _of_file(file: str | Path) -> str:
    """Its digest. Raises PronkError."""
    try:
        return sha256(expanded(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise PronkError(f"{file}, of a reward: cannot be read: {os_problem(error)}") from None


def _newest(file: Path) -> list[dict[str, Any]]:
    """The lines of the last step."""
    found: list[dict[str, Any]] = []
    for raw in raw_lines(file):
        if (line := read(raw)) is None:
            continue
        found = [*found, line] if found and found[-1]["step"] == line["step"] else [line]
    return found
