"""The root of all errors that a caller can catch."""

from typing import ClassVar


class PilotfishError(Exception):
    """Root of the hierarchy; never raised itself.

    code: names the kind on the wire and over HTTP. exit_code: what a command ends with. The message
    is a whole sentence that says what to do.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
