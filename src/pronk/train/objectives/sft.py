"""Supervised fine-tuning: to answer as the data does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from pronk.errors import BadRequest
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.records import Record
from pronk.train.objectives.objective import NextToken

Instructions = Literal["auto", "chat", "alpaca"]

# Stanford Alpaca's two, to the letter: github.com/tatsu-lab/stanford_alpaca, train.py.
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


@dataclass(frozen=True)
class SFT(NextToken):
    """`train_on_prompt`: prompts are learned as well. `instructions`: what instruction records go through, the "chat"
    template or "alpaca"'s; "auto" is the former where the model has one."""

    name = "sft"
    kinds = ("messages", "completion", "instruction", "text")

    train_on_prompt: bool = False
    instructions: Instructions = "auto"

    def __post_init__(self) -> None:
        if self.instructions not in get_args(Instructions):
            raise BadRequest(f"instructions must be one of {', '.join(get_args(Instructions))}")

    @property
    def encoding(self) -> Sequence[Any]:
        return self.train_on_prompt, self.instructions

    def encode(self, record: Record, encoder: Encoder) -> list[Example]:
        values = record.values
        if record.kind == "text":
            parts = encoder.parts(encoder.text(values["text"]))
            return [fitted for part in parts for fitted in encoder.fitted(part)]
        if record.kind == "messages":
            example = encoder.conversation(values)
        elif record.kind == "completion":
            encoder.unused.update(key for key in ("tools",) if key in values)  # a text is no chat template's
            example = encoder.answer(values["prompt"], values["completion"])
        elif self.instructions == "chat" or (self.instructions == "auto" and encoder.talks):
            asked = "\n\n".join(part for part in (values["instruction"], values.get("input", "")) if part.strip())
            turns = {"system": values.get("system", ""), "user": asked, "assistant": values["output"]}
            talk = [{"role": role, "content": said} for role, said in turns.items() if said]
            example = encoder.conversation({"messages": talk})
        else:
            encoder.unused.update(key for key in ("system",) if values.get(key))  # Alpaca's templates have no place
            example = encoder.instruction(alpaca_prompt(values), values["output"])
        if self.train_on_prompt:
            example = replace(example, loss_mask=np.arange(len(example)) > 0)
        return encoder.fitted(example)


def alpaca_prompt(values: Mapping[str, str]) -> str:
    """The prompt for an instruction record: one template with an input, one without."""
    with_input = bool(values.get("input", "").strip())
    return (ALPACA_WITH_INPUT if with_input else ALPACA).format_map(values)
