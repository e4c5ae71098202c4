"""dssd: split verification (DSSD) replaces γ uploads of a distribution by at most one download.

In:  window γ, acceptance α, seconds of a pass of each model (T_SLM, T_LLM), the link. The paper's
     T_NTT is the RTT. Out: seconds of a round, and the speed-up over the target alone.
From: dssd §2.2–§4. Equations 1 and 2 are `speculation.latency.transfer_s`, equation 3 is
     `communication_s` there. The tokens of a round are equation 8 of tslt. Equations 11 and 12 are
     limits of equation 9.
"""

from collections.abc import Callable

from pilotfish.speculation.latency import Link, communication_s
from pilotfish.speculation.theory import tokens_per_round


def eq_4_upload_bits(window: int, distribution_bits: float) -> float:
    """Compute the bits that DSD uploads, D_up: γ distributions of |V|·b_prob bits each (4)."""
    return window * distribution_bits


def eq_5_dsd_communication_s(window: int, distribution_bits: float, link: Link) -> float:
    """Compute T_comm of DSD, the seconds of uploading γ distributions (5)."""
    return communication_s(eq_4_upload_bits(window, distribution_bits) / 8.0, 0.0, link)


def eq_6_round_s(window: int, draft_s: float, communication_s: float, verify_s: float) -> float:
    """Compute the seconds of a round, T_inf = γ·T_SLM + T_comm + T_LLM (6).

    With T_comm by equation 5 this is equation 7; with T_comm by equation 9, equation 13.
    """
    return window * draft_s + communication_s + verify_s


def eq_8_download_bits(rejected: float, distribution_bits: float) -> float:
    """Compute the bits that DSSD downloads, D_down: one distribution after a rejection (8).

    rejected: a, 1 after a rejection and 0 without; or the probability of a rejection.
    """
    return rejected * distribution_bits


def rejection_probability(window: int, alpha: float) -> float:
    """Compute 1 − α^γ, the probability of a rejection among γ drafts (mean of a in equation 8)."""
    return 1.0 - alpha**window


def eq_9_dssd_communication_s(
    window: int, alpha: float, distribution_bits: float, link: Link
) -> float:
    """Compute E[T_comm] of DSSD: with probability 1 − α^γ, a distribution is downloaded (9)."""
    expected = eq_8_download_bits(rejection_probability(window, alpha), distribution_bits)
    return communication_s(0.0, expected / 8.0, link)


def eq_14_speed_up(window: int, alpha: float, round_s: float, verify_s: float) -> float:
    """Compute the speed-up in tokens/s over the target alone, N·T_LLM / T_inf (14, 15)."""
    return tokens_per_round(alpha, window) * verify_s / round_s


def dsd_speed_up(
    window: int, alpha: float, distribution_bits: float, link: Link, c: float, verify_s: float
) -> float:
    """Compute DSD's speed-up, equation 14 with the round of 7; T_SLM = c·T_LLM (§4.2)."""
    communication = eq_5_dsd_communication_s(window, distribution_bits, link)
    round_s = eq_6_round_s(window, c * verify_s, communication, verify_s)
    return eq_14_speed_up(window, alpha, round_s, verify_s)


def dssd_speed_up(
    window: int, alpha: float, distribution_bits: float, link: Link, c: float, verify_s: float
) -> float:
    """Compute DSSD's speed-up, equation 15 with the round of 13; T_SLM = c·T_LLM (§4.2)."""
    communication = eq_9_dssd_communication_s(window, alpha, distribution_bits, link)
    round_s = eq_6_round_s(window, c * verify_s, communication, verify_s)
    return eq_14_speed_up(window, alpha, round_s, verify_s)


def best_window(speed_up: Callable[[int], float], longest: int) -> tuple[int, float]:
    """Find the window from 1 to ``longest`` with the greatest speed-up; return both.

    Among equal speed-ups, the shortest window is returned.
    """
    return max(((g, speed_up(g)) for g in range(1, longest + 1)), key=lambda choice: choice[1])
