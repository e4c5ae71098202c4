"""The edge's spans of an answer: one for its generation, below the device's, with two children.

In:  the jobs of a generation, as they finish. Out: spans, at the generation's end.

While the generation runs, a finished job costs a few additions here, and spans are made after the
answer. Their number is bounded: `prompt` is one span for all passes over the prompt, `passes` one
for all others, with the first passes as events and the sums of all as attributes.
"""

from typing import Final

from pilotfish.base.tracing import Event, Tracer
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.wire.messages import Begin

_MOST_EVENTS: Final = 32  # passes with an event of their own
_NS: Final = 1e-9


class AnswerTrace:
    """The spans of one generation. Used by the serving loop.

    model: name of the target. received_ns: arrival of the `Begin` (monotonic). tokens: number of
    the session's tokens with the prompt.
    """

    def __init__(
        self, tracer: Tracer, model: str, begin: Begin, received_ns: int, tokens: int
    ) -> None:
        self._span = tracer.start(
            f"edge {begin.protocol}",
            "server",
            parent=begin.traceparent,
            begun_ns=received_ns,
            attributes={
                "gen_ai.provider.name": "pilotfish",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": tokens,
                "pilotfish.protocol": begin.protocol,
                "pilotfish.kept_tokens": begin.keep,
            },
        )
        self._prompt_tokens = self._tokens = tokens
        self._prompt_ns: tuple[int, int] | None = None  # begin and end of the prompt's passes
        self._began_ns = self._pass_ns = self._queue_ns = self._passes = self._drafted = 0
        self._ended_ns = received_ns  # end of the last pass
        self._events: list[Event] = []
        self._error = ""

    def add(self, job: Job, tokens: int) -> None:
        """Add a finished job. tokens: number of the session's tokens after it."""
        if job.error is not None or not self._span.recording:
            return
        self._ended_ns, self._error = job.done_ns, ""
        if job.decision is None:
            begun_ns = job.started_ns if self._prompt_ns is None else self._prompt_ns[0]
            self._prompt_ns = begun_ns, job.done_ns
            return
        drafted = job.rows - 1
        queue_ns, pass_ns = job.started_ns - job.queued_ns, job.done_ns - job.started_ns
        self._began_ns = self._began_ns or job.started_ns
        self._passes += 1
        self._drafted += drafted
        self._queue_ns += max(0, queue_ns)
        self._pass_ns += pass_ns
        if len(self._events) < _MOST_EVENTS:
            attributes = {
                "pilotfish.pass_s": pass_ns * _NS,
                "pilotfish.queue_s": max(0, queue_ns) * _NS,
                "pilotfish.tokens": tokens - self._tokens,
            }
            if drafted:
                attributes["pilotfish.drafted_tokens"] = drafted
            self._events.append(Event("pass", job.done_ns, attributes))
        self._tokens = tokens

    def fail(self, job: Job, code: str) -> None:
        """Note a job that failed with this error; the device may repeat its request."""
        self._ended_ns, self._error = job.done_ns, code

    def end(self, tokens: int) -> None:
        """End the spans at the last pass. tokens: number of the session's tokens."""
        span = self._span
        if self._prompt_ns is not None:
            span.child("prompt", *self._prompt_ns)
        sums = {
            "pilotfish.passes": self._passes,
            "pilotfish.pass_s": self._pass_ns * _NS,
            "pilotfish.queue_s": self._queue_ns * _NS,
            "pilotfish.drafted_tokens": self._drafted,
        }
        if self._passes:
            span.child("passes", self._began_ns, self._ended_ns, sums, events=self._events)
        span.set({"gen_ai.usage.output_tokens": max(0, tokens - self._prompt_tokens)})
        span.end(self._ended_ns, self._error)
