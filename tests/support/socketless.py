"""An edge's real service, decoder and scheduler without a socket.

Fast enough for many messages; no pass is made before `start`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pilotfish.base.tracing import Tracer
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.scheduler import Scheduler
from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import open_engine
from pilotfish.wire import messages as m
from pilotfish.wire.transport import Envelope
from tests.support.hostile import WAIT_S
from tests.support.passes import run


class SocketlessEdge:
    """Service, scheduler and decoder; `deliver` replaces the socket, `turn` makes one pass.

    heads: its decision heads. clock: the time (ns) by which
    sessions are idle and passes are shared. tracer: makes its spans.
    """

    def __init__(
        self,
        target: Path,
        heads: Sequence[str] = (),
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer | None = None,
        **limits: Any,
    ) -> None:
        artifact = Artifact.open(target)
        chosen = EdgeLimits(**{"messages_per_s": 1e9, **limits})
        self.replies: list[tuple[bytes, m.Reply, list[bytes]]] = []
        held = LocalTarget(
            open_engine(artifact, slots=chosen.sessions, context=chosen.context, threads=1)
        )
        self.scheduler = Scheduler(held, clock)
        self._working = False
        self.metrics = EdgeMetrics()
        self.service = MessageHandler(
            artifact,
            held,
            chosen,
            self.scheduler.submit,
            self._keep,
            draft_cost=self.scheduler.draft_cost,
            resources=EdgeResources.load(artifact.manifest, heads, None),
            metrics=self.metrics,
            tracer=tracer,
        )
        self.service.sessions._clock = lambda: clock() * 1e-9

    def _keep(self, client: bytes, reply: m.Reply, frames: Sequence[m.Buffer]) -> bool:
        self.replies.append((client, reply, list(map(bytes, frames))))
        return True

    def start(self) -> None:
        """Let the target make passes from now on."""
        self._working = True

    def deliver(self, frames: Sequence[bytes], client: bytes = b"me") -> None:
        """Deliver a message."""
        header, *rest = frames
        self.service.handle(Envelope(client, client, header, rest, sum(map(len, frames))))

    def turn(self) -> None:
        """Make one pass, and apply the finished jobs and grammars."""
        self.service.compiler.run_callbacks()
        for job in run(self.scheduler) if self._working else []:
            self.service.finish_job(job)

    def reply(self, client: bytes = b"me") -> m.Reply:
        """Return the next reply to a client, without its frames."""
        return self.reply_all(client)[0]

    def reply_all(self, client: bytes = b"me") -> tuple[m.Reply, list[bytes]]:
        """Make passes until a client has a reply; returns it, and drops replies to others."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            while self.replies:
                to, reply, frames = self.replies.pop(0)
                if to == client:
                    return reply, frames
            self.turn()
        pytest.fail("the edge said nothing")

    def fails(self, code: str) -> m.Failure:
        """Assert that the next reply is a failure of this kind."""
        reply = self.reply()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code, reply
        return reply

    def close(self) -> None:
        """End the compiler of grammars."""
        self._working = False
        self.service.compiler.close()

    def __enter__(self) -> SocketlessEdge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
