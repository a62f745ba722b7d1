"""What training is after: which records it learns from, how these become examples, and what examples cost.

An objective is a frozen dataclass in a file of its own. Its fields are its settings, and are saved with a run; what
else it comes to know of a run is no field. The loop knows nothing of it but a sum and what that is divided by: the loss
of a step is the sum of its micro-batches' losses over the sum of their weights, however examples were dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.forms import Kind
from pronk.train.data.records import Record
from pronk.train.distributed import Group
from pronk.train.objectives.loss import cross_entropy


class Collated(Protocol):
    """A micro-batch on its device."""

    @property
    def tokens(self) -> int:
        """That are read."""

    @property
    def weight(self) -> int:
        """What its loss counts for: tokens in the loss mask, or pairs."""


class Objective(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]  # as it is saved
    kinds: ClassVar[tuple[Kind, ...]]  # of the records that it learns from
    marked: ClassVar[str] = "trained on"  # what tokens in the loss mask are, for --show-batch
    by_prompt: ClassVar[bool] = False  # whether examples with one prompt are held out together
    stored: ClassVar[bool] = True  # whether its examples are tokens alone, which a store may hold (data/store.py)

    @property
    def slack(self) -> float:
        """How far over four times its recent mean a loss may be before it is taken for a leap."""
        return 1.0

    @property
    def refers(self) -> bool:
        """Whether it holds the model against what it was before."""
        return False

    @property
    def without_reference(self) -> str:
        """What a plan says where others of its kind hold the model against what it was; or nothing."""
        return ""

    @property
    def updates(self) -> int:
        """How many a step makes of what it read."""
        return 1

    @property
    def encoding(self) -> Sequence[Any]:
        """The settings that `encode` looks at."""
        return ()

    def check(self, most: int) -> None:
        """Raises BadRequest where nothing fits into texts of so many tokens at most."""
        return

    def encode(self, record: Record, encoder: Encoder) -> Sequence[Any]:
        """Its examples: as many as there are in it. Raises BadRecord."""

    def prepare(
        self, model: Llama, examples: Sequence[Any], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        """What is to be done before the first step, if anything, with all `examples` that the run will see.

        `watch` is told how many of them are done, and of how many.
        """
        return

    def collate(self, examples: Sequence[Any], device: torch.device) -> Collated:
        """A micro-batch, for `loss`."""

    def begin(self, model: Llama, passes: Sequence[Sequence[Any]], group: Group, counted: Sequence[bool] = ()) -> None:
        """Before a step, or a look at held-out data: what all its losses depend on, if anything.

        `passes`: this process's examples; those not `counted` are others' as well, and take part for their sake.
        """
        return

    def teaches(self, batch: Any) -> bool:
        """False where the gradient of its loss is nothing but zeros, whatever the model is."""
        return True

    def loss(self, model: Llama, batch: Any) -> tuple[Tensor, Mapping[str, float]]:
        """The sum over the micro-batch, with its gradient; and sums of whatever else is to be seen of it."""

    def judged(self, model: Llama, batch: Any) -> tuple[Tensor, Mapping[str, float]]:
        """What held-out data is judged by, the less the better; without a gradient."""
        return self.loss(model, batch)


class Writer(Protocol):
    """Makes what a step learns from of the examples that it reads, where it is the model that writes that."""

    @property
    def spare(self) -> int:
        """How often a step may ask for `more`."""
        return 0

    def write(
        self,
        model: Llama,
        step: int,
        passes: Sequence[Sequence[Any]],
        numbers: Sequence[Sequence[int]],
        more: Callable[[], Sequence[Any]],
    ) -> tuple[Sequence[Sequence[Any]], Mapping[str, float]]:
        """Of the examples of each of this process's passes, and what is to be seen of all processes'. `step`: how many
        are done. `numbers`: those of the examples in the step. `more` gives the examples of the next micro-batch, to
        all processes the same."""

    def answer(self, model: Llama, examples: Sequence[Any]) -> Sequence[Any]:
        """Held-out examples, for `judged`: the same of the same model."""


class NextToken(Objective, Protocol):
    """To foretell each token in the loss mask: its negative log-likelihood, in nats."""

    def collate(self, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        return MicroBatch.of(examples, device)

    def loss(self, model: Llama, batch: MicroBatch) -> tuple[Tensor, Mapping[str, float]]:
        hidden = model.hidden(batch.batch)
        return cross_entropy(hidden.to(compute_type(hidden)), model.lm_head.weight, batch.targets), {}
