"""Answer prompts under several settings of a pair, and compare rounds, acceptance and speed.

In:  a bench; settings, each with the options of its requests. Out: the values of each setting, with
     95 % intervals by a bootstrap over prompts.

An edge with the target and a device with the drafter run on this machine. The settings take turns
at each prompt, with the same seed, so that another load of the machine meets all of them alike.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Generation
from pilotfish.lab.field.papers.figure import Bench
from pilotfish.lab.field.papers.sheet import Value
from pilotfish.lab.field.resampling import estimate, resample_weights
from pilotfish.lab.pairs import serving

_SUMS = ("rounds", "tokens", "verified", "accepted", "deviation", "later_tokens", "later_s")

Options: TypeAlias = Mapping[str, Any]
"""Options of a request, and of its protocol."""
Sums: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Sums over the rounds of each prompt's answer, by name, f64 [prompts] each."""


def answer_settings(
    bench: Bench, settings: Mapping[str, Options], *, tokens: int
) -> dict[str, Sums]:
    """Answer all prompts under each setting; return the sums of each setting by its name.

    settings: for each name, the options of its requests. tokens: length of an answer.
    """
    names = list(settings)
    sums: dict[str, list[list[float]]] = {name: [] for name in names}
    draft, target = bench.pair.paths
    with (
        serving(target, threads=bench.threads) as edge,
        Device(draft, edge, threads=bench.threads) as device,
    ):
        # the first passes of new engines are slow
        device.generate(bench.prompts[0], protocol="greedy", max_tokens=8)
        for at, prompt in enumerate(bench.prompts):
            bench.report("answering prompts", at, len(bench.prompts))
            # both ends read the prompt before the first timed answer
            device.generate(prompt, protocol="greedy", max_tokens=1)
            first = at % len(names)
            for name in (*names[first:], *names[:first]):
                answer = device.generate(
                    prompt, **settings[name], seed=bench.seed + at, max_tokens=tokens
                )
                sums[name].append(_sum_rounds(answer))
    bench.report("answering prompts", len(bench.prompts), len(bench.prompts))
    return {
        name: dict(zip(_SUMS, np.array(rows, np.float64).T, strict=True))
        for name, rows in sums.items()
    }


def _sum_rounds(answer: Generation) -> list[float]:
    """Compute the values of `_SUMS`; the later tokens are those after the first round."""
    rounds = answer.rounds
    return [
        len(rounds),
        len(answer.tokens),
        sum(each.verified for each in rounds),
        sum(each.accepted for each in rounds),
        sum(each.notes.get("deviation", 0.0) for each in rounds),
        sum(len(each.tokens) for each in rounds[1:]),
        answer.total_s - answer.first_token_s,
    ]


def compare_settings(sums: Sums, strict: Sums, stream: Sums) -> dict[str, Value]:
    """Compute a setting's values; each name with ``_low`` and ``_high`` is a 95 % interval.

    tokens_round: committed tokens per round, with the correction or bonus token. longer: relative
    to that of ``strict``. acceptance, deviation: per verified position. speed_strict, speed_stream:
    tokens per second after the first round, relative to ``strict`` and to ``stream``.
    """
    weights = resample_weights(len(sums["rounds"]))

    def ratio(values: Sums, above: str, below: str) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient: NDArray[np.float64] = (weights @ values[above]) / (weights @ values[below])
        return np.where(np.isfinite(quotient), quotient, np.nan)

    length, speed = ratio(sums, "tokens", "rounds"), ratio(sums, "later_tokens", "later_s")
    results = {
        "tokens_round": length,
        "longer": length / ratio(strict, "tokens", "rounds"),
        "acceptance": ratio(sums, "accepted", "verified"),
        "deviation": ratio(sums, "deviation", "verified"),
        "speed_strict": speed / ratio(strict, "later_tokens", "later_s"),
        "speed_stream": speed / ratio(stream, "later_tokens", "later_s"),
    }
    row: dict[str, Value] = {"n": len(sums["rounds"]), "rounds": int(sums["rounds"].sum())}
    for name, values in results.items():
        value, low, high = estimate(values)
        row |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return row


def interval_columns(name: str, heading: str, decimals: int) -> dict[str, tuple[str, int | None]]:
    """Return the columns of a value and its interval."""
    return {
        name: (heading, decimals),
        f"{name}_low": ("95 %", decimals),
        f"{name}_high": ("", decimals),
    }
