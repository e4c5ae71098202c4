"""Run `pilotfish` commands that are to be killed, each in a process forked off this one.

This process has done all slow imports, so that a command starts at once. stdin: a command a line,
as a JSON list. stdout: its process id, and at its end its wait status. Before a command records a
round, it writes ``answer number`` to the file descriptor given as this program's argument, in a
single write that a kill cannot undo: so the number of rounds is known whatever the run file holds.
"""

import json
import os
import sys

from pilotfish.cli import main
from pilotfish.lab.field.recording import Recorder

WITNESS = int(sys.argv[1]) if __name__ == "__main__" else -1


def _witnessed(recorder, answer, number, at_s, round_, _record=Recorder.add_round):
    os.write(WITNESS, f"{answer} {number}\n".encode())
    _record(recorder, answer, number, at_s, round_)


if __name__ == "__main__":
    import onnxruntime  # noqa: F401  # slow to import, so before the forks

    Recorder.add_round = _witnessed
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.stdin.close()
            os.dup2(2, 1)  # our stdout is for process ids and statuses only
            os._exit(main(json.loads(line)))
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
