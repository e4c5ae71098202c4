"""decentralized: a target on N nodes pays its hops once per round instead of once per token.

In:  N, number of nodes; t₀, seconds of computing a token on all nodes together; t₁, seconds of a
     hop; k, committed tokens per round; γ, window. Out: seconds, and the speed-up over decoding
     token by token.
From: decentralized §2.2, §2.4. Equations 3–5 and 9 assume that verification is linear in k, and
     omit drafting, rejected tokens and the hop back. `pipeline_round_s` includes all of these.
"""

import math
from collections.abc import Callable


def eq_3_standard_s(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """Compute seconds of decoding k tokens one by one, T_std = k·(t₀ + (N − 1)·t₁) (3)."""
    return k * (t0_s + (nodes - 1) * t1_s)


def eq_4_speculative_s(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """Compute seconds of k tokens in one round, T_DSD = k·t₀ + (N − 1)·t₁ (4)."""
    return k * t0_s + (nodes - 1) * t1_s


def eq_5_reduction(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """Compute the share of time that one round of k tokens saves (5).

    R_comm = 1 − T_DSD/T_std = (N − 1)·t₁·(k − 1) / (k·(t₀ + (N − 1)·t₁)).
    """
    hops_s = (nodes - 1) * t1_s
    return hops_s * (k - 1.0) / (k * (t0_s + hops_s))


def eq_9_speed_up(k: float, window: int, nodes: int, t0_s: float, t1_s: float) -> float:
    """Compute the speed-up of a round that verifies γ + 1 tokens and commits k of them (9).

    S = (t₀ + (N − 1)·t₁) / (t₀/ρ + (N − 1)·t₁/k) with ρ = k/(γ + 1). Each verified token costs t₀.
    """
    hops_s = (nodes - 1) * t1_s
    acceptance = k / (window + 1)
    return (t0_s + hops_s) / (t0_s / acceptance + hops_s / k)


def pass_s(tokens: int, t0_s: float, slope: float) -> float:
    """Compute the seconds of one pass over ``tokens`` tokens by all stages, Σ_stages c(tokens).

    The first token takes t₀, each further token slope·t₀. With slope 0, only reading the weights
    takes time; with slope 1, the time is linear in the tokens, as equations 4 and 9 assume.
    """
    return t0_s * (1.0 + slope * (tokens - 1))


def hops(nodes: int) -> int:
    """Return H, the hops of a round: N − 1 between the stages and one back; 0 on a single node."""
    return nodes if nodes > 1 else 0


def pipeline_round_s(
    window: int, nodes: int, draft_s: float, t1_s: float, verify_s: Callable[[int], float]
) -> float:
    """Compute the seconds of a round, T = γ·T_draft + Σ_stages c(γ + 1) + H·t₁.

    verify_s: function that returns Σ_stages c, the seconds of a pass over some tokens.
    """
    return window * draft_s + verify_s(window + 1) + hops(nodes) * t1_s


def pipeline_speed_up(
    tokens: float, window: int, nodes: int, draft_s: float, t1_s: float, t0_s: float, slope: float
) -> float:
    """Compute a round's speed-up over decoding token by token: tokens·(t₀ + H·t₁) / T.

    Both times include the hop back. T: see `pipeline_round_s`.
    """
    round_s = pipeline_round_s(window, nodes, draft_s, t1_s, lambda n: pass_s(n, t0_s, slope))
    return tokens * (t0_s + hops(nodes) * t1_s) / round_s


def tokens_for_reduction(reduction: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """Find the k at which equation 5 gives ``reduction``; infinite if there is no such k."""
    most = (nodes - 1) * t1_s / (t0_s + (nodes - 1) * t1_s)
    return 1.0 / (1.0 - reduction / most) if reduction < most else math.inf
