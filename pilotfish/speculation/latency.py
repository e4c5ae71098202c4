"""Cost model of a round, used for choosing, replaying and predicting.

In:  seconds of computing, bytes that cross the link, and the link. Out: seconds.

A round takes T = γ·T_draft + T_comm + T_verify (tslt (5), dssd (6)), where T_comm is an RTT for
each exchange and the bytes of both ways at their rates (dssd (3), wisv (6), (10)); it yields N
tokens (tslt (8)), and protocols and windows are compared by T/N. Under `stream` the tokens follow
each other without requests, so each costs the slower of its pass and its transfer, and all together
cost one RTT.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """RTT in seconds; goodput in bit/s, net of retransmissions and lower layers."""

    rtt_s: float
    up_bps: float
    down_bps: float


def transfer_s(size_bytes: float, rate_bps: float) -> float:
    """Compute the seconds to serialise ``size_bytes`` (dssd (1), (2))."""
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
    """Compute seconds per token under `stream`, for an answer of ``tokens`` tokens."""
    return max(pass_s, transfer_s(down_bytes, link.down_bps)) + link.rtt_s / tokens
