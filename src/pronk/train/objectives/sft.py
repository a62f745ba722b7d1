"""Supervised fine-tuning: to answer as the data does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pronk.train.data.examples import Encoder, Example
from pronk.train.data.records import Record
from pronk.train.objectives.objective import NextToken

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
    """`train_on_prompt`: prompts are learned as well. `chat_instructions`: instruction records go through the chat
    template instead of Alpaca's."""

    name = "sft"
    kinds = ("messages", "completion", "instruction", "text")

    train_on_prompt: bool = False
    chat_instructions: bool = False

    def encode(self, record: Record, encoder: Encoder) -> list[Example]:
        values = record.values
        if record.kind == "text":
            example = encoder.text(values["text"])
        elif record.kind == "messages":
            example = encoder.conversation(values["messages"])
        elif record.kind == "completion":
            example = encoder.answer(values["prompt"], values["completion"])
        elif self.chat_instructions:
            asked = "\n\n".join(part for part in (values["instruction"], values.get("input", "")) if part.strip())
            turns = {"user": asked, "assistant": values["output"]}
            example = encoder.conversation([{"role": role, "content": said} for role, said in turns.items()])
        else:
            example = encoder.answer(alpaca_prompt(values), values["output"])
        if self.train_on_prompt:
            example = replace(example, loss_mask=np.arange(len(example)) > 0)
        return encoder.fitted(example)


def alpaca_prompt(values: Mapping[str, str]) -> str:
    """The prompt for an instruction record: one template with an input, one without."""
    with_input = bool(values.get("input", "").strip())
    return (ALPACA_WITH_INPUT if with_input else ALPACA).format_map(values)
