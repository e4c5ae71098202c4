"""ahead: `stream` with hints. The target never waits, and the drafter never waits.

up:    hints at any time: ids [n] and acceptance probabilities u8 [n]; never answered
down:  the target's tokens as they come, as under `stream`
law:   the target's own seeded sample, token for token, as under `stream`

The token at each position follows from prompt, seed and target alone, as under `coupled`. So a hint
that is late, lost, repeated or wrong cannot change the text. The edge never waits: its next pass
includes the hints that have arrived and agree with the committed tokens. The device continues its
own draft, and starts again from the target's tokens when they differ from it.

A hint is not a round (docs/wire.md, rule 9): the edge neither stores nor answers it.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.base.settings import setting
from pilotfish.speculation.distributions import Floats, probabilities
from pilotfish.speculation.randomness import Purpose, noise, race
from pilotfish.speculation.sequences import common_prefix
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import MAX_WINDOW, Buffer
from pilotfish.wire.protocols.coupled import Coupled
from pilotfish.wire.protocols.options import ProtocolOptions
from pilotfish.wire.protocols.protocol import Ids, SamplingParams
from pilotfish.wire.protocols.window_checks import check_frame_count, count_window_ids

MOST_DRAFTS = 15  # maximum drafts in a pass: with the committed token, a TensorRT engine's 16 rows
# sources of hints; "prediction": the text that the request predicts
DEVICE, TEXT, EDGE, PREDICTION = SOURCES = ("device", "text", "edge", "prediction")
_BYTE = 255.0


class AheadOptions(ProtocolOptions, frozen=True):
    """The sources of a generation's hints."""

    hints: Annotated[
        Literal["all", "device", "edge"],
        setting(
            "ahead: the source of hints; device: only the device's drafter; edge: only the edge, "
            "from repetitions in the text or with its own drafter, while the device drafts nothing"
        ),
    ] = "all"


class Ahead(Coupled):
    """Protocol `ahead`, with the draws of `coupled`.

    `DraftAhead` is the half of an end that drafts (a device, or the edge's drafter); `HintChain`
    receives a device's hints.
    """

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
    """The comparison of drafts with newly committed tokens.

    depth: number of tokens committed between the last correction and these tokens. compared: number
    of drafts up to and including the first wrong draft. agreed: number of right drafts. margins:
    the compared drafts' margins; None: the draft's acceptance was not estimated from a margin.
    places: the compared drafts' places among the drafts of their pass, from 0.
    """

    depth: int
    compared: int
    agreed: int
    margins: Sequence[float | None]
    places: Sequence[int]


class DraftAhead:
    """The device's half: the committed tokens and the drafts after them.

    text: committed tokens and drafts. committed: number of committed tokens.
    """

    def __init__(self) -> None:
        self.text = CommittedTokens()
        self.committed = 0
        self._acceptances: list[float] = []  # each draft's, if the drafts before it are accepted
        self._margins: list[float | None] = []
        self._places: list[int] = []
        self._depth = 0
        self._sent = 0  # the first position that no hint has covered
        self._sent_hash = self.text.hash

    def start(self, committed: Ids) -> None:
        """Start drafting after these tokens, u32 [n]."""
        self.text.truncate(common_prefix(self.text.ids, committed))
        self.text.extend(committed[len(self.text) :])
        self.committed = len(committed)
        self._clear_drafts()
        self._depth = 0

    def _clear_drafts(self) -> None:
        """Clear acceptances, margins and places, and mark the whole text as sent."""
        self._acceptances.clear()
        self._margins.clear()
        self._places.clear()
        self._sent, self._sent_hash = len(self.text), self.text.hash

    def __len__(self) -> int:
        """Return the number of drafts."""
        return len(self._acceptances)

    @property
    def drafts(self) -> Ids:
        """The drafts, u32 [n], as a view that is valid until the next change."""
        return self.text.ids[self.committed :]

    @property
    def joint_acceptance(self) -> float:
        """The probability that all drafts are accepted."""
        return float(np.prod(self._acceptances))

    @property
    def acceptances(self) -> Sequence[float]:
        """Each draft's acceptance probability, if the drafts before it are accepted."""
        return self._acceptances

    @property
    def unsent(self) -> int:
        """The number of drafts that were not sent."""
        return len(self.text) - max(self._sent, self.committed)

    def append(self, token: int, acceptance: float, margin: float | None, place: int = 0) -> None:
        """Add a draft.

        margin: the margin from which its acceptance was estimated, or None. place: its place among
        the drafts of its pass, from 0.
        """
        self.text.extend([token])
        self._acceptances.append(acceptance)
        self._margins.append(margin)
        self._places.append(place)

    def compare(self, ids: Sequence[int]) -> DraftComparison:
        """Commit these tokens and compare the drafts with them; drop all drafts if one is wrong."""
        # [n] or fewer
        drafts = self.drafts[: len(ids)].tolist()
        agreed = next((at for at, id in enumerate(drafts) if id != ids[at]), len(drafts))
        right = agreed == len(drafts)
        compared = agreed if right else agreed + 1
        comparison = DraftComparison(
            self._depth, compared, agreed, self._margins[:compared], self._places[:compared]
        )
        if right and len(drafts) == len(ids):
            for each in (self._acceptances, self._margins, self._places):
                del each[: len(ids)]
        else:
            self.text.truncate(self.committed + agreed)
            self.text.extend(ids[agreed:])
            self._clear_drafts()
        self._depth = self._depth + len(ids) if right else 0
        self.committed += len(ids)
        return comparison

    def resend_all(self) -> None:
        """Mark all drafts as not sent."""
        self._sent, self._sent_hash = self.committed, self.text.hash_at(self.committed)

    def encode_hint(self, vocab_size: int) -> tuple[int, bytes, list[Buffer]]:
        """Return the start, hash and frames of a hint with all drafts that were not sent."""
        if self._sent < self.committed:
            self.resend_all()
        start, digest = self._sent, self._sent_hash
        ids = self.text.ids[start:]
        # [n], in units of 1/255
        odds = np.rint(np.array(self._acceptances[start - self.committed :]) * _BYTE).astype(
            np.uint8
        )
        self._sent, self._sent_hash = len(self.text), self.text.hash
        return start, digest, [encode_ids(ids, vocab_size), odds.tobytes()]


class HintChain:
    """The edge's half: the newest hinted tokens after the committed tokens.

    committed: the session's tokens, which the session extends. most: maximum number of ids.
    """

    def __init__(self, committed: CommittedTokens, most: int) -> None:
        self._committed = committed
        self._most = min(most, MAX_WINDOW)
        self.ids: list[int] = []
        self.acceptances: list[float] = []  # each id's, if the ids before it are accepted

    def add(self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int) -> bool:
        """Add a hint; return False if it does not fit and is dropped.

        A late hint overlaps the committed tokens. If it agrees with them, the rest of its ids is
        kept. A new hint replaces older ids. Raises `MalformedError` for bad frames.
        """
        check_frame_count(frames, 2)
        if len(frames[1]) != count_window_ids(frames[0], vocab_size):
            raise MalformedError("A hint must have one byte of probability for each token id.")
        length = len(self._committed)
        if start > length + len(self.ids):
            return False  # an earlier hint was lost
        ids = decode_ids(frames[0], vocab_size).tolist()
        acceptances = [byte / _BYTE for byte in bytes(frames[1])]
        offset = max(0, start - length)
        late = max(0, length - start)
        if late >= len(ids) or ids[:late] != self._committed.ids[start:length].tolist():
            return False
        if digest != self._hash_before(start, offset):
            return False
        new = ids[late:]
        if new != self.ids[offset : offset + len(new)]:  # otherwise the hint adds nothing
            self.ids[offset:] = new
            self.acceptances[offset:] = acceptances[late:]
            del self.ids[self._most :], self.acceptances[self._most :]
        return True

    def _hash_before(self, start: int, offset: int) -> bytes:
        if start <= len(self._committed):
            return self._committed.hash_at(start)
        return self._committed.hash_after(self.ids[:offset])

    def drop_committed(self, ids: Sequence[int]) -> None:
        """Drop newly committed ids from the chain, or the whole chain if it differs."""
        agree = self.ids[: len(ids)] == list(ids)
        del self.ids[: len(ids) if agree else None], self.acceptances[: len(ids) if agree else None]


def draft_with_margin(logits: Floats, params: SamplingParams, position: int) -> tuple[int, float]:
    """Return the draft at a position, as `draw` does, and its margin; logits: one row, [V].

    The margin is the draft's logit minus the next highest logit (`AcceptanceEstimator`). Above
    temperature 0 both logits include their noise, scaled by the temperature. So at any temperature
    the margin is the change of logits with which the target would choose another token.
    """
    if params.sampling.greedy:
        token = int(logits.argmax())
        rest = (logits[:token].max(initial=-math.inf), logits[token + 1 :].max(initial=-math.inf))
        return token, float(logits[token] - max(rest))
    q = probabilities(logits[None], params.sampling)[0]
    token, margin = race(q, noise(len(q), params.seed, Purpose.TARGET, position))
    return token, params.sampling.temperature * margin
