"""Atomic writes: free space is checked first, and data reach the disk before their name does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moescope.errors import BadInput

SPARE_DISK = 32 * 2**20
PARTIAL_ENDING = ".moescope-partial"


def check_disk(
    folder: Path, needed: int, remedy: str = "free some space, then give the same command to resume"
) -> None:
    """Raise an error before the disk is full: `needed` is the number of bytes to write, uncompressed."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_DISK:
        raise BadInput(
            f"{folder}: {free / 1e6:,.0f} MB of disk left, {(needed + SPARE_DISK) / 1e6:,.0f} MB "
            f"needed; {remedy}"
        )


def replace_synced(partial: Path, path: Path) -> None:
    """Flush a written file to the disk, then give it its final name."""
    sync_file(partial)
    partial.replace(path)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_empty(folders: list[Path]) -> None:
    """Remove the empty ones among the folders, deepest first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def check_target(folder: Path) -> Path:
    """Return the folder to write, links followed; one that is not empty is an error."""
    try:
        target = folder.expanduser().resolve()
        if target.exists() and not target.is_dir():
            raise BadInput(f"{folder}: a file is in the way; give another folder")
        if target.is_dir() and any(target.iterdir()):
            raise BadInput(f"{folder}: not empty; give a folder that is empty or does not exist yet")
    except (OSError, RuntimeError) as error:
        raise BadInput(f"{folder}: cannot be written ({reason(error)}); give another folder") from None
    return target


@contextmanager
def only_writer(shown: Path, lock_path: Path, what: str, remedy: str) -> Iterator[None]:
    """Hold a lock of the operating system while something is written; it is released when the process dies.

    The lock's folder is created, and removed again if it stays empty.
    """
    from filelock import FileLock, Timeout

    new_folders = [place for place in lock_path.parents if not place.exists()]
    lock = FileLock(lock_path)
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:  # an OSError too, so it stands first
        raise BadInput(
            f"{shown}: another moescope process is writing {what}; wait for it, or {remedy}"
        ) from None
    except OSError as error:
        remove_empty(new_folders)
        raise BadInput(f"{shown}: cannot be written ({reason(error)}); {remedy}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock_path.unlink()  # while it is held, so that nobody can lock a file that is about to go
        lock.release()
        remove_empty(new_folders)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside the target to write into; it takes the target's name at the end, or is removed.

    The target must be empty or absent. What a killed process left is removed by the next writer of the same
    target. Whoever writes a file must flush it.
    """
    target = check_target(folder)
    partial = target.with_name(target.name + PARTIAL_ENDING)
    with only_writer(folder, partial.with_name(partial.name + ".lock"), "it", "give another folder"):
        try:
            check_target(folder)  # again: another process may have finished it before we had the lock
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            yield partial
            sync_folder(partial)
            partial.rename(target)  # an empty folder of that name is replaced
            sync_folder(target.parent)
        except OSError as error:
            raise BadInput(f"{folder}: cannot be written ({reason(error)}); give another folder") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Return why a write failed, in the system's words."""
    return (isinstance(error, OSError) and error.strerror) or (
        str(error).splitlines() or [type(error).__name__]
    )[0]
