"""Datasets of the hub as text: streamed row by row, never downloaded whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moescope.checkpoint.files import first_line
from moescope.errors import BadInput

PREFIX = "hf://datasets/"
SPELLING = f"{PREFIX}OWNER/NAME[@REVISION][/CONFIG][:SPLIT][#COLUMN]"
ADDRESS = re.compile(
    re.escape(PREFIX) + r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<config>[^:#/]+))?(?::(?P<split>[\w.-]+))?(?:#(?P<column>.+))?"
)
TEXT_COLUMNS = ("text", "content", "messages")
CHECKED_ROWS = 1  # rows looked at before any work, to know the columns


@dataclass(frozen=True)
class HubText:
    """One column of one split of a dataset, at one commit."""

    given: str  # as the user wrote it
    repository: str
    commit: str
    config: str
    split: str
    column: str

    @property
    def address(self) -> str:
        """The same with nothing left to be guessed, so that it names the same rows next year."""
        return f"{PREFIX}{self.repository}@{self.commit}/{self.config}:{self.split}#{self.column}"

    def read(self) -> Iterator[str | list[Any]]:
        """Every row's text, or its messages; rows without one are passed over."""
        with one_line(self.given):
            for row in streamed(self.repository, self.config, self.commit)[self.split]:
                content = row[self.column]
                if isinstance(content, str | list) and content:
                    yield content


def is_hub_text(path: str) -> bool:
    return path.startswith("hf://")


def find_hub_text(given: str) -> HubText:
    """What the user's word means, or one line that says what is missing.

    Dataset, revision, config, split or column.
    """
    match = ADDRESS.fullmatch(given.rstrip("/"))
    if match is None:
        raise BadInput(f"{given}: not a dataset of the hub; write {SPELLING}")
    check_installed(given)
    repository = f"{match['owner']}/{match['name']}"
    commit = dataset_commit(given, repository, match["revision"])
    with one_line(given):
        config = chosen_config(given, repository, commit, match["config"])
        splits = streamed(repository, config, commit)
        split = chosen_split(given, list(splits), match["split"])
        first = next(iter(splits[split].take(CHECKED_ROWS)), None)
    if first is None:
        raise BadInput(f"{given}: split {split} has no row; name another one with :SPLIT")
    return HubText(given, repository, commit, config, split, chosen_column(given, first, match["column"]))


def check_installed(given: str) -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise BadInput(
            f"{given}: the package datasets is not installed; install moescope with its extra: "
            "pip install 'moescope[hf]'"
        ) from None


def dataset_commit(given: str, repository: str, revision: str | None) -> str:
    """The commit that the revision names now: a run holds on to it."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except hub.RevisionNotFoundError:
        raise BadInput(f"{given}: the hub has no revision {revision} of it; check its name") from None
    except hub.GatedRepoError:
        raise BadInput(f"{given}: access must be asked for on the hub first; then `hf auth login`") from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        raise BadInput(
            f"{given}: the hub has no such dataset, or it is private; check the name, or `hf auth login`"
        ) from None
    except Exception as error:  # no network, a proxy, a time-out: each HTTP library has its own
        raise BadInput(
            f"{given}: the hub cannot be reached ({first_line(error)[:120]}); download the text "
            "where it can, and give its file"
        ) from None


def chosen_config(given: str, repository: str, commit: str, wanted: str | None) -> str:
    import datasets

    with without_bars():
        known = datasets.get_dataset_config_names(repository, revision=commit)
        default = datasets.get_dataset_default_config_name(repository, revision=commit)
    config = wanted or default
    if config is None:
        raise BadInput(f"{given}: has several configs; name one as /CONFIG: {named(known)}")
    if config not in known:
        raise BadInput(f"{given}: no config {config!r} in it; known: {named(known)}")
    return str(config)


def chosen_split(given: str, known: list[str], wanted: str | None) -> str:
    """The one asked for; else the training split, or the only one."""
    split = wanted or ("train" if "train" in known else known[0] if len(known) == 1 else None)
    if split is None:
        raise BadInput(f"{given}: has several splits; name one as :SPLIT: {named(known)}")
    if split not in known:
        raise BadInput(f"{given}: no split {split!r} in it; known: {named(known)}")
    return split


def chosen_column(given: str, row: dict[str, Any], wanted: str | None) -> str:
    """The one asked for; else text, content or messages.

    Only what holds text, or the messages of a chat, will do.
    """
    column = wanted or next((name for name in TEXT_COLUMNS if name in row and holds_text(row[name])), None)
    if column is None:
        raise BadInput(
            f"{given}: no column text, content or messages in it; name one as #COLUMN: {named(row)}"
        )
    if column not in row:
        raise BadInput(f"{given}: no column {column!r} in it; known: {named(row)}")
    if not holds_text(row[column]):
        kind = type(row[column]).__name__
        raise BadInput(
            f"{given}: column {column!r} holds no text ({kind}); name another one as #COLUMN: {named(row)}"
        )
    return column


def holds_text(value: Any) -> bool:
    """Text, messages or token ids; the first row may also have none."""
    return value is None or isinstance(value, str | list)


def named(names: Iterable[str]) -> str:
    """The names, the first twenty where they are many."""
    found = [str(name) for name in names]
    return ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")


def streamed(repository: str, config: str, commit: str) -> Any:
    """split -> its rows, read as they are asked for."""
    import datasets

    with without_bars():
        return datasets.load_dataset(repository, config, revision=commit, streaming=True)


@contextmanager
def without_bars() -> Iterator[None]:
    """The library's own progress bars kept off the terminal; moescope has one."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def one_line(given: str) -> Iterator[None]:
    """Whatever the library raises, in one line.

    It has errors of its own, of the HTTP library and of each file format.
    """
    try:
        yield
    except (BadInput, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise BadInput(
            f"{given}: cannot be read ({first_line(error)[:200]}); check the dataset, or give a file"
        ) from None
