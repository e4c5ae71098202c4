"""A small hub on this machine, with as much of the Hugging Face hub's API as its client uses.

In: a folder of files, which is the model "owner/tiny". Out: an address for HF_ENDPOINT. It answers
with real sockets: redirects, ETags, ranges, sizes, a search, and the errors of gated and absent
models. `cut` ends the first transfer of a file in the middle; `short` lists files of which fewer
bytes come than were announced.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/tiny"


class Hub:
    """The state of the hub; requests read it.

    address: for HF_ENDPOINT. sent: names of the files that were sent, in order. ranges: the values
    of the header Range.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = COMMIT
        self.address = ""
        self.cut: set[str] = set()
        self.short: set[str] = set()
        self.sent: list[str] = []
        self.ranges: list[str] = []

    @property
    def files(self) -> Mapping[str, Path]:
        return {
            file.relative_to(self.folder).as_posix(): file
            for file in self.folder.rglob("*")
            if file.is_file()
        }

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables with which a process uses this hub, and a cache in `home`."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }


@contextmanager
def serving_hub(folder: Path) -> Iterator[Hub]:
    """Serve `folder` as the model "owner/tiny"."""
    hub = Hub(folder)

    class Handler(_Answers):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    state: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, url = self.state, urlsplit(self.path)
        files = hub.files
        name = url.path.partition(f"/resolve/{hub.commit}/")[2]
        if url.path == "/api/models":
            wanted = parse_qs(url.query)["search"][0]
            self._send([{"id": each} for each in (NAME, "owner/other") if wanted[:4] in each])
        elif url.path.startswith(f"/api/models/{NAME}/revision/"):
            revision = url.path.rpartition("/")[2]
            if revision in ("main", hub.commit):
                siblings = [{"rfilename": n, "size": f.stat().st_size} for n, f in files.items()]
                self._send({"id": NAME, "sha": hub.commit, "siblings": siblings})
            else:
                self._refuse(404, "RevisionNotFound")
        elif url.path.startswith(f"/api/models/{NAME}/tree/"):
            self._send(
                [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40}
                    for n, f in files.items()
                ]
            )
        elif url.path == f"/{NAME}/resolve/{hub.commit}/{name}" and name in files:
            self._resolve(name, files[name].read_bytes())
        elif url.path.startswith("/elsewhere/"):
            name = url.path.removeprefix("/elsewhere/")
            self._give(name, files[name].read_bytes(), body=body)
        elif "gated" in url.path:
            self._refuse(403, "GatedRepo")
        else:
            self._refuse(401 if "private" in url.path else 404, "RepoNotFound")

    def _resolve(self, name: str, data: bytes) -> None:
        """Send the client to another host, as the hub does for large files."""
        other = self.state.address.replace("127.0.0.1", "localhost")
        self.send_response(302)
        self.send_header("Location", f"{other}/elsewhere/{name}")
        self.send_header("X-Linked-Etag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Repo-Commit", self.state.commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _give(self, name: str, data: bytes, *, body: bool) -> None:
        hub, start = self.state, 0
        if wanted := self.headers.get("Range"):
            hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        end = len(data) // 2 if name in hub.short else len(data)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if not body:
            return
        if name in hub.cut:
            hub.cut.discard(name)
            self.wfile.write(data[start : len(data) // 2])
            self.close_connection = True
            return
        hub.sent.append(name)
        self.wfile.write(data[start:end])

    def _send(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass
