"""Errors of device and edge, each with a code, an exit code and advice.

Each kind of error is a class. ``code`` crosses the wire, ``exit_code`` is a command's exit status,
and the message is a whole sentence that says what to do. `from_code` turns a received code into its
class, so that a caller on the device catches the type that the edge raised.
"""

from typing import ClassVar, Final

# a command's exit status after these signals: 128 and the signal's number
SIGINT_CODE: Final = 130
SIGHUP_CODE: Final = 129


class PilotfishError(Exception):
    """Base of all errors; never raised itself.

    code: name of the kind on the wire and over HTTP. exit_code: a command's exit status.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class MalformedError(PilotfishError):
    """The bytes are not a message of this protocol."""

    code = "malformed"
    exit_code = 65


class VersionMismatchError(PilotfishError):
    """Device and edge have different versions of the wire protocol."""

    code = "version-mismatch"
    exit_code = 76


class PairMismatchError(PilotfishError):
    """Drafter and target share no token, or the target's vocabulary has changed."""

    code = "pair-mismatch"
    exit_code = 76


class UnsupportedError(PilotfishError, ValueError):
    """A protocol, option or argument that the device or the edge does not offer."""

    code = "unsupported"
    exit_code = 64


class BadGrammarError(PilotfishError):
    """A grammar that does not compile, is too complex, or leaves no token.

    part: the part at fault. A tool's name means the tool's schema; "" means the answer's format;
    None: unknown.
    """

    code = "bad-grammar"
    exit_code = 65
    part: str | None = None


class TooLargeError(PilotfishError):
    """A message, window or prompt beyond the edge's limits."""

    code = "too-large"
    exit_code = 65


class PromptTooLongError(TooLargeError):
    """The prompt leaves no room in the drafter's or the target's context."""

    code = "prompt-too-long"


class TokenOutOfRangeError(PilotfishError):
    """A token id that the vocabulary does not have."""

    code = "token-out-of-range"
    exit_code = 65


class BadDraftError(PilotfishError):
    """The window's tokens cannot have been sampled from the distributions sent with them."""

    code = "bad-draft"
    exit_code = 65


class DivergedError(PilotfishError):
    """Device and edge disagree about the committed tokens."""

    code = "diverged"
    exit_code = 70


class ConflictError(PilotfishError):
    """The edge has already received another window for the same start position."""

    code = "conflict"
    exit_code = 70


class UnknownSessionError(PilotfishError):
    """The edge does not know the session: it restarted, or dropped the session as idle."""

    code = "unknown-session"
    exit_code = 70


class TooManySessionsError(PilotfishError):
    """The edge has no room for another session now."""

    code = "too-many-sessions"
    exit_code = 75


class RateLimitedError(PilotfishError):
    """The client sends more messages per second than the edge accepts."""

    code = "rate-limited"
    exit_code = 75


class BusyError(PilotfishError):
    """The edge's machine cannot serve the request now; the request may be valid."""

    code = "busy"
    exit_code = 75


class InternalError(PilotfishError):
    """A fault inside the edge; its log has the details."""

    code = "internal"
    exit_code = 70


class AccessDeniedError(PilotfishError):
    """The encrypted handshake was refused."""

    code = "access-denied"
    exit_code = 77


class EdgeUnreachableError(PilotfishError):
    """No edge answered at this address."""

    code = "edge-unreachable"
    exit_code = 69


class TargetLostError(PilotfishError):
    """A node of the edge's target is lost, late, or gives invalid answers."""

    code = "target-lost"
    exit_code = 69


class EdgeLostError(PilotfishError):
    """The connection to the edge was lost during a request and did not return in time."""

    code = "edge-lost"
    exit_code = 69


class KeysError(PilotfishError):
    """Key files that are missing, malformed or readable by others."""

    code = "keys"
    exit_code = 77


class InvitationError(PilotfishError):
    """An invitation that is cut or garbled, or was not used in time."""

    code = "invitation"
    exit_code = 65


class CertificateError(PilotfishError):
    """A certificate or its key that is missing, damaged or unfit for a service."""

    code = "certificate"
    exit_code = 78


class TraceError(PilotfishError):
    """A link trace that is missing, empty or malformed."""

    code = "trace"
    exit_code = 65


class ListenError(PilotfishError):
    """The edge cannot or may not listen at an address."""

    code = "listen"
    exit_code = 71


class RunFileError(PilotfishError):
    """A file that holds no run of `field measure`, is damaged, or holds another run."""

    code = "run-file"
    exit_code = 65


class HeadError(PilotfishError):
    """A decision head that is missing, damaged or too large, or that cannot be written."""

    code = "head"
    exit_code = 66


class RelaxationError(PilotfishError):
    """A file of `judge calibrate` that is missing, damaged or too large, or cannot be written."""

    code = "relaxation"
    exit_code = 66


class InterruptedGenerationError(PilotfishError):
    """The caller abandoned the answer."""

    code = "interrupted"
    exit_code = 75


class DeviceInUseError(PilotfishError):
    """The calling thread has an answer of the device open, or another thread is using it."""

    code = "device-in-use"
    exit_code = 75


class DeviceClosedError(PilotfishError):
    """The device was closed, or belongs to the parent process of this forked process."""

    code = "device-closed"
    exit_code = 70


class DrainingError(PilotfishError):
    """The edge is about to stop and accepts no new request."""

    code = "draining"
    exit_code = 75


class ConfigError(PilotfishError):
    """A configuration file that cannot be read, or has unknown or invalid settings."""

    code = "config"
    exit_code = 78


class NotReloadedError(PilotfishError):
    """A running daemon did not apply its whole configuration."""

    code = "not-reloaded"
    exit_code = 78


def _kinds_by_code(kind: type[PilotfishError]) -> dict[str, type[PilotfishError]]:
    """Return the classes of this module by code; other subclasses never cross the wire."""
    kinds = {kind.code: kind}
    for child in kind.__subclasses__():
        if child.__module__ == __name__:
            kinds.update(_kinds_by_code(child))
    return kinds


def from_code(code: str, message: str) -> PilotfishError:
    """Return an error of the class for ``code``; InternalError for an unknown (newer) code.

    Code and message are printable text: `wire.messages.decode_checked` has cleaned them, or our own
    child process has written them.
    """
    kind = _kinds_by_code(PilotfishError).get(code)
    if kind is None:
        return InternalError(f"{message} (code {code!r})")
    return kind(message)
