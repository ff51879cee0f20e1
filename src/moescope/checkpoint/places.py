"""Where a checkpoint may lie: a folder, a file, a repository on the hub, a URL."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moescope.checkpoint.files import Files, first_line
from moescope.checkpoint.headers import GGUF, INDEX_NAMES, folder_tensors
from moescope.checkpoint.local import LocalFiles
from moescope.errors import BadInput

HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<revision>[\w./-]+))?")
HUB_PAGE = re.compile(
    r"https?://(?:www\.)?huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)(?:/tree/(?P<revision>[^/]+))?/?"
)
WEIGHTS = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True)
class Place:
    location: str  # as given
    address: str  # absolute, without revision
    name: str
    files: Files
    one_file: str | None = None
    revision: str | None = None


def find_place(model: str | Path, revision: str | None = None) -> Place:
    """What the user's word for a checkpoint means. A folder or file of that name comes before a hub id."""
    text = str(model)
    if page := HUB_PAGE.fullmatch(text):  # as copied from a browser
        return hub_place(page["id"], revision or page["revision"])
    if text.startswith("hf://") or (isinstance(model, str) and may_be_hub_id(text)):
        return hub_place(text, revision)
    if revision is not None:
        raise BadInput(
            f"{shown_url(text)}: a revision ({revision}) is of a hub id such as owner/name; leave it out"
        )
    if "://" in text and not text.startswith("file://"):
        return url_place(text)
    return local_place(text)


def may_be_hub_id(text: str) -> bool:
    """owner/name, unless something of that name, or a folder named like the owner, is here."""
    match = HUB_ID.fullmatch(text)
    if match is None or match["owner"].startswith("."):
        return False
    return not Path(text).exists() and not Path(match["owner"]).is_dir()


def local_place(text: str) -> Place:
    near = close_names(text)
    missing = BadInput(
        f"{text}: no such folder or file; " + (f"did you mean {near[0]}?" if near else "check the path")
    )
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (RuntimeError, ValueError):  # no such user; a zero byte
        raise missing from None
    if is_file:
        if path.suffix == ".gguf":
            raise BadInput(f"{path}: {GGUF}")
        if path.suffix not in (".safetensors", ".bin"):
            raise BadInput(f"{path}: not a .safetensors file; give a folder or a .safetensors file")
        address = path.parent.resolve() / path.name  # a link keeps its name: the hub's cache is made of them
        return Place(str(path), str(address), path.stem, LocalFiles(path.parent), one_file=path.name)
    if not is_folder:
        raise missing
    return Place(str(path), str(path.resolve()), path.resolve().name, LocalFiles(path))


def close_names(text: str) -> list[str]:
    """What lies where the user pointed, under nearly that name."""
    try:
        path = Path(text)
        stem = path.name.split("@")[0]
        if path.with_name(stem).exists():
            return [str(path.with_name(stem))]
        found = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        return [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, found, 1, 0.7)]
    except (OSError, ValueError):
        return []


def shown_url(url: str) -> str:
    """Without name, password and query."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    plain = url.removesuffix(f"?{parts.query}") if parts.scheme in ("http", "https") else url
    return plain.replace(f"{user}@", "", 1) if user else plain


def url_place(url: str) -> Place:
    import fsspec

    from moescope.checkpoint.remote import RemoteFiles

    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    query = f"?{parts.query}" if parts.query and parts.scheme in ("http", "https") else ""
    plain, shown = url.removesuffix(query), shown_url(url).rstrip("/")
    try:
        filesystem, path = fsspec.core.url_to_fs(plain)
    except (
        Exception
    ) as error:  # every file system has errors of its own; fsspec says which package a protocol needs
        raise BadInput(f"{shown}: {first_line(error)[:200]}; check the address") from None
    root, name = path.rstrip("/"), shown.rsplit("/", 1)[-1]
    secrets = tuple(secret for secret in (f"{user}@", query) if len(secret) > 1)
    if not name.endswith((".safetensors", ".bin")):
        return Place(url, shown, name, RemoteFiles(filesystem, root, shown, query, secrets))
    files = RemoteFiles(filesystem, root.rsplit("/", 1)[0], shown.rsplit("/", 1)[0], query, secrets)
    return Place(url, shown, name.rsplit(".", 1)[0], files, one_file=name)


def hub_place(text: str, revision: str | None) -> Place:
    """A repository at one commit.

    From the hub's cache on this machine where it is whole, else from the server, in byte ranges.
    """
    match = HUB_ID.fullmatch(text.removeprefix("hf://").rstrip("/"))
    if match is None:
        raise BadInput(f"{text}: not a hub id; write owner/name or owner/name@revision")
    if revision and match["revision"] and revision != match["revision"]:
        raise BadInput(f"{text}: two revisions, {match['revision']} and {revision}; give one")
    repository, wanted = f"{match['owner']}/{match['name']}", revision or match["revision"]
    commit, problem = hub_commit(repository, wanted)
    cached = cached_folder(repository, commit or wanted)
    if commit is None:
        if cached is None:
            raise BadInput(f"{text}: no such folder or file here, and {problem}")
        commit = cached.name
    files: Files
    if cached is not None:
        files = LocalFiles(cached)
    else:
        import fsspec

        from moescope.checkpoint.remote import RemoteFiles

        files = RemoteFiles(
            fsspec.filesystem("hf"), f"{repository}@{commit}", f"hf://{repository}@{commit[:12]}"
        )
    name = match["name"] + (f"@{wanted.replace('/', '-')}" if wanted else "")
    return Place(text, f"hf://{repository}", name, files, revision=commit)


def hub_commit(repository: str, revision: str | None) -> tuple[str | None, str]:
    """The commit that the revision names now; None and why not where the hub does not tell."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    named = f"{repository}@{revision}" if revision else repository
    try:
        return HfApi().model_info(repository, revision=revision).sha, ""
    except hub.RevisionNotFoundError:
        raise BadInput(f"{named}: the hub has no such revision of it; check its name") from None
    except hub.GatedRepoError:
        raise BadInput(f"{named}: access must be asked for on the hub first; then `hf auth login`") from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        return None, "the hub has no such model, or it is private: check the name, or `hf auth login`"
    except Exception as error:  # no network, a proxy, a time-out: each HTTP library has its own
        return (
            None,
            (
                f"the hub cannot be reached ({first_line(error)[:120]}); download it where it can, "
                "and give its folder"
            ),
        )


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """The folder of that revision in the hub's cache, if all its weights are there."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=list(WEIGHTS)
            )
        )
        files = LocalFiles(folder)
        names = {info.file_name for info in folder_tensors(files).values()}
    except (BadInput, OSError, ValueError):
        return None
    # one file fetched by itself lies there too: without its index a shard must not pass for the model
    indexed = any(files.exists(index) for index in INDEX_NAMES)
    part_of_more = any(re.search(r"-of-\d+\.", name) for name in names) and not indexed
    return folder if files.exists("config.json") and not part_of_more else None
