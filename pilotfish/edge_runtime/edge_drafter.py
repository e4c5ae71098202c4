"""Edge drafter: a small model on the edge that drafts for sessions under protocol `ahead`.

In:  the tokens that each session commits. Out: drafts for the session's next target pass.

The drafter runs in its own thread while the target computes; both release the interpreter lock. A
pass of the drafter reads one token of every session that needs a draft, or a chunk of one long
prompt. A drafter with a mask token reads several, and drafts several.

Its model, its drafts, their acceptance and the end of drafting follow the same code as a device
(`drafting.model`, `drafting.ahead`). Only the choice of passes is different: a device drafts for
one session, in the thread that receives the target's tokens. And an edge also stops drafting when
drafts cost more than they can save: then it is full, and all cores are left to the target.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from pilotfish.base.errors import PairMismatchError
from pilotfish.drafting.ahead import (
    ModelAcceptance,
    Proposal,
    learn_acceptance,
    next_drafts,
    wants_draft,
)
from pilotfish.drafting.model import SharedModel
from pilotfish.edge_runtime.edge_config import EdgeConfig
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.scheduler import NARROW
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.language_model import Output
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.ahead import FLOOR
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.pass_drafts import stream_drafts
from pilotfish.speculation.projection import Projection
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import MOST_DRAFTS, DraftAhead, DraftComparison
from pilotfish.wire.protocols.protocol import Ids

_log = logging.getLogger("pilotfish.edge")

_MOST = 2 * MOST_DRAFTS  # upper limit of a session's drafts: enough for two target passes
_MOST_COMPARISONS = 1024  # upper limit of comparisons that wait for the drafter's thread
_FULL_EDGE_COST = 1.0  # draft cost (tokens) from which the edge drafts nothing


class Trail:
    """Drafts of one generation; drafting ends when the last reference to the trail is dropped.

    The serving thread reads the drafts and the drafter's thread adds to them, both under the lock
    of `EdgeDrafter`.
    """

    def __init__(
        self,
        drafter: "EdgeDrafter",
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
        self.read_hash = b""  # hash of a text that the slot holds, except maybe its last token
        self.stuck_hash = b""  # hash of a text after which the drafter has no draft

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
            if ids[-1] in self._drafter.ends:
                self.requested_end = 0
            if comparison.compared:
                self._drafter.comparisons.append((self.sampling_params, comparison))
            self._drafter.changed.notify()


class _Task(NamedTuple):
    """A trail that needs a pass. text: its tokens u32 [n], a copy; hash: their hash.

    drafts: maximum number of drafts after the text; 0: the text is read but for its last token.
    joint_acceptance: the joint acceptance of the drafts in the text.
    """

    trail: Trail
    text: Ids
    hash: bytes
    drafts: int
    joint_acceptance: float


def open_drafter(config: EdgeConfig, target: Manifest) -> SharedModel:
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
            "a model of the same family."
        )
    return SharedModel.open(
        artifact,
        slots=config.limits.sessions,
        provider=config.provider,
        threads=config.draft_threads,
        context=config.limits.context,
    )


class EdgeDrafter(threading.Thread):
    """Thread that drafts for the edge's sessions until it is closed; only it uses the model.

    model: the drafter, with a slot for each session: the session's slot in the target. draft_cost:
    function that returns the present cost of a draft, in tokens. ends: the target's end tokens.
    target_s: function that returns the present seconds of a target's pass, 0 if unknown.
    changed: condition that guards all trails; notified when a trail may need a draft. comparisons:
    pairs (sampling parameters, comparison of drafts with committed tokens) to learn from.
    """

    def __init__(
        self,
        model: SharedModel,
        draft_cost: Callable[[], float],
        ends: Collection[int],
        metrics: EdgeMetrics | None = None,
        *,
        target_s: Callable[[], float] = float,
    ) -> None:
        super().__init__(name="drafter", daemon=True)
        self.model, self._draft_cost, self._target_s = model, draft_cost, target_s
        decoder = model.engine.model
        self._context = decoder.context
        self._projection = Projection(decoder.artifact.head_tokens, decoder.vocab_size)
        self.ends = frozenset(ends)
        self._metrics = metrics or EdgeMetrics()
        self.changed = threading.Condition()
        self.comparisons: deque[tuple[SamplingParams, DraftComparison]] = deque(
            maxlen=_MOST_COMPARISONS
        )
        self._acceptance = ModelAcceptance()
        self._trails: WeakValueDictionary[int, Trail] = WeakValueDictionary()  # slot → trail
        self._sessions = [b""] * decoder.slots  # the session whose text each slot holds
        self._closing = False
        self._passes = 0
        # lower limit of all drafts' joint acceptance, at the present cost of a draft
        self._least_acceptance = FLOOR

    def follow(
        self,
        session: bytes,
        slot: int,
        committed: Ids,
        sampling_params: SamplingParams,
        logits_processor: LogitsProcessor | None = None,
    ) -> Trail:
        """Start drafting after the committed tokens u32 [n]; the slot's previous trail ends.

        session: key of the session, different for each owner. logits_processor: processor of the
        drafter's logits; only the drafter's thread uses it.
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
                planned = self._plan_pass(self._wait_for_tasks())
            except Exception:
                _log.exception(
                    "the edge drafter failed to choose a pass; sessions continue without it"
                )
                with self.changed:
                    self._trails.clear()
                continue
            if planned:
                self._run_pass(planned)
            del planned  # so that no reference keeps an ended trail alive

    def _run_pass(self, planned: Sequence[tuple[_Task, Work]]) -> None:
        """Run a pass; if the pass fails, drafting ends for its sessions."""
        started_s = time.monotonic()
        try:
            self._forward(planned)
        except Exception:
            _log.exception("a pass of the edge drafter failed; its sessions continue without it")
            with self.changed:
                for task, _ in planned:
                    if self._trails.get(task.trail.slot) is task.trail:
                        del self._trails[task.trail.slot]
        self._metrics.drafter_passes += 1
        self._metrics.drafter_s += time.monotonic() - started_s

    def _wait_for_tasks(self) -> list[_Task]:
        """Wait for tasks, the longest waiting first; return none when the drafter is closed."""
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
        for params, comparison in comparisons:
            learn_acceptance(self._acceptance.of(params), comparison)

    def _next_tasks(self) -> list[_Task]:
        """Make a task for each trail that needs a pass.

        The caller has the lock, for which the serving thread may wait. So texts are only copied
        here; they are compared with the slots after the lock has been released.
        """
        draft_cost = self._draft_cost()
        if draft_cost >= _FULL_EDGE_COST:
            return []
        self._least_acceptance = max(FLOOR, draft_cost)
        trails = [trail for trail in self._trails.values() if self._wants_pass(trail)]
        trails.sort(key=lambda each: each.last_pass)
        return [self._make_task(trail) for trail in trails]

    def _wants_pass(self, trail: Trail) -> bool:
        """Return whether a trail needs a pass, for its prompt or for a draft worth its cost."""
        draft_ahead = trail.draft_ahead
        if len(draft_ahead.text) > self._context:
            return False
        if not trail.requested_end:
            return trail.read_hash != draft_ahead.text.hash  # read the prompt
        if trail.stuck_hash == draft_ahead.text.hash:
            return False
        return wants_draft(draft_ahead, _most_drafts(trail), self._least_acceptance, self.ends)

    def _make_task(self, trail: Trail) -> _Task:
        ahead = trail.draft_ahead
        text = ahead.text
        drafts = 0
        if trail.requested_end:
            # the masks of a pass, too, must fit the context
            room = self._context - len(text) + 1
            most = min(self.model.drafts_per_pass, _most_drafts(trail) - len(ahead), room)
            means = self._acceptance.of(trail.sampling_params).means(most)
            drafts = stream_drafts(
                means, self.model.pass_times, target_s=self._target_s(), rtt_s=0.0
            )
        return _Task(trail, text.ids.copy(), text.hash, drafts, ahead.joint_acceptance)

    def _plan_pass(self, tasks: Sequence[_Task]) -> list[tuple[_Task, Work]]:
        """Choose the tasks of a pass: the longest waiting one, and others that fit."""
        planned: list[tuple[_Task, Work]] = []
        for task in tasks:
            unread, work = self._next_work(task)
            if unread <= 0:
                task.trail.read_hash = task.hash
            elif unread <= NARROW:
                planned.append((task, work))
            elif not planned:
                return [(task, work)]
        return planned

    def _next_work(self, task: _Task) -> tuple[int, Work]:
        """Return the number of a task's tokens that its slot lacks, and the work of a pass."""
        slot, session = task.trail.slot, task.trail.session
        if self._sessions[slot] != session:  # keep nothing of another session
            self.model.clear(slot)
            self._sessions[slot] = session
        # one chunk at a time: between the chunks of a prompt, other sessions get their drafts
        return self.model.next_work(slot, task.text, CHUNK, predicts=task.drafts)

    def _forward(self, planned: Sequence[tuple[_Task, Work]]) -> None:
        """Run the work as one pass; add drafts to each trail that has been read to its end."""

        def extend(outputs: Sequence[Output]) -> None:
            self._passes += 1
            for (task, work), output in zip(planned, outputs, strict=True):
                task.trail.last_pass = self._passes
                if work.rows:
                    self._extend(task, self._projection(output.logits))

        self.model.run([work for _, work in planned], extend)

    def _extend(self, task: _Task, logits: Floats) -> None:
        """Add drafts to a trail, unless other tokens were committed since the task was created.

        logits: f32 [n, V], predictions of the n tokens after the text.
        """
        trail, draft_ahead = task.trail, task.trail.draft_ahead
        params = trail.sampling_params
        try:
            made = next_drafts(
                logits,
                task.text,
                (),
                trail.logits_processor,
                params,
                self._acceptance.of(params),
                joint_acceptance=task.joint_acceptance,
                least_acceptance=self._least_acceptance,
                ends=self.ends,
            )
        except GrammarError as error:  # the request's grammar failed: no more drafts for this trail
            _log.debug("the edge drafter stops drafting for a session: %s", error)
            with self.changed:
                if self._trails.get(trail.slot) is trail:
                    del self._trails[trail.slot]
            return
        if not made:
            trail.stuck_hash = task.hash
            return
        with self.changed:
            text = draft_ahead.text
            if len(text) < len(task.text) or text.hash_at(len(task.text)) != task.hash:
                return
            late = text.ids[len(task.text) :].tolist()  # committed during the pass
            if late == [draft.token for draft in made[: len(late)]]:
                for draft in made[len(late) :]:
                    draft_ahead.append(*draft)
                self._metrics.drafter_tokens += len(made) - len(late)


def _most_drafts(trail: Trail) -> int:
    """Return the maximum number of drafts beyond the committed tokens."""
    # no draft for the last requested token, since the target samples it in any case
    return min(_MOST, trail.requested_end - trail.draft_ahead.committed - 1)
