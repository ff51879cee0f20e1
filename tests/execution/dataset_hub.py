"""A server on this machine that answers like the hub's part for datasets; each folder below owner/ is one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


class DatasetHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.sent: dict[str, int] = {}  # bytes of bodies, by file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    server: DatasetHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self) -> None:
        self.server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = self.path.partition("?")[0]
        if path == "/sent":
            self.send(self.server.sent)
        elif asked := re.fullmatch(
            r"/api/datasets/([\w.-]+/[\w.-]+)(?:/(revision|tree|paths-info)/(\w+)(?:/(.*))?)?", path
        ):
            self.api(*asked.groups())
        elif asked := re.fullmatch(r"/datasets/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.*)", path):
            self.file(self.server.folder / asked[1] / asked[3])
        else:
            self.missing("EntryNotFound")

    def api(self, name: str, question: str | None, revision: str | None, below: str | None) -> None:
        root = self.server.folder / name
        if not root.is_dir():
            self.missing("RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self.missing("RevisionNotFound")
        elif question == "tree":
            self.tree(root, root / (below or ""))
        elif question == "paths-info":
            wanted = json.loads(self.body)["paths"]
            self.send([self.entry(root, root / path) for path in wanted if (root / path).exists()])
        else:
            files = sorted(file for file in root.rglob("*") if file.is_file())
            siblings = [{"rfilename": str(file.relative_to(root))} for file in files]
            self.send(
                {
                    "id": name,
                    "sha": COMMIT,
                    "siblings": siblings,
                    "tags": [],
                    "private": False,
                    "downloads": 0,
                }
            )

    def tree(self, root: Path, folder: Path) -> None:
        if not folder.is_dir():
            self.missing("EntryNotFound")
            return
        found = folder.rglob("*") if "recursive=true" in self.path.lower() else folder.iterdir()
        self.send([self.entry(root, path) for path in sorted(found)])

    @staticmethod
    def entry(root: Path, path: Path) -> dict[str, object]:
        kind = "directory" if path.is_dir() else "file"
        return {
            "type": kind,
            "path": str(path.relative_to(root)),
            "size": path.stat().st_size,
            "oid": "0" * 40,
        }

    def file(self, path: Path) -> None:
        if not path.is_file():
            self.missing("EntryNotFound")
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status = 206 if asked else 200
        first, last = (int(asked[1]), min(int(asked[2]), len(data) - 1)) if asked else (0, len(data) - 1)
        self.send_response(status)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.server.sent[path.name] = self.server.sent.get(path.name, 0) + last - first + 1
            self.wfile.write(data[first : last + 1])

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


@contextmanager
def serving_datasets(folder: Path) -> Iterator[DatasetHub]:
    server = DatasetHub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
