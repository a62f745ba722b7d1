"""samples.jsonl: what a run's model says to the same prompts, from look to look, as it is kept at the end as well.

A line is {"step", "prompt", "text"}, with "kept": true of what was kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.errors import PronkError, os_problem
from pronk.llm import LLM
from pronk.system import replacing
from pronk.torch_engine.backend import DTYPES, TorchBackend
from pronk.torch_engine.kv import TorchKV
from pronk.train.loop import Loop
from pronk.train.runs.answers import TOKENS
from pronk.train.samples import FILE, read
from pronk.train.trainer import Trainer

if TYPE_CHECKING:
    from pronk.train.runs.run import Prepared


class _Live(TorchBackend):
    """The module in training, whose keys and values are of the type that autocast computes them in."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.model)
        self._loop = loop

    def new_kv(self, num_blocks: int, block_size: int) -> TorchKV:
        return TorchKV(self.config, num_blocks, block_size, DTYPES[self._loop.precision], self._loop.device)


@contextmanager
def answering(trainer: Trainer, ready: Prepared) -> Iterator[LLM]:
    """The module in training, as a model that writes and scores texts."""
    loop = trainer.loop
    loop.model.eval()
    with (
        loop.autocast(),
        LLM("what is trained", ready.checkpoint, ready.tokenizer, _Live(loop), prefix_cache=0) as llm,
    ):
        yield llm


def live(
    trainer: Trainer,
    ready: Prepared,
    asked: Sequence[Sequence[int]],
    drawn: Mapping[str, Any],
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """By the module in training, which is loaded already, with a KV cache. It draws none of torch's random numbers and
    changes nothing. `note` hears where it cannot answer: the run is worth more."""
    step = trainer.loop.position.step
    how = {"max_new_tokens": TOKENS, **drawn}
    try:
        with answering(trainer, ready) as llm:
            found = llm.generate([list(ids) for ids in asked], **how)
    except PronkError as error:
        note(f"no samples after step {step}: {error}")
        return []
    assert isinstance(found, list)
    return [
        {"step": step, "prompt": ready.tokenizer.decode(list(ids)), "text": one.text.strip()}
        for ids, one in zip(asked, found, strict=True)
    ]


def ends(samples: Iterable[Mapping[str, str]], kept: int, *, first: bool) -> list[dict[str, Any]]:
    """Of a Result's samples; `first`: those of before it began as well. `kept`: the step of what was kept."""
    found: list[dict[str, Any]] = []
    for one in samples:
        if first and "before" in one:
            found.append({"step": 0, "prompt": one["prompt"], "text": one["before"]})
    for one in samples:
        if (said := one.get("after", one.get("goes on"))) is not None:
            found.append({"step": kept, "prompt": one["prompt"], "text": said.strip(), "kept": True})
    return found


def add(folder: Path, lines: Iterable[Mapping[str, Any]], note: Callable[[str], None]) -> None:
    try:
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        note(f"{folder / FILE} cannot be written: {os_problem(error)}")


def forget(folder: Path, after: int) -> None:
    """Take away those of the steps after a checkpoint, which will come again, and of what was kept until then."""
    if not (folder / FILE).exists():
        return
    kept = [line for line in read(folder) if line["step"] <= after and not line.get("kept")]
    try:
        with replacing(folder / FILE) as fresh:
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    except OSError as error:
        raise PronkError(f"{folder / FILE}: cannot be written: {os_problem(error)}") from None
