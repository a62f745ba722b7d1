"""What the process does in which structures are tried: compile one over a vocabulary of bytes, and say how it went.

trial.py has it started; a line of JSON, [kind, source], is answered with a line of JSON. Nothing here imports pronk.
"""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path
from typing import Any

_guidance = runpy.run_path(str(Path(__file__).with_name("guidance.py")))
_WORTH_KEEPING = 0.1  # seconds of work: more may leave a large heap, and a new process costs little more


class _Bytes:
    """Every byte is a token, and one more ends a text."""

    tokens = (*(bytes((byte,)) for byte in range(256)), b"</s>")
    eos_token_id, eos_token_ids, special_token_ids, bos_token_id = 256, (256,), (256,), None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_tokenizer = _guidance["tokenizer"](_Bytes())


def answer(line: bytes) -> bytes:
    begun = time.process_time()
    answered: dict[str, Any] = {}
    try:
        kind, source = json.loads(line)
        _guidance["matcher"](kind, source, _tokenizer)
    except (ValueError, RecursionError) as error:
        answered["refused"] = str(error)[:2000]
    except BaseException as error:  # a panic of Rust's is no Exception
        answered |= {"refused": f"{type(error).__name__}: {error}"[:2000], "spent": True}
    answered["seconds"] = time.process_time() - begun
    if answered["seconds"] > _WORTH_KEEPING:
        answered["spent"] = True
    return json.dumps(answered).encode() + b"\n"
