"""dssd: split verification replaces γ uploads of a distribution by at most one download.

In:  window γ, acceptance α, seconds of a pass of each model, the link; the paper's T_NTT is the
     RTT. Out: seconds of a round and the speed-up over the target alone.
From: dssd §2.2–§4. (1), (2) are `speculation.latency.transfer_s` and (3) its `communication_s`;
     tokens of a round are tslt (8). (11) and (12) are limits of (9).
"""

from collections.abc import Callable

from pilotfish.speculation.latency import Link, communication_s
from pilotfish.speculation.theory import tokens_per_round


def eq_4_upload_bits(window: int, distribution_bits: float) -> float:
    """D_up of DSD: γ distributions of |V|·b_prob bits each (4)."""
    return window * distribution_bits


def eq_5_dsd_communication_s(window: int, distribution_bits: float, link: Link) -> float:
    """T_comm of DSD: γ distributions go up (5)."""
    return communication_s(eq_4_upload_bits(window, distribution_bits) / 8.0, 0.0, link)


def eq_6_round_s(window: int, draft_s: float, communication_s: float, verify_s: float) -> float:
    """T_inf = γ·T_SLM + T_comm + T_LLM (6); (7) with T_comm of (5), (13) with that of (9)."""
    return window * draft_s + communication_s + verify_s


def eq_8_download_bits(rejected: float, distribution_bits: float) -> float:
    """D_down of DSSD: one distribution after a rejection, a = 1, else none (8)."""
    return rejected * distribution_bits


def rejection_probability(window: int, alpha: float) -> float:
    """1 − α^γ, the probability of a rejection among γ draft tokens; the mean of a in (8)."""
    return 1.0 - alpha**window


def eq_9_dssd_communication_s(
    window: int, alpha: float, distribution_bits: float, link: Link
) -> float:
    """E[T_comm] of DSSD: a distribution comes down with probability 1 − α^γ (9)."""
    expected = eq_8_download_bits(rejection_probability(window, alpha), distribution_bits)
    return communication_s(0.0, expected / 8.0, link)


def eq_14_speed_up(window: int, alpha: float, round_s: float, verify_s: float) -> float:
    """Tokens a second over those of the target alone, N·T_LLM / T_inf (14), (15)."""
    return tokens_per_round(alpha, window) * verify_s / round_s


def dsd_speed_up(
    window: int, alpha: float, distribution_bits: float, link: Link, c: float, verify_s: float
) -> float:
    """(14) over (7), with T_SLM = c·T_LLM (§4.2)."""
    communication = eq_5_dsd_communication_s(window, distribution_bits, link)
    round_s = eq_6_round_s(window, c * verify_s, communication, verify_s)
    return eq_14_speed_up(window, alpha, round_s, verify_s)


def dssd_speed_up(
    window: int, alpha: float, distribution_bits: float, link: Link, c: float, verify_s: float
) -> float:
    """(15) over (13), with T_SLM = c·T_LLM (§4.2)."""
    communication = eq_9_dssd_communication_s(window, alpha, distribution_bits, link)
    round_s = eq_6_round_s(window, c * verify_s, communication, verify_s)
    return eq_14_speed_up(window, alpha, round_s, verify_s)


def best_window(speed_up: Callable[[int], float], longest: int) -> tuple[int, float]:
    """Find the γ of 1…longest with the greatest speed-up, the shortest of equals; return both."""
    return max(((g, speed_up(g)) for g in range(1, longest + 1)), key=lambda choice: choice[1])
