"""Cost model of a round: used to choose protocols and windows, to replay traces and to predict.

In:  seconds of computing, bytes that cross the link, and the link's RTT and rates. Out: seconds.

A round takes T = γ·T_draft + T_comm + T_verify (tslt (5), dssd (6)). T_comm is one RTT for each
exchange plus the transfer times of both directions (dssd (3), wisv (6), (10)). A round yields N
tokens (tslt (8)); T/N is the value by which protocols and windows are compared. Under `stream`
tokens need no requests: each token costs the longer of its pass and its transfer, and a whole
answer costs one RTT.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: RTT (s) and goodput (bit/s), without retransmissions and lower layers' headers."""

    rtt_s: float
    up_bps: float
    down_bps: float


def transfer_s(size_bytes: float, rate_bps: float) -> float:
    """Compute the seconds to send ``size_bytes`` at this rate, without latency (dssd (1), (2))."""
    return 8.0 * size_bytes / rate_bps


def communication_s(
    up_bytes: float, down_bytes: float, link: Link, exchanges: float = 1.0
) -> float:
    """Compute T_comm of a round, in seconds: both transfers, and an RTT for each exchange.

    With one exchange and no packet loss this is dssd (3) and wisv (6); with two, wisv (10).
    """
    up, down = transfer_s(up_bytes, link.up_bps), transfer_s(down_bytes, link.down_bps)
    return exchanges * link.rtt_s + up + down


def streamed_token_s(pass_s: float, down_bytes: float, link: Link, tokens: float) -> float:
    """Compute seconds per token under `stream`, for an answer of ``tokens`` tokens."""
    return max(pass_s, transfer_s(down_bytes, link.down_bps)) + link.rtt_s / tokens
