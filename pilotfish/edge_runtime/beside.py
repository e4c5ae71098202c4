"""A drafter beside the target, for an edge with room for one: a source of hints without a link.

In:  what each session under `ahead` commits. Out: drafts behind it, for its next pass.

A thread of its own runs the small model, one pass after another, while the target computes; both
release the interpreter meanwhile. A pass takes a token of every session that may use one, or a
piece of one long prompt. As on a device, drafting goes on until the odds that the last draft comes
true are low. It also stops where the price of a draft says that none would be taken: a full edge
leaves the cores to the target.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from pilotfish.base.errors import PairMismatchError
from pilotfish.edge_runtime.edge_config import EdgeConfig
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.hint_sources import Proposal
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.language_model import LanguageModel, open_model
from pilotfish.engines.manifest import Manifest
from pilotfish.engines.pass_times import pass_times
from pilotfish.engines.passes import Pass
from pilotfish.speculation.acceptance import AcceptanceEstimator
from pilotfish.speculation.ahead import FLOOR
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.projection import Projection
from pilotfish.wire.committed_tokens import common_prefix
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import (
    MOST_DRAFTS,
    DraftAhead,
    DraftComparison,
    draft_with_margin,
)
from pilotfish.wire.protocols.protocol import Ids

_log = logging.getLogger("pilotfish.edge")

_WIDTHS = (1, 2, 4)  # tokens of the passes whose times are measured at start
_CHUNK = 128  # tokens of a prompt read in one pass
_NARROW = 32  # sessions that lack at most so many tokens share a pass
_MOST = 2 * MOST_DRAFTS  # of a session: those under way, and as many behind them
_LESSONS = 1024  # that wait for the drafter at most
_FULL = 1.0  # price of a draft at which the edge is full


class Trail:
    """The drafts of one generation; ends when its last reference goes.

    The serving thread calls it; the drafter's thread extends it, both under the lock of `Beside`.
    """

    def __init__(
        self,
        beside: "Beside",
        session: bytes,
        slot: int,
        committed: Ids,
        sampling_params: SamplingParams,
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        self._beside = beside
        self.session, self.slot, self.sampling_params, self.logits_processor = (
            session,
            slot,
            sampling_params,
            logits_processor,
        )
        self.lead = DraftAhead()
        self.lead.start(committed)
        self.last = 0  # the answer's tokens end before this position; 0: none is asked for yet
        self.served = 0  # number of its last pass
        # tokens of its text that its slot holds after the pass under way; None: not compared yet
        self.held: int | None = None

    def set_requested_end(self, last: int) -> None:
        """Note that tokens before this position are asked for."""
        with self._beside.news:
            self.last = last
            self._beside.news.notify()

    def propose(self, limit: int) -> Proposal:
        """Return the first drafts behind the committed tokens."""
        with self._beside.news:
            return Proposal(self.lead.drafts[:limit].tolist(), self.lead.acceptances[:limit])

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Note what was committed."""
        with self._beside.news:
            met = self.lead.compare(ids)
            if self.held is not None and met.compared > met.agreed:
                self.held = min(self.held, self.lead.committed - len(ids) + met.agreed)
            if ids[-1] in self._beside.ends:
                self.last = 0
            if met.compared:
                self._beside.lessons.append((self.sampling_params.sampling.greedy, met))
            self._beside.news.notify()


@dataclass(slots=True)
class _Slot:
    """What a slot of the decoder holds: the first ``length`` of ids u32 [context], of a session."""

    ids: Ids
    session: bytes = b""
    length: int = 0

    def common(self, session: bytes, text: Ids) -> int:
        """Count the tokens of a session's text that it holds."""
        return common_prefix(self.ids[: self.length], text) if session == self.session else 0


class _Task(NamedTuple):
    """What a pass does for a trail: reads ``part`` u32 [m] behind ``held`` tokens.

    length, hash: of the text then. Its last token is read only if tokens are asked for: what reads
    it drafts.
    """

    trail: Trail
    held: int
    part: Ids
    length: int
    hash: bytes

    @property
    def drafts(self) -> bool:
        """Whether it reads all of the text."""
        return self.held + len(self.part) == self.length


def open_drafter(config: EdgeConfig, target: Manifest) -> LanguageModel:
    """Load the drafter of an edge that has one, with a slot for each session.

    Raises `ArtifactError` if the folder holds no artifact, and `PairMismatchError` if the drafter
    has another vocabulary than the target.
    """
    assert config.draft is not None
    artifact = Artifact.open(config.draft)
    manifest = artifact.manifest
    if manifest.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise PairMismatchError(
            f"The drafter {manifest.model} ({manifest.vocab_size} tokens) has not the vocabulary "
            f"of the target {target.model} ({target.vocab_size} tokens): --draft needs a model of "
            "the same family."
        )
    return open_model(
        artifact,
        drafts=True,
        slots=config.limits.sessions,
        context=config.limits.context,
        threads=config.draft_threads,
        provider=config.provider,
    )


class Beside(threading.Thread):
    """Drafts for the sessions of an edge until it is closed. Owns the decoder.

    price: of a draft, as it is now. ends: the target's end tokens. news: guards all trails, and
    tells of what they need; lessons: whether drafts were greedy, and how they did.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        draft_cost: Callable[[], float],
        ends: Collection[int],
        metrics: EdgeMetrics | None = None,
    ) -> None:
        super().__init__(name="drafter", daemon=True)
        self._decoder, self._draft_cost = decoder, draft_cost
        kept = decoder.artifact.head_tokens
        self._projection = None if kept is None else Projection(kept, decoder.vocab_size)
        self.pass_times = pass_times(decoder, _WIDTHS)  # seconds by tokens, while the target rests
        self.ends = frozenset(ends)
        self._metrics = metrics or EdgeMetrics()
        self.news = threading.Condition()
        self.lessons: deque[tuple[bool, DraftComparison]] = deque(maxlen=_LESSONS)
        self._odds = {
            True: AcceptanceEstimator(),
            False: AcceptanceEstimator(),
        }  # of the pair, by whether drafts are greedy
        self._trails: WeakValueDictionary[int, Trail] = WeakValueDictionary()  # by slot
        self._slots = [_Slot(np.empty(decoder.context, np.uint32)) for _ in range(decoder.slots)]
        self._closing = False
        self._passes = 0

    def follow(
        self,
        session: bytes,
        slot: int,
        committed: Ids,
        sampling_params: SamplingParams,
        logits_processor: LogitsProcessor | None = None,
    ) -> Trail:
        """Draft behind these tokens, u32 [n], in this slot, which its last trail leaves.

        shaper: of the drafter's logits; the drafter's thread alone uses it.
        """
        trail = Trail(self, session, slot, committed, sampling_params, logits_processor)
        with self.news:
            self._trails[slot] = trail
            self.news.notify()
        return trail

    def close(self) -> None:
        """End the thread; waits for its pass."""
        with self.news:
            self._closing = True
            self.news.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Make passes while there is something to draft, until closed."""
        while not self._closing:
            try:
                tasks = self._await()
            except Exception:
                _log.exception("the drafter cannot tell what to draft; all sessions go on without")
                with self.news:
                    self._trails.clear()
                continue
            if tasks:
                self._pass(tasks)
            del tasks  # a trail that ended meanwhile is gone now

    def _pass(self, tasks: Sequence[_Task]) -> None:
        """Make a pass; if it fails, nothing is drafted for its sessions any more."""
        started_s = time.monotonic()
        try:
            self._forward(tasks)
        except Exception:
            _log.exception("a pass of the drafter failed; its sessions go on without")
            with self.news:
                for task in tasks:
                    if self._trails.get(task.trail.slot) is task.trail:
                        del self._trails[task.trail.slot]
        self._metrics.drafter_passes += 1
        self._metrics.drafter_s += time.monotonic() - started_s

    def _await(self) -> list[_Task]:
        """Wait for the tasks of the next pass; none once it is closing."""
        with self.news:
            while not self._closing:
                self._learn()
                # without trails nothing is asked, so that what fails cannot fail for ever
                if self._trails and (tasks := self._next()):
                    return tasks
                self.news.wait()
            return []

    def _learn(self) -> None:
        lessons = list(self.lessons)
        self.lessons.clear()
        for greedy, met in lessons:
            for at, margin in enumerate(met.margins):
                if margin is not None:
                    self._odds[greedy].update(margin, at < met.agreed)

    def _next(self) -> list[_Task]:
        """Choose the trails of the next pass: that which waits longest, and those beside it.

        The serving thread waits meanwhile: no text is looked through but at its trail's first time.
        """
        draft_cost = self._draft_cost()
        if draft_cost >= _FULL:
            return []
        trails = [trail for trail in self._trails.values() if self._wanted(trail, draft_cost)]
        tasks = [self._task(trail) for trail in sorted(trails, key=lambda each: each.served)]
        if tasks and len(tasks[0].part) > _NARROW:
            tasks = tasks[:1]
        else:
            tasks = [each for each in tasks if len(each.part) <= _NARROW]
        for each in tasks:
            each.trail.held = each.held + len(each.part)
        return tasks

    def _wanted(self, trail: Trail, draft_cost: float) -> bool:
        """Whether a further draft is worth a pass, and has room."""
        lead = trail.lead
        if len(lead.text) > self._decoder.context:
            return False
        if not trail.last:
            return self._held(trail) < len(lead.text) - 1  # to read the prompt
        # the target makes the last token itself, if all before it come true
        if len(lead) >= min(_MOST, trail.last - lead.committed - 1):
            return False
        if not len(lead):
            return True
        return (
            lead.joint_acceptance >= max(FLOOR, draft_cost)
            and int(lead.drafts[-1]) not in self.ends
        )

    def _held(self, trail: Trail) -> int:
        """Count the tokens of a trail that its slot holds."""
        if trail.held is None:
            # all but the last: what reads that drafts
            trail.held = self._slots[trail.slot].common(trail.session, trail.lead.text.ids[:-1])
        return trail.held

    def _task(self, trail: Trail) -> _Task:
        text = trail.lead.text
        held = self._held(trail)
        end = min(held + _CHUNK, len(text) if trail.last else len(text) - 1)
        return _Task(trail, held, text.ids[held:end].copy(), len(text), text.hash)

    def _forward(self, tasks: Sequence[_Task]) -> None:
        """Read the parts, and draft behind texts that have been read wholly."""
        for task in tasks:
            held = self._slots[task.trail.slot]
            self._decoder.rollback(task.trail.slot, task.held)
            held.session, held.length = task.trail.session, task.held
        outputs = self._decoder.forward(
            [Pass(each.trail.slot, each.part.astype(np.int64), int(each.drafts)) for each in tasks]
        )
        self._passes += 1
        for task, output in zip(tasks, outputs, strict=True):
            held = self._slots[task.trail.slot]
            held.length = task.held + len(task.part)
            held.ids[task.held : held.length] = task.part
            task.trail.served = self._passes
            text = held.ids[: held.length]
            logits = output.logits
            if task.drafts and self._projection is not None:
                logits = self._projection(logits)
            if task.drafts and self._shaped(task.trail, logits, text):
                self._extend(
                    task, *draft_with_margin(logits[0], task.trail.sampling_params, task.length)
                )

    def _shaped(self, trail: Trail, logits: Floats, text: Ids) -> bool:
        """Shape a trail's row; returns whether there is something to draft."""
        if trail.logits_processor is None:
            return True
        try:
            trail.logits_processor.process(logits, text, [()])
        except GrammarError as error:  # the request's own affair: no more drafts for it
            _log.debug("a trail ends: %s", error)
            with self.news:
                if self._trails.get(trail.slot) is trail:
                    del self._trails[trail.slot]
            return False
        return True

    def _extend(self, task: _Task, token: int, margin: float) -> None:
        """Add a draft to a trail, unless the text has taken another way meanwhile."""
        lead = task.trail.lead
        with self.news:
            if lead.text.hash == task.hash:
                odds = self._odds[task.trail.sampling_params.sampling.greedy].estimate(margin)
                lead.append(token, odds, margin)
                self._metrics.drafter_tokens += 1
