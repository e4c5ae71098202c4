"""A process of Pilotfish whose calls are recorded: `tests.support.walks` starts it.

It records the Python functions of the package `pilotfish` that are called between two moments. The
moments are messages on ZeroMQ sockets, or requests on the control socket. The only internal names
that it depends on are the kinds of three messages (`BEGIN`, `WINDOW`, `VERDICT`), so the same code
measures checkouts of different structure.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, TypedDict

import zmq

BEGIN, WINDOW, VERDICT = "begin", "window", "verdict"
LATER = 5  # rounds of an answer that are not recorded; the first ones read the prompt
REPEATS = 5  # answers after the first, which imports modules and greets the edge
PROMPTS = ("ab c", "nul 12", "true, ba", "a b", "cd, e", "ed ab")
OPTIONS: dict[str, Any] = {"protocol": "greedy", "window": 4, "max_tokens": 60, "temperature": 0.0}
# Python 3.12 runs list comprehensions without a call, so none of these counts as a function.
UNCOUNTED = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Walk(TypedDict):
    """The calls between two moments.

    files: paths in the package. functions: path, name and line. calls: number of calls. changes:
    number of calls of a function in another file than the thread's last call.
    """

    files: list[str]
    functions: list[str]
    calls: int
    changes: int


class Recorder:
    """Records the calls of functions below ``folder``, in all threads that start later."""

    def __init__(self, folder: str) -> None:
        self._prefix = os.path.join(folder, "")
        self._open: dict[str, list[tuple[int, CodeType]]] = {}
        self.walks: dict[str, list[Walk]] = {}

    def install(self) -> None:
        """Trace this thread, and those that start from now on."""
        threading.setprofile(self._trace)
        sys.setprofile(self._trace)

    def start(self, name: str) -> None:
        """Begin a walk; a walk of this name that is under way is dropped."""
        self._open = {**self._open, name: []}

    def stop(self, name: str, *, keep: bool = True) -> None:
        """End a walk if it is under way. keep: add it to ``walks``."""
        walks = dict(self._open)
        calls = walks.pop(name, None)
        self._open = walks
        if calls is not None and keep:
            self.walks.setdefault(name, []).append(self._walk(calls))

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._open:
            code = frame.f_code
            if code.co_filename.startswith(self._prefix) and code.co_name not in UNCOUNTED:
                for calls in self._open.values():
                    calls.append((threading.get_ident(), code))

    def _walk(self, calls: Sequence[tuple[int, CodeType]]) -> Walk:
        last: dict[int, str] = {}
        changes = 0
        for thread, code in calls:
            changes += last.get(thread) != code.co_filename
            last[thread] = code.co_filename
        functions = {
            f"{self._relative(code)}:{code.co_name}:{code.co_firstlineno}" for _, code in calls
        }
        return {
            "files": sorted({self._relative(code) for _, code in calls}),
            "functions": sorted(functions),
            "calls": len(calls),
            "changes": changes,
        }

    def _relative(self, code: CodeType) -> str:
        return code.co_filename[len(self._prefix) :]


class RoundMarks:
    """Starts and ends walks at the messages of rounds; both ends have the same marks.

    "first draft" (device): from `start_answer` to the first window. "round": on a device from one
    window to the next, on an edge from the receipt of a window to its verdict. "cycle" (edge): from
    the receipt of a window to that of the next, so with what the edge does after its verdict.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rounds = 0
        self._answers = 0

    def start_answer(self) -> None:
        """Begin the walk to the first draft."""
        self._rounds = 0
        self._recorder.start("first draft")

    def end_answer(self) -> None:
        """Drop the walk after the last window."""
        self._recorder.stop("round", keep=False)

    def sent(self, kind: str) -> None:
        """Take note of a message that is about to be sent."""
        if kind == WINDOW:
            self._recorder.stop("first draft")
            self._recorder.stop("round", keep=self._rounds >= LATER)
            self._rounds += 1
            self._recorder.start("round")
        elif kind == VERDICT:
            self._recorder.stop("round", keep=self._rounds >= LATER and self._answers > 1)
            self._rounds += 1

    def received(self, kind: str) -> None:
        """Take note of a message that was received."""
        if kind == BEGIN:
            self._rounds = 0
            self._answers += 1
            self._recorder.stop("cycle", keep=False)
        elif kind == WINDOW:
            self._recorder.stop("cycle", keep=self._rounds > LATER and self._answers > 1)
            self._recorder.start("cycle")
            self._recorder.start("round")


def kind_of(frame: Any) -> str:
    """Return the kind of the message that this frame begins; "" if it begins none.

    A header is a msgpack array whose first item is the kind, a short string.
    """
    data = bytes(memoryview(frame)[:40])
    if not data or (data[0] & 0xF0 != 0x90 and data[0] != 0xDC):
        return ""
    first = 3 if data[0] == 0xDC else 1
    if len(data) <= first or data[first] & 0xE0 != 0xA0:
        return ""
    end = first + 1 + (data[first] & 0x1F)
    return data[first + 1 : end].decode("ascii", "replace")


def watch_sockets(marks: RoundMarks) -> None:
    """Have the marks see every frame of every ZeroMQ socket of this process."""
    socket_type: Any = zmq.Socket
    send, receive = socket_type.send, socket_type.recv

    def marked_send(self: Any, data: Any, *options: Any, **more: Any) -> Any:
        marks.sent(kind_of(data))
        return send(self, data, *options, **more)

    def marked_receive(self: Any, *options: Any, **more: Any) -> Any:
        frame = receive(self, *options, **more)
        marks.received(kind_of(frame))
        return frame

    socket_type.send, socket_type.recv = marked_send, marked_receive


def answer_requests(recorder: Recorder, control: socket.socket) -> None:
    """Serve the control socket until it closes: start NAME, stop NAME, report."""
    with control.makefile("rw") as lines:
        for line in lines:
            action, _, name = line.strip().partition(" ")
            if action == "start":
                recorder.start(name)
            elif action == "stop":
                recorder.stop(name)
            lines.write(json.dumps(recorder.walks if action == "report" else None) + "\n")
            lines.flush()


def run_device(recorder: Recorder, marks: RoundMarks, draft: str, endpoint: str) -> None:
    """Generate answers, as a program would that imports Pilotfish."""
    from pilotfish import Device

    with Device(draft, endpoint, threads=1) as device:
        for prompt in PROMPTS[: 1 + REPEATS]:
            marks.start_answer()
            device.generate(prompt, **OPTIONS)
            marks.end_answer()
            if prompt == PROMPTS[0]:
                recorder.walks.clear()


def main(control: int, checkout: str, role: str, arguments: Sequence[str]) -> int:
    """Run a device, or with the role "command" the command line ``arguments``."""
    recorder = Recorder(os.path.join(checkout, "pilotfish"))
    marks = RoundMarks(recorder)
    with ExitStack() as stack:
        requests = stack.enter_context(socket.socket(fileno=control))
        watch_sockets(marks)
        if role == "command":
            threading.Thread(target=answer_requests, args=(recorder, requests), daemon=True).start()
        recorder.install()
        import pilotfish

        assert os.path.dirname(pilotfish.__file__) == os.path.join(checkout, "pilotfish")
        if role == "command":
            from pilotfish.cli import main as run_command

            return run_command(list(arguments))
        run_device(recorder, marks, *arguments)
        answer_requests(recorder, requests)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
