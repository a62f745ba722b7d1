"""What the training verbs do: from settings to a run, stopped with a checkpoint or brought to its end and reported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, progress, training_masks, training_plan, training_progress, training_report
from pronk.cli.saving import open_source, tokenizer_for
from pronk.errors import NotEnoughMemory, NoTokenizer, PronkError, one_line, out_of_memory

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.tokenizer import Tokenizer
    from pronk.train.data.examples import Example
    from pronk.train.data.sources import Data
    from pronk.train.distributed import Group
    from pronk.train.settings import Settings
    from pronk.train.trainer import Trainer

SAMPLE_TOKENS = 64
_KEYS = 10  # that are named


def perform(
    settings: Settings,
    *,
    out: str | None,
    device: str | None,
    threads: int | None,
    resume: bool,
    show_batch: bool,
    plan: bool,
    samples: int,
    log_to: tuple[str, ...],
    tokenizer: str | None,
    as_json: bool,
) -> None:
    from pronk.loading import tokenizer_of
    from pronk.train.folder import MODEL, claimed

    if show_batch and plan:
        raise click.UsageError("--show-batch and --plan print different things; give one of them")
    folder = None if show_batch or plan else folder_of(out)
    with joined(device) as group, ExitStack() as held:
        checkpoint = open_source(settings.model, tokenizer, None)
        codec = tokenizer_of(checkpoint)
        if codec is None:
            raise NoTokenizer(f"{settings.model} carries no tokenizer; name one with --tokenizer FILE")
        if folder is None:
            data = _prepared(settings, codec, checkpoint)
            if plan:
                training_plan.show(checkpoint, data, settings, group.device or device, as_json=as_json)
            else:
                _note_losses(data)
                training_masks.show(data, settings, codec)
            return
        group.lead(lambda _: held.enter_context(claimed(folder, resume=resume)))
        held.enter_context(memory_suffices())
        data = _prepared(settings, codec, checkpoint)
        _note_losses(data)
        note_step(data, settings)
        prompts, answers = _prompts(data, codec, samples)
        loading: dict[str, Any] = {"device": group.device or device, "threads": threads}
        before = group.lead(lambda _: answered(settings.model, prompts, tokenizer=tokenizer, **loading))
        run = _make(checkpoint, data, settings, folder, threads=threads, device=device, group=group)
        to_its_end(run, resume=resume, log_to=log_to)
        if not group.first:
            return
        report = training_report.of(run)
        if (losses := report["held_out_loss"]) and losses["kept"] >= losses["first"]:
            console.note("held-out loss never fell below MODEL's own: take a smaller --lr, fewer --epochs or more data")
        del run  # what it kept best is read back, not what it ended with
        if settings.lora:
            after = answered(settings.model, prompts, tokenizer=tokenizer, adapter=folder, **loading)
        else:
            after = answered(str(folder / MODEL), prompts, **loading)
        report["samples"] = [
            {"prompt": codec.decode(ids), "before": b.strip(), "after": a.strip(), **of_data}
            for ids, b, a, of_data in zip(prompts, before or [], after, answers, strict=True)
        ]
        console.write_json(report) if as_json else console.write(training_report.as_text(report) + "\n")


@contextmanager
def joined(device: str | None) -> Iterator[Group]:
    """The group of processes that this one shares its work with; without torchrun it is alone. The first speaks, the
    others are silent, and one of all says what went wrong."""
    from pronk.train import distributed

    try:
        with distributed.joined(device) as group, ExitStack() as silence:
            if not group.first:
                nowhere = silence.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield group
    except distributed.SaidAlready:
        raise click.exceptions.Exit(1) from None


def _prepared(settings: Settings, codec: Tokenizer, checkpoint: Checkpoint) -> Data:
    from pronk.train.data.sources import prepare

    with progress.shown("reading", lambda done, total: f"{done} of {total} records") as advance:
        return prepare(settings, codec, checkpoint.config.max_position_embeddings, advance)


def folder_of(out: str | None) -> Path:
    """Wrong usage where there is none."""
    if out is None:
        raise click.UsageError("name a folder for what comes out: --out FOLDER")
    from pronk.system import expanded

    return expanded(out)


def _make(checkpoint: Checkpoint, data: Data, settings: Settings, folder: Path, **how: Any) -> Trainer:
    from pronk.train.trainer import Trainer

    _, files = (None, None) if settings.lora else tokenizer_for(checkpoint, "safetensors")
    with (
        training_plan.being_made() as made,
        progress.shown("loading", patience=0) as advance,
        progress.shown("preparing", lambda done, total: f"{done} of {total} examples", logged=True) as prepare,
    ):

        def loading(name: str, done: int, total: int) -> None:
            made()
            advance(name, done, total)

        how |= {"progress": loading, "preparing": partial(prepare, "")}
        return Trainer(checkpoint, data, settings, folder, tokenizer_files=files, **how)


def _prompts(data: Data, codec: Tokenizer, count: int) -> tuple[list[list[int]], list[dict[str, str]]]:
    """Of held-out data: prompts, and the answers by name."""
    chosen = [example.answers for example in data.held_out[:count]]
    prompts = [_parts(next(iter(answers.values())), codec)[0] for answers in chosen]
    return prompts, [{name: _parts(one, codec)[1] for name, one in answers.items()} for answers in chosen]


def _parts(example: Example, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """The prompt of an example, up to what is learned first, and the answer that it has."""
    first = int(example.loss_mask.argmax())
    ids = example.ids.tolist()
    answer = [token for token in ids[first:] if token not in tokenizer.eos_ids]
    return ids[:first], tokenizer.decode(answer).strip()


def answered(
    model: str, prompts: Sequence[Sequence[int]], drawn: Mapping[str, Any] | None = None, **loading: Any
) -> list[str]:
    """What a model says to each prompt, greedily, or as `drawn` has it."""
    import pronk

    if not prompts:
        return []
    with progress.shown("loading", patience=0) as advance:
        llm = pronk.load(model, **loading, prefix_cache=0, progress=advance)
    how = {"max_new_tokens": SAMPLE_TOKENS, **(drawn or {})}
    with progress.shown("writing", unit=progress.of_tokens) as advance:
        found = llm.generate([list(ids) for ids in prompts], **how, progress=advance)
    assert isinstance(found, list)
    return [generation.text for generation in found]


def _note_losses(data: Data) -> None:
    """What of the data is not trained on, said before it takes time."""
    if data.skipped:
        console.note(f"malformed records left out: {len(data.skipped)}; the first: {one_line(data.skipped[0], 300)}")
    for what, count in (("examples cut at their end", data.cut), ("examples left out as too long", data.too_long)):
        if count:
            console.note(f"{what}: {count}")
    if any(there != seen for there, seen in data.mixture.values()):
        told = (f"{seen} of {one_line(name, 60)}, which has {there}" for name, (there, seen) in data.mixture.items())
        console.note(f"an epoch has {len(data.train)} examples: {'; '.join(told)}")
    if data.duplicates:
        console.note(f"examples that are exact copies of another: {data.duplicates} (none of them on both sides)")
    if data.unused:
        keys = ", ".join(f"{one_line(key, 60)} ({count})" for key, count in sorted(data.unused.items())[:_KEYS])
        more = f" and {len(data.unused) - _KEYS} more" if len(data.unused) > _KEYS else ""
        console.note(f"keys that nobody reads, and of how many records: {keys}{more}")
    if not data.held_out:
        console.note("no data is held out, so that overfitting will not show")


def note_step(data: Data, settings: Settings) -> None:
    """Said where a step holds more than all there is: it takes longer, and learns nothing more."""
    there = len(settings.batches(data.train).epoch(0))
    if settings.accumulate > there:
        console.note(
            f"each step reads all the data {settings.accumulate / there:.1f} times: --accumulate is "
            f"{settings.accumulate}, and the micro-batches of an epoch are {there}"
        )


def to_its_end(run: Trainer, *, resume: bool, log_to: Sequence[str] = ()) -> None:
    """Or to where it is told to stop: then it is saved, and the program exits with the code that says why."""
    from pronk.train.logs import Logs
    from pronk.train.saved_settings import flat

    if resume:
        run.resume()
        if run.prolonged_from:
            console.note(
                f"prolonged from {run.prolonged_from} to {run.loop.schedule.steps} steps; from step "
                f"{run.loop.position.step} on the learning rate is the longer run's"
            )
    wanted = log_to if run.group.first else ()
    logs = Logs(wanted, run.folder, flat(run.settings), run.loop.position.step, console.note)
    with closing(logs) as run.listener, _stopping() as stop:
        if training_progress.train(run, stop):
            return
    console.note(
        f"stopped after step {run.loop.position.step} of {run.loop.schedule.steps}, and saved; go on with the same "
        "command and --resume"
    )
    raise click.exceptions.Exit(stop.code or 128 + signal.SIGTERM)  # 0: it was another process that was told to


class _Stop:
    """Whether to stop after this step, and the exit code that says why."""

    code = 0

    def __call__(self) -> bool:
        return self.code != 0


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM are noted, so that the step is finished and saved; a second one ends the program at once."""
    stop = _Stop()

    def noted(number: int, frame: FrameType | None) -> None:
        if stop():
            os._exit(stop.code)
        stop.code = 128 + number
        with suppress(OSError):  # a stderr that is closed; and not by click, which may be at work just now
            os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_suffices(less: str | None = None) -> Iterator[None]:
    """Raises PronkError where it does not. `less`: what takes less, where a verb has
    other options than those of fine-tuning."""
    try:
        yield
    except NotEnoughMemory as error:
        if less is None:
            raise
        raise PronkError(f"{error.problem}; what takes less: {less}") from None
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        from pronk.train.memory import LESS

        way_out = f"what takes less: {less or LESS} (a run that has begun goes on with --resume)"
        raise PronkError(f"out of memory; {way_out}") from None
