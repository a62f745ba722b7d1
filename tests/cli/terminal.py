"""pronk on a pseudo-terminal: type, and wait for what it shows."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 120.0  # for what comes at once, but on a machine that is busy with something else
LOOKS, BETWEEN_S = 4, 0.05


class Terminal:
    def __init__(self, command: list[str], home: Path, **environment: str) -> None:
        import pty

        self.master, slave = pty.openpty()
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        env |= {"PRONK_HOME": str(home), "TERM": "xterm", "INPUTRC": os.devnull, **environment}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(slave)
        self.shown = ""
        self.everything = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> str:
        """What was shown up to and with `text`, since the last wait."""
        return self.wait_for_any(re.escape(text), seconds)

    def wait_for_any(self, pattern: str, seconds: float = PATIENCE_S) -> str:
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there was {self.shown!r}"
            assert self._read(), f"{pattern!r} did not come; there was {self.shown!r}"
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def rest(self) -> None:
        """Wait until the program has done what it was told, and waits itself: all of its threads sleep, each time that
        it is looked at, and nothing more is shown. One that a busy machine keeps from going on does not sleep."""
        deadline, calm = time.monotonic() + PATIENCE_S, 0
        while calm < LOOKS:
            assert time.monotonic() < deadline, f"it does not rest; there was {self.shown!r}"
            if select.select([self.master], [], [], BETWEEN_S)[0]:
                self._read()
                calm = 0
            else:
                calm = calm + 1 if self._sleeps() else 0

    def _read(self) -> bool:
        try:
            piece = os.read(self.master, 4096).decode(errors="replace")
        except OSError:  # the other side has closed
            piece = ""
        self.shown += piece
        self.everything += piece
        return bool(piece)

    def _sleeps(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task")
        if not tasks.exists():  # no Linux
            return True
        with suppress(OSError):  # a thread that ends meanwhile
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks.iterdir())
        return False

    def ends_with(self) -> int:
        """The exit code, once the program has ended and all that it wrote has been read."""
        with suppress(OSError):
            while select.select([self.master], [], [], PATIENCE_S)[0] and (piece := os.read(self.master, 4096)):
                self.everything += piece.decode(errors="replace")
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that ^C typed into it becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
