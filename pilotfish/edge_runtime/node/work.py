"""`NodeWork`, the interface of a node's work; each kind of artifact has a subclass."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import zmq

from pilotfish.base.version import SOFTWARE
from pilotfish.engines.language_model import LanguageModel
from pilotfish.engines.stage import Stage
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import VERSION, Attach, Ready, Step


class NodeWork(ABC):
    """Runs the steps of a node. Used by the node's loop.

    Attributes:
        ready: reply to an edge's greeting: the node's artifact, slots and context.
    """

    ready: Ready

    @abstractmethod
    def attach(self, attach: Attach) -> None:
        """Empty all slots for an edge; raise a typed error if the node cannot do the request."""

    @abstractmethod
    def run_step(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Run a step; return the answer's frames, or None if the next node continues the step.

        Raises a typed error for a malformed step, or if the next node is lost.
        """

    @property
    def joined(self) -> bool:
        """Whether the attachment is complete; raises a typed error if it has failed."""
        return True

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors to poll; after an event, read `joined`."""
        return ()

    def close(self) -> None:
        """Close connections at the end of an attachment or of the node."""
        return


def add_compute_time(step: Step, begun_ns: int) -> Step:
    """Add this node's computing time since ``begun_ns`` to the step."""
    spent_ns = time.monotonic_ns() - begun_ns
    return msgspec.structs.replace(step, compute_ns=[*step.compute_ns, spent_ns])


def make_ready(part: LanguageModel | Stage, hidden_size: int) -> Ready:
    """Describe a node's model or stage, and its slots. hidden_size: width of a row it returns."""
    manifest = part.artifact.manifest
    return Ready(
        version=VERSION,
        software=SOFTWARE,
        model=manifest.model,
        digest=manifest.digest,
        tokenizer=manifest.tokenizer_fingerprint,
        vocab_size=manifest.vocab_size,
        hidden_size=hidden_size,
        slots=part.slots,
        context=part.context,
    )
