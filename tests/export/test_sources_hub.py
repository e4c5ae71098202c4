"""Hub ids, against a small hub on this machine that speaks as much HTTP as is needed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.sentencepieces import trained, write_model
from tests.support.small_checkpoints import LLAMA, write_directory

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Opens the source in a fresh process, for the hub's client reads its environment when imported.
SCRIPT = """
import sys
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources import open_source
try:
    source = open_source(sys.argv[1])
except ExportError as error:
    print(type(error).__name__, error)
else:
    d = source.description
    print(d.kind, d.location, d.revision, source.config.name, *sorted(d.sha256))
    print(source.tensor("model.norm.weight").shape)
"""


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the model "owner/tiny"; yields its address and the files it gave."""
    inputs: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            files = {
                file.relative_to(folder).as_posix(): file
                for file in folder.rglob("*")
                if file.is_file()
            }
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            if path.startswith("/api/models/owner/tiny/revision/"):
                siblings = [{"rfilename": name} for name in files]
                self._send(json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}))
            elif path.startswith("/api/models/owner/tiny/tree/"):
                entries = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40}
                    for n, f in files.items()
                ]
                self._send(json.dumps(entries))
            elif path == f"/owner/tiny/resolve/{COMMIT}/{name}" and name in files:
                data = files[name].read_bytes()
                if body:
                    inputs.append(name)
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    self.wfile.write(data)
            else:
                code = "GatedRepo" if "gated" in path else "RepoNotFound"
                self.send_response(403 if "gated" in path else 404)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", inputs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def open_in_process(source: str, endpoint: str, home: Path) -> str:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hub_id(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    with hub(folder) as (endpoint, values):
        for source in ("owner/tiny", "owner/tiny@main"):
            output = open_in_process(source, endpoint, tmp_path / "home")
            assert output.startswith(f"hub owner/tiny {COMMIT} tiny config.json model-00001")
            assert "(32,)" in output
        # Only what is needed, and once.
        assert sorted(values) == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]


def test_a_tokenizer_in_another_form_and_named_templates_are_fetched(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served", LLAMA | {"vocab_size": 700})
    (folder / "tokenizer.json").unlink()
    write_model(folder, trained("bpe"))
    (folder / "chat_template.jinja").write_text("usual")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (folder / "onnx").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "onnx" / name).write_text("of no use")
    with hub(folder) as (endpoint, values):
        output = open_in_process("owner/tiny", endpoint, tmp_path / "home")
        assert "config.json model.safetensors tokenizer.model\n" in output
        assert sorted(values) == [
            "additional_chat_templates/tool_use.jinja",
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.model",
        ]


def test_what_is_not_supported_costs_no_download(tmp_path: Path) -> None:
    for number, change in enumerate(
        ({"model_type": "bloom"}, {"is_causal": False}, {"quantization_config": {"bits": 4}})
    ):
        folder = write_directory(tmp_path / f"served-{number}", LLAMA | change)
        with hub(folder) as (endpoint, values):
            output = open_in_process("owner/tiny", endpoint, tmp_path / f"home-{number}")
            assert "ExportError" in output
            assert "config.json: " in output
            assert values == ["config.json"]


def test_hub_errors_say_what_to_do(tmp_path: Path) -> None:
    with hub(write_directory(tmp_path / "served")) as (endpoint, _):
        assert "DownloadError the hub has no model owner/other" in open_in_process(
            "owner/other", endpoint, tmp_path / "home"
        )
        gated = open_in_process("owner/gated", endpoint, tmp_path / "home")
        assert "DownloadError" in gated
        assert "accept its licence" in gated
    unreachable = open_in_process("owner/tiny", endpoint, tmp_path / "home")
    assert "DownloadError owner/tiny could not be fetched" in unreachable
    assert "give a directory" in unreachable
