"""Measure the link with pings, where real messages have not told enough lately."""

import secrets

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.wire.link.meter import FRESH_S
from pilotfish.wire.link.state import Reading
from pilotfish.wire.messages import Ping, Pong

RATES_FRESH_S = 60.0
PROBE_BYTES = 12_000  # fits TCP's first window, and is large enough to tell a rate
_PINGS = 2  # at most, for one RTT


def ping(link: EdgeLink, size: int = 0) -> None:
    """Measure the RTT, or the rates with ``size`` bytes each way; waits for the reply.

    An edge that is older than this measure sends none back: then the downlink stays unknown.
    """
    nonce = secrets.randbits(63)
    frames = (secrets.token_bytes(size),) if size else ()  # random, so that no link compresses it
    answer = link.ask(
        Ping(nonce=nonce), frames, lambda reply: isinstance(reply, Pong) and reply.nonce == nonce
    )
    pong, gauge = answer.reply, link.gauge
    assert isinstance(pong, Pong)
    gauge.echoes = gauge.echoes and len(answer.frames) == len(frames)
    gauge.pinged(answer, pong.received_ns, pong.sent_ns - pong.received_ns)


def refresh(link: EdgeLink, *, rates: bool, anew: bool = False) -> None:
    """Make sure that RTT, and rates if wanted, are known; with one ping, or none.

    What real messages have told lately needs none. One ping cannot tell both: rates that are due go
    first, as long as the RTT is not as old. anew: the RTT is measured now, whatever was known, and
    both are where rates are due.
    """
    if anew:
        _measure_rtt(link)
    state = link.gauge.state(None)
    readings = (state.up, state.down) if link.gauge.echoes else (state.up,)
    due = rates and any(_older(rate, RATES_FRESH_S) for rate in readings)
    if due and not _older(state.rtt, RATES_FRESH_S):
        ping(link, PROBE_BYTES)
    elif _older(state.rtt, FRESH_S):
        ping(link)


def _measure_rtt(link: EdgeLink) -> None:
    """Measure the RTT by a ping; by another one if that told nothing.

    A ping tells nothing where it was sent twice, or behind a prompt that is still being read.
    """
    link.gauge.next_answer()
    for _ in range(_PINGS):
        ping(link)
        if link.gauge.rtt_is_new:
            return


def _older(reading: Reading | None, age_s: float) -> bool:
    return reading is None or reading.age_s > age_s
