"""The table of angles, which calls from several threads share."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

from tiny import tiny_config

from pronk.cpu_engine.rope import Rope


def test_a_longer_table_is_never_replaced_by_a_shorter_one() -> None:
    begun, longer_is_set, lengths = Event(), Event(), []

    class Model:
        def set_rope(self, cos: Any, sin: Any) -> None:
            if not begun.is_set():
                begun.set()
                longer_is_set.wait(0.2)  # without a lock it is set now
            lengths.append(len(cos))

    rope = Rope(Model(), tiny_config(), 2048)  # type: ignore[arg-type]
    shorter = Thread(target=rope.reach, args=(300,))
    shorter.start()
    begun.wait()
    rope.reach(1000)
    longer_is_set.set()
    shorter.join()
    assert lengths == sorted(lengths)
