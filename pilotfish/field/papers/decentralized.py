"""decentralized: a target sharded over N nodes pays its hops once a round instead of once a token.

In:  nodes N; t₀, seconds of computing a token over all nodes; t₁, seconds of a hop; k, tokens
     committed a round; window γ. Out: seconds, and the speed-up over decoding token by token.
From: decentralized §2.2, §2.4. (3)–(5) and (9) take verification as linear in k, and leave out
     drafting, rejected tokens and the hop back; `pipeline_round_s` includes them.
"""

import math
from collections.abc import Callable


def eq_3_standard_s(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """T_std = k·(t₀ + (N − 1)·t₁), k tokens one by one (3)."""
    return k * (t0_s + (nodes - 1) * t1_s)


def eq_4_speculative_s(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """T_DSD = k·t₀ + (N − 1)·t₁, k tokens in one round (4)."""
    return k * t0_s + (nodes - 1) * t1_s


def eq_5_reduction(k: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """R_comm = 1 − T_DSD/T_std = (N − 1)·t₁·(k − 1) / (k·(t₀ + (N − 1)·t₁)) (5)."""
    hops_s = (nodes - 1) * t1_s
    return hops_s * (k - 1.0) / (k * (t0_s + hops_s))


def eq_9_speed_up(k: float, window: int, nodes: int, t0_s: float, t1_s: float) -> float:
    """S = (t₀ + (N − 1)·t₁) / (t₀/ρ + (N − 1)·t₁/k) with ρ = k/(γ + 1) (9).

    It charges t₀ for each of the γ + 1 tokens verified and commits k of them.
    """
    hops_s = (nodes - 1) * t1_s
    acceptance = k / (window + 1)
    return (t0_s + hops_s) / (t0_s / acceptance + hops_s / k)


def pass_s(tokens: int, t0_s: float, slope: float) -> float:
    """Seconds of one pass over ``tokens`` tokens by all stages, Σ_stages c(tokens).

    The first token takes t₀ and each further one slope·t₀: slope 0 if only reading the weights
    costs, 1 if the cost is linear, as in (4) and (9).
    """
    return t0_s * (1.0 + slope * (tokens - 1))


def hops(nodes: int) -> int:
    """H, hops of a round: N − 1 between the stages and one back; 0 on a single node."""
    return nodes if nodes > 1 else 0


def pipeline_round_s(
    window: int, nodes: int, draft_s: float, t1_s: float, verify_s: Callable[[int], float]
) -> float:
    """T = γ·T_draft + Σ_stages c(γ + 1) + H·t₁; ``verify_s`` is Σ_stages c."""
    return window * draft_s + verify_s(window + 1) + hops(nodes) * t1_s


def pipeline_speed_up(
    tokens: float, window: int, nodes: int, draft_s: float, t1_s: float, t0_s: float, slope: float
) -> float:
    """Speed-up of a round over token by token, both with the hop back: tokens·(t₀ + H·t₁) / T."""
    round_s = pipeline_round_s(window, nodes, draft_s, t1_s, lambda n: pass_s(n, t0_s, slope))
    return tokens * (t0_s + hops(nodes) * t1_s) / round_s


def tokens_for_reduction(reduction: float, nodes: int, t0_s: float, t1_s: float) -> float:
    """The k at which (5) gives ``reduction``; infinite if no k does."""
    most = (nodes - 1) * t1_s / (t0_s + (nodes - 1) * t1_s)
    return 1.0 / (1.0 - reduction / most) if reduction < most else math.inf
