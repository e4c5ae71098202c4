"""ahead: `stream` with hints. The target never waits, and the drafter never waits.

up:    hints: ids [n] and odds u8 [n], whenever there are some; never answered
down:  the target's tokens as they come, as under `stream`
law:   the target's own seeded sample, token for token: that of `stream`

The token at each position follows from prompt, seed and target alone, as under `coupled`. So a
draft is advice: it may be late, lost, doubled or wrong, and cannot touch the text. The edge goes on
by itself; of the hints that have arrived, those that agree with what is committed ride on its next
pass. The device drafts on along its own text and comes back when the target's tokens correct it.

A hint is no round (docs/wire.md, rule 9): it is not settled, not stored and not answered.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.base.settings import setting
from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, race
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens, common_prefix
from pilotfish.wire.messages import MAX_WINDOW, Buffer
from pilotfish.wire.protocols.coupled import Coupled
from pilotfish.wire.protocols.options import ProtocolOptions
from pilotfish.wire.protocols.protocol import (
    Ids,
    SamplingParams,
    check_frame_count,
    count_window_ids,
)

MOST_DRAFTS = 15  # of a pass: with the committed token before them a TensorRT engine's 16 rows
DEVICE, TEXT, EDGE = SOURCES = ("device", "text", "edge")  # of hints
_BYTE = 255.0


class AheadOptions(ProtocolOptions, frozen=True):
    """Whose hints a generation uses."""

    hints: Annotated[
        Literal["all", "device", "edge"],
        setting(
            "ahead: whose hints to use; device: the drafter's here alone; edge: those that the "
            "edge makes of the text, or by a drafter of its own, while the device drafts nothing"
        ),
    ] = "all"


class Ahead(Coupled):
    """What both halves share with `coupled`: the draws."""

    name = "ahead"
    family = "coupled"
    streams = True
    frames = 2
    Options = AheadOptions

    @property
    def device_drafts(self) -> bool:
        """Whether the device sends hints."""
        return self._hints != "edge"

    @property
    def edge_drafts(self) -> bool:
        """Whether the edge uses hints of its own."""
        return self._hints != "device"

    @property
    def _hints(self) -> str:
        assert isinstance(self.options, AheadOptions)
        return self.options.hints


class DraftComparison(NamedTuple):
    """How drafts compared with committed tokens.

    depth: tokens committed since the last correction, those included that came before there was a
    draft of them. compared: drafts of these positions, up to the first that was wrong. agreed: of
    these. margins: of those compared, None where the odds were not told by one.
    """

    depth: int
    compared: int
    agreed: int
    margins: Sequence[float | None]


class DraftAhead:
    """The device's half: the committed tokens, and its drafts ahead of them.

    text: both, in one. committed: how many of them are committed.
    """

    def __init__(self) -> None:
        self.text = CommittedTokens()
        self.committed = 0
        self._acceptances: list[float] = []  # of each draft, given those before it
        self._margins: list[float | None] = []
        self._depth = 0
        self._sent = 0  # tokens before this one need not be sent
        self._sent_hash = self.text.hash

    def start(self, committed: Ids) -> None:
        """Begin behind these tokens, u32 [n]."""
        self.text.truncate(common_prefix(self.text.ids, committed))
        self.text.extend(committed[len(self.text) :])
        self.committed = len(committed)
        self._clear_drafts()
        self._depth = 0

    def _clear_drafts(self) -> None:
        """Note that nothing is drafted."""
        self._acceptances.clear()
        self._margins.clear()
        self._sent, self._sent_hash = len(self.text), self.text.hash

    def __len__(self) -> int:
        """Return the number of drafts."""
        return len(self._acceptances)

    @property
    def drafts(self) -> Ids:
        """The drafts, u32 [n], as a view that the next change may outdate."""
        return self.text.ids[self.committed :]

    @property
    def joint_acceptance(self) -> float:
        """The odds that all drafts come true."""
        return float(np.prod(self._acceptances))

    @property
    def acceptances(self) -> Sequence[float]:
        """The odds of each draft, given those before it."""
        return self._acceptances

    @property
    def unsent(self) -> int:
        """How many drafts have not been sent."""
        return len(self.text) - max(self._sent, self.committed)

    def append(self, token: int, acceptance: float, margin: float | None) -> None:
        """Add a draft; margin: by which the odds were told, if they were."""
        self.text.extend([token])
        self._acceptances.append(acceptance)
        self._margins.append(margin)

    def compare(self, ids: Sequence[int]) -> DraftComparison:
        """Take in the next committed tokens; drops the drafts if one of them was wrong."""
        # [n] or fewer
        drafts = self.drafts[: len(ids)].tolist()
        agreed = next((at for at, id in enumerate(drafts) if id != ids[at]), len(drafts))
        right = agreed == len(drafts)
        compared = agreed if right else agreed + 1
        comparison = DraftComparison(self._depth, compared, agreed, self._margins[:compared])
        if right and len(drafts) == len(ids):
            del self._acceptances[: len(ids)], self._margins[: len(ids)]
        else:
            self.text.truncate(self.committed + agreed)
            self.text.extend(ids[agreed:])
            self._clear_drafts()
        self._depth = self._depth + len(ids) if right else 0
        self.committed += len(ids)
        return comparison

    def resend_all(self) -> None:
        """Note that the edge has none of the drafts."""
        self._sent, self._sent_hash = self.committed, self.text.hash_at(self.committed)

    def encode_hint(self, vocab_size: int) -> tuple[int, bytes, list[Buffer]]:
        """Return start, hash and frames of a hint of all drafts that have not been sent."""
        if self._sent < self.committed:
            self.resend_all()
        start, digest = self._sent, self._sent_hash
        ids = self.text.ids[start:]
        # [n], each in 1/255
        odds = np.rint(np.array(self._acceptances[start - self.committed :]) * _BYTE).astype(
            np.uint8
        )
        self._sent, self._sent_hash = len(self.text), self.text.hash
        return start, digest, [encode_ids(ids, vocab_size), odds.tobytes()]


class HintChain:
    """The edge's half: the newest hints behind the committed tokens.

    committed: the session's, which others extend. most: hints to keep; those beyond it are cut off.
    """

    def __init__(self, committed: CommittedTokens, most: int) -> None:
        self._committed = committed
        self._most = min(most, MAX_WINDOW)
        self.ids: list[int] = []
        self.acceptances: list[float] = []  # of each, given those before it

    def add(self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int) -> bool:
        """Take in a hint; returns whether it fits, else it is dropped.

        Of a late one the rest is kept, if what is committed meanwhile agrees. The newest wins.
        `MalformedError` for frames that are no hint's.
        """
        check_frame_count(frames, 2)
        if len(frames[1]) != count_window_ids(frames[0], vocab_size):
            raise MalformedError("A hint has one byte of odds for each id.")
        length = len(self._committed)
        if start > length + len(self.ids):
            return False  # what came before it was lost
        ids = decode_ids(frames[0], vocab_size).tolist()
        odds = [byte / _BYTE for byte in bytes(frames[1])]
        offset = max(0, start - length)
        late = max(0, length - start)
        if late >= len(ids) or ids[:late] != self._committed.ids[start:length].tolist():
            return False
        if digest != self._hash_before(start, offset):
            return False
        new = ids[late:]
        if new != self.ids[offset : offset + len(new)]:  # else it says less than a newer one did
            self.ids[offset:] = new
            self.acceptances[offset:] = odds[late:]
            del self.ids[self._most :], self.acceptances[self._most :]
        return True

    def _hash_before(self, start: int, offset: int) -> bytes:
        if start <= len(self._committed):
            return self._committed.hash_at(start)
        return self._committed.hash_after(self.ids[:offset])

    def drop_committed(self, ids: Sequence[int]) -> None:
        """Drop what has been committed; all of it, if that differs."""
        agree = self.ids[: len(ids)] == list(ids)
        del self.ids[: len(ids) if agree else None], self.acceptances[: len(ids) if agree else None]


def draft_with_margin(logits: Floats, params: SamplingParams, position: int) -> tuple[int, float]:
    """Return the draft at a position by one row of logits [V], as `draw`, and its margin.

    That is by how many logits it leads the next token (`AcceptanceEstimator`). Under noise both have theirs added,
    scaled by the temperature: so it says how far the target's logits must lie from these to make
    another choice, whatever the temperature.
    """
    if params.sampling.greedy:
        token = int(logits.argmax())
        rest = (logits[:token].max(initial=-math.inf), logits[token + 1 :].max(initial=-math.inf))
        return token, float(logits[token] - max(rest))
    q = probabilities(logits[None], params.sampling)[0]
    token, lead_ratio = race(q, noise(len(q), params.seed, Purpose.TARGET, position))
    return token, params.sampling.temperature * lead_ratio
