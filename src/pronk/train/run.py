"""A run: a checkpoint, data and settings made into an adapter or a model, in a folder of its own.

    adapter_config.json, adapter_model.safetensors     what comes out, in PEFT's format (with full training: `model/`)
    metrics.jsonl                                      a line a step, a line an evaluation
    checkpoints/step-000100/                           to go on from; see state.py

With held-out data the folder holds what did best on it; without, what training ended with. There is a checkpoint from
before the first step on, so that a run that died can be resumed whenever it did.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from pronk.checkpoint import write
from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint, LazyTensor, Progress
from pronk.cpu_engine import memory
from pronk.errors import BadFile, BadRequest, PronkError, os_problem, short
from pronk.tokenizer import Tokenizer
from pronk.torch_engine.backend import load_model, pick_device
from pronk.torch_engine.model import Llama
from pronk.train import adapter, lora, optimizers, records, state
from pronk.train.batches import Batches
from pronk.train.examples import Encoder, Example, Pair
from pronk.train.loop import Loop, Precision, Step
from pronk.train.recompute import recompute
from pronk.train.schedule import Schedule

METRICS, CHECKPOINTS, MODEL = "metrics.jsonl", "checkpoints", "model"
_LOCK = ".lock"
_LEAST_HELD_OUT = 10  # examples: of fewer none is held out unasked


@dataclass(frozen=True)
class Settings:
    """What makes a run what it is: one that is resumed must have the same."""

    model: str
    data: str
    eval_data: str | None = None
    eval_share: float = 0.1  # of the data, held out where there is no eval_data
    lora: LoraConfig | None = field(default_factory=LoraConfig)  # None: all weights are trained
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 1
    accumulate: int = 8
    pack: int | None = None
    bucket: bool = False
    rate: float = 2e-4
    warmup: float = 0.03  # of all steps
    schedule: str = "cosine"
    decay: float = 0.0
    clip: float = 1.0
    optimizer: str = "adamw"
    precision: Precision = "f32"
    recompute: int = 0
    max_length: int | None = None
    too_long: str = "error"
    skip_bad: bool = False
    train_on_prompt: bool = False
    chat_template: str | None = None
    chat_instructions: bool = False
    eval_every: int | None = None  # steps; None: once an epoch
    patience: int | None = None
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.eval_share < 1:
            raise BadRequest(f"the share that is held out must be from 0 to less than 1, not {self.eval_share!r}")
        if not 0 <= self.warmup <= 1:
            raise BadRequest(f"the warm-up is a share of all steps, from 0 to 1, not {self.warmup!r}")
        if self.precision not in ("f32", "bf16", "f16"):
            raise BadRequest(f"precision must be one of f32, bf16, f16, not {self.precision!r}")
        for name in ("batch_size", "accumulate", "save_every", "max_steps", "eval_every", "patience", "max_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise BadRequest(f"{name} must be a whole number from 1 on, not {value!r}")
        if not self.epochs > 0:
            raise BadRequest(f"epochs must be more than 0, not {self.epochs!r}")


@dataclass
class Data:
    train: list[Example]
    held_out: list[Example]
    names: list[str]  # where each of `train` stands
    skipped: list[str]  # bad records, of both
    cut: int
    too_long: int  # skipped
    unused: dict[str, int]  # keys of records that nobody reads


def prepare(settings: Settings, tokenizer: Tokenizer, ctx_size: int) -> Data:
    """Read and encode. Raises BadFile naming file and line."""
    encoder = Encoder(
        tokenizer,
        min(settings.max_length or ctx_size, ctx_size),
        template=settings.chat_template,
        train_on_prompt=settings.train_on_prompt,
        too_long=settings.too_long,  # type: ignore[arg-type]
        chat_instructions=settings.chat_instructions,
    )
    sources = [settings.data] if settings.eval_data is None else [settings.data, settings.eval_data]
    found = [records.read(source, skip_bad=settings.skip_bad) for source in sources]
    examples, names = _encoded(encoder, found[0])
    if settings.eval_data is not None:
        held_out, _ = _encoded(encoder, found[1])
    else:
        count = round(settings.eval_share * len(examples)) if len(examples) >= _LEAST_HELD_OUT else 0
        chosen = set(np.random.Generator(np.random.PCG64([settings.seed])).permutation(len(examples))[:count].tolist())
        held_out = [example for i, example in enumerate(examples) if i in chosen]
        names = [name for i, name in enumerate(names) if i not in chosen]
        examples = [example for i, example in enumerate(examples) if i not in chosen]
    skipped = [f"{one.source}: {line}" for one in found for line in one.skipped]
    unused = sum((one.unused for one in found), Counter[str]())
    return Data(examples, held_out, names, skipped, encoder.cut, encoder.skipped, dict(unused))


def _encoded(encoder: Encoder, found: records.Records) -> tuple[list[Example], list[str]]:
    examples, names = [], []
    for record in found.items:
        try:
            example = encoder.encode(record)
        except (records.BadRecord, BadRequest) as error:
            raise found.problem(record, str(error)) from None
        if isinstance(example, Pair):
            raise BadFile(found.source, "holds preferences (chosen, rejected), from which nothing is imitated")
        if example is not None:
            examples.append(example)
            names.append(f"{found.source}: {record.where}")
    if not examples:
        raise BadFile(found.source, f"no record fits into {encoder.max_length} tokens ({encoder.skipped} were skipped)")
    return examples, names


def batches_of(data: Data, settings: Settings) -> Batches:
    lengths = [len(example) for example in data.train]
    return Batches(lengths, settings.batch_size, settings.pack, settings.bucket, settings.seed)


class Run:
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
    ) -> None:
        """`tokenizer_files`: for a trained model's folder, where `checkpoint` has none to copy; see write.save.

        `threads` is torch's, and holds for the whole process.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(settings.seed)
        self._tokenizer_files = tokenizer_files
        self.checkpoint, self.data, self.settings, self.folder = checkpoint, data, settings, folder
        where = pick_device(device)
        if where.type == "cpu":
            memory.check(_least_memory(checkpoint, settings), f"{checkpoint.path}: training it", _way_out(settings))
        self.model: Llama = load_model(checkpoint, where, torch.float32, progress=progress)
        if settings.lora:
            lora.add(self.model, settings.lora)
        recompute(self.model, settings.recompute)
        batches = batches_of(data, settings)
        self.epoch_steps = len(batches.epoch(0)) / settings.accumulate
        steps = settings.max_steps or max(1, round(settings.epochs * self.epoch_steps))
        schedule = Schedule(settings.rate, steps, round(settings.warmup * steps), settings.schedule)  # type: ignore[arg-type]
        self.loop = Loop(
            self.model,
            data.train,
            batches,
            optimizers.make(self.model, settings.optimizer, settings.rate, settings.decay),
            schedule,
            accumulate=settings.accumulate,
            clip=settings.clip,
            precision=settings.precision,
            names=data.names,
        )
        self.resumed_from: Path | None = None

    @property
    def trained_share(self) -> float:
        every = list(self.model.parameters())
        return sum(p.numel() for p in every if p.requires_grad) / sum(p.numel() for p in every)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or held-out loss has not fallen for as long as was to be waited."""
        patience = self.settings.patience
        return self.loop.done or (patience is not None and self.loop.position.waited >= patience)

    def resume(self) -> None:
        """From the newest checkpoint. Raises BadRequest where there is none, or where settings differ."""
        found = state.checkpoints(self.folder / CHECKPOINTS)
        if not found:
            raise BadRequest(f"{self.folder}: no checkpoint to resume from; leave --resume out to begin")
        state.load(self.loop, found[-1], self._fingerprint())
        self.resumed_from = found[-1]
        kept = [line for line in read_metrics(self.folder) if line["step"] <= self.loop.position.step]
        fresh = self.folder / f".{METRICS}.part"  # without the steps after the checkpoint, which will come again
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        fresh.replace(self.folder / METRICS)

    def train(
        self,
        watch: Callable[[Step], None] | None = None,
        evaluated: Callable[[int, float], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        looking: Callable[[int, int], None] | None = None,
    ) -> bool:
        """Whether it came to its end; where it was told to stop, a checkpoint is there to go on from.

        `watch` is told of each step, `evaluated` of each look at held-out data (step, loss), and `looking` how many of
        its examples have been read, and of how many.
        """
        settings, loop = self.settings, self.loop
        every = settings.eval_every or max(1, round(self.epoch_steps))
        if self.resumed_from is None:
            if self.data.held_out:
                self._evaluate(evaluated, looking)
            self.save()
        while not self.finished:
            if stop():
                self.save()
                return False
            step = loop.step()
            self._write_metrics(asdict(step))
            if watch:
                watch(step)
            if self.data.held_out and (step.step % every == 0 or loop.done):
                self._evaluate(evaluated, looking)
            if step.step % settings.save_every == 0 or self.finished:
                self.save()
        if not self.data.held_out:
            self.write()
        return True

    def save(self) -> Path:
        return state.save(self.loop, self.folder / CHECKPOINTS, self._fingerprint())

    def write(self) -> None:
        """What has been trained, as it is now, into the folder."""
        if not self.settings.lora:
            write.save(
                trained(self.checkpoint, self.model),
                self.folder / MODEL,
                to="safetensors",
                dtype="f32",
                tokenizer_files=self._tokenizer_files,
                overwrite=(self.folder / MODEL).exists(),
            )
            return
        try:
            adapter.replace(self.model, self.settings.lora, self.settings.model, self.folder)
        except OSError as error:
            raise PronkError(f"{self.folder}: cannot be written: {os_problem(error)}") from None

    def _evaluate(
        self, evaluated: Callable[[int, float], None] | None, looking: Callable[[int, int], None] | None
    ) -> None:
        """The model as it was before is no rival: what is written is the best of what was trained."""
        step = self.loop.position.step
        loss = self.loop.evaluate(self.data.held_out, looking)
        self._write_metrics({"step": step, "held_out_loss": loss})
        if step and self.loop.improved(loss):
            self.write()
        if evaluated:
            evaluated(step, loss)

    def _write_metrics(self, line: dict[str, Any]) -> None:
        try:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise PronkError(f"{self.folder / METRICS}: cannot be written: {os_problem(error)}") from None

    def _fingerprint(self) -> dict[str, Any]:
        """The settings, and what the data came to: a file may have changed under its name."""
        digest = hashlib.sha256()
        for part in (self.data.train, self.data.held_out):
            for example in part:
                digest.update(b"%d " % len(example) + example.ids.tobytes() + example.learned.tobytes())
        return {**asdict(self.settings), "the SHA-256 of its examples": digest.hexdigest()[:16]}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, but for a last one that the run died over."""
    path = folder / METRICS
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _least_memory(checkpoint: Checkpoint, settings: Settings) -> int:
    """Bytes: weights in float32, and of what is trained gradients and moments; activations come on top."""
    weights = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    moments = {"adamw": 8, "adamw8bit": 2, "sgd": 4}.get(settings.optimizer, 0)
    return 4 * weights if settings.lora else (4 + 4 + moments) * weights


def _way_out(settings: Settings) -> str:
    return "choose a smaller model" if settings.lora else "choose a smaller model, or train LoRA alone (without --full)"


def trained(checkpoint: Checkpoint, model: Llama) -> Checkpoint:
    """The model's own weights in the place of the checkpoint's."""
    weights = dict(model.named_parameters())

    def lazy(name: str, tensor: LazyTensor) -> LazyTensor:
        return LazyTensor(name, tensor.shape, "F32", 4 * int(np.prod(tensor.shape)), partial(_array, weights[name]))

    tensors = {name: lazy(name, tensor) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, quantization=None)


def _array(parameter: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = parameter.detach().float().cpu().numpy()
    return array


@contextmanager
def claimed(folder: Path, *, resume: bool) -> Iterator[Path]:
    """The folder for one run alone; an empty one is taken away again if nothing came to be in it.

    Raises PronkError where it cannot be had, or holds another run's work.
    """
    there = folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except FileNotFoundError:
        raise PronkError(f"{folder.parent} is no folder; make it first") from None
    except Timeout:
        raise PronkError(f"{folder}: another run is at work here; choose another folder") from None
    except OSError as error:
        raise PronkError(f"{folder}: cannot be written: {error.strerror or error}") from None
    try:
        _clean(folder)
        held = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
        if not resume and state.checkpoints(folder / CHECKPOINTS):
            raise BadRequest(f"{folder} holds a run already; go on with it (--resume), or choose another folder")
        if not resume and held:
            raise BadRequest(
                f"{folder} holds {short(held[0])}, which is no run's; choose an empty folder, or a new one"
            )
        yield folder
    finally:
        with suppress(OSError):  # it does not matter, and some systems let no open file go
            if [path.name for path in folder.iterdir()] == [_LOCK]:
                (folder / _LOCK).unlink()
                if not there:
                    folder.rmdir()
        lock.release()


def _clean(folder: Path) -> None:
    """Take away what a run that was killed had half written."""
    for pattern in (f".{METRICS}.part", ".adapter-*", f".{MODEL}.*.part", f".{MODEL}.*.old", f"{CHECKPOINTS}/.*.part"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    with suppress(OSError):  # died before its first checkpoint
        (folder / CHECKPOINTS).rmdir()


def shown(examples: Sequence[Example], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """For each example its tokens as text, and whether each is learned."""
    for example in examples:
        yield [(tokenizer.token_text(int(i)), bool(m)) for i, m in zip(example.ids, example.learned, strict=True)]
