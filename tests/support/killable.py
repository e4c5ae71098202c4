"""Runs `pilotfish` commands that are to be killed: a process each, forked off this one.

This process has imported all that takes long and does nothing else, so that a command is at work
a moment after it is asked for. stdin: a command a line, as a JSON list. stdout: its process id,
and when it is over, its wait status. Each round that a command is about to record is told on the
file descriptor that is this program's argument, as ``answer number``, with a single write that a
kill cannot undo: who reads it knows how many rounds there were, whatever the run file says.
"""

import json
import os
import sys

from pilotfish.cli import main
from pilotfish.field.recording import Recorder

WITNESS = int(sys.argv[1]) if __name__ == "__main__" else -1


def _witnessed(recorder, answer, number, at_s, round_, _record=Recorder.round):
    os.write(WITNESS, f"{answer} {number}\n".encode())
    _record(recorder, answer, number, at_s, round_)


if __name__ == "__main__":
    import onnxruntime  # noqa: F401  (nothing is opened with it before the fork)

    Recorder.round = _witnessed
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.stdin.close()
            os.dup2(2, 1)  # what a command prints is not for who reads our stdout
            os._exit(main(json.loads(line)))
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
