"""One probe of the link: small pings, the goodput of both directions, the radio, the position."""

import logging
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from pilotfish.base.errors import EdgeLostError
from pilotfish.base.settings import setting
from pilotfish.device_runtime import energy
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.goodput import measure_goodput
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.lab.field.link_rows import Probe
from pilotfish.lab.field.watch.position import DECIMALS, read_position
from pilotfish.lab.field.watch.radio import read_signal
from pilotfish.wire.link.state import Reading
from pilotfish.wire.link.transfer_rate import Goodput

GOODPUT_BYTES: Final = 1_000_000

_log = logging.getLogger("pilotfish.field.probe")


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe measures."""

    pings: Annotated[int, setting("number of small pings of a probe", ge=1, le=1000)] = 10
    goodput_bytes: Annotated[
        int,
        setting(
            "maximum bytes of a probe's transfer in each direction; it ends earlier once its rate "
            "is steady. 0: only trains of at most 100 kB (default: 1 MB, so that 288 probes a "
            "day cost at most 600 MB)",
            form="size",
            metavar="SIZE",
            ge=0,
            le=16_000_000,
        ),
    ] = GOODPUT_BYTES
    position: Annotated[bool, setting("do not ask gpsd for the position", flag="no_position")] = (
        True
    )
    position_decimals: Annotated[
        int,
        setting(
            "decimals of the recorded latitude and longitude: 3 is about 110 m, 5 about 1 m",
            ge=0,
            le=7,
        ),
    ] = DECIMALS


_DEFAULT: Final = ProbeSettings()


def measure_link(
    link: EdgeLink,
    settings: ProbeSettings = _DEFAULT,
    *,
    on_wait: Callable[[], None] = lambda: None,
    on_loss: Callable[[float], None] = lambda silent_s: None,
) -> Probe:
    """Measure the link, then read the radio and the position; the power is that of measuring.

    ``began_unix_s`` and ``clock_s`` of the result are 0: the caller has the clocks. Raises the
    link's errors if the edge is lost during the pings. If it is lost later, the goodput is None.
    on_wait: called after each ping, and several times a second while radio and position are read;
    an error that it raises ends the probe. on_loss: called if the edge is lost in the transfer,
    with the seconds since the last message came.
    """
    before, begun_ns = link.estimator.probing, time.monotonic_ns()
    watts = energy.Meter(energy.rails())
    with watts:
        pings = []
        for _ in range(settings.pings):
            pings.append(ping(link))
            on_wait()
        rtts_s = [each.rtt_s for each in pings if each.rtt_s is not None]
        state = link.state()
        try:
            up, down = _goodput(link, settings, min(rtts_s, default=0.0))
        except EdgeLostError:
            up = down = None
            on_loss(link.silent_s)
        on_wait()
        took_s = (time.monotonic_ns() - begun_ns) * 1e-9
    cost = link.estimator.probing.since(before)
    position = None
    if settings.position:
        position = read_position(decimals=settings.position_decimals, on_wait=on_wait)
    return Probe(
        began_unix_s=0.0,
        clock_s=0.0,
        took_s=took_s,
        rtts_s=rtts_s,
        lost=sum(each.lost for each in pings),
        up_bps=None if up is None else up.bps,
        up_bound=up is not None and up.is_bound,
        down_bps=None if down is None else down.bps,
        down_bound=down is not None and down.is_bound,
        uplink_bytes=cost.uplink_bytes,
        downlink_bytes=cost.downlink_bytes,
        link=state,
        signal=read_signal(on_wait=on_wait),
        position=position,
        power_w=None if watts.joules is None else watts.joules / took_s,
    )


def _goodput(
    link: EdgeLink, settings: ProbeSettings, rtt_s: float
) -> tuple[Goodput | None, Goodput | None]:
    """Return the goodput up and down; by trains if there is no transfer, or it was refused."""
    measure_rates(link, brief=settings.goodput_bytes > 0)
    state = link.state()
    by_trains = _by_train(state.up), _by_train(state.down)
    if not settings.goodput_bytes:
        return by_trains
    up, down, _ = measure_goodput(link, settings.goodput_bytes, rtt_s=rtt_s)
    if up is None or down is None:
        _log.info("a transfer was refused or broke off: the goodput is an estimate by short trains")
    return up or by_trains[0], down or by_trains[1]


def _by_train(reading: Reading | None) -> Goodput | None:
    return None if reading is None else Goodput(reading.value, is_bound=False)
