"""A hub on this machine: an HTTP server that takes what `huggingface_hub` uploads, and remembers it."""

import base64
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub(ThreadingHTTPServer):
    """`branches`: files of each branch by name; to one that nobody has created nothing can be pushed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.unknown: list[str] = []
        self.refuses: int | None = None
        """Status of every answer, if it is to refuse."""


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.refuses is not None:
            return self.say(self.server.refuses, {})
        what = re.fullmatch(r"/api/(repos|models/[^/]+/[^/]+|validate-yaml)/?([a-z]*)/?(.*)", self.path)
        answer = getattr(self, f"on_{what[2] or 'validate'}", None) if what else None
        if answer is None:
            self.server.unknown.append(self.path)
            return self.say(404, {})
        return self.say(*answer(what[3], body))

    def say(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("x-error-code", "RevisionNotFound")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def on_validate(self, _: str, body: bytes) -> tuple[int, Any]:
        return 200, {"errors": [], "warnings": []}

    def on_create(self, _: str, body: bytes) -> tuple[int, Any]:
        return 200, {"url": f"{self.server.url}/me/{json.loads(body)['name']}"}

    def on_branch(self, name: str, body: bytes) -> tuple[int, Any]:
        if name in self.server.branches:
            return 409, {}
        self.server.branches[name] = {}
        return 200, {}

    def on_preupload(self, branch: str, body: bytes) -> tuple[int, Any]:
        if branch not in self.server.branches:
            return 404, {}
        files = [
            {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def on_commit(self, branch: str, body: bytes) -> tuple[int, Any]:
        lines = defaultdict(list)
        for line in map(json.loads, body.splitlines()):
            lines[line["key"]].append(line["value"])
        found = {file["path"]: base64.b64decode(file["content"]) for file in lines["file"]}
        self.server.branches[branch].update(found)
        return 200, {"commitUrl": f"{self.server.url}/me/run/commit/{'0' * 40}", "commitOid": "0" * 40}

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def fake_hub(monkeypatch: Any) -> Iterator[FakeHub]:
    """While it lasts, this process's `huggingface_hub` talks to it."""
    from huggingface_hub import HfApi, constants
    from transformers.utils import hub

    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_hf_api", HfApi(endpoint=server.url, token="hf_token"))
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
