"""Edge drafter: a small model on the edge that drafts for sessions under protocol `ahead`.

In:  the tokens that each session commits. Out: drafts for the session's next target pass.

The drafter runs in its own thread while the target computes; both release the interpreter lock. A
pass of the drafter reads one token of every session that needs a draft, or a chunk of one long
prompt. Drafting for a session stops when its last draft is unlikely to be accepted (the same rule
as on a device). It also stops when drafts cost more than they can save: then the edge is full, and
all cores are left to the target.
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
from pilotfish.speculation.sequences import common_prefix
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import (
    MOST_DRAFTS,
    DraftAhead,
    DraftComparison,
    draft_with_margin,
)
from pilotfish.wire.protocols.protocol import Ids

_log = logging.getLogger("pilotfish.edge")

_WIDTHS = (1, 2, 4)  # sizes (tokens) of the passes timed at the start
_CHUNK = 128  # upper limit of a prompt's tokens in one pass
_NARROW = 32  # upper limit of a session's tokens in a shared pass
_MOST = 2 * MOST_DRAFTS  # upper limit of a session's drafts: enough for two target passes
_MOST_COMPARISONS = 1024  # upper limit of comparisons that wait for the drafter's thread
_FULL_EDGE_COST = 1.0  # draft cost (tokens) from which the edge drafts nothing


class Trail:
    """Drafts of one generation; drafting ends when the last reference to the trail is dropped.

    The serving thread reads the drafts and the drafter's thread adds to them, both under the lock
    of `Beside`.
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
        self.session, self.slot = session, slot
        self.sampling_params, self.logits_processor = sampling_params, logits_processor
        self.draft_ahead = DraftAhead()
        self.draft_ahead.start(committed)
        # position before which drafts end; 0: the device requests no tokens
        self.requested_end = 0
        self.last_pass = 0  # number of the drafter's last pass for this trail
        # length of the text's prefix that the slot has cached after the current pass; None: unknown
        self.cached: int | None = None

    def set_requested_end(self, last: int) -> None:
        """Limit drafts to positions before ``last``; 0 stops drafting."""
        with self._drafter.changed:
            self.requested_end = last
            self._drafter.changed.notify()

    def propose(self, limit: int) -> Proposal:
        """Return at most ``limit`` drafts that follow the committed tokens."""
        with self._drafter.changed:
            return Proposal(
                self.draft_ahead.drafts[:limit].tolist(), self.draft_ahead.acceptances[:limit]
            )

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Record committed tokens, and compare the trail's drafts with these tokens."""
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
    """Cached text of a decoder's slot: the first ``length`` tokens of ``ids`` u32 [context]."""

    ids: Ids
    session: bytes = b""
    length: int = 0

    def common_length(self, session: bytes, text: Ids) -> int:
        """Return the length of the prefix of a session's text that the slot has cached."""
        return common_prefix(self.ids[: self.length], text) if session == self.session else 0


class _Task(NamedTuple):
    """Part of a drafter's pass for one trail: read ``part`` u32 [m] after ``cached`` tokens.

    length, hash: length (tokens) and hash of the trail's text when the task was created.
    """

    trail: Trail
    cached: int
    part: Ids
    length: int
    hash: bytes

    @property
    def completes_text(self) -> bool:
        """Whether the pass reads the text's last token, and so yields a draft."""
        return self.cached + len(self.part) == self.length


def open_drafter(config: EdgeConfig, target: Manifest) -> LanguageModel:
    """Load the edge's drafter, with a slot for each session.

    Raises `ArtifactError` if there is no artifact in the folder, and `PairMismatchError` if the
    drafter and the target have different vocabularies.
    """
    assert config.draft is not None
    artifact = Artifact.open(config.draft)
    manifest = artifact.manifest
    if manifest.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise PairMismatchError(
            f"The drafter {manifest.model} ({manifest.vocab_size} tokens) does not have the "
            f"vocabulary of the target {target.model} ({target.vocab_size} tokens): --draft needs "
            "a model of "
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
    """Thread that drafts for the edge's sessions until it is closed; only it uses the decoder.

    draft_cost: function that returns the present cost of a draft, in tokens. ends: the target's end
    tokens. changed: condition that guards all trails; notified when a trail may need a draft.
    comparisons: pairs (greedy, comparison of drafts with committed tokens) to learn from.
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
        head_tokens = decoder.artifact.head_tokens
        self._projection = (
            None if head_tokens is None else Projection(head_tokens, decoder.vocab_size)
        )
        # tokens of a pass → seconds, measured while the target is idle
        self.pass_times = pass_times(decoder, _WIDTHS)
        self.ends = frozenset(ends)
        self._metrics = metrics or EdgeMetrics()
        self.changed = threading.Condition()
        self.comparisons: deque[tuple[bool, DraftComparison]] = deque(maxlen=_MOST_COMPARISONS)
        # greedy or not → acceptance estimator
        self._estimators = {True: AcceptanceEstimator(), False: AcceptanceEstimator()}
        self._trails: WeakValueDictionary[int, Trail] = WeakValueDictionary()  # slot → trail
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
        """Start drafting after the committed tokens u32 [n]; the slot's previous trail ends.

        logits_processor: processor of the drafter's logits; only the drafter's thread uses it.
        """
        trail = Trail(self, session, slot, committed, sampling_params, logits_processor)
        with self.changed:
            self._trails[slot] = trail
            self.changed.notify()
        return trail

    def close(self) -> None:
        """End the thread, after its present pass."""
        with self.changed:
            self._closing = True
            self.changed.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Run passes until the drafter is closed; wait while no trail needs a pass."""
        while not self._closing:
            try:
                tasks = self._wait_for_tasks()
            except Exception:
                _log.exception(
                    "the edge drafter failed to choose a pass; sessions continue without it"
                )
                with self.changed:
                    self._trails.clear()
                continue
            if tasks:
                self._run_pass(tasks)
            del tasks  # so that no reference keeps an ended trail alive

    def _run_pass(self, tasks: Sequence[_Task]) -> None:
        """Run a pass; if the pass fails, drafting ends for its sessions."""
        started_s = time.monotonic()
        try:
            self._forward(tasks)
        except Exception:
            _log.exception("a pass of the edge drafter failed; its sessions continue without it")
            with self.changed:
                for task in tasks:
                    if self._trails.get(task.trail.slot) is task.trail:
                        del self._trails[task.trail.slot]
        self._metrics.drafter_passes += 1
        self._metrics.drafter_s += time.monotonic() - started_s

    def _wait_for_tasks(self) -> list[_Task]:
        """Wait for the tasks of the next pass; return an empty list when the drafter is closed."""
        with self.changed:
            while not self._closing:
                self._update_estimators()
                # without trails no task is chosen, so an error in the choice cannot repeat forever
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
        """Choose the next pass's tasks: the longest waiting trail's task, and others that fit.

        The caller has the lock, for which the serving thread may wait. So each text is compared
        with its slot's cached text only once.
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
        """Return whether a trail needs a pass, for its prompt or for a draft worth its cost."""
        draft_ahead = trail.draft_ahead
        if len(draft_ahead.text) > self._decoder.context:
            return False
        if not trail.requested_end:
            return self._cached_length(trail) < len(draft_ahead.text) - 1  # read the prompt
        # no draft for the last requested token, since the target samples it in any case
        if len(draft_ahead) >= min(_MOST, trail.requested_end - draft_ahead.committed - 1):
            return False
        if not len(draft_ahead):
            return True
        return (
            draft_ahead.joint_acceptance >= max(FLOOR, draft_cost)
            and int(draft_ahead.drafts[-1]) not in self.ends
        )

    def _cached_length(self, trail: Trail) -> int:
        """Return the length of the prefix of a trail's text that its slot has cached."""
        if trail.cached is None:
            # the last token is left out, since a pass must read it to yield a draft
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
        """Run the tasks as one pass; add a draft to each trail that has been read to its end."""
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
        """Process a trail's logits; return False if its grammar has no next token to draft."""
        if trail.logits_processor is None:
            return True
        try:
            trail.logits_processor.process(logits, text, [()])
        except GrammarError as error:  # the request's grammar failed: no more drafts for this trail
            _log.debug("the edge drafter stops drafting for a session: %s", error)
            with self.changed:
                if self._trails.get(trail.slot) is trail:
                    del self._trails[trail.slot]
            return False
        return True

    def _extend(self, task: _Task, token: int, margin: float) -> None:
        """Add a draft to a trail, unless the text changed after the task was created."""
        draft_ahead = task.trail.draft_ahead
        with self.changed:
            if draft_ahead.text.hash == task.hash:
                acceptance = self._estimators[task.trail.sampling_params.sampling.greedy].estimate(
                    margin
                )
                draft_ahead.append(token, acceptance, margin)
                self._metrics.drafter_tokens += 1
