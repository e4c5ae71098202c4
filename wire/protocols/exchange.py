"""What a drafting protocol is: two halves of one exchange, and the words they share.

A protocol is one subclass of `Exchange` in a file of its own: the device calls `draw` while it
drafts, then `propose` and, with the verdict, commits; the edge calls `admit` on what arrived and
`rule` on the target's logits. None of them has state: what a round needs is in its arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from speculation.distributions import Floats, Sampling
from wire.errors import MalformedError
from wire.messages import Buffer, ids_frame, read_ids

Ids = NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Law:
    """What both ends of a generation sample by. The seed names the generation's draws."""

    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Draft:
    """A window and the distributions that it was sampled from.

    ids: u32 [γ]. q: f32 [γ, V], exactly the numbers sampled from, or None where none are needed.
    """

    ids: Ids
    q: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Ruling:
    """The edge's decision: the first ``accepted`` tokens, then ``token``, are committed."""

    accepted: int
    token: int


class Exchange(ABC):
    """One protocol, both halves."""

    name: ClassVar[str]
    lossless: ClassVar[bool]

    def check(self, sampling: Sampling) -> None:
        """Raise `UnsupportedError` for a sampling that cannot be served; by default all can."""
        return

    @abstractmethod
    def draw(
        self, logits: Floats, law: Law, *, round_start: int, position: int
    ) -> tuple[int, NDArray[np.float32] | None]:
        """Device: the draft token for one row of logits [V], and its q [V] if that is sent."""

    def propose(self, draft: Draft) -> list[Buffer]:
        """Device: the frames of a draft. Ids come first in every protocol."""
        return [ids_frame(draft.ids)]

    def admit(self, frames: Sequence[Buffer], vocab_size: int) -> Draft:
        """Edge: the draft in these frames, checked; a typed error for anything that is not one."""
        expect_frames(frames, 1)
        return Draft(read_ids(frames[0], vocab_size))

    @abstractmethod
    def rule(self, draft: Draft, logits: Floats, law: Law, *, round_start: int) -> Ruling:
        """Edge: decide on a draft by the target's logits [γ+1, V]."""


def expect_frames(frames: Sequence[Buffer], count: int) -> None:
    """Raise `MalformedError` unless there are ``count`` frames."""
    if len(frames) != count:
        raise MalformedError(f"This message has {len(frames)} array frames where {count} belong.")
