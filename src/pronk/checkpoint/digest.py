"""A model's digest: whether what lies under a name is still what it was.

Whole files would take seconds a gigabyte. Of a large one only pieces are read, evenly from its first byte to its last:
weights that were trained on, rounded or replaced differ nearly everywhere, and its header, where tensors are described,
is among the first. A change of a few kilobytes within gigabytes may go unseen.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from pronk.errors import BadFile, os_problem

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint

_PIECE = 1 << 16  # bytes
_PIECES = 1 << 9  # of all files together, but at least _FEWEST of each
_FEWEST = 16


def digest(checkpoint: Checkpoint) -> str:
    """Of its config, of what its tensors are, and of their bytes. Raises BadFile where a file cannot be read."""
    said = repr(checkpoint.config).replace(", num_labels=None", "")  # which runs of 0.1 did not say
    found = hashlib.sha256(said.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        if not checkpoint.files:  # it lies in memory
            found.update(tensor.read().tobytes())
    pieces = max(_FEWEST, _PIECES // max(1, len(checkpoint.files)))
    for path in checkpoint.files:
        try:
            _read(path, pieces, found)
        except OSError as error:
            raise BadFile(path, f"cannot be read: {os_problem(error)}") from None
    return found.hexdigest()[:16]


def _read(path: Path, pieces: int, found: hashlib._Hash) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        found.update(b"%d\n" % size)
        last = max(0, size - _PIECE)
        step = max(_PIECE, -(-last // (pieces - 1)))
        for start in [*range(0, last, step), last]:
            file.seek(start)
            found.update(file.read(_PIECE))
