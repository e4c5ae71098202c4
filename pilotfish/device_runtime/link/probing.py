"""Measure the link with pings and trains if recent messages do not suffice."""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pilotfish.base.errors import MalformedError, RateLimitedError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.pending import SentRequest
from pilotfish.device_runtime.record import Probing
from pilotfish.wire.link.meter import FRESH_S
from pilotfish.wire.link.state import Reading
from pilotfish.wire.link.train import RateProbe
from pilotfish.wire.messages import Ping, Pong, Reply, Train

RATES_FRESH_S = 60.0
_PINGS = 2  # maximum pings to measure one RTT


class PingResult(NamedTuple):
    """The RTT that a ping measured (s); None: it measured none. lost: it had to be sent again."""

    rtt_s: float | None
    lost: bool


def ping(link: EdgeLink) -> PingResult:
    """Measure the RTT; wait for the reply.

    The RTT is of this ping alone, also if it is much longer than its neighbours' and so does not
    count for the link's state.
    """
    nonce = secrets.randbits(63)
    answer = link.request(
        Ping(nonce=nonce), (), lambda reply: isinstance(reply, Pong) and reply.nonce == nonce
    )
    pong = answer.reply
    assert isinstance(pong, Pong)
    link.estimator.on_ping(answer, pong)
    if answer.resent or answer.late or answer.stalled:
        return PingResult(None, answer.resent)
    took_ns = answer.received_ns - answer.sent_ns
    held_ns = min(max(0, pong.sent_ns - pong.received_ns), took_ns)  # the edge may say anything
    return PingResult((took_ns - held_ns) * 1e-9, lost=False)


def measure_rates(link: EdgeLink, *, brief: bool = False) -> None:
    """Measure the rates of both directions at once, by one or two trains each.

    A rate that the trains cannot tell stays unknown. So do both rates if the connection breaks: the
    next one may take another path. brief: send only the first, short train.
    """
    link.await_handshake()
    rtt = link.estimator.state(None).rtt
    rtt_s = rtt.value if rtt is not None else math.inf
    connection = link.connection
    up, down, cost = RateProbe(), RateProbe(), Probing()
    while up.sizes or down.sizes:
        sent = _send_trains(link, up.sizes, down.sizes)
        first, pongs = sent[0], max(1, len(down.sizes))
        answers = _answers(link, [*(first for _ in range(pongs)), *sent[1:]])
        cost = Probing(
            cost.pings + 1,
            cost.uplink_bytes + sum(request.size for request in sent),
            cost.downlink_bytes + sum(answer.downlink_bytes for answer in answers),
        )
        if len(answers) < pongs + len(sent) - 1 or any(
            answer.resent or answer.stalled or answer.connection != connection for answer in answers
        ):
            break
        returned, answers = answers[:pongs], answers[pongs:]
        if down.sizes:
            arrivals_s = [answer.received_ns * 1e-9 for answer in returned]
            took_s = arrivals_s[-1] - first.sent_ns * 1e-9 - (0.0 if rtt is None else rtt.value)
            down.on_train(arrivals_s, took_s, may_repeat=not brief, rtt_s=rtt_s)
        if up.sizes:
            # the edge's clock; the request before the train arrived when the train began
            begun_ns, *arrivals_ns = (_received_ns(answer) for answer in (returned[0], *answers))
            arrivals_s = [(at - begun_ns) * 1e-9 for at in arrivals_ns]
            up.on_train(arrivals_s, arrivals_s[-1], may_repeat=not brief, rtt_s=rtt_s)
    is_whole = link.connection == connection
    up_bps, down_bps = (up.rate_bps, down.rate_bps) if is_whole else (None, None)
    link.estimator.on_rates(link.connection, up_bps, down_bps, cost)


def _answers(link: EdgeLink, awaited: Sequence[SentRequest]) -> list[TimedReply]:
    """Wait for the pongs of a train's messages; some are missing if the edge refuses messages.

    An edge refuses a message if the key has no bytes or messages left. On a link without a
    handshake (`pilotfish probe`) the edge may also be of another version, which knows no trains.
    Each refused message has one failure in place of its pongs; all are received here, so that no
    later request takes them for its own. After a message that had to be sent again, the other pongs
    may be lost, too: the device does not wait for each of them.
    """
    answers: list[TimedReply] = []
    connection, refused = link.connection, None
    for request in awaited:
        if request is refused:  # its failure came in place of all its pongs
            continue
        try:
            answers.append(link.wait(request, _is_pong(request)))
        except (MalformedError, RateLimitedError):
            refused = request
        else:
            if answers[-1].resent:
                break
        if link.connection != connection:
            break
    return answers


def _send_trains(
    link: EdgeLink, up_sizes: Sequence[int], down_sizes: Sequence[int]
) -> list[SentRequest]:
    """Request the train down, then send the train up; each message of it is a request, too."""
    frames = [secrets.token_bytes(size) for size in up_sizes]  # random, so nothing compresses them
    pongs, size = (len(down_sizes), down_sizes[0]) if down_sizes else (1, 0)
    request = link.send(Train(nonce=secrets.randbits(63), pongs=pongs, bytes=size))
    return [
        request,
        *(
            link.send(Train(nonce=secrets.randbits(63), pongs=1, bytes=0), (frame,))
            for frame in frames
        ),
    ]


def _is_pong(request: SentRequest) -> Callable[[Reply], bool]:
    """Return a function that tells the pongs of a train."""
    train = request.message
    assert isinstance(train, Train)
    return lambda reply: isinstance(reply, Pong) and reply.nonce == train.nonce


def _received_ns(answer: TimedReply) -> int:
    assert isinstance(answer.reply, Pong)
    return answer.reply.received_ns


def refresh(link: EdgeLink, *, rates: bool, anew: bool = False) -> None:
    """Update an unknown or old RTT and, with ``rates``, old rates.

    Either the RTT or the rates are measured: old rates come first, unless the RTT is as old. anew:
    always measure the RTT first, then old rates. The rates are tried at most once a minute and,
    after the first time on a connection, briefly.
    """
    if anew:
        _measure_rtt(link)
    state = link.estimator.state(None)
    rates_due = rates and any(_is_older(rate, RATES_FRESH_S) for rate in (state.up, state.down))
    if rates_due and not _is_older(state.rtt, RATES_FRESH_S):
        begins, is_first = link.estimator.begin_rates(link.connection, RATES_FRESH_S)
        if begins:
            measure_rates(link, brief=not is_first)
            return
    if _is_older(state.rtt, FRESH_S):
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
