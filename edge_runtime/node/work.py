"""What a node does with the steps that it gets: one subclass for each thing that it can hold."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Ready, Step

if TYPE_CHECKING:
    import zmq


class Work(ABC):
    """One owner: the node's loop.

    Attributes:
        ready: what the node holds, as it tells an edge that greets it.
    """

    ready: Ready

    @abstractmethod
    def attach(self, attach: Attach) -> None:
        """Begin anew for an edge, with empty slots; a typed error if it asks for the impossible."""

    @abstractmethod
    def do(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """The frames of the answer; None if the step went on to the next node.

        A typed error for a step that makes no sense, or that cannot go on.
        """

    @property
    def joined(self) -> bool:
        """What `attach` began is complete; a typed error if it cannot be, or is not any more."""
        return True

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """What may be polled to learn of news; after it, ask whether it is ``joined``."""
        return ()

    def close(self) -> None:
        """Let go of connections; an attachment is over, or the node ends."""
        return


def timed(step: Step, begun_ns: int) -> Step:
    """The step with the time that this node has computed for it since ``begun_ns``."""
    spent_ns = time.monotonic_ns() - begun_ns
    return msgspec.structs.replace(step, compute_ns=[*step.compute_ns, spent_ns])
