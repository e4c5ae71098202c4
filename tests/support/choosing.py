"""Rounds of made pairs with a known acceptance at each K and expansion, and what "auto" chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Round, Timings
from pilotfish.speculation.cut_mass import CUT_SIZES, acceptance_at
from pilotfish.speculation.more_candidates import acceptance_of
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.codecs.sparse import typical_bytes
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.support.plans import alternatives

VOCAB = 49_152
DRAFTER = {1: 0.010, 2: 0.012, 4: 0.015}
TARGET = {1: 0.100, 2: 0.100, 4: 0.101, 8: 0.103, 16: 0.106, 32: 0.112}
FLAT = (0.60, 0.50, 0.42, 0.35, 0.29, 0.23, 0.11, 0.03)  # σ at each K of `CUT_SIZES`
SHARP = (0.004, 0.002, 0.001, 0.0005, 0.0, 0.0, 0.0, 0.0)
Gain = Callable[[int, float, float], float]  # acceptance by number of candidates, α and σ


def link(up_bps: float, rtt_s: float = 0.02) -> LinkState:
    """Return a link whose RTT and rates were measured; the downlink is fast."""

    def reading(value: float) -> Reading:
        return Reading(value=value, age_s=0.1, samples=5)

    return LinkState(rtt=reading(rtt_s), up=reading(up_bps), down=reading(1e9))


def sigma_at(cut: tuple[float, ...], top_k: int) -> float:
    """Return σ at this K; 0: all tokens."""
    return float(np.interp(np.log(top_k), np.log(CUT_SIZES), cut)) if top_k else 0.0


def played(
    used: Plan,
    cut: tuple[float, ...],
    seed: int,
    count: int = 60,
    *,
    spread: float = 0.2,
    gain: Gain = acceptance_of,
) -> list[Round]:
    """Play rounds of a pair that accepts at each K as the model says, with frames of usual size."""
    rng = np.random.default_rng(seed)
    sigma = sigma_at(cut, used.top_k)
    alpha, gamma = acceptance_at(sigma, spread), len(used.expansion)
    accepts = [gain(candidates, alpha, sigma) for candidates in used.expansion]
    rows = 1 + nodes_at_most(used.expansion[:-1])
    rounds = []
    for _ in range(count):
        accepted = int(np.cumprod(rng.random(gamma) < accepts).sum())
        rounds.append(
            Round(
                protocol=used.protocol,
                start=10,
                window=gamma,
                nodes=nodes_at_most(used.expansion),
                accepted=accepted,
                tokens=[0] * (accepted + 1),
                uplink_bytes=round(60 + 1.1 * typical_bytes(rows, used.top_k)),
                downlink_bytes=58,
                timings=Timings(draft=0.010 * gamma, verify=0.1),
                pass_s=0.1,
                cut_masses=cut,
            )
        )
    return rounds


def informed(used: Plan, cut: tuple[float, ...], answers: int = 30, **pair: Any) -> Evidence:
    """Return evidence of answers under a plan; pair: as in `played`."""
    seen = Evidence(DRAFTER, TARGET, PairSizes(VOCAB, 576))
    for seed in range(answers):
        seen.add(used, played(used, cut, seed, **pair))
    return seen


def chosen(
    protocol: str,
    seen: Evidence,
    state: LinkState,
    policy: PredictivePolicy | None = None,
    *,
    vocab_size: int = 0,
    most: int = 64,
    **options: Any,
) -> tuple[Plan, Choice]:
    """Choose among the plans of this protocol at temperature 1."""
    auto = Auto(among=[protocol])
    wanted = Options(temperature=1.0, **options)
    plans = alternatives(auto, wanted, offered=[protocol], most=most, vocab_size=vocab_size)
    return (policy or PredictivePolicy()).choose(auto, plans, state, seen)
