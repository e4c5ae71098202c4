"""Check that the values of a run file are possible.

In: answers with values of the right types. Out: nothing, or a `RunFileError`. After this check,
    statistics and plots can divide by values and take logarithms.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import STAGES, Round
from pilotfish.lab.field.run import Answer
from pilotfish.wire.protocols import counters

_LONGEST_S = 1e7  # maximum time of a stage or answer (s): four months
_LATEST_UNIX_S = 4e9  # upper bound of a Unix time (s): the year 2096
_LARGEST = 1e15  # upper bound of all other counts and measurements


def expect_plausible(path: Path, answers: Sequence[Answer]) -> None:
    """Raise `RunFileError` if an answer has an impossible value; the error names the first."""
    for answer in answers:
        for what, value, low, high in _values(answer):
            if not low <= value <= high:  # NaN fails both comparisons, and so is refused
                raise RunFileError(
                    f"{path} is damaged: answer {answer.id} has {value:g} as its {what}, which is "
                    "impossible. Restore a copy of the file."
                )


def _values(answer: Answer) -> Iterator[tuple[str, float, float, float]]:
    """Yield the name, the value, and the lower and upper bound of each of an answer's values."""
    yield "begin", answer.started_unix_s, 0.0, _LATEST_UNIX_S
    yield "time", answer.total_s, 0.0, _LONGEST_S
    yield "first token's time", answer.first_token_s, 0.0, _LONGEST_S
    yield "tokens", answer.tokens, 0, _LARGEST
    yield "energy", answer.energy_j or 0.0, -_LARGEST, _LARGEST
    if isinstance(answer.window, int):
        yield "window", answer.window, 0, _LARGEST
    for round_ in answer.rounds:
        yield from _round_values(round_)
    if answer.link is not None:
        for name in ("rtt", "jitter", "up", "down", "retransmitted", "retransmitted_down"):
            reading = getattr(answer.link, name)
            yield f"link's {name}", reading.value if reading else 0.0, 0.0, _LARGEST
        signal = answer.link.signal
        yield "link's signal", signal.value if signal else 0.0, -_LARGEST, _LARGEST
    if answer.choice is not None:
        yield "chosen window", answer.choice.window, 0, _LARGEST
        for forecast in answer.choice.forecasts:
            yield "forecast window", forecast.window, 0, _LARGEST
        times = [answer.choice.token_s or 0.0, *(f.token_s for f in answer.choice.forecasts)]
        yield "least forecast", min(times), 0.0, _LONGEST_S
        yield "largest forecast", max(times), 0.0, _LONGEST_S


def _round_values(round_: Round) -> Iterator[tuple[str, float, float, float]]:
    yield "window of a round", round_.window, 0, 1e4
    yield "accepted tokens of a round", round_.accepted, 0, round_.window
    for name, counter in counters().items():
        yield (
            f"{counter.metric.replace('_', ' ')} of a round",
            round_.notes.get(name, 0),
            0,
            counter.count_units([round_]),
        )
    yield "hidden states of a round", round_.inquired, 0, round_.window
    yield "bytes up of a round", round_.uplink_bytes, 0, _LARGEST
    yield "bytes down of a round", round_.downlink_bytes, 0, _LARGEST
    for stage in STAGES:
        yield f"{stage} time of a round", getattr(round_.timings, stage), 0.0, _LONGEST_S
