"""The text that comes with pronk to measure on, as a file: in the package it is compressed."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from pronk.measure.windows import evaluation_text

_folder = Path(tempfile.mkdtemp(prefix="pronk-prose-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
PROSE = _folder / "evaluation.txt"
PROSE.write_bytes(evaluation_text().encode("utf-8"))
