"""Start generations: check what a device asks for, and compile its grammar elsewhere.

In:  a `Begin`, and whatever comes for its generation before its grammar is compiled. Out: a session
     whose generation has begun, and its prompt's job; or a typed refusal.

All that is cheap to check is checked first. A generation with a grammar then waits for the
`GrammarCompiler`, and so do the requests for it; the session's last generation goes on until then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pilotfish.edge_runtime.beside import Beside, Trail
from pilotfish.edge_runtime.grammar_compiler import Compilation, GrammarCompiler
from pilotfish.edge_runtime.hints import hints_of
from pilotfish.edge_runtime.logprobs import Logprobs, PromptLogprobs, expect_tellable
from pilotfish.edge_runtime.rounds import Rounds
from pilotfish.edge_runtime.sessions import Sessions, SessionState
from pilotfish.edge_runtime.shapers import Shapers
from pilotfish.edge_runtime.supplies import Supplies
from pilotfish.speculation.shaping import Constraint
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import count_ids, decode_ids
from pilotfish.wire.committed import Committed
from pilotfish.wire.errors import (
    DivergedError,
    MalformedError,
    PilotfishError,
    PromptTooLongError,
    RateLimitedError,
    UnknownSessionError,
)
from pilotfish.wire.protocols import STREAM, Exchange, Law, exchange_named
from pilotfish.wire.protocols.exchange import Ids, expect_frames
from pilotfish.wire.transport import Envelope

_MOST_REQUESTS = 64  # that wait for one grammar: a device sends one, and hints

Serve = Callable[[m.Request, Envelope, int], None]
Refuse = Callable[[Envelope, m.Request, PilotfishError], None]


@dataclass(eq=False, slots=True)
class QueuedGeneration:
    """A generation that waits for its grammar; requests: that wait with it, and when they came."""

    begin: m.Begin
    envelope: Envelope
    new: Ids
    law: Law
    exchange: Exchange[Any] | None
    compilation: Compilation
    requests: list[tuple[m.Request, Envelope, int]] = field(default_factory=list)
    size: int = 0  # bytes of the requests


class GenerationStarter:
    """Starts generations in sessions. Used by the serving loop.

    serve, refuse: do so with a request that has waited. vocab_size: of the target.
    """

    def __init__(
        self,
        sessions: Sessions,
        rounds: Rounds,
        shapers: Shapers,
        compiler: GrammarCompiler,
        *,
        supplies: Supplies,
        beside: Beside | None,
        limits: m.Limits,
        vocab_size: int,
        serve: Serve,
        refuse: Refuse,
    ) -> None:
        self._sessions = sessions
        self._rounds = rounds
        self._shapers = shapers
        self._compiler = compiler
        self._supplies = supplies
        self._beside = beside
        self._limits = limits
        self._vocab = vocab_size
        self._serve = serve
        self._refuse = refuse

    def begin(self, begin: m.Begin, envelope: Envelope) -> None:
        """Start a generation, or queue it until its grammar is compiled."""
        constrained = begin.shape is not None and begin.shape.grammar != ""
        expect_frames(envelope.frames, 1 + constrained)
        frame = envelope.frames[0]
        length = begin.keep + count_ids(frame, self._vocab)
        if length >= self._limits.context:  # before so many ids are decoded
            raise PromptTooLongError(
                f"The prompt has {length} tokens; this edge takes at most "
                f"{self._limits.context - 1}."
            )
        new = decode_ids(frame, self._vocab)
        exchange = None if begin.protocol == STREAM else exchange_named(begin.protocol)
        shaping = begin.shaping(envelope.frames[1] if constrained else None)
        law = Law(sampling=begin.sampling, seed=begin.seed, shaping=shaping)
        if exchange is not None:
            exchange.check(law.sampling)
            exchange = self._supplies.exchange(exchange, begin)
        if length == 0:
            raise MalformedError("A generation needs at least one token to go on from.")
        if begin.prompt_logprobs is not None:
            self._shapers.expect_unshaped()
            expect_tellable(length, begin.prompt_logprobs, self._limits.message_bytes // 2)
        self._shapers.check(begin, law, length)
        session = self._session_for(begin, envelope.owner)
        self.forget(session)
        if law.shaping.grammar is None:
            self._start(session, begin, new, law, exchange)
            return
        compilation = Compilation(
            envelope.owner,
            law.shaping.grammar,
            2 if self._drafts_beside(exchange) else 1,
            partial(self._compiled, session),
        )
        session.queued = QueuedGeneration(begin, envelope, new, law, exchange, compilation)
        try:
            self._compiler.submit(compilation)
        except PilotfishError:
            self._unqueue(session)
            raise

    def holds(self, request: m.Request, envelope: Envelope, received_ns: int) -> bool:
        """Whether a request waits for a grammar with its generation; then it comes again later."""
        if not isinstance(request, m.Window | m.States | m.Pull | m.Hint):
            return False
        session = self._sessions.get(request.session)
        if session is None or session.owner != envelope.owner:
            return False
        if (queued := session.queued) is None:
            return False
        if queued.begin.generation != request.generation:
            return False
        most_bytes = self._limits.message_bytes
        if len(queued.requests) >= _MOST_REQUESTS or queued.size + envelope.size > most_bytes:
            raise RateLimitedError("These requests wait for a grammar already; slow down.")
        queued.requests.append((request, envelope, received_ns))
        queued.size += envelope.size
        return True

    def forget(self, session: SessionState, error: PilotfishError | None = None) -> None:
        """Give up a generation that waits for its grammar; refuse what waits, if with an error."""
        queued, session.queued = session.queued, None
        if queued is not None:
            self._compiler.cancel(queued.compilation)
            if error is not None:
                self._refuse_all(queued, error)

    def _compiled(self, session: SessionState, compilation: Compilation) -> None:
        """Go on with a generation whose grammar has been compiled, or refuse it."""
        queued = session.queued
        if queued is None or queued.compilation is not compilation:
            return  # given up meanwhile
        if compilation.error is not None:
            self._unqueue(session)
            self._refuse_all(queued, compilation.error)
            return
        session.queued, begin = None, queued.begin
        try:
            self._expect_kept(begin, session.committed)
        except PilotfishError as error:
            self._refuse_all(queued, error)
            return
        constraints = compilation.constraints
        self._start(session, begin, queued.new, queued.law, queued.exchange, constraints)
        for waiting in queued.requests:
            self._serve(*waiting)

    def _unqueue(self, session: SessionState) -> None:
        """End the wait of a session, and the session if it was opened for this generation."""
        session.queued = None
        if session.generation < 0:
            self._sessions.close(session)

    def _refuse_all(self, queued: QueuedGeneration, error: PilotfishError) -> None:
        self._refuse(queued.envelope, queued.begin, error)
        for request, envelope, _ in queued.requests:
            self._refuse(envelope, request, error)

    def _start(
        self,
        session: SessionState,
        begin: m.Begin,
        new: Ids,
        law: Law,
        exchange: Exchange[Any] | None,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        """Begin a generation in its session. constraints: for the target, and for the drafter."""
        self._rounds.stop(session)
        committed = session.committed
        committed.truncate(begin.keep)
        committed.extend(new)
        session.generation, session.law, session.exchange = begin.generation, law, exchange
        session.shaper = self._shapers.of(begin, law, constraints[0] if constraints else None)
        session.logprobs = (
            None if begin.logprobs is None else Logprobs(begin.logprobs, len(committed))
        )
        session.prompt_logprobs = (
            None
            if begin.prompt_logprobs is None
            else PromptLogprobs(committed.ids, begin.prompt_logprobs)
        )
        session.prompt_told_to = b""
        follow = None
        if self._drafts_beside(exchange):
            follow = self._follower(session, begin, law, constraints[1] if constraints else None)
        session.hints = hints_of(exchange, committed, self._limits.window, follow, session.hints)
        session.round = session.stream = None
        session.awaits_pending = session.ended = False
        if session.prompt_logprobs is not None:
            self._rounds.score(session, session.prompt_logprobs)
        elif len(new) > 1:  # read the prompt while the device drafts
            self._rounds.read(session)

    def _drafts_beside(self, exchange: Exchange[Any] | None) -> bool:
        """Whether the drafter beside the target may follow such a generation."""
        return self._beside is not None and exchange is not None and exchange.streams

    def _follower(
        self, session: SessionState, begin: m.Begin, law: Law, constraint: Constraint | None
    ) -> Callable[[], Trail]:
        assert self._beside is not None
        shaper = self._shapers.of(begin, law, constraint)  # of its own thread
        ids = session.committed.ids
        return partial(self._beside.follow, session.id, session.slot, ids, law, shaper)

    def _session_for(self, begin: m.Begin, owner: bytes) -> SessionState:
        try:
            session = self._sessions.use(begin.session, owner)
        except UnknownSessionError:
            if begin.keep:
                raise
            self._expect_kept(begin, Committed())
            return self._sessions.open(begin.session, owner)
        latest = session.generation
        if session.queued is not None:
            latest = max(latest, session.queued.begin.generation)
        if begin.generation <= latest:
            raise DivergedError(
                f"The edge is at generation {latest} of this session already, and "
                f"generation {begin.generation} does not come after it."
            )
        self._expect_kept(begin, session.committed)
        return session

    @staticmethod
    def _expect_kept(begin: m.Begin, committed: Committed) -> None:
        if begin.keep > len(committed) or committed.hash_of(begin.keep) != begin.hash:
            raise DivergedError(
                f"The edge holds {len(committed)} tokens of this session, and the first "
                f"{begin.keep} are not those of the device: begin again with all tokens."
            )
