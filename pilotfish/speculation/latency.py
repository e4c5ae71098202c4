"""What a round costs: the one cost model by which Pilotfish chooses, replays and predicts.

In:  seconds of computing, bytes that cross the link, and the link. Out: seconds.

A round takes T = γ·T_draft + T_comm + T_verify (tslt (5), dssd (6)), where T_comm is an RTT for
each exchange and the bytes of both ways at their rates (dssd (3), wisv (6), (10)); it yields N
tokens (tslt (8)), and T/N is what a choice of protocol and window is judged by. Under `stream` the
tokens follow each other without being asked for, so each costs what is slower, the pass that makes
it or the bytes that carry it, and all of them together one RTT.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """RTT in seconds; goodput in bit/s, net of retransmissions and lower layers."""

    rtt_s: float
    up_bps: float
    down_bps: float


def transfer_s(size_bytes: float, rate_bps: float) -> float:
    """Compute the seconds to serialise so many bytes (dssd (1), (2))."""
    return 8.0 * size_bytes / rate_bps


def communication_s(
    up_bytes: float, down_bytes: float, link: Link, exchanges: float = 1.0
) -> float:
    """Compute T_comm of a round: both transfers, and an RTT for each exchange.

    dssd (3) and wisv (6) with one exchange and PER 0; wisv (10) with two.
    """
    up, down = transfer_s(up_bytes, link.up_bps), transfer_s(down_bytes, link.down_bps)
    return exchanges * link.rtt_s + up + down


def streamed_token_s(pass_s: float, down_bytes: float, link: Link, tokens: float) -> float:
    """Compute seconds a token under `stream`, for an answer of so many tokens."""
    return max(pass_s, transfer_s(down_bytes, link.down_bps)) + link.rtt_s / tokens
