"""Try a grammar in a process of its own first, which can be ended: its cost has no bound.

In:  a `Grammar`. Out: nothing, or a `GrammarError`: it does not compile, takes too long, or too
     much memory. What has passed is about as cheap to compile again: control tokens that a turn
     names are plain text here.

The process is shared by all of this one, reads grammars from its stdin, and ends with it. It knows
no vocabulary but bytes: what explodes does so before tokens matter.
"""

import atexit
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from pilotfish.engines.compiling import compiled, on_deep_stack
from pilotfish.engines.errors import GrammarError
from pilotfish.speculation.shaping import Grammar

CPU_S, LIMIT_S = 0.25, 1.0  # of a grammar; the latter on the clock, of a busy machine
TOO_LONG = "The grammar takes too long to compile, or too much memory."
_MEMORY = 1 << 30
_START_S = 10.0
_ORPHANED_S = 5
_FORCED = 4096  # bytes that a grammar may force at once: each row of it takes 1 µs a byte


class Trial:
    """The process, started when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def warm(self) -> None:
        """Start the process, and wait until it is ready."""
        with self._lock:
            self._await(self._started())

    def attempt(self, grammar: Grammar) -> None:
        """Try a grammar; `GrammarError` says why it cannot be used."""
        with self._lock:
            process = self._started()
            if not self._await(process):
                raise GrammarError("Grammars cannot be tried: the process for it does not start.")
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                self.end()
                raise GrammarError("The grammar could not be tried; try again.") from None
            line = _line(process, LIMIT_S)
            if not line:
                self.end()
                self._started()  # it is ready by the time that the next one comes
                raise too_costly(TOO_LONG)
        if error := json.loads(line):
            raise GrammarError(error)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pilotfish.engines.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is its parent's affair
            )
        return self._process

    def _await(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until it is ready; returns whether it is."""
        if not self._ready:
            self._ready = bool(_line(process, _START_S))
        return self._ready

    def end(self) -> None:
        """End the process."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def too_costly(why: str) -> GrammarError:
    """Make the error of a grammar that has cost much."""
    error = GrammarError(why)
    error.costly = True
    return error


TRIAL = Trial()
atexit.register(TRIAL.end)


def _line(process: "subprocess.Popen[bytes]", limit_s: float) -> bytes | None:
    """Read a process's next line; None: not in time; b"": it has ended."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if readable else None


class _Bytes:
    """A vocabulary of single bytes and an end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        return [*text.encode("utf-8", "replace")]


def _serve() -> None:
    """Answer grammars, a line each, until stdin ends."""
    from llguidance import LLTokenizer

    with suppress(OSError, ValueError):  # a confined unit may not; the time bounds it, too
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    plain: Any = _Bytes()
    words = LLTokenizer(plain, n_vocab=257, eos_token=256)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        grammar = Grammar(*json.loads(line))
        said = ""
        # it ends by itself: at its limit, and if its parent cannot end it
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.alarm(_ORPHANED_S)
        try:
            matcher = on_deep_stack(partial(compiled, grammar, words))
            if len(matcher.compute_ff_bytes()) > _FORCED:
                said = f"The grammar begins with a text of more than {_FORCED:,} bytes."
        except GrammarError as error:
            said = str(error)
        except BaseException as error:
            said = f"The grammar cannot be used: {type(error).__name__}."
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.alarm(0)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    _serve()
