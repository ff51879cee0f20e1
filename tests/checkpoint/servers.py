"""Real servers on this machine.

One that gives files in byte ranges and counts, and one that answers like the model hub.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

COMMITS = {"main": "a" * 40, "step1000": "b" * 40}


class FileServer(ThreadingHTTPServer):
    """Serves one folder.

    `sent` counts the bytes of bodies; the switches make it misbehave as real servers do.
    """

    daemon_threads = True

    def __init__(self, folder: Path, hub: bool = False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.hub = folder, hub
        self.sent = 0
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
    types: ClassVar[dict[str, str]] = {".json": "application/json"}

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def do_POST(self) -> None:
        self.answer(head=False)

    def answer(self, head: bool) -> None:
        server = self.server
        server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if server.drop_next and not head:
            server.drop_next -= 1
            self.connection.close()
            return
        if server.silent:
            self.rfile.read(1)  # until the client gives up
            self.close_connection = True
            return
        if server.status:
            self.send_error(server.status)
            return
        if server.hub and self.path.startswith("/api/"):
            self.hub_api()
            return
        match = (
            re.fullmatch(r"/tiny/moe/resolve/(\w+)/(.*)", self.path)
            if server.hub
            else re.fullmatch(r"/()([^?]*)(?:\?.*)?", self.path)
        )
        file = server.folder / match[2] if match else None
        if file is None or not file.is_file() or (match and match[1] and match[1] not in COMMITS.values()):
            self.send_error(404)
            return
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and server.ranges:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        if not head:
            server.sent += len(data)  # before the client can have them all and look at the count
            self.wfile.write(data)

    def hub_api(self) -> None:
        """The questions of the hub's interface that reading a model asks; `paths-info` is one of hub 0.x."""
        files = [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
            for file in sorted(self.server.folder.iterdir())
        ]
        model = re.fullmatch(r"/api/models/tiny/moe(?:/revision/(?P<revision>[^/?]+))?(?:\?.*)?", self.path)
        tree = re.fullmatch(r"/api/models/tiny/moe/tree/(?P<revision>[^/?]+)/?(?:\?.*)?", self.path)
        paths = re.fullmatch(r"/api/models/tiny/moe/paths-info/(?P<revision>[^/?]+)", self.path)
        if paths:
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
            files = [file for file in files if file["path"] in asked]
        found = model or tree or paths
        revision = (found["revision"] or "main") if found else ""
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if found is None or commit is None:
            code = "RevisionNotFound" if found else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        answer = {
            "id": "tiny/moe",
            "sha": commit,
            "siblings": [{"rfilename": file["path"]} for file in files],
        }
        body = json.dumps(answer if model else files).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(folder: Path, hub: bool = False) -> Iterator[FileServer]:
    server = FileServer(folder, hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
