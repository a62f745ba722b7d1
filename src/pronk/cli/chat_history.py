"""History: what was typed into earlier chats, for the up arrow and for searching."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MOST = 1000  # entries
_NEWLINE = "\u2028"  # Unicode's separator of lines stands for those within an entry: an entry is a line of the file


class History:
    """Entries, oldest first. A new one is written at once, so that a chat that is killed loses none, and two chats that
    run side by side keep both theirs. Where nothing can be read or written, there is a history of this chat alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines: list[str] = []
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line for line in lines if line]
        self.entries = [line.replace(_NEWLINE, "\n") for line in written[-_MOST:]]
        if len(written) > 2 * _MOST:
            with suppress(OSError):
                path.write_text("".join(line + "\n" for line in written[-_MOST:]), encoding="utf-8")

    def add(self, entry: str) -> None:
        """Nothing where it is blank, or what was typed before."""
        if not entry.strip() or self.entries[-1:] == [entry]:
            return
        self.entries.append(entry)
        with suppress(OSError, UnicodeEncodeError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(entry.replace("\n", _NEWLINE) + "\n")


def of_the_user() -> History:
    """What people typed is no cache, to be thrown away: it is in the user's directory for state, or in PRONK_HOME."""
    if os.environ.get("PRONK_HOME"):
        from pronk.checkpoint.hub.local import home

        return History(home() / "chat_history")
    import platformdirs

    return History(platformdirs.user_state_path("pronk", appauthor=False) / "chat_history")
