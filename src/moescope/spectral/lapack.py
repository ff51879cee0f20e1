"""LAPACK and BLAS routines that scipy ships without a Python function, called through ctypes.

scipy publishes their addresses to compiled code (`scipy.linalg.cython_blas`, `cython_lapack`). ctypes
releases the GIL, so other Python threads run meanwhile. Arrays are overwritten in place, are column-major (a
C-ordered [rows, columns] array is its own transpose to LAPACK), and must be fp64 or int32.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moescope.types import Array

CAPSULE_NAME = ctypes.pythonapi.PyCapsule_GetName
CAPSULE_NAME.restype, CAPSULE_NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
CAPSULE_POINTER.restype, CAPSULE_POINTER.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@cache
def routine(name: str) -> Any:
    from scipy.linalg import cython_blas, cython_lapack

    published = cython_lapack.__pyx_capi__ | cython_blas.__pyx_capi__
    return ctypes.CFUNCTYPE(None)(CAPSULE_POINTER(published[name], CAPSULE_NAME(published[name])))


def to_fortran(argument: str | int | float | np.ndarray[Any, Any]) -> Any:
    """Return the argument's address, as Fortran expects."""
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if isinstance(argument, int):
        return ctypes.byref(ctypes.c_int(argument))
    if isinstance(argument, float):
        return ctypes.byref(ctypes.c_double(argument))
    assert argument.dtype in (np.float64, np.int32), argument.dtype
    assert argument.flags.forc, "LAPACK needs contiguous arrays"
    return ctypes.c_void_p(argument.ctypes.data)


def blas(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    routine(name)(*map(to_fortran, arguments))


def product(left_NK: Array, right: Array, transposed: bool = False) -> Array:
    """left @ right, or left @ right.T, by scipy's BLAS: numpy's own would keep a second set of threads."""
    left, right = np.ascontiguousarray(left_NK), np.ascontiguousarray(right)
    inner, columns = right.shape[::-1] if transposed else right.shape
    result = np.empty((len(left), columns))
    form, width = "T" if transposed else "N", right.shape[1]
    blas("dgemm", form, "N", columns, len(left), inner, 1.0, right, width, left, inner, 0.0, result, columns)
    return result


def lapack(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    """Call a routine whose last argument is `info`, which is added and checked here."""
    info = np.zeros(1, np.int32)
    blas(name, *arguments, info)
    assert info[0] >= 0, f"{name}: argument {-info[0]} is not what LAPACK expects"
    if info[0]:
        raise np.linalg.LinAlgError(f"{name} returned info = {info[0]}")


def lapack_with_workspace(name: str, *arguments: str | int | float | np.ndarray[Any, Any]) -> None:
    """Call a routine that ends in `work, lwork, info`, with the workspace size it asks for."""
    wanted = np.zeros(1)
    lapack(name, *arguments, wanted, -1)
    size = int(wanted[0])
    lapack(name, *arguments, np.empty(size), size)


class ThreadControls(NamedTuple):
    """Get and set the number of threads of a BLAS."""

    get: Callable[[], int]
    set: Callable[[int], None]


@cache
def thread_controls(package: str = "scipy") -> ThreadControls | None:
    """Those of the OpenBLAS in scipy's or numpy's wheels; None where it was built with another BLAS."""
    folder = Path(str(import_module(package).__file__)).parent
    for libraries in (folder.parent / f"{package}.libs", folder / ".dylibs"):
        for path in sorted(libraries.glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for name in ("scipy_openblas_%s_num_threads", "openblas_%s_num_threads"):
                for symbol in (name, f"{name}64_"):  # of 64-bit integers
                    if hasattr(library, symbol % "set"):
                        return ThreadControls(*(getattr(library, symbol % verb) for verb in ("get", "set")))
    return None


_lock = threading.Lock()
_saved_counts: dict[str, list[int]] = {}  # one per active one_blas_thread: the thread count to restore


@contextmanager
def one_blas_thread(package: str = "scipy") -> Iterator[None]:
    """Limit the package's BLAS to one thread until the last active caller, in whatever thread, leaves."""
    controls = thread_controls(package)
    if controls is None:
        yield
        return
    with _lock:
        saved = _saved_counts.setdefault(package, [])
        saved.append(saved[0] if saved else controls.get())
        controls.set(1)
    try:
        yield
    finally:
        with _lock:
            before = saved.pop()
            if not saved:
                controls.set(before)
