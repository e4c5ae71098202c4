"""Values of single answers by configuration, and what `auto` chose for each.

In: counted answers. Out: arrays, of which tables and plots take percentiles and distributions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.configuration import Configuration
from pilotfish.lab.field.report.figures import (
    Figures,
    by_series,
    joules_per_token,
    quickest,
    steady_token_ms,
    timed,
)
from pilotfish.lab.field.report.samples import Array
from pilotfish.wire.request import AUTO


@dataclass(frozen=True)
class Measure:
    """A value of an answer: key in JSON, heading with the unit, name in a sentence, the value."""

    key: str
    heading: str
    name: str
    of: Callable[[Answer], float | None]


MEASURES = (
    Measure("token_ms", "time per token (ms)", "ms a token", steady_token_ms),
    Measure(
        *("first_token_ms", "first token (ms)", "ms to the first token"),
        lambda answer: 1e3 * answer.first_token_s,
    ),
    Measure("joules_per_token", "energy per token (J)", "J a token", joules_per_token),
)


# values of single answers, by measure and configuration
Values: TypeAlias = dict[Measure, dict[Configuration, Array]]


def values_by_configuration(
    answers: Sequence[Answer], measure: Measure
) -> dict[Configuration, Array]:
    """Collect a value of all answers that have it, by configuration."""
    groups: dict[Configuration, list[float]] = {}
    for answer in answers:
        if (value := measure.of(answer)) is not None:
            groups.setdefault(answer.configuration, []).append(value)
    return {configuration: np.array(values) for configuration, values in groups.items()}


def best_windows(all_figures: Sequence[Figures], fewest: int) -> list[Configuration]:
    """Return the configuration of each series that is `quickest` of those with enough answers."""
    series = by_series(f for f, _ in timed(all_figures))
    return [quickest(line, fewest).configuration for line in series.values()]


def chosen_protocols(answers: Sequence[Answer]) -> list[tuple[int, str]]:
    """Return the index of each answer under `auto`, and the protocol that `auto` chose for it."""
    return [
        (at, answer.choice.protocol)
        for at, answer in enumerate(answers)
        if answer.protocol == AUTO and answer.choice is not None
    ]


def choice_shares(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the share of each protocol among the choices of `auto`, the largest first."""
    chosen = [protocol for _, protocol in chosen_protocols(answers)]
    shares = {protocol: chosen.count(protocol) / len(chosen) for protocol in dict.fromkeys(chosen)}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))
