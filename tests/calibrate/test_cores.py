"""Work shared out: the same bits on any number of cores, numpy's settings kept, BLAS's threads given back."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pronk.calibrate import cores, gptq


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_bits_on_any_number_of_cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(1100, 600)).astype(np.float32)
    made = []
    for cores_here in (1, count):
        monkeypatch.setattr(cores, "processors", lambda cores_here=cores_here: cores_here)
        with cores.a_thread_a_call():
            made.append((cores.product(x, x.T), cores.product(x[:7], x.T), cores.gram(x)))
    exact = x.astype(np.float64)
    for one, other, expected in zip(*made, (exact @ exact.T, exact[:7] @ exact.T, exact.T @ exact), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(made[1][2], made[1][2].T)


@pytest.mark.parametrize("size", [1, 144, 145, 577])
def test_products_that_leave_out_what_is_known(size: int) -> None:
    draw = np.random.default_rng(size)
    a, upper = draw.normal(size=(size // 2 + 1, size)), np.triu(draw.normal(size=(size, size)))
    made = cores.triangular(a, upper), cores.triangular(a, upper, turned=True), cores.squared(a)
    for found, expected in zip(made, (a @ upper, a @ upper.T, a.T @ a), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-15 * size * np.abs(expected).max())
    np.testing.assert_array_equal(made[2], made[2].T)


def test_what_comes_of_each_part_in_their_order_or_its_error() -> None:
    assert cores.shared(lambda part: part * part, range(20)) == [part * part for part in range(20)]
    with pytest.raises(ZeroDivisionError):
        cores.shared(lambda part: 1 // part, range(3))
    with np.errstate(over="ignore"):
        assert cores.shared(np.exp, [np.float32(1000)]) == [np.inf]
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        cores.shared(np.exp, [np.float32(1000)])


def test_a_pool_is_kept_and_work_in_it_may_share_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread, which would wait for itself."""
    monkeypatch.setattr(cores, "processors", lambda: 1)

    def names(parts: range) -> list[str]:
        return cores.shared(lambda _: threading.current_thread().name, parts)

    with cores.a_thread_a_call():
        assert len({*names(range(5)), *names(range(5))}) == 1
        within = cores.shared(names, [range(3), range(2)])
    assert [len(each) for each in within] == [3, 2]
    assert names(range(5)) != names(range(5))


def test_an_error_comes_when_the_others_are_done() -> None:
    """Else they would go on beside whoever takes it, in the same arrays."""
    done = []

    def work(part: int) -> None:
        if part == 0:
            raise ZeroDivisionError
        time.sleep(0.05)
        done.append(part)

    with cores.a_thread_a_call(), pytest.raises(ZeroDivisionError):
        cores.shared(work, range(4))
    assert sorted(done) == [1, 2, 3]


def test_threads_of_blas_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [4]
    monkeypatch.setattr(cores, "_threads_of_blas", lambda: (lambda: threads[-1], threads.append))
    with pytest.raises(ZeroDivisionError), cores.a_thread_a_call():
        raise ZeroDivisionError
    assert threads == [4, 1, 4]
    monkeypatch.setattr(cores, "_threads_of_blas", lambda: None)
    with cores.a_thread_a_call():
        pass


def test_numpys_own_blas_is_found() -> None:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if "openblas" not in blas:
        pytest.skip(f"numpy was built with {blas}")
    found = cores._threads_of_blas()
    assert found
    before = found[0]()
    with cores.a_thread_a_call():
        assert found[0]() == 1
    assert found[0]() == before


@pytest.mark.parametrize("power", [-30, -75, -120])
def test_squares_that_float32_does_not_hold(power: int) -> None:
    """Of what a nearly dead layer gives they were no normal numbers, and a matrix of them was not positive definite."""
    x = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    found = gptq.spread(cores.gram(np.ldexp(x, power)), 0.02)
    np.testing.assert_allclose(found, gptq.spread(cores.gram(x), 0.02), rtol=0, atol=1e-6)
