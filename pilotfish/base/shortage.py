"""Distinguish the errors of a machine without room from those of a program."""

from pilotfish.base.descriptors import EXHAUSTED

_NO_THREAD = "can't start new thread"  # CPython's message for it


def shortage(error: BaseException) -> str | None:
    """Return the resource that the machine lacks, if that caused the error; else None."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return "threads or memory"
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return "open files or memory"
    return None
