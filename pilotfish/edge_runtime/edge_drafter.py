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
_MOST_COMPARISONS = 1024  # that wait for the drafter at most
_FULL_EDGE_COST = 1.0  # price of a draft at which the edge is full


class Trail:
    """The drafts of one generation; ends when its last reference goes.

    The serving thread calls it; the drafter's thread extends it, both under the lock of `Beside`.
    """

    def __init__(
        self,
        drafter: "Beside",
        session: bytes,
        slot: int,
        committed: Ids,
        sampling_params: SamplingParams,
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        self._drafter = drafter
        self.session, self.slot, self.sampling_params, self.logits_processor = (
            session,
            slot,
            sampling_params,
            logits_processor,
        )
        self.draft_ahead = DraftAhead()
        self.draft_ahead.start(committed)
        self.requested_end = (
            0  # the answer's tokens end before this position; 0: none is asked for yet
        )
        self.last_pass = 0  # number of its last pass
        # tokens of its text that its slot holds after the pass under way; None: not compared yet
        self.cached: int | None = None

    def set_requested_end(self, last: int) -> None:
        """Note that tokens before this position are asked for."""
        with self._drafter.changed:
            self.requested_end = last
            self._drafter.changed.notify()

    def propose(self, limit: int) -> Proposal:
        """Return the first drafts behind the committed tokens."""
        with self._drafter.changed:
            return Proposal(
                self.draft_ahead.drafts[:limit].tolist(), self.draft_ahead.acceptances[:limit]
            )

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Note what was committed."""
        with self._drafter.changed:
            comparison = self.draft_ahead.compare(ids)
            if self.cached is not None and comparison.compared > comparison.agreed:
                self.cached = min(
                    self.cached, self.draft_ahead.committed - len(ids) + comparison.agreed
                )
            if ids[-1] in self._drafter.ends:
                self.requested_end = 0
            if comparison.compared:
                self._drafter.comparisons.append((self.sampling_params.sampling.greedy, comparison))
            self._drafter.changed.notify()


@dataclass(slots=True)
class _Slot:
    """What a slot of the decoder holds: the first ``length`` of ids u32 [context], of a session."""

    ids: Ids
    session: bytes = b""
    length: int = 0

    def common_length(self, session: bytes, text: Ids) -> int:
        """Count the tokens of a session's text that it holds."""
        return common_prefix(self.ids[: self.length], text) if session == self.session else 0


class _Task(NamedTuple):
    """What a pass does for a trail: reads ``part`` u32 [m] behind ``held`` tokens.

    length, hash: of the text then. Its last token is read only if tokens are asked for: what reads
    it drafts.
    """

    trail: Trail
    cached: int
    part: Ids
    length: int
    hash: bytes

    @property
    def completes_text(self) -> bool:
        """Whether it reads all of the text."""
        return self.cached + len(self.part) == self.length


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
        head_tokens = decoder.artifact.kept
        self._projection = (
            None if head_tokens is None else Projection(head_tokens, decoder.vocab_size)
        )
        self.pass_times = pass_times(decoder, _WIDTHS)  # seconds by tokens, while the target rests
        self.ends = frozenset(ends)
        self._metrics = metrics or EdgeMetrics()
        self.changed = threading.Condition()
        self.comparisons: deque[tuple[bool, DraftComparison]] = deque(maxlen=_MOST_COMPARISONS)
        self._estimators = {
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
        with self.changed:
            self._trails[slot] = trail
            self.changed.notify()
        return trail

    def close(self) -> None:
        """End the thread; waits for its pass."""
        with self.changed:
            self._closing = True
            self.changed.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Make passes while there is something to draft, until closed."""
        while not self._closing:
            try:
                tasks = self._wait_for_tasks()
            except Exception:
                _log.exception("the drafter cannot tell what to draft; all sessions go on without")
                with self.changed:
                    self._trails.clear()
                continue
            if tasks:
                self._run_pass(tasks)
            del tasks  # a trail that ended meanwhile is gone now

    def _run_pass(self, tasks: Sequence[_Task]) -> None:
        """Make a pass; if it fails, nothing is drafted for its sessions any more."""
        started_s = time.monotonic()
        try:
            self._forward(tasks)
        except Exception:
            _log.exception("a pass of the drafter failed; its sessions go on without")
            with self.changed:
                for task in tasks:
                    if self._trails.get(task.trail.slot) is task.trail:
                        del self._trails[task.trail.slot]
        self._metrics.drafter_passes += 1
        self._metrics.drafter_s += time.monotonic() - started_s

    def _wait_for_tasks(self) -> list[_Task]:
        """Wait for the tasks of the next pass; none once it is closing."""
        with self.changed:
            while not self._closing:
                self._update_estimators()
                # without trails nothing is asked, so that what fails cannot fail for ever
                if self._trails and (tasks := self._next_tasks()):
                    return tasks
                self.changed.wait()
            return []

    def _update_estimators(self) -> None:
        comparisons = list(self.comparisons)
        self.comparisons.clear()
        for greedy, comparison in comparisons:
            for at, margin in enumerate(comparison.margins):
                if margin is not None:
                    self._estimators[greedy].update(margin, at < comparison.agreed)

    def _next_tasks(self) -> list[_Task]:
        """Choose the trails of the next pass: that which waits longest, and those beside it.

        The serving thread waits meanwhile: no text is looked through but at its trail's first time.
        """
        draft_cost = self._draft_cost()
        if draft_cost >= _FULL_EDGE_COST:
            return []
        trails = [trail for trail in self._trails.values() if self._wants_pass(trail, draft_cost)]
        tasks = [
            self._make_task(trail) for trail in sorted(trails, key=lambda each: each.last_pass)
        ]
        if tasks and len(tasks[0].part) > _NARROW:
            tasks = tasks[:1]
        else:
            tasks = [each for each in tasks if len(each.part) <= _NARROW]
        for each in tasks:
            each.trail.cached = each.cached + len(each.part)
        return tasks

    def _wants_pass(self, trail: Trail, draft_cost: float) -> bool:
        """Whether a further draft is worth a pass, and has room."""
        draft_ahead = trail.draft_ahead
        if len(draft_ahead.text) > self._decoder.context:
            return False
        if not trail.requested_end:
            return self._cached_length(trail) < len(draft_ahead.text) - 1  # to read the prompt
        # the target makes the last token itself, if all before it come true
        if len(draft_ahead) >= min(_MOST, trail.requested_end - draft_ahead.committed - 1):
            return False
        if not len(draft_ahead):
            return True
        return (
            draft_ahead.joint_acceptance >= max(FLOOR, draft_cost)
            and int(draft_ahead.drafts[-1]) not in self.ends
        )

    def _cached_length(self, trail: Trail) -> int:
        """Count the tokens of a trail that its slot holds."""
        if trail.cached is None:
            # all but the last: what reads that drafts
            trail.cached = self._slots[trail.slot].common_length(
                trail.session, trail.draft_ahead.text.ids[:-1]
            )
        return trail.cached

    def _make_task(self, trail: Trail) -> _Task:
        text = trail.draft_ahead.text
        cached = self._cached_length(trail)
        end = min(cached + _CHUNK, len(text) if trail.requested_end else len(text) - 1)
        return _Task(trail, cached, text.ids[cached:end].copy(), len(text), text.hash)

    def _forward(self, tasks: Sequence[_Task]) -> None:
        """Read the parts, and draft behind texts that have been read wholly."""
        for task in tasks:
            slot = self._slots[task.trail.slot]
            self._decoder.rollback(task.trail.slot, task.cached)
            slot.session, slot.length = task.trail.session, task.cached
        outputs = self._decoder.forward(
            [
                Pass(each.trail.slot, each.part.astype(np.int64), int(each.completes_text))
                for each in tasks
            ]
        )
        self._passes += 1
        for task, output in zip(tasks, outputs, strict=True):
            slot = self._slots[task.trail.slot]
            slot.length = task.cached + len(task.part)
            slot.ids[task.cached : slot.length] = task.part
            task.trail.last_pass = self._passes
            text = slot.ids[: slot.length]
            logits = output.logits
            if task.completes_text and self._projection is not None:
                logits = self._projection(logits)
            if task.completes_text and self._process_logits(task.trail, logits, text):
                self._extend(
                    task, *draft_with_margin(logits[0], task.trail.sampling_params, task.length)
                )

    def _process_logits(self, trail: Trail, logits: Floats, text: Ids) -> bool:
        """Shape a trail's row; returns whether there is something to draft."""
        if trail.logits_processor is None:
            return True
        try:
            trail.logits_processor.process(logits, text, [()])
        except GrammarError as error:  # the request's own affair: no more drafts for it
            _log.debug("a trail ends: %s", error)
            with self.changed:
                if self._trails.get(trail.slot) is trail:
                    del self._trails[trail.slot]
            return False
        return True

    def _extend(self, task: _Task, token: int, margin: float) -> None:
        """Add a draft to a trail, unless the text has taken another way meanwhile."""
        draft_ahead = task.trail.draft_ahead
        with self.changed:
            if draft_ahead.text.hash == task.hash:
                acceptance = self._estimators[task.trail.sampling_params.sampling.greedy].estimate(
                    margin
                )
                draft_ahead.append(token, acceptance, margin)
                self._metrics.drafter_tokens += 1
