"""Conversation: what `pronk chat` remembers, saves and goes on from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from pronk.cli import text_files
from pronk.errors import BadFile, BadRequest
from pronk.strict_json import half_character
from pronk.system import replacing

Message = dict[str, str]


@dataclass
class Conversation:
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    path: Path | None = None  # where it was read from or written to

    @property
    def messages(self) -> list[Message]:
        return ([] if self.system is None else [{"role": "system", "content": self.system}]) + self.turns

    def last_question(self) -> int:
        """Where the last question stands among the turns. Raises BadRequest where nothing was asked yet."""
        asked = [n for n, message in enumerate(self.turns) if message["role"] == "user"]
        if not asked:
            raise BadRequest("nothing was asked yet")
        return asked[-1]

    @classmethod
    def read(cls, path: Path) -> Conversation:
        """A file that `save` wrote, or any JSON list of messages; the first may be the system's.

        Raises BadFile, and BadRequest where it cannot be read as text.
        """
        from pronk.tokenizer.messages import checked

        text = text_files.read_file(str(path))
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadFile(path, f"not JSON ({error})") from None
        if problem := half_character(messages, text):
            raise BadFile(path, f"holds {problem}")
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise BadFile(path, 'must be a JSON list of messages, {"role": …, "content": …} each')
        try:
            messages = checked(messages) if messages else []
        except BadRequest as error:
            raise BadFile(path, str(error)) from None
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        return cls(system, messages, path)

    def save(self, path: Path) -> None:
        """A file that this conversation did not come from is left alone: BadRequest."""
        if path.exists() and path != self.path:
            raise BadRequest(f"{path} exists; name another file, or delete it first")
        if problem := half_character(self.messages):
            raise BadRequest(f"the conversation holds {problem}")
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.path = path


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and isinstance(message["role"], str)
        and isinstance(message["content"], str | list)
    )
