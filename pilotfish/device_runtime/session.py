"""The session loop: draft → send → settle → commit (`Session.speculate`), or a stream.

The session owns the committed tokens. The drafter's K/V and the edge's session follow them, and
both can be rebuilt from them.

The committed tokens belong to the owner of the last answer. When another owner begins an answer,
drafter and edge forget these tokens unless sharing is on: otherwise the answer's time would reveal
that another owner used the same prefix.

Under link-loss policy "local", a window that gets no verdict is dropped whole. The link alone
decides this, never the drawn tokens, and protocol `local` draws from another random stream. So the
distribution of the output is unchanged.
"""

import time
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import (
    BadGrammarError,
    MalformedError,
    PromptTooLongError,
    TokenOutOfRangeError,
    UnsupportedError,
)
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.draft_advice import DraftAdvice
from pilotfish.device_runtime.edge_session import EdgeSession, StreamedTokens, VerifiedWindow
from pilotfish.device_runtime.forerunner import Forerunner
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import CancelToken
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round, Timings
from pilotfish.device_runtime.window_passes import WindowPasses
from pilotfish.drafting.ahead import ModelAcceptance
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.drafting.window import Drafter
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.randomness import Purpose
from pilotfish.speculation.sequences import common_prefix
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.wire.codecs.ids import count_ids, decode_ids
from pilotfish.wire.codecs.logprobs import TokenLogprob, decode_logprobs
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import Buffer, DecisionConditions, Tokens
from pilotfish.wire.protocols import (
    LOCAL,
    OMITTED_MASS,
    Ahead,
    Decision,
    Draft,
    SamplingParams,
    SpeculationProtocol,
    choose,
    lossless,
)
from pilotfish.wire.protocols.ahead import DEVICE, MOST_DRAFTS, SOURCES
from pilotfish.wire.protocols.protocol import NO_IDS, Ids

_NS = 1e-9
_UNKNOWN = Channel()
_MOST_PREDICTED = 32  # upper limit of the tokens of a window that come from a prediction


class Session:
    """One conversation with one edge, or with none for `local`.

    shares: True: an owner's answer may reuse the tokens of another owner.
    """

    def __init__(
        self,
        drafter: Drafter,
        link: EdgeLink | None,
        interrupt: CancelToken | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self.committed = CommittedTokens()
        self._drafter = drafter
        self._vocab = drafter.bridge.vocab_size
        self.edge = EdgeSession(link, self.committed, self._vocab)
        self._cancel_token = interrupt or CancelToken()
        self._acceptance = ModelAcceptance()  # learns across answers
        self._window_passes = WindowPasses(drafter, self.edge, self._acceptance)
        self._plan: Plan | None = None
        self._last_round: Round | None = None  # the generation's last round
        self._prompt_length = 0
        self.reused = 0  # number of the prompt's tokens that the session held when it began
        self.prompt_logprobs: list[TokenLogprob | None] = []  # filled once they have arrived
        self._logits_processor: LogitsProcessor | None = None
        self._constraint: DraftAdvice | None = None
        self._shares = shares
        self._owner: Owner = DEFAULT_OWNER  # owner of the committed tokens

    @property
    def context(self) -> int:
        """Maximum number of tokens that fit both ends, prompt included.

        A drafter with another vocabulary sets no limit: it stops drafting when its context is full.
        """
        if not self._drafter.bridge.trivial:
            return self.edge.limits.context
        return min(self._drafter.context, self.edge.limits.context)

    def start(
        self,
        prompt: Prompt,
        plan: Plan,
        channel: Channel = _UNKNOWN,
        constraint: DraftAdvice | None = None,
        owner: Owner = DEFAULT_OWNER,
        prediction: Ids = NO_IDS,
        traceparent: str | None = None,
    ) -> None:
        """Prepare a generation: both ends keep the prefix that session and prompt share.

        channel: the link's measured state, an input of a decision head. constraint: the plan's
        grammar, applied to drafts. owner: the user who requests the answer. prediction: ids that
        the answer is expected to have, u32 [n]: under `ahead` the edge drafts from them, in windows
        the drafter. traceparent: the answer's span, for the edge.
        """
        ids = prompt.ids
        if len(ids) == 0:
            raise MalformedError("The prompt is empty; a generation needs at least one token.")
        if len(ids) >= self.context:
            raise PromptTooLongError(
                f"The prompt has {len(ids)} tokens; drafter and target together accept at most "
                f"{self.context - 1}."
            )
        if plan.protocol == LOCAL and len(prompt.draft_ids) > self._drafter.context:
            raise PromptTooLongError(
                f"The prompt has {len(prompt.draft_ids)} tokens in the drafter's vocabulary; the "
                f"drafter accepts at most {self._drafter.context}."
            )
        self._check_drafter(plan)
        biased = max(plan.sampling.logits_options.logit_bias, default=0)
        if biased >= self._vocab:
            raise TokenOutOfRangeError(
                f"logit_bias names token {biased}, but the target has {self._vocab} tokens."
            )
        self._logits_processor = plan.sampling.logits_processor(len(ids), constraint)
        self._constraint = constraint
        self.reused = shared = self.shared_tokens(ids, owner)
        self.committed.truncate(shared)
        self.committed.extend(ids[shared:])
        if not shared:
            self._drafter.reset()
        if owner != self._owner:
            if not self._shares:
                self.edge.forget()
            self._owner = owner
        self._drafter.start(prompt, owner, lossless=lossless(plan.protocol))
        self._drafter.predict_answer(NO_IDS if plan.streams else prediction, len(ids))
        self._plan, self._last_round = plan, None
        self._window_passes.start(channel.rtt_s or 0.0)
        self.prompt_logprobs, self._prompt_length = [], len(ids)
        self.edge.truncate(shared)
        conditions = self._conditions(plan, channel)
        self.edge.prepare(plan, len(ids), conditions, prediction, traceparent)

    def _check_drafter(self, plan: Plan) -> None:
        """Raise `UnsupportedError` for a plan that this drafter cannot follow."""
        drafter = self._drafter
        if drafter.no_tree_reason and any(count > 1 for count in plan.expansion):
            raise UnsupportedError(
                f"The drafter {drafter.name} {drafter.no_tree_reason}, so it drafts no trees for "
                f"protocol {plan.protocol}: use greedy or tslt."
            )
        if plan.requires and not drafter.hidden_size:
            raise UnsupportedError(
                f"The drafter {drafter.name} drafts without hidden states, which protocol "
                f"{plan.protocol} needs: use greedy or tslt."
            )
        if plan.protocol == LOCAL and not drafter.standalone:
            raise UnsupportedError(
                f"The drafter {drafter.name} only repeats earlier text: protocol local needs a "
                "model."
            )

    def shared_tokens(self, prompt: NDArray[np.uint32], owner: Owner = DEFAULT_OWNER) -> int:
        """Count the first tokens of the owner's prompt that the session already holds."""
        if owner != self._owner and not self._shares:
            return 0
        return common_prefix(self.committed.ids, prompt)

    def join(self) -> None:
        """Send the edge the committed tokens: at the start, and after the drafter went on alone."""
        assert self._plan is not None
        if self._constraint is not None:
            self._constraint.decides_alone = False
        self.edge.begin()
        if not self._plan.streams:  # read the prompt while the edge reads it
            self._drafter.prefill(self.committed.ids, self._cancel_token.check)

    def _conditions(self, plan: Plan, channel: Channel) -> DecisionConditions | None:
        """Return a decision head's inputs on link and drafter; None for other protocols."""
        if not plan.depends_on_link:
            return None
        return DecisionConditions(
            drafter=self._drafter.origin,
            hidden_size=self._drafter.hidden_size,
            rtt_s=channel.rtt_s,
            up_bps=channel.up_bps,
            down_bps=channel.down_bps,
            loss=channel.loss,
        )

    def truncate(self, length: int) -> None:
        """Keep only ``length`` committed tokens: the answer ended within a round."""
        self.committed.truncate(length)
        self.edge.truncate(length)

    def end(self) -> None:
        """Tell the drafter that the answer is complete."""
        self._drafter.end(self.committed.ids)

    # Speculation

    def speculate(self, plan: Plan, remaining: int, ends: Collection[int]) -> Round:
        """Run one round: draft a window, send it, settle the edge's verdict, commit the tokens."""
        exchange = plan.exchange
        assert exchange is not None
        start, began_ns = len(self.committed), time.monotonic_ns()
        reply = None
        while reply is None:  # repeats only if another edge, with smaller windows, has come
            draft = self._draft(plan, exchange, remaining, ends)
            if plan.depends_on_link:
                draft = self.edge.renew_channel(exchange, draft)
            drafted_ns = time.monotonic_ns()
            sent = self.edge.send(exchange, draft)
            if exchange.requests_states:  # the edge may request the last token's hidden state
                self._drafter.decode_last()
            reply = self.edge.wait_verdict(
                exchange, draft, sent, drafted_ns, late=exchange.requests_states
            )
        decision = self._take_prompt_logprobs(plan, _decision(draft, reply), start)
        decision, logprobs = self._take_logprobs(plan, draft, decision)
        decision, key = exchange.take_key_tokens(draft, decision)
        path = draft.path(decision.accepted)
        accepted = len(path)
        notes = exchange.check_notes(decision.notes, window=draft.depth, accepted=accepted)
        token = exchange.finish_round(
            draft, decision, plan.sampling, round_start=start, vocab_size=self._vocab
        )
        tokens = self._commit(draft, decision, token)
        reply.timings.draft += (drafted_ns - began_ns) * _NS
        reply.timings.settle += (time.monotonic_ns() - reply.received_ns) * _NS
        self._window_passes.record_round(plan, accepted, reply.timings)
        self._last_round = _record(exchange, draft, notes, reply, start, tokens)
        self._last_round.logprobs, self._last_round.key = logprobs, key
        self._last_round.forced = self._drafter.forced_positions(accepted)
        self._last_round.cut_masses = self._drafter.verified_cut_masses(path)
        return self._last_round

    def _take_logprobs(
        self, plan: Plan, draft: Draft, decision: Decision
    ) -> tuple[Decision, list[TokenLogprob | None]]:
        """Remove the frame of logprobs from a decision; returns the decision and the logprobs.

        If the frame begins with the logprob of the last round's pending token, set it in that
        round.
        """
        if plan.request.logprobs is None:
            return decision, []
        if not decision.frames:
            raise MalformedError("The edge's verdict lacks the requested logprobs.")
        *frames, frame = decision.frames
        count = len(draft.path(decision.accepted)) + (decision.token is not None)
        logprobs = decode_logprobs(frame, plan.request.logprobs, self._vocab, (count, count + 1))
        if len(logprobs) > count:
            pending = logprobs.pop(0)
            if self._last_round is not None and self._last_round.logprobs:
                self._last_round.logprobs[-1] = pending
        if decision.token is None:
            logprobs.append(None)
        return decision._replace(frames=frames), logprobs

    def _take_prompt_logprobs(self, plan: Plan, decision: Decision, start: int) -> Decision:
        """Remove the frame of the prompt's logprobs from a decision that has one."""
        if not self.edge.expects_prompt_logprobs(start):
            return decision
        if not decision.frames:
            raise MalformedError("The edge's verdict lacks the prompt's logprobs.")
        *frames, frame = decision.frames
        self._set_prompt_logprobs(plan, frame, start)
        return decision._replace(frames=frames)

    def _set_prompt_logprobs(self, plan: Plan, frame: Buffer, start: int) -> None:
        """Set the prompt's logprobs from a frame with logprobs of the first ``start`` tokens."""
        assert plan.request.prompt_logprobs is not None
        logprobs = decode_logprobs(frame, plan.request.prompt_logprobs, self._vocab, (start - 1,))
        self.prompt_logprobs = [None, *logprobs[: self._prompt_length - 1]]
        self.edge.has_prompt_logprobs = True

    def _draft(
        self, plan: Plan, exchange: SpeculationProtocol[Any], remaining: int, ends: Collection[int]
    ) -> Draft:
        """Draft a window within ``plan.expansion``, of at most ``remaining`` − 1 levels."""
        levels = min(remaining, self.context - len(self.committed)) - 1
        expansion = self._fitting_expansion(self._wanted_expansion(plan), levels)
        return self._drafter.draft(
            self.committed.ids,
            expansion,
            exchange,
            plan.drafting,
            ends,
            logits_processor=self._logits_processor,
            auto=plan.auto,
            single=self._window_passes.single(plan, len(expansion)),
        )

    def _wanted_expansion(self, plan: Plan) -> Expansion:
        """Return the plan's expansion, or a longer chain if the prediction is likely to be right.

        Only the deterministic protocols have longer chains: their text does not depend on windows.
        """
        exchange = plan.exchange
        if exchange is None or not exchange.deterministic or plan.request.window is not None:
            return plan.expansion
        predicted = self._drafter.count_predicted(self.committed.ids, _MOST_PREDICTED)
        return max(plan.expansion, (1,) * predicted, key=len)

    def _commit(self, draft: Draft, decision: Decision, token: int) -> list[int]:
        """Commit the accepted path and the next token, at both ends; returns these tokens."""
        if token >= self._vocab:
            raise MalformedError(
                f"The edge's verdict names token {token}, but the vocabulary has "
                f"{self._vocab} tokens."
            )
        path, ids = draft.path(decision.accepted), draft.ids.tolist()
        tokens = [*(ids[node - 1] for node in path), token]
        self.committed.extend(tokens)
        # a token sampled on the device is pending: the edge gets it with the next window
        self.edge.set_edge_length(len(self.committed) - (decision.token is None))
        return tokens

    def _fitting_expansion(self, expansion: Expansion, levels: int) -> Expansion:
        """Cut the expansion to ``levels``, the edge's window and the context.

        Assumes the largest tree of an expansion: the tree's size must not depend on the drawn
        tokens.
        """
        expansion = expansion[: max(0, levels)]
        room = max(0, min(self.edge.limits.window, self.context - len(self.committed) - 1))
        while nodes_at_most(expansion) > room:
            expansion = expansion[:-1]
        return expansion

    # Streams

    def stream(self, plan: Plan, count: int, ends: Collection[int]) -> Iterator[Round]:
        """Yield rounds of the target's tokens; under `ahead`, send hints.

        The stream has ``count`` tokens, or fewer: the edge ends it at an end token of the target.
        """
        count = min(count, self.context - len(self.committed))
        end = len(self.committed) + count
        forerunner = self._forerunner(plan, count, ends)
        if forerunner is None:
            for tokens in self.edge.stream_tokens(count):
                yield self._commit_stream(plan, tokens, end)
                if self.edge.has_ended_stream:
                    return
            return
        for tokens in self.edge.stream_tokens(count, forerunner.step):
            record = self._commit_stream(plan, tokens, end)
            comparison, stats = forerunner.record_tokens(
                record.tokens, record.source, record.pass_s
            )
            record.run = (comparison.depth, comparison.compared, comparison.agreed)
            record.nodes, record.uplink_bytes = stats.drafts, record.uplink_bytes + stats.sent_bytes
            record.timings = _split_wait(record.timings, stats.draft_s)
            if stats.forced and record.source == DEVICE:
                record.forced = tuple(at for at in stats.forced if at < record.accepted)
            yield record
            if self.edge.has_ended_stream:
                return

    def _forerunner(self, plan: Plan, count: int, ends: Collection[int]) -> Forerunner | None:
        """Make the forerunner of this stream; None if the device drafts nothing."""
        if not isinstance(plan.exchange, Ahead) or not plan.exchange.device_drafts:
            return None
        committed = self.committed.ids
        return Forerunner(
            self._drafter,
            self.edge,
            plan,
            self._acceptance.of(plan.sampling),
            committed,
            self._logits_processor,
            last=len(committed) + count - 1,
            ends=ends,
            rtt_s=self._window_passes.rtt_s,
        )

    def _commit_stream(self, plan: Plan, tokens: StreamedTokens, end: int) -> Round:
        """Commit the tokens of a stream message. end: position after the last requested token."""
        reply, answer, waited_ns = tokens
        start = len(self.committed)
        prompt = self.edge.expects_prompt_logprobs(start)
        extra_frames = (plan.request.logprobs is not None) + prompt
        if len(answer.frames) != 1 + extra_frames or len(answer.frames[0]) == 0:
            raise MalformedError(
                "The edge sent a stream message without tokens or without the requested logprobs."
            )
        if prompt:
            self._set_prompt_logprobs(plan, answer.frames[-1], start)
        if start + count_ids(answer.frames[0], self._vocab) > end:
            raise MalformedError("The edge sent more tokens than the device requested.")
        ids = decode_ids(answer.frames[0], self._vocab).tolist()
        if not _are_possible(reply, len(ids)):
            raise MalformedError(
                "The edge's counts of drafts, or its omitted mass, do not fit its tokens."
            )
        logprobs: list[TokenLogprob | None] = []
        if plan.request.logprobs is not None:
            logprobs = decode_logprobs(
                answer.frames[1], plan.request.logprobs, self._vocab, (len(ids),)
            )
        self.committed.extend(ids)
        self.edge.set_edge_length(len(self.committed))
        # count only the part of the pass that the device waited for: tokens may have arrived before
        verify_ns = min(waited_ns, reply.times.verify_ns)
        return Round(
            protocol=plan.protocol,
            start=start,
            window=reply.drafted,
            accepted=reply.accepted,
            source=reply.source,
            tokens=ids,
            uplink_bytes=answer.uplink_bytes,
            downlink_bytes=answer.downlink_bytes,
            timings=Timings(verify=verify_ns * _NS, downlink=(waited_ns - verify_ns) * _NS),
            pass_s=reply.times.verify_ns * _NS,
            logprobs=logprobs,
            notes={} if reply.omitted_mass is None else {OMITTED_MASS.name: reply.omitted_mass},
        )

    # The drafter alone

    def _process_alone(self, logits: Floats) -> None:
        """Process a row [V] of logits without an edge; `BadGrammarError` if no token remains."""
        if self._logits_processor is None:
            return
        if self._constraint is not None:
            self._constraint.decides_alone = True
        self._logits_processor.process(logits[None], self.committed.ids, [()])
        if not np.isfinite(logits.max()):
            raise BadGrammarError("The drafter has no token that the grammar allows.")

    def local(self, sampling: SamplingParams, count: int) -> Iterator[Round]:
        """Yield the rounds of `local`: the drafter generates alone, until its context is full."""
        for _ in range(min(count, self.context - len(self.committed))):
            if self._drafter.remaining_context(self.committed.ids) < 0:
                return
            started_ns = time.monotonic_ns()
            start = len(self.committed)
            self._drafter.prefill(self.committed.ids, self._cancel_token.check)
            logits = self._drafter.logits(self.committed.ids)
            self._process_alone(logits)
            token = choose(logits, sampling, start, Purpose.LOCAL)
            self.committed.extend([token])
            record = Round(protocol=LOCAL, start=start, window=0, accepted=0, tokens=[token])
            record.timings.draft = (time.monotonic_ns() - started_ns) * _NS
            yield record


def _are_possible(reply: Tokens, count: int) -> bool:
    """Check that what a message says of its pass is possible, given its ``count`` tokens."""
    sources = SOURCES if reply.drafted else ("", *SOURCES)
    max_accepted = min(reply.drafted, count)
    return (
        reply.source in sources
        and reply.accepted <= max_accepted
        and reply.drafted <= MOST_DRAFTS
        # NaN fails this comparison
        and (reply.omitted_mass is None or reply.omitted_mass <= reply.accepted + 1)
    )


def _split_wait(waited: Timings, draft_s: float) -> Timings:
    """Split the time between two tokens into drafting and waiting."""
    draft_s = min(draft_s, waited.total)
    downlink_s = max(0.0, waited.downlink - draft_s)
    verify_s = waited.total - draft_s - downlink_s
    return Timings(draft=draft_s, verify=verify_s, downlink=downlink_s)


def _decision(draft: Draft, reply: VerifiedWindow) -> Decision:
    """Convert the verdict to a decision; `MalformedError` if it does not fit the window."""
    verdict = reply.verdict
    if verdict.accepted > len(draft.ids):
        raise MalformedError("The edge's verdict does not fit the window that was sent.")
    return Decision(verdict.accepted, verdict.token, reply.frames, verdict.notes)


def _record(
    exchange: SpeculationProtocol[Any],
    draft: Draft,
    notes: dict[str, float],
    reply: VerifiedWindow,
    start: int,
    tokens: list[int],
) -> Round:
    return Round(
        protocol=exchange.name,
        start=start,
        window=draft.depth,
        nodes=len(draft.ids),
        accepted=len(tokens) - 1,
        tokens=tokens,
        uplink_bytes=reply.uplink_bytes,
        downlink_bytes=reply.downlink_bytes,
        timings=reply.timings,
        notes=notes,
        inquired=reply.inquired,
        pass_s=reply.pass_s,
    )
