"""Try a grammar in a process of its own first, which can be ended: its cost has no bound.

In:  a `Grammar`. Out: nothing, or a `GrammarError`: it does not compile, takes too much time of a
     processor, or too much memory. What has passed is about as cheap to compile again: control
     tokens that a turn names are plain text here.

The process is shared by all of this one, reads grammars from its stdin, and ends with it. It knows
no vocabulary but bytes: what explodes does so before tokens matter. Time on the clock says nothing
of a grammar: a process that stands still, or was ended by somebody else, is replaced, and the
grammar tried once more; after that it is a `GrammarBusyError`.
"""

import atexit
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from pilotfish.engines.compiling import compile_grammar, on_deep_stack
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.speculation.logits_options import Grammar

CPU_S: Final = 0.25  # that a grammar may take, of a processor
TOO_LONG: Final = "The grammar takes too long to compile, or too much memory."
_MEMORY = 1 << 30
# On the clock: for an answer of a process that computes, its start included, and without any
# computing, after which it counts as standing still.
_PATIENCE_S, _STILL_S = 10.0, 2.0
_ORPHANED_S = 30
_PR_SET_PDEATHSIG = 1
# Its address space is bounded, whatever the number of cores: no stacks and arenas for each of them.
_FRUGAL: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_STARTED_CPU_S = 0.3  # what it takes to start another process, about
_FORCED = 4096  # bytes that a grammar may force at once: each row of it takes 1 µs a byte
# What ends the process by a grammar's doing: its time, which is kept as a verdict; and its depth
# and its memory, which are not, since they may be the machine's.
_OWN_DOING = {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}


class Trial:
    """The process, started when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._spent = threading.local()

    @property
    def cpu_s(self) -> float:
        """Seconds of a processor that the trials of the calling thread have taken, about.

        What others try meanwhile is no cost of its grammars.
        """
        return getattr(self._spent, "cpu_s", 0.0)

    def _spend(self, cpu_s: float) -> None:
        self._spent.cpu_s = self.cpu_s + cpu_s

    def warm(self) -> None:
        """Start the process, and wait until it is ready."""
        with self._lock:
            self._await(self._started())

    def attempt(self, grammar: Grammar) -> None:
        """Try a grammar; `GrammarError` says why it cannot be used."""
        with self._lock:
            if not (self._passes(grammar) or self._passes(grammar)):
                raise GrammarBusyError(
                    "This machine is too busy to try the grammar: try again later."
                )

    def _passes(self, grammar: Grammar) -> bool:
        """Whether the grammar passes; False: nothing can be said. Raises `GrammarError`."""
        process = self._started()
        if not self._await(process):
            self.end()
            return False
        line = _answer(process, json.dumps(grammar).encode() + b"\n")
        if not line:
            self._replace(process.poll() if line is None else process.wait())
            return False
        said, lasting, cpu_s = json.loads(line)
        self._spend(cpu_s)
        if said:
            error = GrammarError(said)
            error.lasting = lasting
            raise error
        return True

    def _replace(self, status: int | None) -> None:
        """End a process that gave no answer; `GrammarError` if its exit status blames the grammar.

        status: None where it has not ended by itself.
        """
        self.end()
        self._spend(_STARTED_CPU_S)
        if status is not None and -status in _OWN_DOING:
            self._spend(CPU_S)
            self._started()  # it is ready by the time that the next one comes
            error = GrammarError(TOO_LONG)
            error.costly, error.lasting = True, -status == signal.SIGPROF
            raise error

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.end()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pilotfish.engines.grammar_trial"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | _FRUGAL,
                    start_new_session=True,  # a Ctrl-C is its parent's affair
                )
            except OSError as error:  # no descriptors, no memory, no processes left
                raise GrammarBusyError(
                    f"The process that tries grammars cannot start: {error.strerror}. "
                    "Try again later."
                ) from error
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _await(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until it is ready; returns whether it is."""
        if not self._ready:
            self._ready = bool(_answer(process))
        return self._ready

    def end(self) -> None:
        """End the process."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


TRIAL = Trial()
atexit.register(TRIAL.end)


def _answer(process: "subprocess.Popen[bytes]", asked: bytes = b"") -> bytes | None:
    """Ask a process, and return its line; b"": it has ended; None: it stands still, or is too slow.

    It may take its time as long as it computes.
    """
    assert process.stdin is not None
    moved_s = time.monotonic()
    until_s, spent = moved_s + _PATIENCE_S, b""
    line: bytes | None = None
    while line is None and time.monotonic() < until_s:
        if asked:
            _, writable, _ = select.select([], [process.stdin], [], _STILL_S / 4)
            if writable:
                try:
                    written = os.write(process.stdin.fileno(), asked)
                except OSError:  # the process has ended
                    return b""
                asked = asked[written:]
        else:
            line = _line(process, _STILL_S / 4)
        if (now := _cpu_time(process.pid)) != spent:
            spent, moved_s = now, time.monotonic()
        elif time.monotonic() - moved_s > _STILL_S:
            break
    return line


def _cpu_time(pid: int) -> bytes:
    """Return the processor's time of a process as the kernel writes it; b"" where it does not."""
    with suppress(OSError):
        told = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return b" ".join(told[11:13])
    return b""


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


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, even if it stands still.

    On Linux; elsewhere it ends when its stdin does.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve() -> None:
    """Answer grammars, a line each, until stdin ends."""
    _end_with_parent()
    from llguidance import LLTokenizer

    with suppress(OSError, ValueError):  # a confined unit may not; the time bounds it, too
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    plain: Any = _Bytes()
    words = LLTokenizer(plain, n_vocab=257, eos_token=256)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        grammar = Grammar(*json.loads(line))
        said, lasting, begun_s = "", True, time.process_time()
        # it ends by itself: at its limit, and if its parent cannot end it
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.alarm(_ORPHANED_S)
        try:
            matcher, _ = on_deep_stack(partial(compile_grammar, grammar, words))
            if len(matcher.compute_ff_bytes()) > _FORCED:
                said = f"The grammar begins with a text of more than {_FORCED:,} bytes."
        except (GrammarBusyError, MemoryError):  # it may be full of earlier ones
            sys.exit(GrammarBusyError.exit_code)
        except GrammarError as error:
            said = str(error)
        except BaseException as error:  # this machine may be short of something
            said, lasting = f"The grammar cannot be used: {type(error).__name__}.", False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.alarm(0)
        print(json.dumps([said, lasting, time.process_time() - begun_s]), flush=True)


if __name__ == "__main__":
    _serve()
