"""`Device`: the drafting end as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pilotfish.base.errors import PairMismatchError, UnsupportedError
from pilotfish.device_runtime.bridge import Pair, Prompt, PromptInput, read_talk
from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.conversation import AutoRequest, Conversation
from pilotfish.device_runtime.drafting import Drafter
from pilotfish.device_runtime.drafting.draft_source import DraftSource
from pilotfish.device_runtime.drafting.text_folder import DEFAULT_OWNER, Owner
from pilotfish.device_runtime.link.connectivity import LinkStatus
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import LinkGroup, load_keys
from pilotfish.device_runtime.link.probing import PROBE_BYTES, ping
from pilotfish.device_runtime.link.retry import AWAY, FAIL, CancelToken, OnLinkLoss, RetryPolicy
from pilotfish.device_runtime.plan import AUTO, Auto, Plan, plan
from pilotfish.device_runtime.record import Generation, Piece, Round
from pilotfish.device_runtime.turn import AnswerStream, DeviceTurn, DeviceTurns
from pilotfish.device_runtime.vocabulary_pairs import VocabularyPairs
from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.language_model import Execution
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import LOCAL

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pilotfish.device_runtime.plan import Options, TalkOptions


class Device:
    """A drafter and its edge, with one conversation: one answer at a time.

    `beside` makes devices for more. A call from another thread waits for its turn, in the order of
    request; a thread that has a stream open is refused with `DeviceInUseError`.

    draft: the drafter's artifact, or "text": what followed before, in this text or an earlier one,
    without a model. If its vocabulary differs from the target's, the target's is fetched from the
    edge and cached; on_fetch is called with the bytes fetched and their total.
    draft_text: an artifact drafts by the text, too, where it repeats itself.
    texts: the folder where earlier conversations are kept for that, or "off": each has its own text
    alone; None: they are kept in memory. Each owner that `stream` names has texts of its own.
    share_texts: unless they are shared, for lossless protocols, with the prompts that were read.
    edge: ``tcp://host:port``, or None when only ``local`` is used.
    keys: the folder with ``device.key`` and ``edge.pub``; None is allowed on loopback only.
    on_round: is called with every round at its end.

    lanes: the most devices, this one included, that share the drafter's weights.

    on_link_loss: what to do while the edge is away (it cannot be reached, drains, or is full).
    "fail": raise `EdgeLostError` 2.2 s after the loss; the edge must also be there at the start.
    "wait": wait ``patience_s``, then raise it. "local": after a second go on with the drafter alone
    until the edge is back. Verified text is the same as without the loss; pieces of origin "local"
    are the drafter's.

    All but `attend` is for any thread. `generate`, `stream` and `probe` wait for their turn; all
    else answers at once, while an answer runs, too. After `close`, and in a process that was forked
    from this one, what needs the edge or the drafter raises `DeviceClosedError`.
    """

    def __init__(
        self,
        draft: str | Path,
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
    ) -> None:
        if lanes < 1:
            raise UnsupportedError(f"A device has at least one lane, not {lanes}.")
        self._retry_policy = RetryPolicy.from_policy(on_link_loss, patience_s)
        self._on_round = on_round
        self._cancel_token = CancelToken()
        self._link: EdgeLink | None = None
        self._turns = DeviceTurns()
        self._shares = share_texts
        source = DraftSource.open(draft, text=draft_text, text_location=texts, shared=share_texts)
        if source.artifact is None and (edge is None or on_link_loss == "local"):
            raise UnsupportedError(
                "The drafter text repeats what was said, and can say nothing by itself: give it an "
                'edge, and on_link_loss "wait" or "fail".'
            )
        self._hello = source.hello
        # the edge first: its absence shows at once, while loading a model takes long
        if edge is not None:
            self._link_group = LinkGroup(edge, load_keys(edge, keys))
            self._link = self._dial(self._cancel_token)
        try:
            drafter = source.load(provider=provider, threads=threads, context=context, lanes=lanes)
            self._pairs = VocabularyPairs(
                source.vocabulary,
                source.vocabulary_subset,
                drafter.pass_times,
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
            raise

    def _dial(self, interrupt: CancelToken) -> EdgeLink:
        """Open a link and, unless the policy allows a later edge, wait for the connection."""
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
        """Use this drafter, and start a conversation with the edge if it is there."""
        self._drafter = drafter
        self._pair = self._pairs.latest
        self._start_conversation()
        self._match_vocabulary()

    def _start_conversation(self) -> None:
        """Start a conversation in the partner's vocabulary."""
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
        """Switch to the vocabulary of the edge greeted last; returns whether it changed."""
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
                    return False  # the earlier vocabulary again
                link.unusable = link.vocabulary
            if self._retry_policy.policy == "local" and isinstance(error, AWAY):
                return False  # the drafter goes on alone until a suitable edge is there
            raise
        self._start_conversation()
        return True

    def beside(self) -> Device:
        """Make a device for another conversation and thread, with the same weights and edge.

        It has its own lane, connection and session, and is closed separately. Raises
        `UnsupportedError` if all lanes are taken.
        """
        self._turns.check()
        other = copy(self)
        other._cancel_token, other._turns = CancelToken(), DeviceTurns()
        drafter = self._drafter.fork()
        try:
            if self._link is not None:
                other._link = self._dial(other._cancel_token)
                if other._link.welcomed is None:  # not greeted yet: assume the same edge
                    other._link.on_welcome(self._link.welcomed)
            other._use_drafter(drafter)
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
        """Generate an answer and return it whole. The options are those of `stream`."""
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
        """Begin an answer, and return its pieces, the whole behind them as ``generation``.

        Nothing else may use the device until the last piece was taken or the stream is closed.

        A text prompt becomes one user message in the target's chat template, if it has one;
        messages (each with "role" and "content") are rendered by that template, with the tools of
        the options (`TalkOptions`) or those of a `Talk`; a list of the target's token ids is used
        as it is. The other options are those of `device_runtime.plan.plan`. owner: a name for
        the user, which no other user may have; the text drafter reads and keeps texts under it. By
        default the device has one user. None keeps nothing.
        """
        source, plan_options = read_talk(prompt, options)
        turn = DeviceTurn()
        try:
            self._turns.take(turn)
            with self._turns.running(turn):
                self._cancel_token.reset()
                turn.pieces = self._answer(source, plan_options, owner)
            return AnswerStream(self._turns, turn, self._last_answer)
        except BaseException:
            self._turns.end(turn)
            raise

    def _answer(
        self, source: PromptInput | Prompt, options: Options, owner: Owner
    ) -> Generator[Piece, None, None]:
        """Greet the edge if need be, check the options, and make the pieces of an answer."""
        request = self._wanted_plan(options)
        self._handshake(request)
        self._match_vocabulary()
        prompt = self._translate(source)
        pieces = self._conversation.answer(prompt, request, owner, alone=False)
        return self._restart_on_mismatch(pieces, prompt, request, owner)

    def _last_answer(self) -> Generation:
        assert self.last is not None
        return self.last

    def _wanted_plan(self, options: Options) -> Plan | AutoRequest:
        """Check the options; returns the plan, or what "auto" chooses from.

        The default is "auto"; without an edge it is "local", as there is no other.
        """
        options.setdefault("protocol", LOCAL if self._link is None else AUTO)
        auto = options["protocol"]
        if auto == AUTO:
            auto = Auto()
        if not isinstance(auto, Auto):
            return plan(**options)
        self._pair.statistics.check(auto.policy)
        request = AutoRequest(auto, options)
        self._conversation.plans(request)
        return request

    def _handshake(self, request: Plan | AutoRequest) -> None:
        """Greet an edge not met before: the prompt's vocabulary depends on it."""
        link = self._link
        if link is None:
            return
        link.lost_ns = None  # ignore an earlier answer's loss
        if link.welcomed is not None:
            return
        if self._retry_policy.policy == "local":
            link.poll()
        elif isinstance(request, AutoRequest) or request.protocol != LOCAL:
            with suppress(PairMismatchError):  # an edge of another vocabulary has been met, too
                link.handshake()

    def _restart_on_mismatch(
        self,
        pieces: Generator[Piece, None, None],
        prompt: Prompt,
        request: Plan | AutoRequest,
        owner: Owner,
    ) -> Generator[Piece, None, None]:
        """Yield the pieces; restarts the answer if the edge's vocabulary is not the prompt's."""
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
        yield from self._conversation.answer(self._translate(prompt), request, owner)

    def _translate(self, prompt: PromptInput | Prompt) -> Prompt:
        """Translate the prompt to the vocabularies of this pair."""
        pair = self._pair.pair
        if not isinstance(prompt, Prompt):
            return pair.prompt(prompt, max_tokens=self.context - 1)
        if prompt.pair == pair.digests:
            return prompt
        if prompt.can_reencode or prompt.vocabulary in ("", pair.fingerprint):
            return pair.prompt(prompt.source, chat=prompt.chat, max_tokens=self.context - 1)
        raise PairMismatchError(
            f"These token ids are of another vocabulary than that of {pair.target.model}, which "
            "the edge serves now: make the prompt again."
        )

    @property
    def last(self) -> Generation | None:
        """The last complete answer, whichever thread asked for it."""
        return self._conversation.last

    def interrupt(self) -> None:
        """End the answer that has its turn, with `InterruptedGenerationError`.

        Ends its waits for the edge, too; calls that wait for their turn go on.
        """
        self._cancel_token.cancel()

    @property
    def last_checked_s(self) -> float:
        """When the answer's thread last checked for an interruption (monotonic).

        It also checks while it waits for the edge or reads a prompt: a thread that has not checked
        for long hangs, and cannot be interrupted.
        """
        return self._cancel_token.last_checked_s

    def prompt(self, asked: PromptInput, *, chat: bool = True) -> Prompt:
        """Tokenise a prompt as `stream` does, for target and drafter.

        chat: a text is a user message; otherwise it is used as it is. The vocabulary is that of the
        edge that any lane of this device greeted last.
        """
        return self._pairs.latest.pair.prompt(asked, chat=chat, max_tokens=self.context - 1)

    @property
    def knows_target(self) -> bool:
        """Whether `prompt` knows the edge's vocabulary, or there is no edge."""
        link, pairs = self._link, self._pairs
        if link is None:
            return True
        welcome = link.welcomed
        return welcome is not None and pairs.expect(welcome) == pairs.latest.vocabulary

    @property
    def pair(self) -> Pair:
        """The drafter's vocabulary and the target's; its own twice until an edge is greeted."""
        return self._pairs.latest.pair

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary; the drafter's until an edge is greeted."""
        return self.pair.target

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.vocabulary.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """Its template, or None."""
        return self.vocabulary.template

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together; an edge may allow fewer."""
        return self._conversation.session.context

    def shared(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER) -> int:
        """Count the first tokens of an owner's prompt that this conversation already holds."""
        if prompt.vocabulary != self._pair.pair.fingerprint:
            return 0  # ids of another vocabulary
        return self._conversation.session.shared_tokens(prompt.ids, owner)

    # The edge

    @property
    def welcome(self) -> Welcome | None:
        """The edge's last `Welcome`.

        None before the first, and while the edge has another vocabulary.
        """
        return self._link.welcome if self._link is not None else None

    @property
    def evidence(self) -> Evidence:
        """The evidence that protocol "auto" decides by, shared by all lanes."""
        return self._pair.statistics.evidence

    def probe(self, *, rates: bool = False) -> LinkState:
        """Measure the link to the edge with a ping; rates: and with a larger one, its rates.

        Waits for its turn, as `stream` does.
        """
        with self._turns.turn():
            if self._link is None:
                raise UnsupportedError("This device has no edge, so there is no link to measure.")
            self._cancel_token.reset()
            ping(self._link)
            if rates:
                ping(self._link, PROBE_BYTES)
            return self._link.state()

    @property
    def link_up(self) -> bool:
        """Whether there is a connection to the edge."""
        link = self._link
        return link is not None and self._turns.usable and link.is_up()

    @property
    def link_status(self) -> LinkStatus | None:
        """The state of the link, in words; None without an edge. For any thread.

        Of this device and all `beside` it, the one that is best off.
        """
        return self._link_group.status if self._link is not None else None

    def attend(self) -> None:
        """Greet an edge that has come back, while this device answers nothing; never waits.

        For the thread that answers; call it now and then.
        """
        if self._link is not None and self._turns.usable:
            self._link.attend()

    def retry(self) -> None:
        """Try at once to connect, where no connection is: keys may have changed. For any thread."""
        if self._link is not None and self._turns.usable:
            self._link_group.retry()

    def link_state(self) -> LinkState | None:
        """The link's state; None without an edge. Sends nothing."""
        link = self._link
        return link.state() if link is not None and self._turns.usable else None

    @property
    def execution(self) -> Execution | None:
        """How the drafter is run; None where it is no model."""
        return self._drafter.execution

    def redirect(self, edge: str, keys: str | Path | None = None) -> None:
        """Use another address for this device and all `beside` it.

        keys: the folder of other keys. Running answers go on there. Raises like the constructor
        for a wrong address or wrong keys, and then changes nothing.
        """
        self._turns.check()
        if self._link is None:
            raise UnsupportedError("This device has no edge, so there is nothing to redirect.")
        self._link_group.redirect(edge, keys)

    def close(self) -> None:
        """Close the session and the connection, and free the lane.

        Ends the present answer, and refuses what waits for its turn, with `DeviceClosedError`.
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

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(edge: str, keys: str | Path | None, patience_s: float | None = None) -> EdgeLink:
    """Connect to an edge with the keys in this folder, which are needed beyond loopback.

    patience_s: how long the edge may be away, or owe a reply; None: as under the policy "fail".
    """
    patience = FAIL if patience_s is None else RetryPolicy.from_policy("wait", patience_s)
    link = EdgeLink(edge, load_keys(edge, keys), patience)
    try:
        link.connect()
    except BaseException:
        link.close()
        raise
    return link
