"""The process's standard streams, which may be closed, of a narrow encoding, or lead to nobody."""

import io
import os
import sys
from contextlib import suppress
from logging import ERROR

from pilotfish.cli.logs import is_journal, prefixed

_STREAMS = ("stdin", "stdout", "stderr")


def repair() -> None:
    """Open the standard streams that are closed, on /dev/null, and let none fail at a character.

    A file that is opened later would else get a closed stream's number, and libraries that write to
    standard output would write into it. Characters that the encoding lacks become "?".
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number
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
    """Print a line on stderr, if anybody reads it; to the journal it is an error."""
    line = f"pilotfish: {sentence}"
    try:
        print(prefixed(line, ERROR) if is_journal() else line, file=sys.stderr, flush=True)
    except OSError:
        abandon_unread()


def abandon_unread() -> None:
    """Give up the output streams that nobody reads any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _abandon(stream.fileno())


def _abandon(descriptor: int) -> None:
    """Lead a stream that nobody reads to /dev/null: Python flushes it when it ends, and fails."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
