"""Compare the choices of `auto` with the fixed choices of the same run.

In: the answers of a run; each answer under ``auto`` has the choice that ``auto`` made when it
began. Out: for each choice, how often ``auto`` made it, its predicted and measured times, and its
time as a fixed choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pilotfish.device_runtime.record import Choice
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.axes import Point, applied_to
from pilotfish.lab.field.configuration import Configuration
from pilotfish.lab.field.report.figures import order, steady_token_ms
from pilotfish.lab.statistics import Spread, spread
from pilotfish.wire.request import AUTO


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A configuration that ``auto`` can choose. Times are ms per committed token.

    chosen: number of answers for which ``auto`` chose it. forecasts: number of answers for which
    its time was predicted. forecast_ms: median of these predictions. measured: its time when
    ``auto`` chose it. fixed: its time as a fixed configuration of the same run. reason: the reason
    of the last time that ``auto`` chose it.
    """

    configuration: Configuration
    chosen: int
    forecasts: int
    forecast_ms: float | None
    measured: Spread | None
    fixed: Spread | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Hindsight:
    """The choices of ``auto`` in one run.

    predicted: predicted and measured ms per token, one pair for each answer.
    """

    policies: list[str]
    n: int
    auto: Spread | None
    alternatives: list[Alternative]
    predicted: list[tuple[float, float]]

    @property
    def best(self) -> Alternative | None:
        """The fixed choice with the lowest median time, among protocols that ``auto`` compared."""
        compared = {a.configuration.protocol for a in self.alternatives if a.forecasts or a.chosen}
        known = [
            a
            for a in self.alternatives
            if a.fixed is not None and a.configuration.protocol in compared
        ]
        return min(known, key=lambda a: a.fixed.median if a.fixed else 0.0, default=None)

    @property
    def excess(self) -> float | None:
        """The relative excess of auto's median over the best fixed choice's; may be negative."""
        if self.auto is None or self.best is None or self.best.fixed is None:
            return None
        return self.auto.median / self.best.fixed.median - 1.0

    @property
    def error(self) -> float | None:
        """The median relative error of the predictions, |predicted / measured − 1|."""
        return median(abs(p / m - 1.0) for p, m in self.predicted) if self.predicted else None


def hindsight(answers: Sequence[Answer]) -> Hindsight | None:
    """Evaluate the choices of ``auto`` in finished answers; None without answers under ``auto``."""
    auto_answers = [answer for answer in answers if answer.protocol == AUTO]
    if not auto_answers:
        return None
    fixed = _token_ms_by_configuration([answer for answer in answers if answer.protocol != AUTO])
    chosen: dict[Configuration, list[Answer]] = {}
    forecasts: dict[Configuration, list[float]] = {}
    for answer in auto_answers:
        if answer.choice is not None:
            chosen.setdefault(
                _configuration(answer.choice.protocol, answer.choice.window, answer.point), []
            ).append(answer)
            for configuration, predicted_ms in _forecast_ms(answer.choice, answer.point).items():
                forecasts.setdefault(configuration, []).append(predicted_ms)
    alternatives = [
        Alternative(
            configuration=choice,
            chosen=len(chosen.get(choice, [])),
            forecasts=len(forecasts.get(choice, [])),
            forecast_ms=median(forecasts[choice]) if choice in forecasts else None,
            measured=spread([ms for a in chosen.get(choice, []) if (ms := steady_token_ms(a))]),
            fixed=spread(fixed.get(choice, [])),
            reason=_last_reason(chosen.get(choice, [])),
        )
        for choice in sorted({*chosen, *fixed, *forecasts}, key=order)
    ]
    choices = [(a.choice, steady_token_ms(a)) for a in auto_answers if a.choice is not None]
    return Hindsight(
        policies=list(dict.fromkeys(choice.policy for choice, _ in choices)),
        n=len(auto_answers),
        auto=spread([ms for answer in auto_answers if (ms := steady_token_ms(answer))]),
        alternatives=alternatives,
        predicted=[(c.token_s * 1e3, ms) for c, ms in choices if c.token_s is not None and ms],
    )


def _configuration(protocol: str, window: int, point: Point) -> Configuration:
    """Return the configuration of a choice, without its hints: `ahead` is one configuration.

    point: the varied options of the answer under ``auto``.
    """
    return Configuration.of(protocol, window, applied_to(protocol, point))


def _forecast_ms(choice: Choice, point: Point) -> dict[Configuration, float]:
    """Return the predicted ms per token of each configuration.

    Of several forecasts that differ only in their hints, the lowest is used.
    """
    least_ms: dict[Configuration, float] = {}
    for forecast in choice.forecasts:
        configuration, ms = (
            _configuration(forecast.protocol, forecast.window, point),
            forecast.token_s * 1e3,
        )
        least_ms[configuration] = min(ms, least_ms.get(configuration, ms))
    return least_ms


def _last_reason(answers: Sequence[Answer]) -> str:
    reasons = [answer.choice.reason for answer in answers if answer.choice is not None]
    return reasons[-1] if reasons else ""


def _token_ms_by_configuration(answers: Sequence[Answer]) -> dict[Configuration, list[float]]:
    """Collect the steady ms per token of all answers, by configuration."""
    token_ms: dict[Configuration, list[float]] = {}
    for answer in answers:
        if ms := steady_token_ms(answer):
            token_ms.setdefault(answer.configuration, []).append(ms)
    return token_ms
