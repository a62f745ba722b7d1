"""What the training verbs share: stopping with a checkpoint, progress, samples, and the mask made visible."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, progress
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer
    from pronk.train.examples import Example
    from pronk.train.loop import Step
    from pronk.train.run import Run

SAMPLE_TOKENS = 64


class Stop:
    """Whether to stop after this step, and the exit code that says why."""

    code = 0

    def __call__(self) -> bool:
        return self.code != 0


@contextmanager
def stopping() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM are noted, so that the step is finished and saved; a second one ends the program at once."""
    stop = Stop()

    def noted(number: int, frame: FrameType | None) -> None:
        if stop():
            os._exit(stop.code)
        stop.code = 128 + number
        with suppress(OSError):  # a stderr that is closed; and not by click, which may be at work just now
            os.write(2, b"\nstopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_suffices() -> Iterator[None]:
    """Raises PronkError where it does not: torch says so in several ways."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if not isinstance(error, MemoryError) and "out of memory" not in said and "can't allocate memory" not in said:
            raise
        raise PronkError(
            "out of memory; --recompute 1, a smaller --batch-size, --pack or --max-length, --precision bf16, LoRA "
            "instead of --full and --optimizer adamw8bit take less (a run that has begun goes on with --resume)"
        ) from None


def train(run: Run, stop: Callable[[], bool]) -> bool:
    """`run.train`, watched: a bar on a terminal, a line for each look at held-out data everywhere."""
    first, steps = run.loop.position.step, run.loop.schedule.steps
    rate, state = _Rate(), ""

    def unit(done: int, total: int) -> str:
        return f"step {first + done} of {steps}{state}"

    def examples(done: int, total: int) -> str:
        return f"{done} of {total} examples"

    with progress.shown("training", unit, patience=0) as advance, progress.shown("", examples) as look:
        advance("", 0, max(1, steps - first))

        def watch(step: Step) -> None:
            nonlocal state
            rate.add(step)
            state = f", loss {step.loss:.3f}, {rate.tokens_a_second:.0f} tokens/s, {console.size(peak_bytes(run))}"
            advance("", step.step - first, steps - first)

        def evaluated(step: int, loss: float) -> None:
            look("", 1, 1)  # takes the bar away
            best = " (the best so far)" if step and run.loop.position.waited == 0 else ""
            left = rate.left(steps - step)
            console.note(f"step {step} of {steps}: held-out loss {loss:.4f}{best}{state if step else ''}{left}")

        def looking(done: int, total: int) -> None:
            advance("", 1, 1)
            look(f"held-out data after step {run.loop.position.step}", done, total)

        return run.train(watch, evaluated, stop, looking)


def peak_bytes(run: Run) -> int:
    """The most that was in use so far: of the GPU's memory, or else of the process's."""
    from pronk.generation import peak_rss_mb
    from pronk.torch_engine import device_memory

    on_gpu = device_memory.peak(str(run.loop.device))
    return int((peak_rss_mb() or 0) * 1e6) if on_gpu is None else on_gpu


class _Rate:
    """How fast it goes, of the steps of this process."""

    def __init__(self) -> None:
        self.begun, self.steps, self.tokens, self.seconds = time.monotonic(), 0, 0, 0.0

    def add(self, step: Step) -> None:
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + step.tokens, self.seconds + step.seconds

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds

    def left(self, steps: int) -> str:
        if not self.steps or not steps:
            return ""
        return f", {progress.duration((time.monotonic() - self.begun) / self.steps * steps)} left"


def samples(model: str, prompts: Sequence[Sequence[int]], **loading: Any) -> list[str]:
    """What a model says to each prompt, greedily."""
    import pronk

    if not prompts:
        return []
    with progress.shown("loading", patience=0) as advance:
        llm = pronk.load(model, **loading, prefix_cache=0, progress=advance)
    with progress.shown("answering", unit=progress.of_tokens) as advance:
        found = llm.generate([list(ids) for ids in prompts], max_new_tokens=SAMPLE_TOKENS, progress=advance)
    assert isinstance(found, list)
    return [generation.text.strip() for generation in found]


def parts(example: Example, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """The prompt of an example, up to what is learned first, and the answer that it has."""
    first = int(example.learned.argmax())
    ids = example.ids.tolist()
    answer = [token for token in ids[first:] if token not in tokenizer.eos_ids]
    return ids[:first], tokenizer.decode(answer).strip()


def show_batches(batches: Sequence[Sequence[Example]], tokenizer: Tokenizer) -> None:
    """Micro-batches on stdout: what is learned in green, or in brackets where there is no colour."""
    from pronk.train.data import shown

    on_terminal = sys.stdout.isatty()
    coloured = on_terminal and not console.is_dumb() and not os.environ.get("NO_COLOR")
    lines = []
    for number, examples in enumerate(batches, 1):
        tokens, learned = sum(map(len, examples)), sum(example.targets for example in examples)
        lines.append(f"micro-batch {number}: {len(examples)} examples, {tokens} tokens, {learned} of them learned")
        for example in shown(examples, tokenizer):
            spans = [(console.shown(text) if on_terminal else text, marked) for text, marked in _spans(example)]
            lines += ["", "".join(_marked(text, learned, coloured) for text, learned in spans)]
        lines.append("")
    console.write_styled("\n".join(lines))


def _spans(tokens: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Neighbours that are alike, joined."""
    text, kind = "", False
    for piece, learned in tokens:
        if learned != kind and text:
            yield text, kind
            text = ""
        text, kind = text + piece, learned
    yield text, kind


def _marked(text: str, learned: bool, coloured: bool) -> str:
    if not learned:
        return text
    return click.style(text, fg="green", bold=True) if coloured else f"⟦{text}⟧"


def check_out(out: str | None) -> Path:
    """Wrong usage where there is none."""
    if out is None:
        raise click.UsageError("name a folder for what comes out: --out FOLDER")
    from pronk.paths import expanded

    return expanded(out)
