"""pronk on a pseudo-terminal: type, and wait for what it shows."""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path


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

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What was shown up to and with `text`, since the last wait."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; there was {self.shown!r}"
            try:
                piece = os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the other side has closed
                assert text in self.shown, f"{text!r} did not come; there was {self.shown!r}"
            self.shown += piece
            self.everything += piece
        until = self.shown.index(text) + len(text)
        seen, self.shown = self.shown[:until], self.shown[until:]
        return seen

    def ends_with(self) -> int:
        """The exit code, once the program has ended."""
        return self.process.wait(timeout=60)

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
