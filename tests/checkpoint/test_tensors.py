"""What is said of tensors whatever the format."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mutations import modestly
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint.tensors import check_finite
from pronk.errors import BadFile


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_infinity_and_nan_wherever_they_stand(dtype: type) -> None:
    most = float(ml_dtypes.finfo(dtype).max)
    array = np.full((3, 100_000), most, dtype)
    array[0, :4] = [0, -most, ml_dtypes.finfo(dtype).smallest_subnormal, -0.0]
    check_finite(Path("x"), "a", array)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for place in ((0, 0), (1, 50_000), (-1, -1)):
            broken = array.copy()
            broken[place] = bad
            with pytest.raises(BadFile, match="x: tensor 'a': holds infinity or NaN"):
                check_finite(Path("x"), "a", broken)


def test_looking_takes_no_memory() -> None:
    array = np.zeros((1 << 12, 1 << 12), np.float32)
    with modestly(megabytes=4):
        check_finite(Path("x"), "a", array)
        check_finite(Path("x"), "a", array[:0])


def test_the_plan_counts_a_tied_head_where_an_engine_keeps_it_apart() -> None:
    tied, untied = (
        in_memory(c, random_weights(c)) for c in (tiny_config(tie_word_embeddings=t) for t in (True, False))
    )
    head = 4 * tied.config.vocab_size * tied.config.hidden_size
    assert tied.plan(4, head_apart=True).loaded == tied.plan(4).loaded + head == untied.plan(4).loaded
    assert tied.plan(4, head_apart=True).peak == tied.plan(4).peak
    assert untied.plan(4, head_apart=True) == untied.plan(4)
