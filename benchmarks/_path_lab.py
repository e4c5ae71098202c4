"""An edge and devices at the two ends of a kernel path, tiny models, and what crosses the path.

`Lab` runs commands of this or of another release's interpreter, and counts what their connections
sent; `MessageHandler` is a device service at the device's end, whose answers are streamed.
"""

import http.client
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from _common import throwaway_keys

from tests.support.kernel_path import KernelPath
from tests.support.path_connections import Connection
from tests.support.path_ways import PathConditions
from tests.support.tiny import tiny_artifact

START_S = 120.0
PORT = 7077
SERVICE_PORT = 8080
VOCABULARY = 1000
_SENTENCE = "The quick brown fox jumps over the lazy dog. "


def letters(count: int) -> str:
    """A prompt of so many letters; each is about 1.3 bytes on the wire, as ids of tokens."""
    return (_SENTENCE * (count // len(_SENTENCE) + 1))[:count]


@dataclass
class Outcome:
    """A command's end, and its connections."""

    seconds: float
    code: int | None  # None: it had to be killed
    message: str  # its last line
    connections: list[Connection]


@dataclass
class Answer:
    """A streamed answer: when it began, each piece came, and how it ended (monotonic seconds)."""

    begun_s: float
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a piece, from the beginning to the end."""
        times = [self.begun_s, *self.pieces_s, self.ended_s]
        return max(after - before for before, after in pairwise(times))


class Lab:
    """A path with an edge at its end."""

    def __init__(self, python: str, folder: Path, keys: Path, path: KernelPath) -> None:
        self.python, self.folder, self.keys, self.path = python, folder, keys, path
        self.endpoint = f"tcp://{path.address}:{PORT}"
        self._edge: subprocess.Popen[bytes] | None = None

    def idealise(self) -> None:
        """Undo all changes to the path."""
        self.path.set(**asdict(PathConditions()))

    def start_edge(self) -> None:
        """Start it (again), and wait until it serves."""
        words = ["edge", "serve", "--target", self.folder / "target", "--listen", self.endpoint]
        words += ["--keys", self.keys, "--threads", 1, "--context", 65536, "--sessions", 8]
        log = self.folder / "edge.log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            command = self.path.edge_command(self.python, "-m", "pilotfish", "-v", *words)
            self._edge = subprocess.Popen(command, stderr=out, stdout=out, cwd=self.folder)
        deadline = time.monotonic() + START_S
        while b"serves on" not in log.read_bytes()[before:]:
            if self._edge.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the edge does not start: {log.read_text()[-500:]}")
            time.sleep(0.05)

    def signal_edge(self, number: signal.Signals) -> None:
        """SIGKILL: it is dead; SIGSTOP: it is frozen, and its kernel goes on."""
        assert self._edge is not None
        self._edge.send_signal(number)

    def stop_edge(self) -> None:
        """Kill it if it runs."""
        if self._edge is not None:
            self._edge.kill()
            self._edge.wait()

    def run(self, *words: object, within_s: float = 90.0) -> Outcome:
        """Run a command of the package at the device's end."""
        self.path.forget()
        before = len(self.path.connections())
        command = self.path.device_command(self.python, "-m", "pilotfish", *words)
        begun_s, code = time.monotonic(), None
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            text=True,
            errors="replace",
        )
        try:
            reply, _ = process.communicate(timeout=within_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            reply, _ = process.communicate()
        seconds = time.monotonic() - begun_s
        mine = self.path.connections()[before:]
        return Outcome(
            seconds,
            code,
            (reply.strip().splitlines() or [""])[-1],
            mine,
        )

    def ask(self, prompt: str, policy: str, *more: object, within_s: float = 90.0) -> Outcome:
        """Answer one prompt with `device run`."""
        words = ["device", "run", "--draft", self.folder / "draft", "--edge", self.endpoint]
        words += ["--keys", self.keys, "--on-link-loss", policy, "--threads", 1, *more]
        return self.run(*words, prompt, within_s=within_s)

    @contextmanager
    def service(self, policy: str, *more: object, port: int = SERVICE_PORT) -> Iterator["Service"]:
        """Run a device service at the device's end."""
        words = ["device", "serve", "--draft", self.folder / "draft", "--edge", self.endpoint]
        words += ["--keys", self.keys, "--on-link-loss", policy, "--threads", 1]
        words += ["--listen", f"127.0.0.1:{port}", *more]
        command = self.path.device_command(self.python, "-m", "pilotfish", "-v", *words)
        with (self.folder / f"device-{port}.log").open("ab") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log, cwd=self.folder)
        try:
            service = Service(self.path, port)
            service.await_health()
            yield service
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


class Service:
    """The service as its clients see it; they are at the device's end, too."""

    def __init__(self, path: KernelPath, port: int) -> None:
        self._path, self._port = path, port

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        with self._path.at_device():
            connection.connect()
        return connection

    def await_health(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                self.edge_up()
                return
            if time.monotonic() > deadline:
                raise RuntimeError("the device service does not start")
            time.sleep(0.1)

    def edge_up(self) -> bool:
        """What `/health` says of the link."""
        connection = self._connect()
        connection.request("GET", "/health")
        up: bool = json.loads(connection.getresponse().read())["edge_up"]
        connection.close()
        return up

    def await_edge(self, up: bool, within_s: float = 30.0) -> float | None:
        """Wait until `/health` says so; returns the seconds that it took, or None."""
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < within_s:
            if self.edge_up() is up:
                return time.monotonic() - begun_s
            time.sleep(0.02)
        return None

    def answer(self, messages: list[dict[str, Any]] | str, max_tokens: int) -> Answer:
        """Ask for an answer, and wait for its end."""
        seen = Answer(time.monotonic())
        self._stream(seen, messages, max_tokens)
        return seen

    def scores(self, words: int) -> Answer:
        """Have a prompt of so many words scored: a reply of some 600 bytes a word comes down."""
        seen = Answer(time.monotonic())
        body = {"model": "pilotfish", "prompt": "fox " * words, "max_tokens": 1}
        body |= {"echo": True, "logprobs": 20}
        try:
            connection = self._connect()
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            response = connection.getresponse()
            read = response.read()
            seen.error = "" if response.status == 200 else f"{response.status}: {read[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            seen.error = repr(error)
        seen.ended_s = time.monotonic()
        return seen

    def begin(
        self, messages: list[dict[str, Any]] | str, max_tokens: int
    ) -> tuple[Answer, threading.Thread]:
        """Ask for an answer; it grows while the thread runs."""
        seen = Answer(time.monotonic())
        thread = threading.Thread(target=self._stream, args=(seen, messages, max_tokens))
        thread.start()
        return seen, thread

    def _stream(self, seen: Answer, messages: list[dict[str, Any]] | str, max_tokens: int) -> None:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {
            "model": "pilotfish",
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
        }
        try:
            connection = self._connect()
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
            response = connection.getresponse()
            if response.status != 200:
                seen.error = f"{response.status}: {response.read()[:200]!r}"
                return
            for line in response:
                if line.startswith(b"data: {"):
                    seen.pieces_s.append(time.monotonic())
                    if b'"error"' in line:
                        seen.error = line.decode()[:200]
        except (OSError, http.client.HTTPException) as error:
            seen.error = repr(error)
        finally:
            seen.ended_s = time.monotonic()


@contextmanager
def laboratory(python: str, folder: Path, **conditions: Any) -> Iterator[Lab]:
    """A path, keys, tiny models and an edge; ``folder`` gets the logs."""
    make_models(folder)
    with throwaway_keys() as keys, KernelPath(**conditions) as path:
        lab = Lab(python, folder, keys, path)
        try:
            lab.start_edge()
            yield lab
        finally:
            lab.stop_edge()


def make_models(folder: Path) -> None:
    """Write a tiny drafter and target that take long prompts."""
    sizes = {"vocab": VOCABULARY, "context": 65536, "heads": 2, "kv_heads": 1}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "target").exists():
        tiny_artifact(folder / "target", seed=1, **sizes)
        tiny_artifact(folder / "draft", seed=2, **sizes)
