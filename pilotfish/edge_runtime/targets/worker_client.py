"""Edge's side of one worker of a federation: the worker's slots, open steps and answers.

In:  passes. Out: whether the worker takes part in a pass, and its top K of each row.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.edge_runtime.edge_config import MEBIBYTE, EdgeLimits
from pilotfish.edge_runtime.step_options import StatedWorks, state_works
from pilotfish.edge_runtime.steps import encode_works, record_works
from pilotfish.edge_runtime.targets.node_client import NodeAddress, NodeClient
from pilotfish.edge_runtime.targets.node_list import Federation, WorkerEntry, lacks_room
from pilotfish.edge_runtime.targets.remote import WakingClock
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.ensemble import TopRows, restrict
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.topk import decode_topk, decode_topk_each
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Ready, Scored, Step

DEPTH = 2  # number of passes under way: one at the workers, one on its way to them
_MOST_OPEN_STEPS = 2 * DEPTH  # upper limit of unanswered steps of a worker
_CATCHING_UP = 2**61  # number of the first catch-up step; these steps belong to no pass
# factor by which a row's smallest possible mass is multiplied, to allow for rounding
_LEAST_MASS = 1.0 - 1e-3
_MASS_TOLERANCE = 1e-5  # rounding error of a row's mass in each format
_TRIAL_ROWS = 32  # number of rows in the largest trial pass at the start
_TOKEN_BYTES = 16  # upper limit of an answer's bytes per top-K token, and per row in addition


class _OpenStep(NamedTuple):
    """Unanswered step: the time at which it was sent, its number of rows, and their masks."""

    since_s: float
    rows: int
    masks: Masks | None


class WorkerClient:
    """Worker with its weight in the federation.

    digest: required digest of the worker's artifact; "": any digest, until the first attachment.
    context: required number of positions of its slots; 0 before the federation sets it. left_out:
    whether the last finished pass was averaged without this worker. clock: the target's clock.
    """

    def __init__(
        self,
        entry: WorkerEntry,
        node: NodeAddress,
        federation: Federation,
        options: TargetOptions,
        clock: WakingClock,
    ) -> None:
        limits = options.config.limits
        self.weight, self.digest = entry.weight, entry.digest
        self.context = 0
        self.left_out = False
        self._federation, self._clock = federation, clock
        self._manifest = options.artifact.manifest
        self._slots = limits.sessions
        # what the worker's slots hold after all steps that were sent to it
        self._contents = SlotContents(
            limits.sessions, min(limits.context, self._manifest.dimensions.context)
        )
        self._metrics = options.metrics
        most = _answer_bytes(limits, federation, self._manifest)
        self._client = NodeClient(
            node, options.keys, most, check=self._check_fit, on_event=self.record_event
        )
        self._incarnation: bytes | None = None  # incarnation of the last known attachment
        self._open_steps: dict[int, _OpenStep] = {}
        self._extra = count(_CATCHING_UP)
        self._catch_up = -1  # number of the last catch-up step
        self.name = node.name
        self.sources = self._client.sources
        self.close = self._client.close

    @property
    def attached(self) -> bool:
        """Whether the worker is attached."""
        return self._client.incarnation is not None

    @property
    def takes_part(self) -> bool:
        """Whether the worker gets passes now: it is attached, and not catching up."""
        return self.attached and not self._catching_up

    @property
    def ready(self) -> Ready | None:
        """The worker's reply to the greeting, if its artifact, slots and context fit."""
        return self._client.ready

    @property
    def problem(self) -> str:
        """Reason why the worker takes no part, or "late"; "" if it takes part in time."""
        if self._client.problem:
            return self._client.problem
        if self._catching_up:
            return f"{self.name}: catching up"
        return f"{self.name}: late" if self._waited_s > self._federation.late_s else ""

    @property
    def due_s(self) -> float | None:
        """Seconds until the worker is to be contacted again; None: no contact is planned."""
        return self._client.due_s

    def awaits(self, number: int) -> bool:
        """Return whether the worker has not yet answered step ``number``."""
        return number in self._open_steps

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that the worker has cached; 0 if it is not attached."""
        return self._contents.find(slot, tokens, rows).tokens if self.attached else 0

    def clear(self, slot: int) -> None:
        """Have the worker empty the slot at its next step."""
        self._contents.clear(slot)

    def take_part(self, number: int, stated: StatedWorks, now_s: float) -> bool:
        """Send a pass to the worker; return False if the worker cannot take a pass now.

        Under ``drop`` a worker that has missed many tokens gets them in a catch-up step, and takes
        part again after this step. So the other workers do not wait for it.
        """
        if not self._can_take_step:
            return False
        if self._federation.late == "drop":
            missed = [(work, self._missing(work)) for work in stated.works]
            # compare the missed tokens of each slot: their sum over many sessions could exceed any
            # limit, and the worker would never take part again
            if any(count > CHUNK for _, count in missed):
                texts = [Work(work.slot, _text(work), 0) for work, count in missed if count]
                self._catch_up = next(self._extra)
                vocab = self._manifest.vocab_size
                self._send(self._catch_up, state_works(texts, vocab), now_s)
                return False
        self._send(number, stated, now_s)
        return True

    def _missing(self, work: Work) -> int:
        """Return the number of tokens before a work's output rows that the worker lacks."""
        return len(_text(work)) - self._contents.find(work.slot, work.tokens, work.rows).tokens

    def receive(self) -> Iterator[tuple[int, list[TopRows]]]:
        """Yield step number and rows of each answer; detach the worker if one is malformed.

        The rows have the same K; if workers choose K, each is one of the list.
        """
        for scored, frames in self._client.receive():
            if scored.incarnation != self._client.incarnation:
                continue  # an earlier answer was malformed and detached the worker
            try:
                rows = self._rows(scored, frames)
            except MalformedError as error:
                self.record_event("lied")
                self._client.detach(f"its answer is not valid: {error}")
                continue
            del self._open_steps[scored.number]
            self._client.record_success()
            self._metrics.node_compute_s[self.name] += sum(scored.compute_ns) * 1e-9
            yield scored.number, rows
        self._metrics.node_bytes[self.name, "from"] = self._client.received_bytes

    def attach_if_ready(self) -> None:
        """Request the worker's attachment if it is ready; a new attachment has empty slots."""
        if self._incarnation != self._client.incarnation:
            self._incarnation = self._client.incarnation
            self._contents.clear_all()
            self._open_steps.clear()
        if (ready := self._client.unattached) is not None:
            self.digest = self.digest or ready.digest
            federation = self._federation
            self._client.attach(
                Attach(
                    incarnation=secrets.token_bytes(16),
                    top_k=federation.top_k,
                    values=federation.values,
                    mass=federation.mass or None,
                )
            )

    def record_event(self, what: str) -> None:
        """Count an event of this worker, for example "late", in the metrics."""
        self._metrics.node_events[self.name, what] += 1

    @property
    def _catching_up(self) -> bool:
        """Whether the worker has not yet answered its catch-up step."""
        return self.awaits(self._catch_up)

    @property
    def _can_take_step(self) -> bool:
        """Whether the worker can take a step now."""
        if (
            self._incarnation is None
            or len(self._open_steps) >= _MOST_OPEN_STEPS
            or self._catching_up
        ):
            return False
        return self._federation.late != "drop" or self._waited_s <= self._federation.late_s

    @property
    def _waited_s(self) -> float:
        """Seconds since the oldest unanswered step was sent; −∞ if all are answered."""
        oldest_s = min((owed.since_s for owed in self._open_steps.values()), default=math.inf)
        return self._clock.now_s - oldest_s

    def _send(self, number: int, stated: StatedWorks, now_s: float) -> None:
        assert self._incarnation is not None
        works, options, masks = stated
        items, tokens, parents = encode_works(works, self._contents)
        record_works(works, self._contents)
        step = Step(
            incarnation=self._incarnation,
            number=number,
            items=list(items),
            options=None if options is None else options.items,
        )
        frames = [tokens, parents]
        if options is not None:
            frames += [options.biases, options.masks]
        self._open_steps[number] = _OpenStep(now_s, sum(work.rows for work in works), masks)
        self._metrics.node_bytes[self.name, "to"] += self._client.send(step, frames)

    def _rows(self, scored: Scored, frames: Sequence[Buffer]) -> list[TopRows]:
        """Decode an answer; raise `MalformedError` if no model can have computed it."""
        if scored.number != next(iter(self._open_steps), None):
            raise MalformedError(f"It answers step {scored.number}, which is not the next step.")
        if len(frames) != 1:
            raise MalformedError(f"An answer has 1 frame, not {len(frames)}.")
        (_, due, masks), vocab = self._open_steps[scored.number], self._manifest.vocab_size
        most, mass = self._federation.top_k, self._federation.mass
        if mass:
            answers = decode_topk_each(frames[0], due, most, vocab)
            lacking = mass - _MASS_TOLERANCE
            if any(row.k < min(most, vocab) and row.retained_mass[0] < lacking for row in answers):
                raise MalformedError("A row's probabilities have a smaller sum than was asked for.")
        else:
            answers = [decode_topk(frames[0], due, most, vocab)]
        if masks is not None:
            ends = np.cumsum([0, *map(len, answers)]).tolist()
            parts = [masks[begin:end] for begin, end in pairwise(ends)]
            answers = [restrict(rows, part) for rows, part in zip(answers, parts, strict=True)]
        if due and _has_impossible_mass(answers, masks, vocab):
            raise MalformedError(
                "The probabilities of a row have a smaller sum than the most "
                "probable tokens can have."
            )
        return answers

    def _check_fit(self, ready: Ready) -> str:
        """Return the reason why the worker's artifact, slots or context do not fit, or ""."""
        if ready.stages:
            return "it holds one stage of a model, but a federation needs whole models"
        known = (self._manifest.tokenizer_fingerprint, self._manifest.vocab_size)
        if (ready.tokenizer, ready.vocab_size) != known:
            return (
                f"the vocabulary of {ready.model} ({ready.vocab_size} tokens) differs from the "
                f"vocabulary of {self._manifest.model} ({known[1]} tokens): all workers of a "
                "federation must have the same vocabulary"
            )
        if self.digest and ready.digest != self.digest:
            return (
                f"it holds {ready.model} with digest {ready.digest}, not {self.digest}: if the "
                "new model is intended, change the list of workers or restart this edge"
            )
        return lacks_room(ready, self._slots, self.context)


def _text(work: Work) -> NDArray[np.integer[Any]]:
    """Return the tokens before a work's output rows; they are a chain."""
    return work.tokens[: len(work.tokens) - max(work.rows, 1)]


def _has_impossible_mass(answers: Sequence[TopRows], masks: Masks | None, vocab: int) -> bool:
    """Return whether a row's sum is too small: the K likeliest of n tokens have at least K/n."""
    allowed = vocab if masks is None else masks.counts()
    sizes = np.concatenate([np.full(len(rows), rows.k) for rows in answers])
    masses = np.concatenate([rows.retained_mass for rows in answers])
    return bool((masses < _LEAST_MASS * np.minimum(sizes / allowed, 1.0)).any())


def _answer_bytes(limits: EdgeLimits, federation: Federation, manifest: Manifest) -> int:
    """Return the upper limit of an answer's bytes: all sessions' windows, or a trial pass."""
    rows = max(limits.sessions * (limits.window + 1), _TRIAL_ROWS)
    return MEBIBYTE + rows * (min(federation.top_k, manifest.vocab_size) + 1) * _TOKEN_BYTES
