"""What a run came to, read off its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pronk.checkpoint.adapter import WEIGHTS
from pronk.errors import PronkError
from pronk.system import peak_memory
from pronk.torch_engine import device_memory
from pronk.train.curve import CURVE, draw
from pronk.train.folder import METRICS, MODEL, is_whole, read_metrics
from pronk.train.trainer import TASK, Trainer

_STEPS = 10  # whose losses are told as one: each is of few examples


@dataclass(frozen=True)
class Result:
    """Losses are means over what is learned, nats a token; of preferences, over pairs."""

    model: str
    out: str  # the run's folder
    method: str  # "LoRA", "DoRA" or "full"
    adapter: str | None  # the folder of the adapter, in PEFT's format
    model_folder: str | None  # where all weights were trained: that of the model, in Hugging Face's
    finished: bool  # False: it was left early, and goes on with resume=True
    trained_share: float  # of all parameters
    examples: dict[str, int]  # "train" and "held_out"
    steps: int
    planned_steps: int
    epochs: float
    loss: dict[str, float]  # "first" and "last": means of so many "steps"
    held_out_loss: dict[str, float] | None  # "first", "last", "kept", and of which step that is: "kept_step"
    rewards: (
        dict[str, dict[str, float]] | None
    )  # of preferences: "margin" (of pairs) and "accuracy", each "first" and "last"
    held_out_rewards: dict[str, float] | None  # the same of what was kept
    held_out_task: dict[str, float] | None  # the score of a task that judged: "first", "last" and "kept"
    reward: dict[str, float] | None  # of what the model wrote itself: "first" and "last"
    held_out_reward: dict[str, float] | None  # "first" and "kept"
    mismatch: float | None  # nats a token, mean of all steps: KL of what wrote that from what was trained
    seconds: float  # of steps
    tokens: int
    tokens_a_second: float
    peak_bytes: int  # of the GPU's memory, or else of the process's
    curve: str | None  # the picture of the losses
    parameters: int | None = None  # of a new model
    vocabulary: int | None = None
    bits_a_byte: float | None = None
    samples: tuple[dict[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As --json has it: figures that are of other runs are left out."""
        found = asdict(self) | {"samples": list(self.samples)}
        others = {"rewards", "held_out_rewards"} if self.rewards is None else set()
        others |= {"reward", "held_out_reward", "mismatch"} if self.reward is None else set()
        others |= {"held_out_task"} if self.held_out_task is None else set()
        others |= {"parameters", "vocabulary", "bits_a_byte"} if self.parameters is None else set()
        return {name: value for name, value in found.items() if name not in others}


def of(run: Trainer, note: Callable[[str], None]) -> Result:
    """`note` hears of a curve that cannot be drawn. Raises PronkError where the metrics are gone."""
    metrics = read_metrics(run.folder)
    steps = [line for line in metrics if "loss" in line]
    try:
        if not all(map(is_whole, metrics)):
            raise LookupError
        return _of(run, metrics, steps, note)
    except (LookupError, TypeError, ZeroDivisionError):  # lines that lack numbers, or none at all
        problem = "is gone or damaged: what was trained is there, and no report of it"
        raise PronkError(f"{run.folder / METRICS} {problem}") from None


def peak_bytes(run: Trainer) -> int:
    """The most that was in use so far: of the GPU's memory, or else of the process's."""
    on_gpu = device_memory.of(run.loop.device)
    return on_gpu.peak() if on_gpu else peak_memory() or 0


def _of(
    run: Trainer,
    metrics: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    note: Callable[[str], None],
) -> Result:
    held_out = [line for line in metrics if "held_out_loss" in line]
    kept = _kept(run, held_out)
    looks = held_out or [kept or {}]
    seconds, tokens = (sum(line[name] for line in steps) for name in ("seconds", "tokens"))
    some = max(1, min(_STEPS, len(steps) // 2))  # so that the first are not the last
    written = "mismatch/kl" in steps[0]
    preferred = {} if written else {word: name for word, name in _REWARDS.items() if name in steps[0]}
    adapter, model = _made(run)
    return Result(
        model=run.settings.model,
        out=str(run.folder),
        method=("DoRA" if run.settings.lora.dora else "LoRA") if run.settings.lora else "full",
        adapter=adapter,
        model_folder=model,
        finished=run.finished,
        trained_share=run.trained_share,
        examples={"train": len(run.data.train), "held_out": len(run.data.held_out)},
        steps=run.loop.position.step,
        planned_steps=run.loop.schedule.steps,
        epochs=steps[-1]["epoch"],
        loss={**_ends(steps, "loss", some), "steps": some},
        held_out_loss={
            "first": looks[0]["held_out_loss"],
            "last": looks[-1]["held_out_loss"],
            "kept": kept["held_out_loss"],
            "kept_step": kept["step"],
        } if kept else None,
        held_out_task={"first": looks[0][TASK], "last": looks[-1][TASK], "kept": kept[TASK]}
        if kept and TASK in kept else None,
        rewards={word: _ends(steps, name, some) for word, name in preferred.items()} or None,
        held_out_rewards={word: kept[f"held_out_{name}"] for word, name in preferred.items()}
        if kept and preferred else None,
        reward=_ends(steps, "reward", some) if written else None,
        held_out_reward={"first": looks[0]["held_out_reward"], "kept": kept["held_out_reward"]}
        if kept and written else None,
        mismatch=sum(line["mismatch/kl"] for line in steps) / len(steps) if written else None,
        seconds=seconds,
        tokens=tokens,
        tokens_a_second=tokens / seconds,
        peak_bytes=peak_bytes(run),
        curve=_curve(run.folder, note),
    )  # fmt: skip


_REWARDS = {"margin": "rewards/margins", "accuracy": "rewards/accuracies"}


def _kept(run: Trainer, held_out: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line of the look that found what the folder holds: the run knows it, whatever the file has lost."""
    position = run.loop.position
    if position.best is None:
        return None
    if position.kept:
        return position.kept.line
    # Of a pronk that did not save it:
    return min(held_out[1:], key=lambda line: -line[TASK] if TASK in line else line["held_out_loss"], default=None)


def _made(run: Trainer) -> tuple[str | None, str | None]:
    """The folders of the adapter and the model; until there is a best, the newest checkpoint's adapter."""
    mine = not run.data.held_out or run.loop.position.best is not None  # else it is what a killed run left
    if not run.settings.lora:
        return None, str(run.folder / MODEL) if mine and (run.folder / MODEL).exists() else None
    there = (run.folder if mine else None, run.newest)
    found = [place for place in there if place and (place / WEIGHTS).exists()]
    return str(found[0]) if found else None, None


def _curve(folder: Path, note: Callable[[str], None]) -> str | None:
    try:
        curve = draw(folder)
    except OSError as error:  # what was trained is there, and so is all that the curve is drawn from
        note(f"{folder / CURVE} cannot be drawn: {error.strerror or error}")
        return None
    return str(curve) if curve else None


def _ends(steps: Sequence[Mapping[str, float]], name: str, some: int) -> dict[str, float]:
    """Means of the first and of the last so many steps."""
    values = [line[name] for line in steps]
    return {"first": sum(values[:some]) / some, "last": sum(values[-some:]) / some}
