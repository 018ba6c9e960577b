"""A stand-in of the Hugging Face hub: the calls of its API that putting a folder there and fetching it take."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Hub(ThreadingHTTPServer):
    """Repositories by ``owner/name``, each with files by path; ``tokens`` seen, ``private`` ones among them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Calls)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Calls(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(
        self, status: int, value: object = None, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        content = body if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(sent)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            if name in self.server.files:
                self._answer(409, {"url": f"{self.server.url}/{name}", "error": "You already created this repo"})
                return
            self.server.files[name], self.server.private[name] = (
                {},
                asked.get("visibility") == "private" or bool(asked.get("private")),
            )
            self._answer(200, {"url": f"{self.server.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(sent)["files"]]
            self._answer(200, {"files": [one | {"shouldIgnore": False, "oid": None} for one in names]})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in sent.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            about = {"commitUrl": f"{self.server.url}/{name}/commit/{_SHA}", "commitOid": _SHA, "success": True}
            self._answer(200, about)
        else:
            self._answer(404, {"error": path})

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        held = self.server.files.get(name)
        if held is None:
            self._answer(404, {"error": "Repository not found"}, headers={"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            file = held.get(path.partition("/resolve/")[2].partition("/")[2])
            if file is None:
                self._answer(404, {"error": "no such file"}, headers={"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha1(file).hexdigest()
            self._answer(200, body=file, headers={"ETag": f'"{etag}"', "X-Repo-Commit": _SHA})
        elif "/tree/" in path:
            self._answer(200, [{"type": "file", "path": one, "size": len(held[one]), "oid": "0"} for one in held])
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file} for file in held]
            about = {"id": name, "modelId": name, "sha": _SHA, "siblings": siblings, "private": True, "tags": []}
            self._answer(200, about | {"downloads": 0, "likes": 0})
        else:
            self._answer(404, {"error": path})

    do_HEAD = do_GET


_SHA = "a" * 40


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on loopback."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
