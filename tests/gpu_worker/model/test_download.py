"""A model that comes from a hub: one on this machine."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 3_000_000,
    "pytorch_model.bin": b"the same weights again",
    "original/model.safetensors": b"and again",
}
CODE = """
import sys
from gpu_worker.model.download import LoggedProgress, download
from shared.logs import setup_logging

setup_logging("worker", "info")
LoggedProgress.interval_s = 0.0
download(sys.argv[1])
"""


class Hub(BaseHTTPRequestHandler):
    """The part of a hub that one download needs."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        match = re.fullmatch(r"/org/model/resolve/[^/]+/(.+)", path)
        if match is not None and match[1] in FILES:
            body = FILES[match[1]]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        elif path.startswith("/api/models/org/model/tree/"):
            body, headers = json.dumps(list(map(_entry, FILES))).encode(), {}
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in FILES]
            found = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings}
            body, headers = json.dumps(found).encode(), {}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


def _entry(name: str) -> dict[str, object]:
    body = FILES[name]
    oid = hashlib.sha1(body).hexdigest()
    return {"type": "file", "path": name, "size": len(body), "oid": oid}


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_logged_with_bytes_and_percent(hub: str, tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, "org/model"],
        cwd=ROOT,
        env={**os.environ, **environ, "HF_HUB_OFFLINE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size = len(FILES["model.safetensors"]) + len(FILES["config.json"])
    assert f"downloading model percent=100 bytes={size} of={size}" in done.stderr, done.stderr
    assert done.stderr.count("downloading model") >= 2
    files = {path.name for path in tmp_path.rglob("snapshots/*/*")}
    assert files == {"config.json", "model.safetensors"}
