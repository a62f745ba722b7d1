"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """With `~` and `~user` for home directories; a `~user` whom nobody knows stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no such user
