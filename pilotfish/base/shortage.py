"""Recognize errors that mean: the machine lacks memory, threads or file descriptors."""

from pilotfish.base.descriptors import EXHAUSTED

_NO_THREAD = "can't start new thread"  # the start of CPython's message


def shortage(error: BaseException) -> str | None:
    """Return the resource that the machine lacks, if its lack caused the error; else None."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return "threads or memory"
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return "open files or memory"
    return None
