"""`pilotfish field watch` by a told clock: `_told_watch.py CLOCK SPEED WITNESS FLAGS …`.

Before a row goes to the run file, the file WITNESS gets the time, in one write that a kill cannot
undo: the machine's (monotonic) and the told clock's (since the boot), two doubles. So it is known
how many rows were measured, and when, whatever the run file holds.
"""

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from _told_clock import ToldClock

from pilotfish.cli import main
from pilotfish.cli.field import watch
from pilotfish.lab.field.watch.row_buffer import RowBuffer


def run(clock: ToldClock, witness: int, flags: list[str]) -> int:
    """Run the command; return its exit code."""
    add = RowBuffer._add
    command = watch.watch

    def witnessed(rows: RowBuffer, row: Any) -> None:
        os.write(witness, struct.pack("<dd", time.monotonic(), clock.boot_s()))
        add(rows, row)

    RowBuffer._add = witnessed  # type: ignore[method-assign,assignment]  # the witness
    watch.watch = lambda settings: command(settings, clock)  # type: ignore[assignment,misc]  # the clock
    return main(["field", "watch", *flags])


if __name__ == "__main__":
    told_clock = ToldClock(Path(sys.argv[1]), float(sys.argv[2]))
    out = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.exit(run(told_clock, out, sys.argv[4:]))
