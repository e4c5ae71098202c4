"""Run several commands at once, none of them longer than a time limit.

A driver that hangs can make its tools unkillable: a killed process then stays in the kernel. So
nothing here waits for the end of a process that was killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

_MOST_BYTES = 256 * 1024  # of one command's output; the rest is not read
_READ_BYTES = 1 << 16
_NO_FILE = 127  # exit status of a shell whose command is missing


class Output(NamedTuple):
    """The output of a command, stdout and stderr together; status None: it did not end in time."""

    text: str
    status: int | None = 0


def run_commands(commands: Mapping[str, Sequence[str]], limit_s: float) -> dict[str, Output]:
    """Run all commands at once; return their outputs by name.

    A command that does not end within ``limit_s`` is killed, and its output so far is returned. A
    command that cannot be started has status 127 and the reason as its output.
    """
    outputs: dict[str, Output] = {}
    running: dict[str, _Running] = {}
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for name, words in commands.items():
            try:
                running[name] = command = _Running(words)
            except OSError as error:
                outputs[name] = Output(error.strerror or str(error), _NO_FILE)
                continue
            selector.register(command.descriptor, selectors.EVENT_READ, command)
        while any(command.open for command in running.values()):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                break
            for key, _ in events:
                if not key.data.read():
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return outputs | {name: each.end(deadline) for name, each in running.items()}


class _Running:
    """A command that runs in a process group of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C", "LANGUAGE": "", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.descriptor = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        os.set_blocking(self.descriptor, False)
        self._parts: list[bytes] = []
        self._left = _MOST_BYTES
        self.open = True

    def read(self) -> bool:
        """Read what is there; return whether more may come."""
        part = os.read(self.descriptor, _READ_BYTES)
        self._parts.append(part[: self._left])
        self._left -= len(self._parts[-1])
        self.open = bool(part) and self._left > 0
        return self.open

    def end(self, deadline: float) -> Output:
        """Return the output; kill the command if it still runs at the deadline."""
        if self.open:
            os.close(self.descriptor)
        status = None
        with suppress(subprocess.TimeoutExpired):
            # a command that has closed its output ends at once, or is killed
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.poll()
        text = b"".join(self._parts).decode("utf-8", "replace")
        return Output(text, status)
