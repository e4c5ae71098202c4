"""tslt: the speed-up from truncating the drafter's distribution to K tokens on a slow uplink.

In:  levels L (a chain's length, a tree's depth), top K tokens, acceptance α, seconds of a pass of
     each model, uplink rate. Out: seconds of an oracle call (a round), tokens a second, speed-up.
From: tslt §2.2–§2.3, §4.2, §5. (1) is `speculation.latency.transfer_s`, (8) `tokens_per_round`,
     (7), (39) and (40) are `alpha` and `theta`, all of `speculation.theory`. The paper's downlink
     and propagation cost nothing.
Misprints: (9) leaves T_LLM outside the factor (1 − α), which belongs to all of T; (28) takes
     N = Lα + 1, and 1 instead of 1/N, so that it cannot exceed 1. N/T of (8) and (5) is right and
     used here; ``eq_…_as_printed`` are the printed forms.
"""

import math
from collections.abc import Sequence

from pilotfish.speculation.latency import transfer_s
from pilotfish.speculation.theory import tokens_per_round


def eq_2_upload_bits(distributions: int, distribution_bits: float) -> float:
    """D_up: L distributions of a chain (2), |𝒬| of a tree (27)."""
    return distributions * distribution_bits


def eq_3_distribution_bits(top_k: int, vocabulary: int, probability_bits: int) -> float:
    """D_V for the top K tokens: probability and index of each, K·(b_prob + ⌈log₂|V|⌉) (3).

    A full vocabulary needs no index; the paper's D_V = 0.5 Mbit has none either.
    """
    index_bits = math.ceil(math.log2(vocabulary)) if top_k < vocabulary else 0
    return float(top_k * (probability_bits + index_bits))


def eq_4_communication_s(distributions: int, distribution_bits: float, rate_bps: float) -> float:
    """T_comm = D_up / R_up (4), from (1) and (2)."""
    return transfer_s(eq_2_upload_bits(distributions, distribution_bits) / 8.0, rate_bps)


def eq_5_oracle_s(levels: int, draft_s: float, communication_s: float, verify_s: float) -> float:
    """T_oracle = L·T_SLM + T_comm + T_LLM (5); (26) for a tree, whose levels draft in parallel."""
    return levels * draft_s + communication_s + verify_s


def eq_9_throughput(alpha: float, levels: int, oracle_s: float) -> float:
    """Θ = N / T_oracle, tokens a second, with N of (8) (9 corrected)."""
    return tokens_per_round(alpha, levels) / oracle_s


def eq_9_as_printed(
    alpha: float, levels: int, draft_s: float, communication_s: float, verify_s: float
) -> float:
    """(1 − α^{L+1}) / ((1 − α)·(L·T_SLM + T_comm) + T_LLM): T_LLM lacks the factor (1 − α)."""
    slow_s = levels * draft_s + communication_s
    return (1.0 - alpha ** (levels + 1)) / ((1.0 - alpha) * slow_s + verify_s)


def eq_10_speed_up(throughput: float, verify_s: float) -> float:
    """S_inf = Θ_DSD / Θ_LLM, with Θ_LLM = 1/T_LLM for the target alone (10)."""
    return throughput * verify_s


def eq_27_distributions(expansion: Sequence[int]) -> int:
    """|𝒬| = 1 + Σ_{1≤l<L} Π_{i≤l} kᵢ, one for each expanded node (27)."""
    return 1 + sum(math.prod(expansion[:level]) for level in range(1, len(expansion)))


def eq_28_as_printed(
    alpha: float, levels: int, draft_s: float, communication_s: float, verify_s: float
) -> float:
    """1 / ((L·T_SLM + |𝒬|·T_V) / ((Lα + 1)·T_LLM) + 1): never above 1."""
    slow_s = levels * draft_s + communication_s
    return 1.0 / (slow_s / ((levels * alpha + 1.0) * verify_s) + 1.0)


def eq_41_total_s(compute_s: float, rounds: float, communication_s: float) -> float:
    """T_DSD = T_comp + N_oracle·T_comm (41); here N_oracle counts oracle calls, in (8) tokens."""
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
    """(10) over (9), (5) and (4): what figures 5 and 6 show against the uplink rate."""
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
    """The uplink rate at which the speed-up is 1; infinite if speculation pays at no rate."""
    spare_s = tokens_per_round(alpha, levels) * verify_s - levels * draft_s - verify_s
    if spare_s <= 0.0:
        return math.inf
    return eq_2_upload_bits(distributions, distribution_bits) / spare_s
