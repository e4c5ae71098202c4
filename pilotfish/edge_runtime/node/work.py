"""`NodeWork`, the interface of what a node runs: one subclass for each kind of artifact."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import zmq

from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Ready, Step


class NodeWork(ABC):
    """Runs the steps of a node. Used by the node's loop.

    Attributes:
        ready: the node's artifact and room, for the reply to an edge's greeting.
    """

    ready: Ready

    @abstractmethod
    def attach(self, attach: Attach) -> None:
        """Empty all slots for an edge; raises a typed error if its request cannot be met."""

    @abstractmethod
    def run_step(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Run a step; returns the answer's frames, or None if the next node continues it.

        Raises a typed error for a malformed step, or if the next node is lost.
        """

    @property
    def joined(self) -> bool:
        """Whether the attachment is complete; raises a typed error if it failed or was lost."""
        return True

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets to poll for events; after one, check ``joined``."""
        return ()

    def close(self) -> None:
        """Close connections at the end of an attachment or of the node."""
        return


def add_compute_time(step: Step, begun_ns: int) -> Step:
    """Add this node's computing time since ``begun_ns`` to the step."""
    spent_ns = time.monotonic_ns() - begun_ns
    return msgspec.structs.replace(step, compute_ns=[*step.compute_ns, spent_ns])
