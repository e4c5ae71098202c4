"""Sweep thresholds, τ, windows and links over a set of questions (WISV §VI).

In:  questions, heads with their thresholds, τ of `adaptive`, windows, links. Out: each question's
     counts under every setting (`judge.sweep_file`).

The tokens and rounds come from the real models. Their time is modelled (`judge.costs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from pilotfish.base.settings import setting
from pilotfish.bridge import Pair
from pilotfish.edge_runtime.head import DecisionHead, Score
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.judge.baselines import Baseline
from pilotfish.lab.judge.model_passes import Procedure, Readers
from pilotfish.lab.judge.question_reader import QuestionReader
from pilotfish.lab.judge.relaxed_walks import (
    RelaxedSampling,
    RelaxedTrajectory,
    relaxed_walks,
)
from pilotfish.lab.judge.sweep_file import LinkProfile, QuestionCounts, SweepHeader, SweepSetting
from pilotfish.lab.judge.tasks import TASKS, Question, Task
from pilotfish.lab.judge.trajectories import Trajectory, WalkSettings, walks
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.adaptive import Adaptive, Ratio, RelaxationOptions, Share

QUANTILES = "quantiles"
_WHOLE = 12  # number of one question's windows that are read to their ends


def thresholds(text: str) -> tuple[float, ...]:
    """Parse ``0,0.5,1``. The word ``quantiles`` gives (): the thresholds of each head's curve."""
    values = () if text == QUANTILES else tuple(sorted({float(part) for part in text.split(",")}))
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{text} is not between 0 and 1")
    return values


def links(text: str) -> tuple[LinkProfile, ...]:
    """Parse links as in ``500:5,20:50``: rates in Mbit/s, RTTs in milliseconds."""
    return tuple(dict.fromkeys(LinkProfile(*pair) for pair in _pairs(text, "links", "500:5,20:50")))


def passes(text: str) -> dict[int, float]:
    """Parse pass times as in ``1:80,11:95``: numbers of tokens, milliseconds."""
    pass_ms = dict(_pairs(text, "passes", "1:80,11:95"))
    if not all(width.is_integer() for width in pass_ms):
        raise ValueError(f"{text!r} is not a list of passes; write for example 1:80,11:95")
    return {int(width): ms for width, ms in pass_ms.items()}


def _pairs(text: str, what: str, example: str) -> list[tuple[float, float]]:
    try:
        pairs = [
            (float(left), float(right))
            for left, right in (part.split(":") for part in text.split(","))
        ]
    except ValueError:
        pairs = []
    if not pairs or not all(0 < number < math.inf for pair in pairs for number in pair):
        raise ValueError(f"{text!r} is not a list of {what}; write for example {example}")
    return pairs


class SweepSettings(EngineSettings, frozen=True, kw_only=True):
    """Options of ``pilotfish judge sweep``; ``report`` needs no other option."""

    draft: Annotated[Path, setting("the drafter, as for `device run`", metavar="MODEL")] | None = (
        None
    )
    target: Annotated[Path, setting("the target, as for `edge serve`", metavar="MODEL")] | None = (
        None
    )
    heads: Annotated[
        tuple[str, ...],
        setting(
            "a decision head: its name, or the path of its files; may be repeated",
            flag="head",
            metavar="NAME",
            repeat=True,
        ),
    ] = ()
    questions: (
        Annotated[Path, setting('JSON lines with "question" and "answer"', metavar="FILE")] | None
    ) = None
    count: Annotated[int, setting("use only the first N questions (default: all)", ge=1)] | None = (
        None
    )
    task: Annotated[
        str, setting("task of the questions, as for judge mine", choices=tuple(TASKS))
    ] = "gsm8k"
    checker: Annotated[
        tuple[str, ...],
        setting("program for task command, as for judge mine", form="command", metavar="COMMAND"),
    ] = ()
    thresholds: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1)], ...],
        setting(
            "thresholds from 0 (reject every mismatch) to 1 (reject none); quantiles: the "
            "thresholds of each head's curve (default)",
            form=thresholds,
            metavar="ρ,ρ,…",
        ),
    ] = ()
    tau: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1)], ...],
        setting(
            "also answer with protocol adaptive, at the shortest of the windows, with these τ",
            form=thresholds,
            metavar="τ,τ,…",
        ),
    ] = ()
    lambdas: Annotated[
        tuple[Ratio, Share, Share] | None,
        setting("λ₁, λ₂ and λ₃ of protocol adaptive", metavar="λ₁,λ₂,λ₃"),
    ] = None
    temperature: Annotated[
        float, setting("temperature of both models under protocol adaptive", gt=0, metavar="T")
    ] = 1.0
    seed: Annotated[int, setting("seed of the draws under protocol adaptive", ge=0)] = 0
    windows: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=MAX_WINDOW)], ...],
        setting("numbers of draft tokens per round", metavar="γ,γ,…"),
    ] = (10,)
    links: Annotated[
        tuple[LinkProfile, ...],
        setting(
            "links as RATE:RTT, in Mbit/s and ms (default: 500:5,500:50,20:5,20:50)",
            form=links,
            metavar="R:T,…",
        ),
    ] = tuple(LinkProfile(mbps, rtt_ms) for mbps in (500.0, 20.0) for rtt_ms in (5.0, 50.0))
    max_tokens: Annotated[int, setting("maximum number of tokens in an answer", ge=1)] = 160
    slots: Annotated[int, setting("number of questions that run at a time", ge=1, le=256)] = 8
    mined: (
        Annotated[
            Path,
            setting(
                "folder that judge mine wrote from questions that the head was not trained on: "
                "compare each row with a coin and with a threshold of the target's logit gap, each "
                "of which forgives as many of these mismatches",
                metavar="MINED",
            ),
        ]
        | None
    ) = None
    whole: Annotated[
        int,
        setting(
            "number of questions whose drafts are also judged after a rejection, to count the "
            "hidden states that the protocol wisv-selective would request",
            ge=0,
        ),
    ] = 2
    draft_ms: (
        Annotated[
            float,
            setting(
                "duration of a drafter's pass, in ms (default: measured on this machine)",
                gt=0,
                metavar="X",
            ),
        ]
        | None
    ) = None
    verify_ms: (
        Annotated[
            dict[int, float],
            setting(
                "duration of a target's pass over WIDTH tokens, in ms; passes between two widths "
                "are interpolated, a wider one counts as the widest (default: measured on this "
                "machine)",
                form=passes,
                metavar="WIDTH:X,…",
            ),
        ]
        | None
    ) = None
    out: (
        Annotated[
            Path, setting("output: the sweep's file, one line of JSON per question", metavar="FILE")
        ]
        | None
    ) = None
    report: (
        Annotated[
            Path, setting("only show the results of a file that --out has written", metavar="FILE")
        ]
        | None
    ) = None
    plot: (
        Annotated[Path, setting("write a plot of accuracy against threshold (PNG)", metavar="FILE")]
        | None
    ) = None
    update_head: Annotated[
        bool,
        setting(
            "store the measured results by threshold in each head's file: those with the first of "
            "the windows, over the link with the lowest quality"
        ),
    ] = False


def settings_of(
    windows: Sequence[int],
    thresholds: Mapping[str, Sequence[float]],
    profiles: Sequence[LinkProfile],
    taus: Sequence[float] = (),
    baselines: Callable[[str, float, LinkProfile], Sequence[Baseline]] = lambda *_: (),
) -> list[SweepSetting]:
    """List the settings: `greedy`, then `adaptive`, then the heads, then the heads' baselines.

    windows: of `greedy` and of the heads. thresholds: thresholds of each head, by name. profiles:
    links of the heads. taus: τ of `adaptive` at the first window. baselines: function from a head's
    name, a threshold and a link to the rules to compare; each is one more setting.
    """
    judged = [
        SweepSetting(window, head, threshold, profile)
        for head, values in thresholds.items()
        for profile in profiles
        for threshold in values
        for window in windows
    ]
    relaxed = [SweepSetting(windows[0], tau=tau) for tau in taus]
    rivals = [
        SweepSetting(window, head, threshold, profile, baseline=baseline)
        for head, values in thresholds.items()
        for profile in profiles
        for threshold in values
        for baseline in baselines(head, threshold, profile)
        for window in windows
    ]
    return [*(SweepSetting(window) for window in windows), *relaxed, *judged, *rivals]


def sweep(
    readers: Readers,
    pair: Pair,
    task: Task,
    questions: Sequence[Question],
    plan: SweepHeader,
    heads: Mapping[str, DecisionHead],
    whole: Collection[str] = (),
    answered: Mapping[str, int] = MappingProxyType({}),
    windows: int = _WHOLE,
) -> Iterator[tuple[str, list[QuestionCounts]]]:
    """Yield each question's key and its counts, as soon as it is finished.

    whole: keys of the questions with windows that are read to their ends. answered: how many of the
    plan's first settings each question already has counts for; they are not walked again. windows:
    the largest number of one question's windows that are read to their ends.
    """
    courses = _courses(plan.settings, heads)

    def begin(number: int, question: Question) -> Procedure[list[QuestionCounts]]:
        reader = QuestionReader(question, pair, plan.most)
        missing = range(answered.get(question.key, 0), len(plan.settings))
        strict = [at for at in missing if plan.settings[at].tau is None]
        relaxed = [at for at in missing if plan.settings[at].tau is not None]
        read = windows * (question.key in whole)
        outcomes: dict[int, Trajectory | RelaxedTrajectory] = {}
        if strict:
            walked = yield from walks(reader, [courses[at] for at in strict], whole=read)
            outcomes |= zip(strict, walked, strict=True)
        # a later run may have added τ at another window
        for window in dict.fromkeys(plan.settings[at].window for at in relaxed):
            ours = [at for at in relaxed if plan.settings[at].window == window]
            protocols = [relaxed_protocol(plan, plan.settings[at]) for at in ours]
            sampling = relaxed_sampling(plan, window, number)
            relaxed_answers = yield from relaxed_walks(reader, protocols, sampling)
            outcomes |= zip(ours, relaxed_answers, strict=True)
        return _count_questions([outcomes[at] for at in missing], reader, task)

    return readers.run(
        [
            (question.key, partial(begin, number, question))
            for number, question in enumerate(questions)
            if answered.get(question.key, 0) < len(plan.settings)
        ]
    )


def relaxed_protocol(plan: SweepHeader, setting: SweepSetting) -> Adaptive:
    """Return `adaptive` with the setting's τ."""
    assert plan.sampling is not None
    return Adaptive(RelaxationOptions(tau=setting.tau, lambdas=tuple(plan.sampling["lambdas"])))


def relaxed_sampling(plan: SweepHeader, window: int, number: int) -> RelaxedSampling:
    """Return the sampling parameters of `adaptive`; each question has a seed of its own."""
    assert plan.sampling is not None
    temperature = plan.sampling["temperature"]
    return RelaxedSampling(
        window=window,
        seed=plan.sampling["seed"] + number,
        target=Sampling(temperature=temperature),
        drafter=Sampling(temperature=temperature, top_k=plan.sampling["draft_top_k"]),
    )


def _count_questions(
    trajectories: Sequence[Trajectory | RelaxedTrajectory], reader: QuestionReader, task: Task
) -> list[QuestionCounts]:
    """Count each trajectory's rounds; check each distinct answer once, since checkers are slow."""
    right_by_text: dict[tuple[int, ...], bool] = {}
    results = []
    for trajectory in trajectories:
        key = tuple(trajectory.tokens)
        if key not in right_by_text:
            outcome = task.outcome(reader.question, reader.text(trajectory.tokens))
            right_by_text[key] = task.right(reader.question, outcome)
        counted = (
            QuestionCounts.from_relaxed(trajectory, right_by_text[key])
            if isinstance(trajectory, RelaxedTrajectory)
            else QuestionCounts.from_trajectory(trajectory, right_by_text[key])
        )
        results.append(counted)
    return results


def _courses(
    settings: Iterable[SweepSetting], heads: Mapping[str, DecisionHead]
) -> list[WalkSettings]:
    scores: dict[
        tuple[str, LinkProfile | None], Score
    ] = {}  # score functions, shared by all thresholds
    courses = []
    for sweep_setting in settings:
        if sweep_setting.baseline is not None:
            courses.append(WalkSettings(sweep_setting.window, baseline=sweep_setting.baseline))
            continue
        if sweep_setting.head is None:
            courses.append(WalkSettings(sweep_setting.window))
            continue
        profile = sweep_setting.profile
        channel = Channel() if profile is None else profile.channel
        judge = heads[sweep_setting.head].judge(channel, sweep_setting.threshold)
        score = scores.setdefault((sweep_setting.head, profile), judge.score)
        courses.append(WalkSettings(sweep_setting.window, replace(judge, score=score)))
    return courses
