"""What both ways of downloading share: where files go, what their bytes hash to, what is said meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pronk.paths import expanded
from pronk.terminal import shown

_CHUNK = 1 << 20


def home() -> Path:
    """`PRONK_HOME`, or pronk's folder in the user's cache directory."""
    if chosen := os.environ.get("PRONK_HOME"):
        return expanded(chosen).absolute()
    import platformdirs

    return platformdirs.user_cache_path("pronk", appauthor=False)


def digest(path: Path, hasher: Any) -> str:
    """Hexadecimal digest of a file's content, on top of what `hasher` has already seen."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return str(hasher.hexdigest())


def say(line: str, progress: bool = True) -> None:
    if progress:
        print(shown(line), file=sys.stderr, flush=True)


def megabytes(n: int) -> str:
    return f"{n / 1e6:.0f} MB"
