"""The loop: micro-batches through the cache-free forward, gradients added up, a step, and a look at held-out data.

The loss of a step is the sum over all tokens in the loss masks of its micro-batches (or whatever else the objective
counts) divided by their number: how examples were dealt out to micro-batches makes no difference, whatever their
lengths, nor how micro-batches are dealt out to processes.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pronk.errors import BadRequest, PronkError
from pronk.torch_engine.model import Llama
from pronk.train import lora, neftune, optimizers
from pronk.train.data.batches import Batches
from pronk.train.distributed import Group
from pronk.train.kept import Kept
from pronk.train.objectives.objective import Objective, Writer
from pronk.train.objectives.sft import SFT
from pronk.train.schedule import Schedule

if TYPE_CHECKING:
    from pronk.train.settings import Settings

Precision = Literal["f32", "bf16", "f16"]
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_SPIKE = 4.0  # times the mean of the losses before: beyond it something is broken
REMEMBERED = 20  # losses that a spike is held against


class Broken(PronkError):
    """Training that must not go on: a loss that is no number, or a sudden leap of it."""


@dataclass(frozen=True)
class Step:
    """What one step was. Seconds, and bytes where known."""

    step: int  # from 1
    epoch: float
    loss: float  # mean over what the objective counts: tokens in the loss mask, nats each, or pairs
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # read
    targets: int  # what the loss is the mean over
    seconds: float
    seen: dict[str, float] = field(default_factory=dict)  # means of what else the objective shows


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out data."""

    loss: float
    seen: dict[str, float]


@dataclass
class Position:
    """How far training has come: all of it that is no tensor."""

    step: int = 0
    epoch: int = 0
    at: int = 0  # micro-batches of the epoch that are done
    losses: list[float] = field(default_factory=list)  # the newest
    best: float | None = None  # held-out loss
    waited: int = 0  # evaluations since
    kept: Kept | None = None  # what the folder holds of the best


class Loop:
    """Trains `model` in place; what requires gradients is trained."""

    def __init__(
        self,
        model: Llama,
        examples: Sequence[Any],
        batches: Batches,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        objective: Objective | None = None,
        accumulate: int = 1,
        clip: float = 1.0,
        precision: Precision = "f32",
        names: Sequence[str] = (),
        group: Group | None = None,
    ) -> None:
        """`objective`: SFT, unless another is given. `names`: where each example stands, for messages.

        Steps end with the schedule. Raises BadRequest where micro-batches cannot be dealt out evenly to the group.
        """
        self.group = group or Group()
        if accumulate % self.group.size:
            raise BadRequest(
                f"{self.group.size} processes share the micro-batches of a step evenly, and {accumulate} are not a "
                "multiple of that; give another --accumulate"
            )
        self.model, self.examples, self.batches = model, examples, batches
        self.optimizer, self.schedule = optimizer, schedule
        self.objective: Objective = objective or SFT()
        self.accumulate, self.clip, self.precision, self.names = accumulate, clip, precision, names
        self.position = Position()
        self.device = model.model.embed_tokens.weight.device
        if precision in _TYPES and self.group.size == 1:  # several gather them in that type
            lora.narrow(model, _TYPES[precision])
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "f16")
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        self.writer: Writer | None = None  # of what is learned, where examples are only what it begins with

    @classmethod
    def of(cls, settings: Settings, model: Llama, examples: Sequence[Any], batches: Batches, **more: Any) -> Loop:
        """As `settings` have it, with an objective that has not seen another run; `more`: of the arguments above."""
        steps = settings.steps(batches)
        if settings.neftune_alpha:
            neftune.add(model, settings.neftune_alpha)
        ratio = settings.lora_plus_ratio
        return cls(
            model,
            examples,
            batches,
            optimizers.make(model, settings.optimizer, settings.lr, settings.weight_decay, ratio=ratio),
            Schedule(settings.lr, steps, round(settings.warmup * steps), settings.schedule),  # type: ignore[arg-type]
            objective=replace(settings.objective),
            clip=settings.clip,
            precision=settings.precision,
            **more,
        )

    @property
    def done(self) -> bool:
        return self.position.step >= self.schedule.steps

    def step(self) -> Step:
        """One step of the optimizer, or as many as its objective makes of what was read.

        Raises Broken, instead of changing parameters, where the loss or its gradient is no number, or the loss leaps.
        """
        begun, position = time.perf_counter(), self.position
        self.model.train()
        lr = self.schedule.at(position.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        chosen = [self._next() for _ in range(self.accumulate)]
        mine, numbers = self.group.share(chosen), self.group.share(_numbered(chosen, chosen))
        if self.group.size == 1:  # several gather weights together, and so have as many passes each
            mine = self.batches.passes(mine)
            numbers = _numbered(chosen, mine)
        passes: Sequence[Sequence[Any]] = [[self.examples[i] for i in indices] for indices in mine]
        told: Mapping[str, float] = {}
        if self.writer:
            with self.autocast():
                passes, told = self.writer.write(
                    self.model, position.step, passes, numbers, lambda: [self.examples[i] for i in self._next()]
                )
            self.model.train()
        with self.autocast():
            self.objective.begin(self.model, passes, self.group)
        micro = [self.objective.collate(examples, self.device) for examples in passes]
        weight, tokens = map(int, self.group.sum(sum(m.weight for m in micro), sum(m.tokens for m in micro)))
        read = [i for indices in chosen for i in indices]
        made = [self._update(micro, weight, read) for _ in range(self.objective.updates)]
        total, norm = sum(update[0] for update in made) / len(made), sum(update[1] for update in made) / len(made)
        seen = Counter[str]()
        for update in made:
            seen.update(update[2])
        position.step += 1
        position.losses = [*position.losses, total][-REMEMBERED:]
        epoch = position.epoch + position.at / len(self._of_epoch(position.epoch))
        seconds = time.perf_counter() - begun
        shown = {**told, **_means(seen, weight * len(made))}
        return Step(position.step, epoch, total, lr, norm, tokens, weight, seconds, shown)

    def _update(self, micro: Sequence[Any], weight: int, read: Sequence[int]) -> tuple[float, float, Counter[str]]:
        """Of parameters: the loss, the norm of its gradient before clipping, and sums of what else is to be seen."""
        summed, seen = torch.zeros((), dtype=torch.float64, device=self.device), Counter[str]()
        for number, batch in enumerate(micro, 1):
            self.group.reduce(self.model, last=number == len(micro))
            cost, shown = self._loss(batch)
            loss = cost / weight
            scaled = self.scaler.scale(loss)  # of any loss: a scaler that met none cannot take a step
            if self.group.size > 1 or self.objective.teaches(batch):  # several reduce their gradients together
                scaled.backward()
            summed += loss.detach()
            seen.update(shown)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in trained:
            if parameter.grad is None:  # where nothing taught, the optimizer goes on with what it remembers
                parameter.grad = torch.zeros_like(parameter)
        self.scaler.unscale_(self.optimizer)
        length = self.group.whole(nn.utils.clip_grad_norm_(trained, self.clip or math.inf))  # before clipping
        total, norm = torch.stack((summed, length.to(summed))).tolist()  # a GPU is waited for here, and nowhere else
        total, seen = self._summed(total, seen)
        self._check(total, read)
        if not (math.isfinite(norm) or self.scaler.is_enabled()):  # which leaves such steps out, with a smaller scale
            self._break("gradient is not a number", read)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, seen

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Any], watch: Callable[[int, int], None] | None = None) -> Evaluation:
        """Of `examples`, one by one, without dropout."""
        self.model.eval()
        total, weight, seen = 0.0, 0, Counter[str]()
        if self.writer:
            with self.autocast():
                examples = self.writer.answer(self.model, examples)
        turns = [done + self.group.rank for done in range(0, len(examples), self.group.size)]
        with self.autocast():
            own = [[examples[min(at, len(examples) - 1)]] for at in turns]
            self.objective.begin(self.model, own, self.group, [at < len(examples) for at in turns])
        for done in range(0, len(examples), self.group.size):
            if watch:
                watch(done, len(examples))
            at = done + self.group.rank
            batch = self.objective.collate([examples[min(at, len(examples) - 1)]], self.device)
            with self.autocast():
                cost, shown = self.objective.judged(self.model, batch)
            counts = at < len(examples)  # a process that has none left takes part in the others' work
            total, weight = total + float(cost) * counts, weight + batch.weight * counts
            seen.update({name: value * counts for name, value in shown.items()})
        self.group.rest(self.model)
        total, seen = self._summed(total, seen)
        (weight,) = map(int, self.group.sum(weight))
        if not math.isfinite(total):  # which no later one would be better than
            raise Broken(
                f"after step {self.position.step}: the held-out loss is not a number; train with a smaller learning "
                "rate, or look at MODEL and the data"
            )
        return Evaluation(total / weight, _means(seen, weight))

    def improved(self, held_out: float) -> bool:
        """Note an evaluation; whether it is the best so far."""
        position = self.position
        better = position.best is None or held_out < position.best
        position.best = held_out if better else position.best
        position.waited = 0 if better else position.waited + 1
        return better

    def autocast(self) -> torch.autocast:
        """What the model is computed under."""
        return torch.autocast(self.device.type, _TYPES.get(self.precision), enabled=self.precision in _TYPES)

    def prepare(self, examples: Sequence[Any], watch: Callable[[int, int], None] | None = None) -> None:
        """The objective, for all `examples` that the run will see."""
        with self.autocast():
            self.objective.prepare(self.model, examples, self.group, watch)
        self.group.rest(self.model)

    def _loss(self, batch: Any) -> tuple[Tensor, Mapping[str, float]]:
        with self.autocast():
            return self.objective.loss(self.model, batch)

    def _summed(self, total: float, seen: Counter[str]) -> tuple[float, Counter[str]]:
        """Over the group."""
        total, *values = self.group.sum(total, *seen.values())
        return total, Counter(dict(zip(seen, values, strict=True)))

    def _next(self) -> list[int]:
        """The examples of the next micro-batch."""
        if self.position.at == len(self._of_epoch(self.position.epoch)):
            self.position.epoch, self.position.at = self.position.epoch + 1, 0
        indices = self._of_epoch(self.position.epoch)[self.position.at]
        self.position.at += 1
        return indices

    def _of_epoch(self, number: int) -> list[list[int]]:
        if self._epoch[0] != number:
            self._epoch = number, self.batches.epoch(number)
        return self._epoch[1]

    def _check(self, loss: float, examples: Sequence[int]) -> None:
        before = self.position.losses
        usual = sum(before) / len(before) if len(before) == REMEMBERED else math.inf
        if math.isfinite(loss) and loss <= _SPIKE * usual + self.objective.slack:
            return
        leapt = f"loss leapt to {loss:.3g} from {usual:.3g}"
        self._break(leapt if math.isfinite(loss) else "loss is not a number", examples)

    def _break(self, what: str, examples: Sequence[int]) -> NoReturn:
        self.optimizer.zero_grad(set_to_none=True)
        where = ", ".join(self.names[i] for i in examples[:8]) if self.names else f"examples {list(examples[:8])}"
        more = f" and {len(examples) - 8} more" if len(examples) > 8 else ""
        raise Broken(
            f"step {self.position.step + 1}: the {what}, on {where}{more}; look at these records, or train with a "
            "smaller learning rate"
        )


def _numbered(chosen: Sequence[Sequence[int]], passes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places that the examples of `passes` have in the step, which they make up as `chosen` do."""
    places: dict[int, deque[int]] = {}
    for place, index in enumerate(index for indices in chosen for index in indices):
        places.setdefault(index, deque()).append(place)
    return [[places[index].popleft() for index in indices] for indices in passes]


def _means(sums: Mapping[str, float], weight: int) -> dict[str, float]:
    return {name: value / weight for name, value in sums.items()}
