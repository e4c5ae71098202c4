"""`Device`: the drafting end as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from pilotfish.base.errors import PairMismatchError, UnsupportedError
from pilotfish.base.tracing import Tracer, TracerProvider
from pilotfish.boards.misfit import Misfit
from pilotfish.boards.start import warn_before_load, warn_of_idle_gpu
from pilotfish.bridge import Pair, Prompt, PromptInput, read_talk
from pilotfish.device_runtime.answer_trace import AnswerTrace
from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.conversation import Conversation
from pilotfish.device_runtime.default_temperature import with_default_temperature
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.link.connectivity import LinkStatus
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import LinkGroup, load_keys
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.device_runtime.link.retry import AWAY, CancelToken, OnLinkLoss, RetryPolicy
from pilotfish.device_runtime.plan import Plan, plan
from pilotfish.device_runtime.record import Generation, Piece, Round
from pilotfish.device_runtime.turn import AnswerStream, DeviceTurn, DeviceTurns
from pilotfish.device_runtime.vocabulary_pairs import VocabularyPairs
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.drafting.window import Drafter
from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.language_model import Execution
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import LOCAL
from pilotfish.wire.request import AUTO, Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pilotfish.bridge.prompt import TalkOptions

_Measured = TypeVar("_Measured")


class Device:
    """A drafter, its edge, and one conversation; the device gives one answer at a time.

    `beside` makes devices for further conversations. Calls from other threads wait for their turn,
    in the order of request; a call from a thread that has a stream open raises `DeviceInUseError`.

    draft: the drafter's artifact, or "text": draft without a model, by repeating earlier text; or
    an opened source of drafts, which then determines draft_text, texts and share_texts. If
    the vocabularies differ, the device fetches the target's vocabulary from the edge and caches it;
    it calls on_fetch with the number of bytes fetched so far and the total.
    draft_text: True: a drafter with a model also drafts by repeating earlier text.
    texts: the folder that keeps earlier conversations for drafting by text; "off": each
    conversation uses only its own text; None: keep earlier conversations in memory. Each owner (see
    `stream`) has separate texts.
    share_texts: True: lossless protocols draft from the texts of all owners, and an answer may
    reuse another owner's prompt.
    keys: the folder with ``device.key`` and ``edge.pub``; None is allowed on loopback only.
    on_round: called with the record of each round when the round ends.

    lanes: maximum number of devices that share the drafter's weights, this device included.

    on_link_loss: what the device does while the edge is away (it cannot be reached, drains, or is
    full). "fail": raise `EdgeLostError` 2.2 s after the loss; the edge must also be there at the
    start. "wait": wait ``patience_s``, then raise `EdgeLostError`. "local": after a second,
    continue with the drafter alone until the edge is back. The drafter's pieces have the origin
    "local". Verified text is the same as without the loss.

    traces: a tracer provider of OpenTelemetry for the spans of answers, or the address of a
    collector (OTLP over HTTP), such as "http://collector:4318"; the SDK's environment variables
    hold. None: the program's own provider, if the program has loaded OpenTelemetry; else no traces.
    An answer is a child of the span that is current when it begins.

    cancel_token: its method `end`, which any thread may call, ends the opening of this device with
    `InterruptedGenerationError`, and then all calls that wait for the edge. Devices that `beside`
    makes have tokens of their own.

    misfits: why the drafter's model does not suit this machine, as found at the opening.

    Any thread may call any method except `attend`. `generate`, `stream` and `probe` wait for their
    turn; all others return at once, even during an answer. After `close`, and in a process forked
    from this one, calls that need the edge or the drafter raise `DeviceClosedError`.
    """

    def __init__(
        self,
        draft: str | Path | DraftSource,
        edge: str | None = None,
        keys: str | Path | None = None,
        *,
        provider: str = "auto",
        threads: int | None = None,
        context: int | None = None,
        on_round: Callable[[Round], None] | None = None,
        on_fetch: Callable[[int, int], None] | None = None,
        lanes: int = 1,
        on_link_loss: OnLinkLoss = "fail",
        patience_s: float = 120.0,
        draft_text: bool = False,
        texts: str | Path | None = None,
        share_texts: bool = False,
        traces: str | TracerProvider | None = None,
        cancel_token: CancelToken | None = None,
    ) -> None:
        if lanes < 1:
            raise UnsupportedError(f"A device must have at least one lane, not {lanes}.")
        self._retry_policy = RetryPolicy.from_policy(on_link_loss, patience_s)
        self._on_round = on_round
        self._cancel_token = cancel_token or CancelToken()
        self._link: EdgeLink | None = None
        self._turns = DeviceTurns()
        self._shares = share_texts
        source = draft
        if not isinstance(source, DraftSource):
            source = DraftSource.open(
                source, text=draft_text, text_location=texts, shared=share_texts
            )
        if source.artifact is None and (edge is None or on_link_loss == "local"):
            raise UnsupportedError(
                "The drafter text only repeats earlier text: give the device an edge, and "
                "on_link_loss "
                '"wait" or "fail".'
            )
        self._hello = source.hello
        self._tracer = Tracer.for_device(traces)
        try:
            # connect first: an absent edge shows at once, while loading a model takes long
            if edge is not None:
                self._link_group = LinkGroup(edge, load_keys(edge, keys))
                self._link = self._dial(self._cancel_token)
            self.misfits: tuple[Misfit, ...] = ()
            if source.artifact is not None:
                self.misfits = warn_before_load(source.artifact, context)
            drafter = source.load(provider=provider, threads=threads, context=context, lanes=lanes)
            if source.artifact is not None and drafter.execution is not None:
                self.misfits += warn_of_idle_gpu(source.artifact, drafter.execution.idle_gpu)
            self._pairs = VocabularyPairs(
                source.vocabulary,
                source.vocabulary_subset,
                drafter.pass_times,
                drafter.drafts_per_pass,
                drafter.prior_acceptance,
                self._hello.hidden_size,
                on_fetch,
            )
            if self._link is not None and self._retry_policy.starts_without_edge:
                self._link.wait_briefly()
            self._use_drafter(drafter)
        except BaseException:
            if self._link is not None:
                self._link.close()
            if self._tracer is not None:
                self._tracer.close()
            raise

    def _dial(self, interrupt: CancelToken) -> EdgeLink:
        """Open a link; wait for the edge if the policy requires it at the start."""
        link = self._link_group.open(self._retry_policy, interrupt)
        try:
            link.set_hello(self._hello)
            if not self._retry_policy.starts_without_edge:
                link.connect()
                link.handshake()
        except BaseException:
            self._link_group.remove(link)
            link.close()
            raise
        return link

    def _use_drafter(self, drafter: Drafter) -> None:
        """Use this drafter, and start a conversation."""
        self._drafter = drafter
        self._pair = self._pairs.latest
        self._start_conversation()
        self._match_vocabulary()

    def _start_conversation(self) -> None:
        """Start a conversation in the pair's vocabularies."""
        _, pair, statistics = self._pair
        self._drafter.set_bridge(pair.bridge(), pair.fingerprint)
        if self._link is not None:
            self._link.require_vocabulary(pair.fingerprint)
        self._conversation = Conversation(
            self._drafter,
            pair.target,
            self._link,
            statistics,
            self._retry_policy,
            self._cancel_token,
            self._on_round,
            shares=self._shares,
        )

    def _match_vocabulary(self) -> bool:
        """Switch to the vocabulary of the last greeted edge; returns whether it changed."""
        link = self._link
        if link is None or link.welcomed is None:
            return False
        welcome = link.welcomed
        if self._pairs.expect(welcome) == self._pair.vocabulary:
            return False
        link.require_vocabulary(link.vocabulary)
        try:
            self._pair = self._pairs.get(link, welcome)
        except BaseException as error:
            link.require_vocabulary(self._pair.pair.fingerprint)
            if isinstance(error, PairMismatchError):
                if link.welcome is not None:
                    return False  # the edge has the earlier vocabulary again
                link.unusable = link.vocabulary
            if self._retry_policy.policy == "local" and isinstance(error, AWAY):
                return False  # the drafter continues alone until a suitable edge is there
            raise
        self._start_conversation()
        return True

    def beside(self) -> Device:
        """Make a device for another conversation and thread, with the same weights and edge.

        The new device has its own lane, connection and session, and is closed separately. Raises
        `UnsupportedError` if all lanes are taken.
        """
        self._turns.check()
        other = copy(self)
        other._cancel_token, other._turns = CancelToken(), DeviceTurns()
        drafter = self._drafter.fork()
        try:
            if self._link is not None:
                other._link = self._dial(other._cancel_token)
                if other._link.welcomed is None:  # no handshake yet: copy this device's
                    other._link.on_welcome(self._link.welcomed)
            other._use_drafter(drafter)
            if self._tracer is not None:
                other._tracer = self._tracer.share()
        except BaseException:
            if other._link is not None and other._link is not self._link:
                self._link_group.remove(other._link)
                other._link.close()
            drafter.release()
            raise
        return other

    # Answers

    def generate(
        self,
        prompt: PromptInput | Prompt,
        *,
        owner: Owner = DEFAULT_OWNER,
        **options: Unpack[TalkOptions],
    ) -> Generation:
        """Generate a whole answer. The options are those of `stream`."""
        with self.stream(prompt, owner=owner, **options) as pieces:
            for _ in pieces:
                pass
        assert pieces.generation is not None
        return pieces.generation

    def stream(
        self,
        prompt: PromptInput | Prompt,
        *,
        owner: Owner = DEFAULT_OWNER,
        **options: Unpack[TalkOptions],
    ) -> AnswerStream:
        """Begin an answer and return the stream of its pieces.

        After the last piece, the stream's ``generation`` is the whole answer. Until then, or until
        the stream is closed, nothing else may use the device.

        A text becomes one user message in the target's chat template, if there is one. Messages
        (each with "role" and "content") are rendered by this template, with the tools of the
        options (`TalkOptions`) or of a `Talk`. A list of the target's token ids is used unchanged.
        The other options are those of `wire.request.Request`. owner: the user's unique name;
        the text drafter keeps texts by owner. By default all answers have the same owner. With
        None, no text is kept.
        """
        source, keywords = read_talk(prompt, options)
        return self.answer(source, Request.from_options(keywords), owner=owner)

    def answer(
        self, prompt: PromptInput | Prompt, request: Request, *, owner: Owner = DEFAULT_OWNER
    ) -> AnswerStream:
        """Begin the answer to a request, and return the stream of its pieces; see `stream`."""
        turn = DeviceTurn()
        try:
            self._turns.take(turn)
            with self._turns.running(turn):
                self._cancel_token.reset()
                turn.pieces = self._answer(prompt, request, owner)
            return AnswerStream(self._turns, turn, self._last_answer)
        except BaseException:
            self._turns.end(turn)
            raise

    def _answer(
        self, source: PromptInput | Prompt, request: Request, owner: Owner
    ) -> Generator[Piece, None, None]:
        """Return the pieces of an answer, with spans if this device makes traces."""
        if self._tracer is None:
            return self._begin(source, request, owner, None)
        trace = AnswerTrace(self._tracer, source, request)
        try:
            pieces = self._begin(source, request, owner, trace)
        except BaseException as error:
            trace.fail(error)
            raise
        return trace.follow(pieces, lambda: (self.last, self.vocabulary))

    def _begin(
        self,
        source: PromptInput | Prompt,
        request: Request,
        owner: Owner,
        trace: AnswerTrace | None,
    ) -> Generator[Piece, None, None]:
        """Check the request, greet the edge if needed, and return the pieces of an answer."""
        checked = self._check(request)
        self._handshake(checked)
        self._match_vocabulary()
        if isinstance(checked, Plan):
            checked.expect_sendable(self.tokenizer.vocab_size)
        prompt = self._translate(source)
        pieces = self._conversation.answer(prompt, checked, owner, alone=False, trace=trace)
        return self._restart_on_mismatch(pieces, prompt, checked, owner, trace)

    def _last_answer(self) -> Generation:
        assert self.last is not None
        return self.last

    def _check(self, request: Request) -> Plan | Request:
        """Check a request; returns its plan, or itself for protocol "auto".

        The default protocol is "auto"; without an edge it is "local".
        """
        request = request.with_plain_types()
        if request.protocol is None:
            default = LOCAL if self._link is None else AUTO
            request = structs.replace(request, protocol=default)
        request = with_default_temperature(request)
        if request.protocol != AUTO:
            return plan(request)
        self._pair.statistics.check(request.auto.policy)
        self._conversation.plans(request, reachable=self._link is not None)
        return request

    def _handshake(self, request: Plan | Request) -> None:
        """Greet the first edge: the prompt must be encoded in its vocabulary."""
        link = self._link
        if link is None:
            return
        link.lost_ns = None  # ignore a loss during an earlier answer
        if link.welcomed is not None:
            return
        if self._retry_policy.policy == "local":
            link.poll()
        elif request.protocol != LOCAL:
            with suppress(PairMismatchError):  # the handshake itself succeeded
                link.handshake()

    def _restart_on_mismatch(
        self,
        pieces: Generator[Piece, None, None],
        prompt: Prompt,
        request: Plan | Request,
        owner: Owner,
        trace: AnswerTrace | None,
    ) -> Generator[Piece, None, None]:
        """Yield the pieces; restart the answer if the edge has another vocabulary."""
        with closing(pieces):
            try:
                first = next(pieces, None)
            except PairMismatchError:
                if not self._match_vocabulary() and self._retry_policy.policy != "local":
                    raise
            else:
                if first is not None:
                    yield first
                    yield from pieces
                return
        yield from self._conversation.answer(self._translate(prompt), request, owner, trace=trace)

    def _translate(self, prompt: PromptInput | Prompt) -> Prompt:
        """Encode the prompt in the vocabularies of this pair."""
        pair = self._pair.pair
        if not isinstance(prompt, Prompt):
            return pair.prompt(prompt, max_tokens=self.context - 1)
        if prompt.pair == pair.digests:
            return prompt
        if prompt.can_reencode or prompt.vocabulary in ("", pair.fingerprint):
            return pair.prompt(prompt.source, chat=prompt.chat, max_tokens=self.context - 1)
        raise PairMismatchError(
            f"These token ids do not belong to the vocabulary of {pair.target.model}, which the "
            "edge serves now: make the prompt again."
        )

    @property
    def last(self) -> Generation | None:
        """The last complete answer, whichever thread requested it."""
        return self._conversation.last

    def interrupt(self) -> None:
        """End the running answer with `InterruptedGenerationError`.

        Also ends the answer's waits for the edge. Calls that wait for their turn keep waiting.
        """
        self._cancel_token.cancel()

    @property
    def last_checked_s(self) -> float:
        """Time of the answering thread's last check for an interruption (monotonic).

        The thread also checks while it waits for the edge or reads a prompt. If the last check is
        long ago, the thread hangs and cannot be interrupted.
        """
        return self._cancel_token.last_checked_s

    def prompt(self, asked: PromptInput, *, chat: bool = True) -> Prompt:
        """Tokenise a prompt as `stream` does, for target and drafter.

        chat: True: a text becomes a user message; False: it is used unchanged. The prompt is in the
        vocabulary of the last edge that any lane of this device greeted.
        """
        return self._pairs.latest.pair.prompt(asked, chat=chat, max_tokens=self.context - 1)

    @property
    def knows_target(self) -> bool:
        """Whether `prompt` has the edge's vocabulary; True without an edge."""
        link, pairs = self._link, self._pairs
        if link is None:
            return True
        welcome = link.welcomed
        return welcome is not None and pairs.expect(welcome) == pairs.latest.vocabulary

    @property
    def pair(self) -> Pair:
        """The vocabularies of drafter and target; until a handshake, both are the drafter's."""
        return self._pairs.latest.pair

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary; until a handshake, the drafter's."""
        return self.pair.target

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.vocabulary.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """The target's chat template, or None."""
        return self.vocabulary.template

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and answer together; an edge may set a lower limit."""
        return self._conversation.session.context

    def shared(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER) -> int:
        """Count the first tokens of the owner's prompt that this conversation already holds."""
        if prompt.vocabulary != self._pair.pair.fingerprint:
            return 0  # token ids of another vocabulary
        return self._conversation.session.shared_tokens(prompt.ids, owner)

    # The edge

    @property
    def welcome(self) -> Welcome | None:
        """The edge's last `Welcome`; None before a handshake, or if its vocabulary does not fit."""
        return self._link.welcome if self._link is not None else None

    @property
    def evidence(self) -> Evidence:
        """The evidence of protocol "auto", shared by all lanes."""
        return self._pair.statistics.evidence

    def probe(self, *, rates: bool = False) -> LinkState:
        """Measure the RTT of the link with a ping; rates: measure its rates, too, with trains.

        Waits for its turn, as `stream` does.
        """

        def measure(link: EdgeLink) -> LinkState:
            ping(link)
            if rates:
                measure_rates(link)
            return link.state()

        return self.measure(measure)

    def measure(self, measure: Callable[[EdgeLink], _Measured]) -> _Measured:
        """Measure the link by this function, and return its result. Waits for its turn."""
        with self._turns.turn():
            if self._link is None:
                raise UnsupportedError("This device has no edge, so there is no link to measure.")
            self._cancel_token.reset()
            return measure(self._link)

    @property
    def link_up(self) -> bool:
        """Whether there is a connection to the edge."""
        link = self._link
        return link is not None and self._turns.usable and link.is_up()

    @property
    def link_status(self) -> LinkStatus | None:
        """The state of the link, in words; None without an edge. For any thread.

        The best state among the links of this device and of the devices made by `beside`.
        """
        return self._link_group.status if self._link is not None else None

    def attend(self) -> None:
        """Greet an edge that has come back, without waiting.

        The thread that answers must call this method from time to time between answers.
        """
        if self._link is not None and self._turns.usable:
            self._link.attend()

    def retry(self) -> None:
        """Reconnect all unconnected links at once: keys may have changed. For any thread."""
        if self._link is not None and self._turns.usable:
            self._link_group.retry()

    def link_state(self) -> LinkState | None:
        """The link's state; None without an edge. Sends nothing."""
        link = self._link
        return link.state() if link is not None and self._turns.usable else None

    @property
    def tracer(self) -> Tracer | None:
        """Makes the spans of this device's answers; None: it makes no traces."""
        return self._tracer

    @property
    def execution(self) -> Execution | None:
        """How the drafter's model is executed; None without a model."""
        return self._drafter.execution

    def redirect(self, edge: str, keys: str | Path | None = None) -> None:
        """Use another address for this device and all devices made by `beside`.

        keys: the folder of the new edge's keys. Running answers continue at the new address. A
        wrong address or wrong keys raise the constructor's errors and change nothing.
        """
        self._turns.check()
        if self._link is None:
            raise UnsupportedError("This device has no edge, so there is nothing to redirect.")
        self._link_group.redirect(edge, keys)

    def reconnect(self) -> None:
        """Connect anew to the same edge: what was measured of the link ends with its connection.

        For a path that has changed. A running answer continues on the new connection.
        """
        self._turns.check()
        if self._link is not None:
            self._link_group.reconnect()

    def close(self) -> None:
        """Close the session and the connection, and free the lane.

        Ends the running answer and all waiting calls with `DeviceClosedError`.
        """
        if not self._turns.close(self._cancel_token.cancel):
            return
        link, self._link = self._link, None
        try:
            if link is not None:
                self._link_group.remove(link)
                self._conversation.session.edge.close()
        finally:
            if link is not None:
                link.close()
            self._drafter.release()
            if self._tracer is not None:
                self._tracer.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
