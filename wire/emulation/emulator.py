"""`Emulator`: a slow, distant or lossy link in front of an edge, for tests, benchmarks and demos.

in:  where to pass connections on to, and `Conditions`; they may change while it runs.
out: an endpoint to connect to instead. What crosses it is delayed as `wire.emulation.shaper` says.

It is the proxy that `pilotfish emulate` runs, in a process of its own: beside a busy test in one
interpreter it would be late by milliseconds. The two hold the ends of a socket pair, over which
conditions go and figures come; when the parent is gone, however it went, the proxy stops.
"""

import math
import os
import sys
import threading
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from pilotfish.wire.errors import ListenError, UnsupportedError
from pilotfish.wire.tie import TiedProcess

_ANSWER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a link is like; the default is a link that one does not notice.

    "up" is from the side that connects to the emulator towards the edge. Raises UnsupportedError
    for figures that no link has.

    rtt_s: seconds, half of them each way. jitter_s: a round trip takes up to so many more; each
    segment's share is drawn evenly from [0, jitter_s/2] each way, and none overtakes another.
    up_bps, down_bps: bit/s of TCP payload; None is no limit. trace_up, trace_down: paths of
    Mahimahi traces, instead of a rate. loss: share of the segments (≤ 1500 bytes) that are lost on
    the way; TCP sends them again, so loss shows as stalls. seed: of jitter and loss.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    up_bps: float | None = None
    down_bps: float | None = None
    loss: float = 0.0
    trace_up: str | os.PathLike[str] | None = None
    trace_down: str | os.PathLike[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("rtt_s", self.rtt_s), ("jitter_s", self.jitter_s)):
            if not 0.0 <= value < math.inf:
                raise UnsupportedError(f"{name} is {value}; a link needs a time of 0 s or more.")
        if not 0.0 <= self.loss < 1.0:
            raise UnsupportedError(f"loss is {self.loss}; give a share of 0 or more, below 1.")
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
    """What has passed: payload bytes handed on, segments lost (and sent again), connections."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_lost: int = 0
    down_lost: int = 0
    connections: int = 0


class Emulator:
    """Starts the proxy on entry and stops it on exit; ``endpoint`` is where to connect to.

    connect: the edge, ``tcp://HOST:PORT``; it need not be there yet. listen: port 0 takes a free
    one. ``since_s`` is the time, by ``time.monotonic()``, from which on ``conditions`` hold; traces
    begin then.
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
        self._turn = threading.Lock()  # one question at a time
        self._child: TiedProcess | None = None

    @property
    def pid(self) -> int:
        """The proxy's process."""
        return self._running.process.pid

    @property
    def _running(self) -> TiedProcess:
        if self._child is None:
            raise ListenError("The emulator is not running; enter it with `with` first.")
        return self._child

    def start(self) -> "Emulator":
        """Start the proxy and wait until it listens.

        Raises ListenError (address taken), TraceError, UnsupportedError (address misspelt),
        EdgeUnreachableError (no such host).
        """
        command = [sys.executable, "-m", "pilotfish.wire.emulation.tied"]
        self._child = TiedProcess(command, _ANSWER_S)
        try:
            told = self._ask(
                listen=self._listen, connect=self._connect, conditions=asdict(self.conditions)
            )
        except BaseException:
            self.stop()
            raise
        self.endpoint, self.since_s = told["endpoint"], told["since_s"]
        return self

    def set(self, conditions: Conditions | None = None, /, **changes: Any) -> None:
        """From now on the link is like this; back when it is so.

        changes: fields of `Conditions` that differ, as ``set(rtt_s=0.1)``. What is under way keeps
        its delay, what still waits to be sent takes the new rate. Traces begin anew.
        """
        wanted = replace(conditions or self.conditions, **changes)
        self.since_s = self._ask(set=asdict(wanted))["since_s"]
        self.conditions = wanted

    def cut(self, for_s: float = 0.0, *, silent: bool = False) -> None:
        """The link breaks now, and for so many seconds there is none.

        Connections are reset and new ones refused, as when an interface goes down; ``silent``:
        nothing is told, and nothing crosses, as when the radio is out of reach. Back at once.
        """
        if not 0.0 <= for_s < math.inf:
            raise UnsupportedError(f"for_s is {for_s}; a cut takes a time of 0 s or more.")
        self._ask(cut={"for_s": for_s, "silent": silent})

    def traffic(self) -> Traffic:
        """What has passed so far."""
        return Traffic(**self._ask(traffic=True)["traffic"])

    def stop(self) -> None:
        """Stop the proxy and cut all connections through it; kills it if it does not stop."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _ask(self, **question: Any) -> dict[str, Any]:
        with self._turn:
            child = self._running
            try:
                child.tie.tell(question)
                told = child.hear()
            except OSError as error:
                raise ListenError(f"The emulator does not answer: {error}.") from error
        if told is None:
            raise ListenError("The emulator ended; see what it wrote to stderr.")
        return told

    def __enter__(self) -> "Emulator":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
