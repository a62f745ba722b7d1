from __future__ import annotations

from pathlib import Path

import kinds
import pytest

from pronk.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def every_kind(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return kinds.every_kind(data, tmp_path_factory.mktemp("tokenizers"))
