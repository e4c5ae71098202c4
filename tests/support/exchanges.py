"""Record what a device sends in its rounds, and what the edge answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.pending import SentRequest
from pilotfish.wire import messages as m


class Exchange(NamedTuple):
    """A window or states, as sent, and the answer."""

    message: m.DeviceMessage
    frames: Sequence[bytes]
    answer: TimedReply


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """The exchanges of all rounds from now on."""
    seen: list[Exchange] = []
    real = EdgeLink.wait

    def wait(link: EdgeLink, sent: SentRequest, *rest: Any, **more: Any) -> TimedReply:
        answer = real(link, sent, *rest, **more)
        if isinstance(sent.message, m.Window | m.States):
            seen.append(Exchange(sent.message, [bytes(frame) for frame in sent.frames], answer))
        return answer

    monkeypatch.setattr(EdgeLink, "wait", wait)
    return seen
