"""Repair the standard streams: closed streams, narrow encodings, pipes without a reader."""

import io
import os
import sys
from contextlib import suppress
from logging import ERROR

from pilotfish.cli.logs import is_journal, prefixed

_STREAMS = ("stdin", "stdout", "stderr")


def repair() -> None:
    """Open closed standard streams on /dev/null, and make streams replace characters they lack.

    Otherwise a file opened later would get a closed stream's number, and libraries that write to
    standard output would write into the file. Characters that the encoding lacks become "?".
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
        stream = getattr(sys, name)
        if stream is None:
            opened = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  # stays open
            setattr(sys, name, opened)
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def complain(sentence: str) -> None:
    """Print a line on stderr if stderr is open; in the journal, with the priority of an error."""
    line = f"pilotfish: {sentence}"
    try:
        print(prefixed(line, ERROR) if is_journal() else line, file=sys.stderr, flush=True)
    except OSError:
        abandon_unread()


def abandon_unread() -> None:
    """Abandon the output streams that have lost their reader."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _abandon(stream.fileno())


def _abandon(descriptor: int) -> None:
    """Redirect a stream without a reader to /dev/null, since Python's flush at exit would fail."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
