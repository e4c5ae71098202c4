"""What is wrong with a machine, and the command that mends it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# fault: something will not run. warning: it will be slow, idle or fragile. note: good to know.
Severity = Literal["fault", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or good to know.

    Attributes:
        severity: "fault": something will not run. "warning": it will be slow, or may fail later.
            "note": good to know.
        subject: the part of the machine, such as "power mode".
        message: a sentence.
        mend: the command that mends it; None: no command does.
    """

    severity: Severity
    subject: str
    message: str
    mend: str | None = None


def fault(subject: str, message: str, mend: str | None = None) -> Finding:
    """Return a finding: something will not run."""
    return Finding(severity="fault", subject=subject, message=message, mend=mend)


def warning(subject: str, message: str, mend: str | None = None) -> Finding:
    """Return a finding: something will be slow, or may fail later."""
    return Finding(severity="warning", subject=subject, message=message, mend=mend)


def note(subject: str, message: str, mend: str | None = None) -> Finding:
    """Return a finding that is good to know."""
    return Finding(severity="note", subject=subject, message=message, mend=mend)
