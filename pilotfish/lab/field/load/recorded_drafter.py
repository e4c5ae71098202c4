"""A drafter that replays a record: each draft sleeps the recorded time and is the recorded token.

So any number of devices draft without computing, and the edge accepts as many of their drafts as it
would accept of real ones. After a wrong draft the real drafter would draft something else than the
record has. Neither can be accepted, since the edge compares all drafts before it first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pilotfish.bridge import Bridge, Prompt, TrivialBridge
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.drafting.window import Drafter, Ids, Level
from pilotfish.lab.field.load.record import Record, RecordedAnswer
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.sequences import common_prefix
from pilotfish.speculation.tree import Expansion, Tree
from pilotfish.wire.protocols import SpeculationProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

_BOUNDLESS = 1 << 31
_NOTHING = np.empty(0, np.uint32)


class RecordedDrafter(Drafter):
    """Drafts the recorded tokens, as chains."""

    origin, no_tree_reason = "", "recorded drafts are chains"
    context, hidden_size, standalone = _BOUNDLESS, 0, False
    prior_acceptance = PRIOR_ACCEPTANCE

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self.name = record.drafter
        self.pass_times = {nodes: max(record.draft_s, 1e-6) for nodes in (1, 2, 4)}
        self._by_prompt = {answer.prompt.tobytes(): answer for answer in record.answers}
        self._answer: RecordedAnswer | None = None
        self._start = 0  # number of the prompt's tokens
        self._read: Ids = _NOTHING  # the last prompt that was read
        self.set_bridge(TrivialBridge(1))

    def fork(self) -> Self:
        """Make a drafter for another session."""
        other = type(self)(self._record)
        other.set_bridge(self.bridge)
        return other

    def release(self) -> None:
        """Do nothing: the number of lanes is unlimited."""

    def set_bridge(self, bridge: Bridge, vocabulary: str = "") -> None:
        """Use this bridge, which is trivial: the record has the target's tokens."""
        self.bridge = bridge

    def start(self, prompt: Prompt, owner: Owner = DEFAULT_OWNER, *, lossless: bool = True) -> None:
        """Begin a generation; a prompt that the record lacks gets no drafts."""
        self._answer = self._by_prompt.get(prompt.ids.tobytes())
        self._start = len(prompt.ids)

    def reset(self) -> None:
        """Forget the last prompt, so that reading the next one takes its whole time."""
        self._read = _NOTHING

    def prefill(self, committed: Ids, before_chunk: Callable[[], None] = lambda: None) -> None:
        """Sleep as long as the real drafter reads these tokens."""
        unread = len(committed) - common_prefix(self._read, committed)
        self._read = committed.copy()
        before_chunk()
        time.sleep(unread * self._record.read_s)

    def remaining_context(self, committed: Ids) -> int:
        """Return more than any window takes: the record has no limit."""
        return _BOUNDLESS - len(committed)

    def catch_up(self, committed: Ids, drafts: Ids) -> bool:
        """Do nothing: reading is part of a draft's time."""
        return False

    def predict_next(self, committed: Ids, drafts: Ids, most: int = 1) -> Level | None:
        """Return the recorded prediction of the next token; None after the recorded answer."""
        return self._level_at(len(committed) + len(drafts))

    def _open(
        self, committed: Ids, expansion: Expansion, protocol: SpeculationProtocol[Any]
    ) -> Expansion:
        self._committed = len(committed)
        return expansion

    def _level(self, tree: Tree, *, unread: bool) -> Level | None:
        return self._level_at(self._committed + len(tree))

    def _level_at(self, position: int) -> Level | None:
        """Sleep for the time of a draft; return the prediction of the token at this position."""
        begun_s = time.perf_counter()
        answer, row = self._answer, position - self._start
        if answer is None or not 0 <= row < len(answer.ids):
            return None
        logits = self._logits(answer, row)
        time.sleep(max(0.0, begun_s + self._record.draft_s - time.perf_counter()))
        return Level(logits)

    def _logits(self, answer: RecordedAnswer, row: int) -> Floats:
        """Return log probabilities [1, V]; the tokens that are not recorded share the rest."""
        known = answer.log_probabilities[row]
        size = self.bridge.vocab_size
        rest = max(1e-9, 1.0 - float(np.exp(known).sum())) / max(1, size - len(known))
        # below all recorded ones, so that the likeliest stays the likeliest
        lowest = float(known[np.isfinite(known)].min())
        logits: Floats = np.full((1, size), min(np.log(rest), lowest - 1e-3), np.float32)
        finite = np.isfinite(known)
        logits[0, answer.ids[row][finite]] = known[finite]
        return logits


@dataclass(frozen=True)
class RecordedSource(DraftSource):
    """The source of recorded drafts, in the vocabulary of the edge that was recorded."""

    record: Record = field(default_factory=lambda: Record([]))

    @classmethod
    def of(cls, record: Record) -> Self:
        """Return the source of a record's drafts."""
        return cls(artifact=None, memory=None, record=record)

    @property
    def name(self) -> str:
        """Display name."""
        return self.record.drafter

    def load(
        self, *, provider: str, threads: int | None, context: int | None, lanes: int
    ) -> Drafter:
        """Return the first lane's drafter; nothing is loaded, and no lane is limited."""
        return RecordedDrafter(self.record)
