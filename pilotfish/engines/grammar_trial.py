"""Try a grammar in a separate process, which can be killed: compilation may never end.

In:  a `Grammar`. Out: nothing, or a `GrammarError` if the grammar does not compile, or takes too
much CPU time or memory. A grammar that passes is compiled again in the main process, at about the
same cost: the trial has no control tokens, and treats the control tokens of a turn as plain text.

All threads of the main process share one trial process. The trial process reads grammars from its
stdin and ends with its parent. Its vocabulary is the 256 bytes: what makes a grammar costly does
not depend on the tokens. Wall-clock time is no evidence against a grammar. A trial process that
stalls, or that somebody killed, is replaced and the grammar is tried once more; if that fails,
`GrammarBusyError` is raised.
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

CPU_S: Final = 0.25  # limit (CPU seconds) for one grammar
TOO_LONG: Final = "The grammar takes too much time or memory to compile."
_MEMORY_BYTES = 1 << 30
# Wall-clock limits (s): for a reply, start of the process included; and without any CPU use, after
# which the process counts as stalled.
_PATIENCE_S, _STALLED_S = 10.0, 2.0
_ORPHANED_S = 30
_PR_SET_PDEATHSIG = 1
# Environment that keeps the process from reserving stacks and arenas per core: its address space is
# limited, and the number of cores is not.
_SINGLE_THREADED: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
_START_CPU_S = 0.3  # approximate CPU seconds of starting a trial process
_MOST_FORCED_BYTES = (
    # maximum bytes of the text that a grammar may force at its start; a row takes 1 µs per byte
    4096
)
# Signals that blame the grammar if they end the process: SIGPROF stands for too much CPU time, and
# this verdict is lasting. The other signals stand for stack depth and memory, and their verdict is
# not lasting, because the machine may be at fault.
_GRAMMAR_SIGNALS = {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}


class Trial:
    """The trial process, which starts when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._spent = threading.local()

    @property
    def cpu_s(self) -> float:
        """The approximate CPU seconds that trials of the calling thread took.

        Other threads' trials do not count.
        """
        return getattr(self._spent, "cpu_s", 0.0)

    def _add_cost(self, cpu_s: float) -> None:
        self._spent.cpu_s = self.cpu_s + cpu_s

    def start(self) -> None:
        """Start the process if necessary, and wait until it is ready."""
        with self._lock:
            self._wait_ready(self._running_process())

    def attempt(self, grammar: Grammar) -> None:
        """Try a grammar; raise `GrammarError` if it cannot be used."""
        with self._lock:
            if not (self._passes(grammar) or self._passes(grammar)):
                raise GrammarBusyError(
                    "This machine is too busy to try the grammar: try again later."
                )

    def _passes(self, grammar: Grammar) -> bool:
        """Try a grammar once; return False if the process gave no reply. Raises `GrammarError`."""
        process = self._running_process()
        if not self._wait_ready(process):
            self.end()
            return False
        line = _ask(process, json.dumps(grammar).encode() + b"\n")
        if not line:
            self._replace(process.poll() if line is None else process.wait())
            return False
        problem, lasting, cpu_s = json.loads(line)
        self._add_cost(cpu_s)
        if problem:
            error = GrammarError(problem)
            error.lasting = lasting
            raise error
        return True

    def _replace(self, status: int | None) -> None:
        """End a process that gave no reply; raise `GrammarError` if its status blames the grammar.

        status: exit status; None if the process was still running.
        """
        self.end()
        self._add_cost(_START_CPU_S)
        if status is not None and -status in _GRAMMAR_SIGNALS:
            self._add_cost(CPU_S)
            self._running_process()  # start the next process early
            error = GrammarError(TOO_LONG)
            error.costly, error.lasting = True, -status == signal.SIGPROF
            raise error

    def _running_process(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.end()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pilotfish.engines.grammar_trial"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | _SINGLE_THREADED,
                    start_new_session=True,  # so that Ctrl-C reaches only the parent
                )
            except OSError as error:  # the machine has no descriptors, memory or processes left
                raise GrammarBusyError(
                    f"The process that tries grammars cannot start: {error.strerror}. "
                    "Try again later."
                ) from error
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _wait_ready(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until the process is ready; return whether it is."""
        if not self._ready:
            self._ready = bool(_ask(process))
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


def _ask(process: "subprocess.Popen[bytes]", request: bytes = b"") -> bytes | None:
    """Send a request; return the reply line, b"" if the process ended, None if it stalls.

    The wait ends after _PATIENCE_S, or after _STALLED_S in which the process used no CPU time.
    """
    assert process.stdin is not None
    progress_s = time.monotonic()
    until_s, spent = progress_s + _PATIENCE_S, b""
    line: bytes | None = None
    while line is None and time.monotonic() < until_s:
        if request:
            _, writable, _ = select.select([], [process.stdin], [], _STALLED_S / 4)
            if writable:
                try:
                    written = os.write(process.stdin.fileno(), request)
                except OSError:  # the process has ended
                    return b""
                request = request[written:]
        else:
            line = _read_line(process, _STALLED_S / 4)
        if (now := _cpu_time(process.pid)) != spent:
            spent, progress_s = now, time.monotonic()
        elif time.monotonic() - progress_s > _STALLED_S:
            break
    return line


def _cpu_time(pid: int) -> bytes:
    """Return a process's CPU times as the kernel prints them; b"" if unavailable."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return b" ".join(fields[11:13])
    return b""


def _read_line(process: "subprocess.Popen[bytes]", limit_s: float) -> bytes | None:
    """Read the next line of a process; return None after `limit_s`, b"" if the process ended."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if readable else None


class _Bytes:
    """A vocabulary of the 256 bytes and an end token, with llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        return [*text.encode("utf-8", "replace")]


def _end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    This works on Linux only; elsewhere the process ends when its stdin does.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve() -> None:
    """Read grammars from stdin, one per line, and print the result of each, until stdin ends."""
    _end_with_parent()
    from llguidance import LLTokenizer

    with suppress(OSError, ValueError):  # a sandbox may forbid limits; CPU time is bounded anyway
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    plain: Any = _Bytes()
    tokenizer = LLTokenizer(plain, n_vocab=257, eos_token=256)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        grammar = Grammar(*json.loads(line))
        problem, lasting, begun_s = "", True, time.process_time()
        # Two timers: for the CPU limit, and for a process that its parent can no longer end.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.alarm(_ORPHANED_S)
        try:
            matcher, _ = on_deep_stack(partial(compile_grammar, grammar, tokenizer))
            if len(matcher.compute_ff_bytes()) > _MOST_FORCED_BYTES:
                problem = (
                    f"The grammar begins with a text of more than {_MOST_FORCED_BYTES:,} bytes."
                )
        except (GrammarBusyError, MemoryError):  # earlier grammars may have filled the memory
            sys.exit(GrammarBusyError.exit_code)
        except GrammarError as error:
            problem = str(error)
        except BaseException as error:  # the machine may lack some resource
            problem, lasting = f"The grammar cannot be used: {type(error).__name__}.", False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.alarm(0)
        print(json.dumps([problem, lasting, time.process_time() - begun_s]), flush=True)


if __name__ == "__main__":
    _serve()
