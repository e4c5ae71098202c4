"""Record a chat whose link breaks, as a picture of a terminal that plays by itself (SVG).

    python benchmarks/recording.py [--out docs/link-loss.svg]

`pilotfish chat` runs in a pseudo-terminal, and reaches its edge through the emulator. While an
answer arrives, the emulator lets nothing pass for some seconds, as a radio out of range does: the
drafter goes on alone, in another colour, until the target takes the answer over again. What is
drawn is what the program wrote, at the times at which it wrote it; ``--slower`` stretches all times
alike.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from _common import options, pair, pair_options, throwaway_keys
from _terminal import Recording
from _terminal_picture import Phase, draw

from pilotfish import EdgeServer
from pilotfish.base.errors import PilotfishError
from pilotfish.base.files import write_output
from pilotfish.emulation.emulator import Conditions, Emulator

COLUMNS, ROWS = 80, 40
KEY_S = 0.03  # between two typed letters
PATIENCE_S = 60.0
QUESTION = "Explain in a few sentences why the sky is blue."


class TerminalProcess:
    """A command in a pseudo-terminal; ``recording`` has what it wrote since `begin`."""

    def __init__(self, *words: object) -> None:
        self._descriptor, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        for name in ("COLORTERM", "NO_COLOR", "LINES"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pilotfish", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.begin()

    def begin(self) -> None:
        """Start the recording anew, at the line on which the program stands."""
        self.recording = Recording(COLUMNS)
        self._begun_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self._begun_s

    def read(self, for_s: float) -> bool:
        """Record what comes within this time; return whether something came."""
        if not select.select([self._descriptor], [], [], for_s)[0]:
            return False
        try:
            output = os.read(self._descriptor, 65536)
        except OSError:  # the program has ended
            output = b""
        if not output:
            raise PilotfishError(f"The chat ended too early:\n{self.recording.text()}")
        self.recording.write(self.now_s, output)
        return True

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Record until something is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > end_s:
                raise PilotfishError(f"The chat hangs:\n{self.recording.text()}")
            self.read(0.05)

    def read_until_quiet(self) -> None:
        """Record until the program has written something and then nothing for a second."""
        self.read_until(lambda: bool(self.recording.text().strip()))
        while self.read(1.0):
            pass

    def type(self, text: str) -> None:
        """Type as a person does."""
        for letter in text:
            os.write(self._descriptor, letter.encode())
            self.read(KEY_S)

    def end(self) -> None:
        """End the program as the end of its input does, or by force."""
        os.write(self._descriptor, b"\x04")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._descriptor)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--out", type=Path, default=Path("docs/link-loss.svg"), metavar="FILE")
    parser.add_argument("--question", default=QUESTION, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="of the answer (%(default)s)")
    parser.add_argument(
        "--after", type=int, default=130, help="letters of the answer before the cut (%(default)s)"
    )
    parser.add_argument("--cut", type=float, default=3.0, help="seconds (%(default)s)")
    parser.add_argument("--slower", type=float, default=2.0, help="playback (%(default)s)")
    args = parser.parse_args()
    drafter, target = pair(args)
    with (
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder, threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.03)) as link,
    ):
        words = ["--draft", drafter, "--edge", link.endpoint, "--keys", folder, "--threads", 1]
        chat = TerminalProcess("chat", *words, "--max-tokens", args.tokens, "--temperature", 0)
        try:
            phases = _record(chat, link, args.question, args.after, args.cut)
        finally:
            chat.end()
    title = "A chat whose link breaks: the drafter goes on alone, until the target takes over again"
    write_output(args.out, draw(chat.recording, phases, title, slower=args.slower).encode())
    print(args.out)
    return 0


def _record(
    chat: TerminalProcess, link: Emulator, question: str, after: int, cut_s: float
) -> list[Phase]:
    """Ask, break the link in mid-answer, and wait for the end; return what happened when."""
    chat.read_until_quiet()
    ready = chat.recording.text().splitlines()[-1]
    chat.type(question)
    chat.type("\n")
    length = len(chat.recording.text())
    chat.read_until(lambda: len(chat.recording.text()) >= length + after)
    lost_s = chat.now_s
    link.cut(cut_s, silent=True)
    chat.read_until(lambda: chat.recording.text().splitlines()[-1] == ready)
    return [
        Phase(0.0, "up", "link: up, RTT 30 ms (emulated)"),
        Phase(lost_s, "down", "link: out of range"),
        Phase(lost_s + cut_s, "up", "link: up again"),
    ]


if __name__ == "__main__":
    sys.exit(main())
