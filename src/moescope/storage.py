"""Atomic writes: free space is checked first, and data reach the disk before their name does.

A file or folder is created exclusively under a random name in the target folder, written, and then renamed.
Its writer holds a lock of the operating system on it, so that `remove_leftovers` can tell the leftovers of a
killed process from files that another process is writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from moescope.errors import BadInput, reason

AGAIN = "free some space, then give the same command"
REPORT = "report.html"  # in a run folder
SPARE_DISK = 32 * 2**20
PARTIAL_ENDING = ".moescope-partial"
LEFTOVER = re.compile(r"\.moescope-[0-9a-f]{16}\.tmp")


# --- failures that tests arm


class Failpoint:
    """Fails at the n-th write of this process: `kill:n` ends it with SIGKILL, `full:n` fills the disk."""

    def __init__(self, armed: str):
        self.kind, _, number = armed.partition(":")
        self.left = int(number)

    def reach(self, creates: bool) -> None:
        self.left -= 1
        if self.kind == "kill" and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full" and self.left <= 0 and creates:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


failpoint = Failpoint(armed) if (armed := os.environ.get("MOESCOPE_FAILPOINT")) else None


def write_point(creates: bool = False) -> None:
    """Mark a moment between two changes on disk, at which a test may have armed a failure."""
    if failpoint is not None:
        failpoint.reach(creates)


# --- paths in what is written

ABSOLUTE = re.compile(r"(?<![\w./~-])(?:/[^/\s'\",;:()\[\]]+){2,}/?")


def without_absolute_paths(text: str) -> str:
    """Return the text with the last name of every absolute path in it."""
    if text.startswith("moescope "):
        with suppress(ValueError):  # a sentence with an apostrophe, no command
            return shlex.join(map(word_without_path, shlex.split(text)))
    return word_without_path(text)


def word_without_path(text: str) -> str:
    """Return the text with names for paths: itself one, one after NAME=, or some within it."""
    name, equals, path = text.rpartition("=")
    if path.startswith("/") and not any(mark in path for mark in (": ", "; ", ", ", "\n")):
        return f"{name}{equals}{Path(path).name}"
    return ABSOLUTE.sub(lambda found: Path(found[0]).name, text)


# --- files and folders


def is_leftover(path: Path) -> bool:
    """Return whether the name is one that unfinished writes have."""
    return LEFTOVER.fullmatch(path.name) is not None


def leftover_name(folder: Path) -> Path:
    """Return a random name for what is being written in the folder; absolute, as "s3:x" looks like a URL."""
    return folder.absolute() / f".moescope-{secrets.token_hex(8)}.tmp"


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written or half-removed there or one folder below; no links."""
    for path in (*folder.glob("*.tmp"), *folder.glob("*/*.tmp")):
        if is_leftover(path) and not path.is_symlink() and not path.parent.is_symlink():
            with suppress(OSError), opened(path) as descriptor:  # a held lock is one, too
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete(path)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_inside(path: Path, run: Path) -> None:
    """Raise an error if what the path names does not lie in the run's folder, behind a link for example."""
    if not (place := path.parent.resolve()).is_relative_to(run.resolve()):
        raise BadInput(
            f"{path}: a link leads to {place}, outside {run}, where nothing is changed; replace the link by "
            "a folder, or give another --out"
        )


def remove(path: Path, run: Path) -> None:
    """Remove a file, folder or link of the folder `run`, if it exists; of a link, the target stays.

    A killed process leaves it as it was, or a leftover.
    """
    if not os.path.lexists(path):
        return
    check_inside(path, run)
    write_point()
    if path.is_dir() and not path.is_symlink():
        path = path.rename(leftover_name(path.parent))
        write_point()
    delete(path)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yield a descriptor of a file or folder."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path, remedy: str = AGAIN, partial_folder: Path | None = None) -> Iterator[Path]:
    """Yield a new file of a random name beside `path` to write to; at the end it takes the name `path`.

    With `partial_folder` it is a new folder of that name.
    """
    partial = partial_folder or leftover_name(path.parent)
    try:
        write_point(creates=True)
        if partial_folder:
            partial.mkdir(parents=True)
        flags = os.O_RDONLY if partial_folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
        with opened(partial, flags) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield partial
                write_point(creates=True)
                os.fsync(descriptor)
                partial.replace(path)
            except BaseException:
                delete(partial)
                raise
        if partial_folder:
            sync(path.parent)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({reason(error)}); {remedy}") from None


def atomic_folder(path: Path) -> AbstractContextManager[Path]:
    """Return a context with a new folder of a random name, to fill; at the end it takes the name `path`."""
    return atomic_file(path, partial_folder=leftover_name(path.parent))


def check_disk(folder: Path, needed: int, remedy: str = f"{AGAIN} to resume") -> None:
    """Raise an error before the disk is full: `needed` is the number of bytes to write, uncompressed."""
    needed += SPARE_DISK
    if (free := shutil.disk_usage(folder).free) < needed:
        left = f"{free / 1e6:,.0f} MB of disk left, {needed / 1e6:,.0f} MB needed"
        raise BadInput(f"{folder}: {left}; {remedy}")


def sync(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


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
    target, remedy = check_target(folder), "give another folder"
    partial = target.with_name(target.name + PARTIAL_ENDING)
    with only_writer(folder, partial.with_name(partial.name + ".lock"), "it", remedy):
        check_target(folder)  # again: another process may have finished it before we had the lock
        delete(partial)
        with atomic_file(target, remedy, partial):  # an empty folder of that name is replaced
            yield partial
