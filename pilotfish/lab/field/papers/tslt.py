"""tslt: the speed-up from truncating the drafter's distribution to K tokens, on a slow uplink.

In:  L, levels (length of a chain or depth of a tree); K, top tokens; acceptance α; seconds of a
     pass of each model (T_SLM, T_LLM); uplink rate. Out: seconds of an oracle call (a round),
     tokens/s, speed-up.
From: tslt §2.2–§2.3, §4.2, §5. Equation 1 is `speculation.latency.transfer_s`. In
     `speculation.theory`, equation 8 (tokens N of a round) is `tokens_per_round`; equations 7, 39
     and 40 are `alpha` and `theta`. In the paper, downlink and propagation take no time.
Misprints: in equation 9 the factor (1 − α) must apply to all of T, but omits T_LLM. Equation 28 has
     N = Lα + 1, and 1 in the place of 1/N, so that it cannot exceed 1. This module uses N/T with N
     of equation 8 and T of equation 5; the functions ``eq_…_as_printed`` are the printed forms.
"""

import math
from collections.abc import Sequence

from pilotfish.speculation.latency import transfer_s
from pilotfish.speculation.theory import tokens_per_round


def eq_2_upload_bits(distributions: int, distribution_bits: float) -> float:
    """Compute the bits of an upload, D_up: L distributions for a chain (2), |𝒬| for a tree (27)."""
    return distributions * distribution_bits


def eq_3_distribution_bits(top_k: int, vocabulary: int, probability_bits: int) -> float:
    """Compute the bits of a distribution, D_V: K probabilities and indices (3).

    D_V = K·(b_prob + ⌈log₂|V|⌉). If K is the whole vocabulary, no indices are sent; the paper's
    D_V = 0.5 Mbit also omits them.
    """
    index_bits = math.ceil(math.log2(vocabulary)) if top_k < vocabulary else 0
    return float(top_k * (probability_bits + index_bits))


def eq_4_communication_s(distributions: int, distribution_bits: float, rate_bps: float) -> float:
    """Compute the seconds of an upload, T_comm = D_up / R_up (4)."""
    return transfer_s(eq_2_upload_bits(distributions, distribution_bits) / 8.0, rate_bps)


def eq_5_oracle_s(levels: int, draft_s: float, communication_s: float, verify_s: float) -> float:
    """Compute the seconds of a round, T_oracle = L·T_SLM + T_comm + T_LLM (5).

    For a tree this is equation 26: one drafter's pass drafts a whole level.
    """
    return levels * draft_s + communication_s + verify_s


def eq_9_throughput(alpha: float, levels: int, oracle_s: float) -> float:
    """Compute the tokens/s, Θ = N / T_oracle, with N by equation 8 (9, corrected)."""
    return tokens_per_round(alpha, levels) / oracle_s


def eq_9_as_printed(
    alpha: float, levels: int, draft_s: float, communication_s: float, verify_s: float
) -> float:
    """Compute equation 9 as it is printed, in which T_LLM lacks the factor (1 − α).

    (1 − α^{L+1}) / ((1 − α)·(L·T_SLM + T_comm) + T_LLM).
    """
    slow_s = levels * draft_s + communication_s
    return (1.0 - alpha ** (levels + 1)) / ((1.0 - alpha) * slow_s + verify_s)


def eq_10_speed_up(throughput: float, verify_s: float) -> float:
    """Compute the speed-up over the target alone, S_inf = Θ_DSD / Θ_LLM, Θ_LLM = 1/T_LLM (10)."""
    return throughput * verify_s


def eq_27_distributions(expansion: Sequence[int]) -> int:
    """Compute the number of distributions for a tree, one per expanded node (27).

    |𝒬| = 1 + Σ_{1≤l<L} Π_{i≤l} kᵢ. expansion: kᵢ, children of each node at level i.
    """
    return 1 + sum(math.prod(expansion[:level]) for level in range(1, len(expansion)))


def eq_28_as_printed(
    alpha: float, levels: int, draft_s: float, communication_s: float, verify_s: float
) -> float:
    """Compute equation 28 as it is printed, which never exceeds 1.

    1 / ((L·T_SLM + |𝒬|·T_V) / ((Lα + 1)·T_LLM) + 1).
    """
    slow_s = levels * draft_s + communication_s
    return 1.0 / (slow_s / ((levels * alpha + 1.0) * verify_s) + 1.0)


def eq_41_total_s(compute_s: float, rounds: float, communication_s: float) -> float:
    """Compute the seconds of an answer, T_DSD = T_comp + N_oracle·T_comm (41).

    Here N_oracle is a number of rounds; in equation 8 it is a number of tokens.
    """
    return compute_s + rounds * communication_s


def speed_up(
    alpha: float,
    levels: int,
    distributions: int,
    distribution_bits: float,
    rate_bps: float,
    draft_s: float,
    verify_s: float,
) -> float:
    """Compute the speed-up that figures 5 and 6 show, by equations 4, 5, 9 (corrected) and 10."""
    communication_s = eq_4_communication_s(distributions, distribution_bits, rate_bps)
    oracle_s = eq_5_oracle_s(levels, draft_s, communication_s, verify_s)
    return eq_10_speed_up(eq_9_throughput(alpha, levels, oracle_s), verify_s)


def break_even_bps(
    alpha: float,
    levels: int,
    distributions: int,
    distribution_bits: float,
    draft_s: float,
    verify_s: float,
) -> float:
    """Compute the uplink rate at which the speed-up is 1; infinite if there is no such rate."""
    spare_s = tokens_per_round(alpha, levels) * verify_s - levels * draft_s - verify_s
    if spare_s <= 0.0:
        return math.inf
    return eq_2_upload_bits(distributions, distribution_bits) / spare_s
