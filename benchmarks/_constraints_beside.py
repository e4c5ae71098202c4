"""A hostile client of an edge, and what becomes of a neighbour; for `constraints.py` only."""

import json
import os
import select
import shutil
import string
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from _common import PROMPTS
from _daemons import memory_mib

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.record import Round
from pilotfish.wire import keys

TOKENS = 32  # of a neighbour's answer
HERE = Path(__file__).parent


class Lines:
    """A process that answers lines on stdin by lines on stdout."""

    def __init__(self, *words: object, root: Path | None = None) -> None:
        info = os.environ | ({} if root is None else {"PYTHONPATH": str(root)})
        command = [sys.executable, *map(str, words)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=info, cwd=root
        )
        self.first = self.answer()

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def answered(self) -> bool:
        """Whether a line waits."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *info: object) -> None:
        self._process.kill()
        self._process.communicate()


class Memory(threading.Thread):
    """The peaks of an edge's own memory, and of all its children's, MiB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._over = pid, threading.Event()
        self.before = self.peak = memory_mib(pid)[0]
        self.children = 0.0

    def run(self) -> None:
        while not self._over.wait(0.02):
            with suppress(OSError, ValueError):
                self.peak = max(self.peak, memory_mib(self._pid)[0])
                below = Path(f"/proc/{self._pid}/task").glob("*/children")
                result = [int(pid) for each in below for pid in each.read_text().split()]
                self.children = max(self.children, sum(memory_mib(pid)[0] for pid in result))

    def end(self) -> float:
        """Returns what the edge holds now."""
        self._over.set()
        self.join()
        return memory_mib(self._pid)[0]


@contextmanager
def _folders(count: int) -> Iterator[list[Path]]:
    """The folders of an edge and its neighbour's keys, and of so many other clients'."""
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        folders = [Path(name) / f"device-{number}" for number in range(1 + count)]
        keys.create(folders[0], keys.EDGE)
        for folder in folders:
            keys.allow(folders[0], keys.create(folder, keys.DEVICE), folder.name)
            if folder != folders[0]:
                shutil.copy(folders[0] / "edge.pub", folder)
        yield folders


class Neighbour:
    """Generates, and compares its answers with those of a time when it was alone."""

    def __init__(self, device: Device, seen: list[Round]) -> None:
        self._device, self._seen = device, seen
        self._wanted = [self._answer(prompt) for prompt in PROMPTS[:2]]
        self.wrong = 0
        self.error = ""

    def _answer(self, prompt: str) -> list[int]:
        options: dict[str, Any] = {"protocol": "greedy", "window": 4, "max_tokens": TOKENS}
        return self._device.generate(prompt, **options).tokens

    def rounds(self, least: int, hostile: Lines | None = None) -> list[float]:
        """Seconds of the rounds of so many answers, and more until a hostile client is done."""
        self._seen.clear()
        done = 0
        while (done < least or (hostile and not hostile.answered())) and not self.error:
            try:
                reply = self._answer(PROMPTS[done % 2])
                self.wrong += reply != self._wanted[done % 2]
            except PilotfishError as error:
                self.error = f"{type(error).__name__}: {error}"
            done += 1
        return [each.timings.total for each in self._seen]


def attacked(names: Sequence[str], draft: Path, target: Path) -> Iterator[dict[str, Any]]:
    """Attack an edge in turn, each time with another key; the first that it is lost to is last."""
    seen: list[Round] = []
    with (
        _folders(1 + len(names)) as (folder, first, *others),
        EdgeServer(target, keys=folder, threads=1) as edge,
        Device(draft, edge.endpoint, folder, threads=1, on_round=seen.append) as device,
    ):
        neighbour, tokenizer = Neighbour(device, seen), device.tokenizer
        assert device.welcome is not None
        options = {
            "prompt": device.prompt(PROMPTS[2]).ids.tolist(), "vocab": device.welcome.vocab_size,
            "ends": device.welcome.eos_ids,
            "drafts": [tokenizer.encode(letter)[0] for letter in string.ascii_letters],
        }  # fmt: skip
        script = HERE / "_constraints_attacks.py"
        with Lines(script, edge.endpoint, json.dumps(options)) as hostile:
            hostile.tell(["", str(first)])  # the vocabulary has been read then
            hostile.answer()
            for name, key in zip(names, others, strict=True):
                yield _row(name, key, edge.pid, neighbour, hostile)
                if neighbour.error:
                    return


def _row(name: str, key: Path, edge: int, neighbour: Neighbour, hostile: Lines) -> dict[str, Any]:
    neighbour.wrong, quiet = 0, neighbour.rounds(2)
    memory = Memory(edge)
    memory.start()
    hostile.tell([name, str(key)])
    neighbour_value = neighbour.rounds(1, hostile) or [99.0]
    came = {"outcome": "silence", "settled_s": 99.0} if neighbour.error else hostile.answer()
    after = 0.0 if neighbour.error else memory.end()
    hostile.tell("go on")
    return {
        "attack": name, **came, "times": came.get("times", ""), "rounds": len(neighbour_value),
        "quiet_p50_ms": 1e3 * median(quiet), "p50_ms": 1e3 * median(neighbour_value),
        "quiet_worst_s": max(quiet), "worst_s": max(neighbour_value),
        "peak_mib": memory.peak - memory.before, "after_mib": after - memory.before,
        "trial_mib": memory.children, "wrong": neighbour.wrong, "error": neighbour.error,
    }  # fmt: skip
