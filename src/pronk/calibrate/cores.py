"""Work shared out among the processor's cores: the same bits on any number of them.

BLAS gets one thread a call meanwhile. Its own threads spin while they wait for each other, at every small product and
dozens of times in a Cholesky decomposition: beside another program attention took 27 times the processor's time. Ours
are begun once: to begin them for every product took a tenth of the time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pronk.system import processors

Floats = NDArray[np.float32]
Part = TypeVar("Part")
Made = TypeVar("Made")

_LARGEST = 512  # rows or columns of a product that are a piece of work, at most
_COLUMNS = 256  # likewise, of a matrix times itself
_FEWEST = 144  # that are not cut further: a thread is not worth it
_SMALL = 2.0**-40  # squares of what is a millionth of it are still normal numbers

# OpenBLAS in numpy's own wheels, in others' builds, and MKL.
_GET_AND_SET = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)


_POOL: ContextVar[ThreadPoolExecutor | None] = ContextVar("_POOL", default=None)


def shared(work: Callable[[Part], Made], parts: Iterable[Part]) -> list[Made]:
    """What comes of each part, in their order; numpy lets go of Python's lock, and its errstate holds here too."""
    parts = list(parts)
    if len(parts) == 1:  # to hand it over takes longer than the small products of a triangle do
        return [copy_context().run(work, parts[0])]
    with _pool() as pool:
        made = [pool.submit(copy_context().run, _outside, work, part) for part in parts]
        wait(made)  # the others too, where one ends in an error
        return [one.result() for one in made]


def _outside(work: Callable[[Part], Made], part: Part) -> Made:
    """Work in a thread of the pool: were it to share more out there, it would wait for itself."""
    _POOL.set(None)
    return work(part)


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """a @ b, of which some rows are a piece, or some columns where there are more of these."""
    out = np.empty((len(a), b.shape[1]), a.dtype)
    if len(a) >= b.shape[1]:
        shared(lambda some: np.matmul(a[some], b, out=out[some]), _slices(len(a), min(_LARGEST, _piece(len(a)))))
    else:
        columns = _slices(b.shape[1], min(_LARGEST, _piece(b.shape[1])))
        shared(lambda some: np.matmul(a, b[:, some], out=out[:, some]), columns)
    return out


def gram(x: Floats) -> Floats:
    """x.T @ x, up to a factor: very small x, whose squares float32 does not hold, are made a power of two larger."""
    if 0 < (largest := float(max(x.max(), -x.min()))) < _SMALL:
        x = np.ldexp(x, -math.frexp(largest)[1])
    return squared(x, _COLUMNS)


def squared(x: NDArray[Any], columns: int | None = None) -> NDArray[Any]:
    """x.T @ x, of which one half is copied from the other; so many columns are a piece."""
    size = x.shape[1]
    out = np.empty((size, size), x.dtype)

    def piece(at: tuple[slice, slice]) -> None:
        one, other = at
        out[one, other] = x[:, one].T @ x[:, other]
        if one != other:
            out[other, one] = out[one, other].T

    slices = _slices(size, columns or _piece(size))
    shared(piece, [(one, other) for number, one in enumerate(slices) for other in slices[number:]])
    return out


def triangular(a: NDArray[Any], upper: NDArray[Any], *, turned: bool = False) -> NDArray[Any]:
    """a @ upper, or a @ upper.T, without most of what is nothing below the diagonal."""
    size = len(upper)
    out = np.empty((len(a), size), a.dtype)

    def piece(some: slice) -> None:
        if turned:
            np.matmul(a[:, some.start :], upper[some, some.start :].T, out=out[:, some])
        else:
            np.matmul(a[:, : some.stop], upper[: some.stop, some], out=out[:, some])

    shared(piece, _slices(size, _piece(size)))
    return out


@contextmanager
def a_thread_a_call() -> Iterator[None]:
    """Keep numpy's BLAS to one thread; where it is none of those that are known, leave it as it is. What is shared
    meanwhile has the same threads."""
    found = _threads_of_blas()
    get, set_to = found or (lambda: 0, lambda _: None)
    before = get()
    set_to(1)
    try:
        with ThreadPoolExecutor(processors()) as pool:
            token = _POOL.set(pool)
            try:
                yield
            finally:
                _POOL.reset(token)
                pool.shutdown(cancel_futures=True)
    finally:
        set_to(before)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """That of `a_thread_a_call`, or one for this once."""
    if kept := _POOL.get():
        yield kept
        return
    with ThreadPoolExecutor(processors()) as pool:
        yield pool


def _threads_of_blas() -> tuple[Callable[[], int], Callable[[int], object]] | None:
    try:
        core = import_module("numpy._core._multiarray_umath")
        library = ctypes.CDLL(core.__file__)  # what it is linked with is looked through as well
    except (ImportError, OSError):
        return None
    for get, set_to in _GET_AND_SET:
        if hasattr(library, get) and hasattr(library, set_to):
            return getattr(library, get), getattr(library, set_to)
    return None


def _piece(size: int) -> int:
    """A quarter, so that all cores have as much to do."""
    return max(_FEWEST, -(-size // 4))


def _slices(size: int, most: int) -> list[slice]:
    """As few as can be of so many at most, and then as even as can be."""
    step = -(-size // -(-size // most)) if size else most
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]
