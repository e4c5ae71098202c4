"""Refuse requests in OpenAI's form.

`RefusalError` carries the HTTP status and the error body; `refusal_of` converts any error to one. A
client gets at most the message of a typed error; everything else is only logged.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from pilotfish.base.errors import (
    AccessDeniedError,
    BadGrammarError,
    BusyError,
    DrainingError,
    EdgeLostError,
    EdgeUnreachableError,
    InterruptedGenerationError,
    PilotfishError,
    PromptTooLongError,
    RateLimitedError,
    TargetLostError,
    TokenOutOfRangeError,
    TooLargeError,
    TooManySessionsError,
    UnsupportedError,
)
from pilotfish.base.prose import one_line
from pilotfish.base.shortage import shortage
from pilotfish.engines.engine_errors import EngineError, TemplateError, TextTooLongError

_log = logging.getLogger("pilotfish.service")

Body = dict[str, Any]

_MESSAGE_CHARACTERS, _PARAM_CHARACTERS = 500, 80

# Errors in the client's request → the refusal's reason in the metrics.
_FAULTS: dict[type[PilotfishError], str] = {
    PromptTooLongError: "too-long",
    TooLargeError: "too-long",
    TextTooLongError: "too-long",
    UnsupportedError: "unsupported",
    TokenOutOfRangeError: "malformed",
    BadGrammarError: "grammar",
    TemplateError: "malformed",
}
# Errors that make an answer impossible now; a later try may succeed.
_ABSENT = (
    AccessDeniedError,
    BusyError,
    DrainingError,
    EdgeLostError,
    EdgeUnreachableError,
    InterruptedGenerationError,
    RateLimitedError,
    TargetLostError,
    TooManySessionsError,
)


class RefusalError(Exception):
    """The refusal of a request: an HTTP response with an error.

    status: HTTP status. code: the error's name for programs. param: the request's field at fault.
    reason: the error's name in the metrics. retry_s: seconds until another try may succeed. close:
    whether to close the connection, since the request was not read to its end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        reason: str = "malformed",
        retry_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        # the message may quote the client's request, or the edge's chat template
        self.message = one_line(message, _MESSAGE_CHARACTERS)
        self.code = code
        self.param = param and param[:_PARAM_CHARACTERS]
        self.reason = reason
        self.retry_s = retry_s
        self.close = close

    @property
    def body(self) -> Body:
        """The response's body: OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers."""
        headers = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.close:
            headers["connection"] = "close"
        return headers


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


def bad_request(param: str | None, message: str) -> RefusalError:
    """Return the refusal of a field's value. param: the field's name."""
    return RefusalError(400, message, code="invalid_value", param=param)


def client_gone(message: str = "The client is gone.") -> RefusalError:
    """Return the refusal for a client that is gone: it is counted, but not sent."""
    return RefusalError(499, message, code="gone", reason="gone")


def refusal_of(error: BaseException, params: Mapping[str, str] | None = None) -> RefusalError:
    """Convert any error to a refusal. params: as in `CompletionRequest`."""
    if isinstance(error, RefusalError):
        return error
    if (short := shortage(error)) is not None:
        _log.warning("an answer failed because this machine lacks %s: %s", short, error)
        error = BusyError(
            f"This machine has no {short} left for this request now: try again later."
        )
    for kind, reason in _FAULTS.items():
        if isinstance(error, kind):
            assert isinstance(error, PilotfishError)
            code = error.code.replace("-", "_")
            if isinstance(error, PromptTooLongError):
                code = "context_length_exceeded"
            param = None
            if isinstance(error, BadGrammarError) and params and error.part is not None:
                param = params.get(error.part)
            return RefusalError(400, str(error), code=code, param=param, reason=reason)
    if isinstance(error, _ABSENT):
        assert isinstance(error, PilotfishError)
        code = error.code.replace("-", "_")
        return RefusalError(503, str(error), code=code, reason=error.code, retry_s=5.0)
    if isinstance(error, EngineError):
        _log.warning("an answer failed: %s: %s", type(error).__name__, error)
        return RefusalError(500, str(error), code=error.code, reason=error.code)
    if isinstance(error, PilotfishError):  # any other typed error comes from the edge
        _log.warning("an answer failed: %s: %s", type(error).__name__, error)
        code = error.code.replace("-", "_")
        return RefusalError(502, str(error), code=code, reason=error.code)
    _log.error("an answer failed", exc_info=error)
    return RefusalError(
        500,
        "The service failed at this request; its log has the details.",
        code="internal",
        reason="internal",
    )
