"""A real server on this machine: files in byte ranges, counted, or repositories as the hub serves them."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

COMMITS = {"main": "a" * 40, "step1000": "b" * 40}


class FileServer(ThreadingHTTPServer):
    """Serves one folder, or as the hub models and datasets: `hub` is owner/name -> folder.

    `sent` counts the bytes of bodies; the switches make it misbehave as real servers do.
    """

    daemon_threads = True

    def __init__(self, folder: Path, hub: dict[str, Path] | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.hub = folder, hub
        self.sent = 0
        self.sent_of = Counter[str]()  # by file
        self.requests: list[str] = []
        self.ranges = True  # honour Range headers
        self.drop_next = 0  # connections to cut before answering
        self.status: int | None = None  # answer everything with that
        self.silent = False  # accept every request and answer none

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if server.drop_next and self.command != "HEAD":
            server.drop_next -= 1
            self.connection.close()
        elif server.silent:
            self.rfile.read(1)  # until the client gives up
            self.close_connection = True
        elif server.status:
            self.send_error(server.status)
        elif server.hub is None:
            self.file(server.folder / path.lstrip("/"))
        elif path == "/sent":
            self.send(server.sent_of)
        elif match := re.fullmatch(r"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)(?:/(.*))?", path):
            self.hub_api(match[1], *(match[2] or "revision/main").split("/", 2))
        else:
            match = re.fullmatch(r"(?:/datasets)?/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.*)", path)
            known = match and match[1] in server.hub and match[2] in COMMITS.values()
            self.file(server.hub[match[1]] / match[3] if known else None, match[2] if known else "")

    do_HEAD = do_POST = do_GET

    def file(self, file: Path | None, commit: str = "") -> None:
        if file is None or not file.is_file():
            self.missing("EntryNotFound")
            return
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.server.ranges:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command != "HEAD":
            self.server.sent += len(data)  # before the client can have them all and look at the count
            self.server.sent_of[file.name] += len(data)
            self.wfile.write(data)

    def hub_api(self, name: str, question: str, revision: str, below: str = "") -> None:
        """The questions of the hub's interface that reading asks; `paths-info` of hub 0.x is a form."""
        root = (self.server.hub or {}).get(name)
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if root is None or commit is None:
            self.missing("RepoNotFound" if root is None else "RevisionNotFound")
        elif question == "tree":
            recursive = "recursive=true" in self.path.lower()
            paths = (root / below).rglob("*") if recursive else (root / below).glob("*")
            self.send([entry(root, path) for path in sorted(paths)])
        elif question == "paths-info":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            self.send([entry(root, root / path) for path in wanted if (root / path).exists()])
        else:
            files = [str(file.relative_to(root)) for file in sorted(root.rglob("*")) if file.is_file()]
            facts = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            self.send({**facts, "tags": [], "private": False, "downloads": 0})

    def send(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def entry(root: Path, path: Path) -> dict[str, object]:
    kind = "directory" if path.is_dir() else "file"
    return {
        "type": kind,
        "path": str(path.relative_to(root)),
        "size": path.stat().st_size,
        "oid": "0" * 40,
    }


@contextmanager
def serving(folder: Path, hub: dict[str, Path] | None = None) -> Iterator[FileServer]:
    server = FileServer(folder, hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
