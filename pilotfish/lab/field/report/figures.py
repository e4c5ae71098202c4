"""Compute the results of a run's answers, for each (protocol, window) of the matrix.

In: finished answers with their rounds. Out: medians with intervals, stages, bytes, acceptance.

The first round of an answer reads the prompt. So tokens/s (`field.token_speed`) and the times per
token, per round and per stage cover only the later rounds, which are called *steady*. All rounds
count in acceptance, tokens per round and bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pilotfish.device_runtime.record import STAGES, Round, acceptance
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.axes import applied_to
from pilotfish.lab.field.configuration import Configuration
from pilotfish.lab.field.token_speed import (
    committed_tokens,
    steady_rounds,
    steady_token_s,
    tokens_per_s,
)
from pilotfish.lab.statistics import PositionCounts, Spread, positions, spread
from pilotfish.wire.protocols import (
    PROTOCOL_REGISTRY,
    STREAM,
    RoundCounter,
    counters,
    counters_of,
    lossless,
    names,
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of one configuration. Bytes are the sizes of the frames that ZeroMQ gets.

    comm_ms: T_comm, the mean ms of a steady round on the link, both ways. tokens_per_s: of the
    median of token_ms. speedup: these tokens/s divided by those of `stream` over the same link with
    the same sampling; None without such answers.
    n: number of answers. rounds: number of all their rounds. round_ms: spread over steady rounds;
    each other `Spread` is over answers. notes: share of each counter, by name; None if the protocol
    does not have the counter. asked: share of rounds in which the edge requested hidden states;
    None if the protocol never requests them. A value is None if it was not measured: acceptance if
        there were no drafts, joules if there is no sensor, values of steady rounds if every answer
        had only one round.
    """

    configuration: Configuration
    n: int
    rounds: int
    token_ms: Spread | None
    round_ms: Spread | None
    tokens_per_s: float | None
    first_token_ms: Spread | None
    joules_per_token: Spread | None
    acceptance: float | None
    notes: dict[str, float | None]
    asked: float | None
    tokens_per_round: float | None
    up_bytes_per_token: float | None
    down_bytes_per_token: float | None
    up_bytes_per_round: float | None
    down_bytes_per_round: float | None
    comm_ms: float | None
    rounds_per_answer: float
    speedup: float | None
    stages_ms: dict[str, float]  # mean ms per committed token, by stage
    positions: list[PositionCounts]


def steady_token_ms(answer: Answer) -> float | None:
    """Compute the ms per committed token of an answer's steady rounds; None if it has none."""
    token_s = steady_token_s(answer)
    return None if token_s is None else token_s * 1e3


def joules_per_token(answer: Answer) -> float | None:
    """Compute the joules of an answer per token; None without a sensor, or without tokens."""
    if answer.energy_j is None or not answer.tokens:
        return None
    return answer.energy_j / answer.tokens


def figures(answers: Sequence[Answer]) -> list[Figures]:
    """Compute the results of each (protocol, window), sorted by `order`."""
    groups: dict[Configuration, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.configuration, []).append(answer)
    results = [
        _figures(configuration, groups[configuration])
        for configuration in sorted(groups, key=order)
    ]
    streamed = {f.configuration.point: f for f in results if f.configuration.protocol == STREAM}
    return [
        replace(f, speedup=_speedup(f, streamed.get(applied_to(STREAM, f.configuration.point))))
        for f in results
    ]


def _speedup(measured: Figures, streamed: Figures | None) -> float | None:
    """Return the ratio of the tokens/s."""
    if streamed is None or streamed.tokens_per_s is None or measured.tokens_per_s is None:
        return None
    return measured.tokens_per_s / streamed.tokens_per_s


def protocols_of(all_figures: Sequence[Figures]) -> list[str]:
    """List each protocol of the results once, in the order of the results."""
    return list(dict.fromkeys(f.configuration.protocol for f in all_figures))


def by_series(all_figures: Iterable[Figures]) -> dict[str, list[Figures]]:
    """Group the results by protocol and varied options, with all windows; keys are labels."""
    groups: dict[str, list[Figures]] = {}
    for each in all_figures:
        groups.setdefault(str(each.configuration._replace(window=None)), []).append(each)
    return groups


def timed(all_figures: Iterable[Figures]) -> list[tuple[Figures, Spread]]:
    """Return those results that have a time per token (ms), with this time."""
    return [(f, f.token_ms) for f in all_figures if f.token_ms is not None]


def quickest(all_figures: Sequence[Figures], fewest: int) -> Figures:
    """Return the results with the lowest median time per token, of those with enough answers.

    fewest: number of answers that is enough. If none of the results has them, the ones with the
    most answers are returned.
    """
    known = timed(all_figures)
    enough = [pair for pair in known if pair[1].n >= fewest]
    if not enough:
        return max(known, key=lambda pair: pair[1].n)[0]
    return min(enough, key=lambda pair: pair[1].median)[0]


def lowest(all_figures: Sequence[Figures]) -> Figures | None:
    """Return the results of the fixed choice with the shortest time per token.

    Lossy protocols are skipped, because their text is not the target's. ``auto`` is skipped,
    because it chooses among the other protocols.
    """
    known = [f for f in all_figures if f.token_ms and lossless(f.configuration.protocol)]
    return min(known, key=lambda f: f.token_ms.median if f.token_ms else 0.0, default=None)


def order(configuration: Configuration) -> tuple[Any, ...]:
    """Return a sort key: protocols in the registry's order; windows from short to ``auto``."""
    protocol, window, point = configuration
    known = names()
    registered = known.index(protocol) if protocol in known else len(known)
    length = window if isinstance(window, int) else 0
    values = [(name, isinstance(value, str | tuple), value) for name, value in point]
    return registered, protocol, values, int(window == "auto"), length


def _figures(configuration: Configuration, answers: list[Answer]) -> Figures:
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    drafted = [round_ for round_ in rounds if round_.window]
    inquiring = [round_ for round_ in drafted if _may_request_states(round_.protocol)]
    after_prompt = [round_ for answer in answers for round_ in steady_rounds(answer)]
    tokens = committed_tokens(rounds)
    token_ms = _spread_over(answers, steady_token_ms)
    return Figures(
        configuration=configuration,
        n=len(answers),
        rounds=len(rounds),
        token_ms=token_ms,
        round_ms=spread([r.timings.total * 1e3 for r in after_prompt], independent=False),
        tokens_per_s=tokens_per_s(token_ms.median * 1e-3 if token_ms else None),
        first_token_ms=_spread_over(answers, lambda a: a.first_token_s * 1e3),
        joules_per_token=_spread_over(answers, joules_per_token),
        acceptance=acceptance(drafted) if drafted else None,
        notes={name: _counter_share(counter, rounds) for name, counter in counters().items()},
        asked=_share(sum(r.inquired > 0 for r in inquiring), len(inquiring)),
        tokens_per_round=tokens / len(rounds) if rounds else None,
        up_bytes_per_token=sum(r.uplink_bytes for r in rounds) / tokens if tokens else None,
        down_bytes_per_token=sum(r.downlink_bytes for r in rounds) / tokens if tokens else None,
        up_bytes_per_round=_mean([r.uplink_bytes for r in rounds]),
        down_bytes_per_round=_mean([r.downlink_bytes for r in rounds]),
        comm_ms=_mean([(r.timings.uplink + r.timings.downlink) * 1e3 for r in after_prompt]),
        rounds_per_answer=len(rounds) / len(answers),
        speedup=None,
        stages_ms=_stages_ms(after_prompt),
        positions=positions(drafted),
    )


def counters_with_values(all_figures: Sequence[Figures]) -> list[RoundCounter]:
    """Return the counters that have a value in any of these results."""
    known = counters().values()
    return [
        counter for counter in known if any(f.notes[counter.name] is not None for f in all_figures)
    ]


def _stages_ms(rounds: Sequence[Round]) -> dict[str, float]:
    """Compute the mean ms of each stage per committed token; means, unlike medians, add up."""
    tokens = committed_tokens(rounds)
    if not tokens:
        return {}
    return {
        stage: sum(getattr(r.timings, stage) for r in rounds) * 1e3 / tokens for stage in STAGES
    }


def _spread_over(
    answers: Sequence[Answer], value: Callable[[Answer], float | None]
) -> Spread | None:
    """Compute the spread of a value over the answers that have it; None if no answer has it."""
    return spread([number for number in map(value, answers) if number is not None])


def _counter_share(counter: RoundCounter, rounds: Sequence[Round]) -> float | None:
    """Compute a counter's share over the rounds of protocols or ensembles that report it."""
    return counter.share(
        [
            round_
            for round_ in rounds
            if counter in counters_of(round_.protocol) or counter.name in round_.notes
        ]
    )


def _may_request_states(protocol: str) -> bool:
    return protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].requests_states


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten a dictionary of results: move configuration and notes to the top level."""
    configuration = Configuration(*values.pop("configuration"))
    notes = values.pop("notes", {})
    return {**configuration.to_json(), **values, **notes}
