"""Measure the link with pings if recent messages do not suffice."""

import secrets

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.wire.link.meter import FRESH_S
from pilotfish.wire.link.state import Reading
from pilotfish.wire.messages import Ping, Pong

RATES_FRESH_S = 60.0
PROBE_BYTES = 12_000  # fits TCP's first window, and is large enough to measure a rate
_PINGS = 2  # maximum pings to measure one RTT


def ping(link: EdgeLink, size: int = 0) -> None:
    """Measure the RTT, or with ``size`` bytes in each direction the rates; wait for the reply.

    An older edge returns no bytes; then the downlink's rate stays unknown.
    """
    nonce = secrets.randbits(63)
    frames = (secrets.token_bytes(size),) if size else ()  # random, so that no link compresses it
    answer = link.request(
        Ping(nonce=nonce), frames, lambda reply: isinstance(reply, Pong) and reply.nonce == nonce
    )
    pong, estimator = answer.reply, link.estimator
    assert isinstance(pong, Pong)
    estimator.echoes = estimator.echoes and len(answer.frames) == len(frames)
    estimator.on_ping(answer, pong.received_ns, pong.sent_ns - pong.received_ns)


def refresh(link: EdgeLink, *, rates: bool, anew: bool = False) -> None:
    """Update an unknown or old RTT and, with ``rates``, old rates; sends at most one ping.

    One ping measures either the RTT or the rates: old rates come first, unless the RTT is as old.
    anew: always measure the RTT first, then old rates with another ping.
    """
    if anew:
        _measure_rtt(link)
    state = link.estimator.state(None)
    readings = (state.up, state.down) if link.estimator.echoes else (state.up,)
    rates_due = rates and any(_is_older(rate, RATES_FRESH_S) for rate in readings)
    if rates_due and not _is_older(state.rtt, RATES_FRESH_S):
        ping(link, PROBE_BYTES)
    elif _is_older(state.rtt, FRESH_S):
        ping(link)


def _measure_rtt(link: EdgeLink) -> None:
    """Measure the RTT with a ping, and with a second ping if the first did not measure it.

    A ping measures nothing if it was sent twice, or had to wait while the edge read a prompt.
    """
    link.estimator.next_answer()
    for _ in range(_PINGS):
        ping(link)
        if link.estimator.rtt_is_new:
            return


def _is_older(reading: Reading | None, age_s: float) -> bool:
    return reading is None or reading.age_s > age_s
