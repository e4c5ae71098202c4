"""`Device`: the drafting end as a Python object."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from device_runtime.choice import POLICIES, Evidence, Policy
from device_runtime.drafter import Drafter
from device_runtime.edge_link import PROBE_BYTES, EdgeLink
from device_runtime.plan import AUTO, Auto, Options, Plan, alternatives, plan
from device_runtime.record import Choice, Generation, Piece, Probing, Round
from device_runtime.session import Proposal, Session
from device_runtime.stops import Answer
from engines.artifact import Artifact
from engines.chat import ChatTemplate
from wire.errors import TokenOutOfRangeError, UnsupportedError
from wire.keys import DeviceKeys
from wire.link.meter import SMALL_BYTES
from wire.link.state import LinkState
from wire.messages import Welcome
from wire.protocols import LOCAL, STREAM
from wire.transport import is_loopback

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Device:
    """A drafter and its edge. Not thread-safe: one generation at a time.

    draft: the drafter's artifact. edge: ``tcp://host:port``, or None when only ``local`` is used.
    keys: the folder with ``device.key`` and ``edge.pub``; None is allowed on loopback only.
    on_round: is told of every round when it is over, before the next one begins.
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
    ) -> None:
        self._link: EdgeLink | None = None
        self.welcome: Welcome | None = None
        self._on_round = on_round
        artifact = Artifact.open(draft)
        # the edge first: its absence shows at once, loading a model takes a while
        if edge is not None:
            self._link = connect(edge, keys)
        try:
            if self._link is not None:
                self.welcome = self._link.greet(artifact.manifest)
            self._drafter = Drafter(artifact, provider=provider, threads=threads, context=context)
            self._template = _chat_template(self._drafter)
        except BaseException:
            if self._link is not None:
                self._link.close()
            raise
        self.tokenizer = self._drafter.tokenizer
        self._session = Session(self._drafter, self._link)
        if self.welcome is not None:
            self._session.keep_to(self.welcome.limits)
        self.evidence = Evidence(
            self._drafter.pace,
            {told.tokens: told.ns * 1e-9 for told in self.welcome.passes} if self.welcome else {},
            artifact.manifest.vocab_size,
        )
        self._policies = {name: policy() for name, policy in POLICIES.items()}
        self.last: Generation | None = None

    def generate(self, prompt: str | Sequence[int], **options: "Unpack[Options]") -> Generation:
        """One answer, whole. The options are those of `stream`."""
        for _ in self.stream(prompt, **options):
            pass
        assert self.last is not None
        return self.last

    def stream(self, prompt: str | Sequence[int], **options: "Unpack[Options]") -> Iterator[Piece]:
        """One answer, piece by piece; the whole is in ``last`` when the iterator ends.

        A text prompt is one user message in the model's chat template, where it has one; a list of
        token ids is taken as it is. The options are those of `device_runtime.plan.plan`.
        """
        ids = self.prompt_ids(prompt)
        auto = options.get("protocol")
        if auto == AUTO:
            auto = Auto()
        if not isinstance(auto, Auto):
            return self._run(ids, [plan(**options)], policy=None)
        if auto.policy not in self._policies:
            known = ", ".join(self._policies)
            raise UnsupportedError(f"There is no policy {auto.policy!r}: {known}.")
        return self._run(ids, self._alternatives(auto, options), self._policies[auto.policy])

    def probe(self, *, rates: bool = False) -> LinkState:
        """Measure the link to the edge with a ping, and a larger one for its rates."""
        if self._link is None:
            raise UnsupportedError("This device has no edge, so there is no link to measure.")
        self._link.ping()
        if rates:
            self._link.ping(PROBE_BYTES)
        return self._link.state()

    def prompt_ids(self, prompt: str | Sequence[int]) -> NDArray[np.uint32]:
        """The token ids u32 [n] that a prompt stands for."""
        vocab = self._drafter.manifest.vocab_size
        if not isinstance(prompt, str):
            ids = list(prompt)
            wrong = [i for i in ids if not isinstance(i, int | np.integer) or not 0 <= i < vocab]
            if wrong:
                raise TokenOutOfRangeError(
                    f"{wrong[0]!r} is no token id: the vocabulary has {vocab} tokens."
                )
            return np.array(ids, dtype=np.uint32)
        if self._template is not None:
            text = self._template.render([{"role": "user", "content": prompt}])
            return np.array(self.tokenizer.encode(text, special=True), dtype=np.uint32)
        ids = [*self.tokenizer.beginning, *self.tokenizer.encode(prompt)]
        return np.array(ids, dtype=np.uint32)

    @property
    def _ends(self) -> list[int]:
        """The tokens that end an answer: the target's, whose text it is."""
        return list((self.welcome or self._drafter.manifest).eos_ids)

    def _alternatives(self, auto: Auto, options: Options) -> list[Plan]:
        if self.welcome is None:
            return alternatives(auto, options, offered=[LOCAL])
        offered, limits = [*self.welcome.protocols, LOCAL], self.welcome.limits
        plans = alternatives(auto, options, offered=offered, most=limits.window)
        fitting = [plan for plan in plans if self._freight(plan) <= limits.message_bytes // 2]
        return fitting or plans[:1]

    def _freight(self, plan: Plan) -> float:
        """Bytes of the longer message of a round under this plan."""
        return 0.0 if plan.exchange is None else max(self.evidence.freight(plan))

    def _greet_again(self) -> None:
        """An edge that has come back may be another one, with other limits."""
        if self._link is not None and self._link.renewed:
            self.welcome = self._link.greet(self._drafter.manifest)
            self._session.keep_to(self.welcome.limits)

    def _choose(
        self, plans: Sequence[Plan], policy: Policy
    ) -> tuple[Plan, Choice, LinkState | None]:
        """One of the plans, by what is known of the link; measures it first if need be."""
        state = None
        if self._link is not None:
            matter = any(self._freight(plan) > SMALL_BYTES for plan in plans)
            self._link.refresh(rates=matter)
            state = self._link.state()
        wanted, choice = policy.choose(plans, state or LinkState(), self.evidence)
        return wanted, choice, state

    def _run(
        self, prompt: NDArray[np.uint32], plans: Sequence[Plan], policy: Policy | None
    ) -> Iterator[Piece]:
        session = self._session
        begun_s = time.monotonic()
        self._greet_again()
        before = self._link.probing if self._link else Probing()
        choice = None
        if policy is None:
            wanted = plans[0]
            state = self._link.state() if self._link else None
        else:
            wanted, choice, state = self._choose(plans, policy)
        if self._link is not None:
            self._link.next_answer()
        answer = Answer(
            self.tokenizer, eos_ids=self._ends, stop=wanted.stop, max_tokens=wanted.max_tokens
        )
        rounds: list[Round] = []
        first_token_s = 0.0
        finished = False
        try:
            session.start(prompt, wanted)
            for proposal in self._proposals(wanted, answer):
                settled_ns = time.monotonic_ns()
                pieces, kept = _pieces(proposal, answer)
                record = proposal.record
                record.tokens = kept
                record.timings.settle += (time.monotonic_ns() - settled_ns) * 1e-9
                rounds.append(record)
                first_token_s = first_token_s or time.monotonic() - begun_s
                if self._on_round is not None:
                    self._on_round(record)
                yield from pieces
                if answer.finish_reason is not None:
                    break
            rest = answer.end("length")  # the context is full
            if rest:
                yield Piece(rest, [], "target")
            finished = True
        finally:
            if wanted.protocol == STREAM or not finished:
                session.cancel()
            session.keep(len(prompt) + len(answer.tokens))
            self.evidence.add(wanted, rounds)
        after = self._link.probing if self._link else Probing()
        self.last = Generation(
            protocol=wanted.protocol,
            prompt_tokens=len(prompt),
            tokens=answer.tokens,
            text=answer.text,
            finish_reason=answer.finish_reason or "length",
            rounds=rounds,
            first_token_s=first_token_s,
            total_s=time.monotonic() - begun_s,
            link=state,
            choice=choice,
            probing=after.since(before),
        )

    def _proposals(self, wanted: Plan, answer: Answer) -> Iterator[Proposal]:
        session = self._session
        if wanted.protocol == STREAM:
            yield from session.stream(answer.remaining)
        elif wanted.protocol == LOCAL:
            yield from session.local(wanted.law, answer.remaining)
        else:
            while answer.remaining and len(session.committed) < session.context:
                yield session.speculate(wanted, answer.remaining, self._ends)

    def close(self) -> None:
        """Tell the edge to forget the session, and hang up."""
        if self._link is None:
            return
        link, self._link = self._link, None
        try:
            self._session.close()
        finally:
            link.close()

    def __enter__(self) -> "Device":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(edge: str, keys: str | Path | None) -> EdgeLink:
    """A connection to an edge, with the keys in this folder; beyond loopback there must be some."""
    if keys is None and not is_loopback(edge):
        raise UnsupportedError(
            f"Without keys a device talks to loopback only, not to {edge}; name the folder "
            "with device.key and edge.pub."
        )
    return EdgeLink(edge, DeviceKeys.load(Path(keys)) if keys is not None else None)


def _pieces(proposal: Proposal, answer: Answer) -> tuple[list[Piece], list[int]]:
    """The pieces that a round adds to the answer, and the tokens of it that the answer keeps."""
    record = proposal.record
    if record.protocol in (STREAM, LOCAL):
        parts = [(record.tokens, "target" if record.protocol == STREAM else LOCAL)]
    else:
        last = "bonus" if proposal.full else "corrected"
        parts = [(record.tokens[: record.accepted], "drafted"), (record.tokens[-1:], last)]
    pieces, kept = [], []
    for ids, origin in parts:
        taken, text = answer.push(ids)
        kept += taken
        if taken:
            pieces.append(Piece(text, taken, origin))
    return pieces, kept


def _chat_template(drafter: Drafter) -> ChatTemplate | None:
    manifest, tokenizer = drafter.manifest, drafter.tokenizer
    if manifest.chat_template is None:
        return None
    return ChatTemplate(
        manifest.chat_template,
        bos_token="" if manifest.bos_id is None else tokenizer.piece(manifest.bos_id),
        eos_token=tokenizer.piece(manifest.eos_ids[0]) if manifest.eos_ids else "",
    )
