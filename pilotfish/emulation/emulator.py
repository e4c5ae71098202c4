"""`Emulator`: a slow, long or lossy link in front of an edge, for tests, benchmarks and demos.

In: the address of the edge, and `Conditions`, which may change at run time. Out: the endpoint of a
proxy; clients connect to it, and it delays their traffic as `emulation.shaper` describes.

The proxy is the same as in `pilotfish emulate`. It has its own process: in the interpreter of a
busy test it would be late by milliseconds. A socket pair carries conditions and totals; the proxy
stops when its parent ends for any reason.
"""

import math
import os
import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Struct, structs

from pilotfish.base.child import ChildProcess
from pilotfish.base.errors import ListenError, UnsupportedError
from pilotfish.base.settings import setting

_ANSWER_S = 30.0
MAX_BUFFER_BYTES = 16 * 1024 * 1024


_UP, _DOWN = (
    setting(
        f"payload rate {way} per second, such as 20mbit",
        form="rate",
        axis="link",
        flag=way,
        metavar="RATE",
        exclusive=way,
    )
    for way in ("up", "down")
)
_TRACE_UP, _TRACE_DOWN = (
    setting(
        "Mahimahi trace instead of a rate: each line is a millisecond at which 1500 bytes can "
        "leave",
        form=str,
        metavar="FILE",
        exclusive=way,
    )
    for way in ("up", "down")
)


class Conditions(Struct, frozen=True, kw_only=True):
    """The properties of a link; the default is an ideal link.

    `field measure` can vary those that are marked by ``axis`` (`lab.field.axes`).

    "Up" is the direction from the connecting side to the edge. Raises UnsupportedError for
    impossible values.

    rtt_s: round trip in seconds, half of it each way. jitter_s: the largest extra time of a round
    trip; each segment draws uniformly from [0, jitter_s/2] each way, without reordering. up_bps,
    down_bps: bit/s of TCP payload; None: no limit. trace_up, trace_down: paths of Mahimahi traces,
    in place of a rate. loss: share of lost segments (≤ 1500 bytes); TCP sends them again, so loss
    shows as stalls. seed: seed of jitter and loss. buffer_bytes: payload bytes that may queue for
    the link, each way, before the sender must wait; None: the bytes that the link carries in 0.25
    s, at least 3,000 and at most 512 KiB.
    """

    rtt_s: Annotated[
        float,
        setting("round-trip time, such as 50ms", form="duration", axis="link", metavar="TIME"),
    ] = 0.0
    jitter_s: Annotated[
        float,
        setting(
            "maximum random extra time of a round trip, half of it each way",
            form="duration",
            axis="link",
            metavar="TIME",
        ),
    ] = 0.0
    up_bps: Annotated[float, _UP] | None = None
    trace_up: Annotated[str | os.PathLike[str], _TRACE_UP] | None = None
    down_bps: Annotated[float, _DOWN] | None = None
    trace_down: Annotated[str | os.PathLike[str], _TRACE_DOWN] | None = None
    loss: Annotated[
        float,
        setting(
            "share of segments lost each way, such as 1% or 0.01; TCP sends them again, so losses "
            "show as stalls",
            form="share",
            axis="link",
            metavar="SHARE",
        ),
    ] = 0.0
    seed: Annotated[int, setting("seed of the random jitter and loss")] = 0
    buffer_bytes: (
        Annotated[
            int,
            setting(
                "bytes that may queue for the link each way before the sender must wait (default: "
                "what the link carries in 0.25 s, at most 512 KiB)",
                metavar="BYTES",
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        for name, value in (("rtt_s", self.rtt_s), ("jitter_s", self.jitter_s)):
            if not 0.0 <= value < math.inf:
                raise UnsupportedError(f"{name} is {value}; a link needs a time of 0 s or more.")
        if not 0.0 <= self.loss < 1.0:
            raise UnsupportedError(f"loss is {self.loss}; give a share of 0 or more, below 1.")
        if self.buffer_bytes is not None and not 0 < self.buffer_bytes <= MAX_BUFFER_BYTES:
            raise UnsupportedError(
                f"buffer_bytes is {self.buffer_bytes}; a link needs 1 to {MAX_BUFFER_BYTES:,}."
            )
        for way, rate, trace in (
            ("up", self.up_bps, self.trace_up),
            ("down", self.down_bps, self.trace_down),
        ):
            if rate is not None and not 0.0 < rate < math.inf:
                raise UnsupportedError(f"{way}_bps is {rate}; a link needs a rate above 0 bit/s.")
            if rate is not None and trace is not None:
                raise UnsupportedError(
                    f"The link has both a rate and a trace for {way}; give one of them."
                )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Totals so far: payload bytes delivered, segments lost (and sent again), connections."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_lost: int = 0
    down_lost: int = 0
    connections: int = 0


class Emulator:
    """A proxy that runs inside a ``with`` block; clients connect to its ``endpoint``.

    connect: the edge's address, ``tcp://HOST:PORT``; the edge may start later. listen: the proxy's
    address; port 0 means a free port. since_s: the time (``time.monotonic()``) at which the present
    ``conditions`` and their traces began.
    """

    def __init__(
        self,
        connect: str,
        conditions: Conditions | None = None,
        *,
        listen: str = "tcp://127.0.0.1:0",
    ) -> None:
        self.conditions = conditions or Conditions()
        self.endpoint = ""
        self.since_s = math.nan
        self._connect = connect
        self._listen = listen
        self._lock = threading.Lock()  # allows the proxy one request at a time
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """The process id of the proxy."""
        return self._running.process.pid

    @property
    def _running(self) -> ChildProcess:
        if self._child is None:
            raise ListenError("The emulator is not running; enter it with `with` first.")
        return self._child

    def start(self) -> "Emulator":
        """Start the proxy and wait until it listens.

        Raises ListenError (address taken), TraceError, UnsupportedError (address misspelt),
        EdgeUnreachableError (no such host).
        """
        command = [sys.executable, "-m", "pilotfish.emulation.proxy_process"]
        self._child = ChildProcess(command, _ANSWER_S)
        try:
            reply = self._request(
                listen=self._listen,
                connect=self._connect,
                conditions=structs.asdict(self.conditions),
            )
        except BaseException:
            self.stop()
            raise
        self.endpoint, self.since_s = reply["endpoint"], reply["since_s"]
        return self

    def set(self, conditions: Conditions | None = None, /, **changes: Any) -> None:
        """Change the link; return when the change is in effect.

        changes: the changed fields of `Conditions`, such as ``set(rtt_s=0.1)``. Segments in
        transit keep their delay; waiting segments use the new rate. Traces start again.
        """
        wanted = structs.replace(conditions or self.conditions, **changes)
        self.since_s = self._request(set=structs.asdict(wanted))["since_s"]
        self.conditions = wanted

    def cut(self, for_s: float = 0.0, *, silent: bool = False) -> None:
        """Break the link for ``for_s`` seconds; return at once.

        The proxy resets connections and refuses new ones, as if an interface went down. With
        ``silent`` it resets nothing and delivers nothing, as if the radio were out of range.
        """
        if not 0.0 <= for_s < math.inf:
            raise UnsupportedError(f"for_s is {for_s}; a cut takes a time of 0 s or more.")
        self._request(cut={"for_s": for_s, "silent": silent})

    def traffic(self) -> Traffic:
        """Return the totals so far."""
        return Traffic(**self._request(traffic=True)["traffic"])

    def stop(self) -> None:
        """Stop the proxy, or kill it if it does not stop; all its connections end."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _request(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            child = self._running
            try:
                child.pipe.send(request)
                reply = child.receive()
            except OSError as error:
                raise ListenError(f"The emulator does not answer: {error}.") from error
        if reply is None:
            raise ListenError("The emulator ended; see what it wrote to stderr.")
        return reply

    def __enter__(self) -> "Emulator":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
