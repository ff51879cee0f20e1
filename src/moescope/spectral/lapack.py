"""LAPACK's routines as scipy carries them, for those that scipy has no function for.

scipy publishes the addresses of all of BLAS and LAPACK to compiled code (`scipy.linalg.cython_blas`,
`cython_lapack`); here
they are called through ctypes, which also lets other Python threads run meanwhile. Arrays are overwritten in
place, lie in
memory column by column (a C-ordered [rows, columns] array is its own transpose to LAPACK), and must be fp64
or int32.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moescope.spectral.arrays import Array

CAPSULE_NAME = ctypes.pythonapi.PyCapsule_GetName
CAPSULE_NAME.restype, CAPSULE_NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
CAPSULE_POINTER.restype, CAPSULE_POINTER.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@cache
def routine(name: str) -> Any:
    from scipy.linalg import cython_blas, cython_lapack

    published = cython_lapack.__pyx_capi__ | cython_blas.__pyx_capi__
    signature = CAPSULE_NAME(published[name])
    return ctypes.CFUNCTYPE(None)(CAPSULE_POINTER(published[name], signature))


def passed(argument: str | int | float | np.ndarray[Any, Any]) -> Any:
    """As Fortran wants it: everything by its address."""
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if isinstance(argument, int):
        return ctypes.byref(ctypes.c_int(argument))
    if isinstance(argument, float):
        return ctypes.byref(ctypes.c_double(argument))
    assert argument.dtype in (np.float64, np.int32), argument.dtype
    assert argument.flags.forc, "LAPACK needs arrays without gaps"
    return ctypes.c_void_p(argument.ctypes.data)


def blas(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    routine(name)(*map(passed, arguments))


def product(left_NK: Array, right: Array, transposed: bool = False) -> Array:
    """left @ right, or left @ right.T.

    By the same BLAS as all else here: a second one's idle threads would be in the way.
    """
    left, right = np.ascontiguousarray(left_NK), np.ascontiguousarray(right)
    inner, columns = right.shape[::-1] if transposed else right.shape
    result = np.empty((len(left), columns))
    form, width = "T" if transposed else "N", right.shape[1]
    blas("dgemm", form, "N", columns, len(left), inner, 1.0, right, width, left, inner, 0.0, result, columns)
    return result


def lapack(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    """Call a routine whose last argument is `info`, which is looked at here and not to be given."""
    info = np.zeros(1, np.int32)
    blas(name, *arguments, info)
    assert info[0] >= 0, f"{name}: argument {-info[0]} is not what LAPACK expects"
    if info[0]:
        raise np.linalg.LinAlgError(f"{name} returned info = {info[0]}")


def lapack_with_workspace(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    """Call a routine that ends in `work, lwork, info`, with as much workspace as it asks for."""
    wanted = np.zeros(1)
    lapack(name, *arguments, wanted, -1)
    size = int(wanted[0])
    lapack(name, *arguments, np.empty(size), size)


class ThreadControls(NamedTuple):
    """How many threads scipy's BLAS uses, and how to change it."""

    get: Callable[[], int]
    set: Callable[[int], None]


@cache
def thread_controls() -> ThreadControls | None:
    """Of the OpenBLAS that scipy's wheels carry.

    None where scipy came with another BLAS, which is then left alone.
    """
    import scipy

    package = Path(scipy.__file__).parent
    for folder in (package.parent / "scipy.libs", package / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for prefix in ("scipy_openblas", "openblas"):
                if hasattr(library, f"{prefix}_set_num_threads"):
                    return ThreadControls(
                        getattr(library, f"{prefix}_get_num_threads"),
                        getattr(library, f"{prefix}_set_num_threads"),
                    )
    return None


_alone = threading.Lock()
_inside: list[int] = []  # how many threads BLAS had when the first of several came in


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on one thread until the last of those who asked for it, from whatever thread, is done."""
    controls = thread_controls()
    if controls is None:
        yield
        return
    with _alone:
        _inside.append(_inside[0] if _inside else controls.get())
        controls.set(1)
    try:
        yield
    finally:
        with _alone:
            before = _inside.pop()
            if not _inside:
                controls.set(before)
