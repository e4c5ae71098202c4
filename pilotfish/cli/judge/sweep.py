"""``pilotfish judge sweep``: measure a head's thresholds over links and windows."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.default_models import drafter_folder, target_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.head_verdict import with_worth
from pilotfish.cli.judge.swept import draw, show
from pilotfish.cli.options import Commands, json_option
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import CurvePoint
from pilotfish.lab.judge.baselines import Baseline, MinedMismatches
from pilotfish.lab.judge.costs import ModelPace, measure_pace
from pilotfish.lab.judge.episodes import episodes
from pilotfish.lab.judge.figures import Figure, curve, figures
from pilotfish.lab.judge.model_passes import Readers
from pilotfish.lab.judge.question_reader import count_tokens, select_fitting
from pilotfish.lab.judge.rivals import rivalries
from pilotfish.lab.judge.sweep_file import LinkProfile, SweepFile, SweepSetting
from pilotfish.lab.judge.sweep_plan import plan_sweep
from pilotfish.lab.judge.sweeping import SweepSettings, settings_of, sweep
from pilotfish.lab.judge.tasks import Question, Task, make_task, read_task_questions
from pilotfish.lab.pairs import OpenPair
from pilotfish.wire.protocols.adaptive import Adaptive, RelaxationOptions
from pilotfish.wire.protocols.decision_head import CERTAIN_THRESHOLDS

_Value = TypeVar("_Value")
_EXAMPLE = """\
example:
  pilotfish judge sweep --draft drafter --target target --head heads/smol-qwen \\
      --questions dev.jsonl --windows 10,16 --links 500:5,20:50 --out sweep.jsonl --plot sweep.png
  pilotfish judge sweep --draft drafter --target target --tau 0,0.2,0.4,0.6,0.8 --windows 4 \\
      --questions dev.jsonl --links 500:5,20:50 --out sweep.jsonl
  pilotfish judge sweep --report sweep.jsonl

To resume an interrupted run, give the same command again. With further heads, thresholds, links,
windows or τ, it adds what each question lacks.
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "sweep",
        help="compare heads and adaptive with greedy: accuracy, rounds, bytes, latency",
        description="Answers questions with both models under each threshold, τ, window and link.\n"
        "Reports how many answers are right, how many rounds they take, and how long these rounds\n"
        "would take over the links.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, SweepSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, SweepSettings)
    if settings.update_head and any(map(DecisionHead.is_shipped, settings.heads)):
        raise UnsupportedError(
            "The shipped head is a part of the package: name the path of a copy by --head."
        )
    sweep_file = SweepFile(settings.report or _require(settings.out, "out"))
    if not settings.report:
        _sweep(settings, sweep_file)
    if not sweep_file.tallies:
        raise UnsupportedError(f"The sweep file {sweep_file.path} has no answered question yet.")
    show(sweep_file, pace_of(sweep_file, settings.draft_ms, settings.verify_ms), args.json)
    if settings.plot:
        draw(settings.plot, sweep_file)
    if settings.update_head:
        _update(settings.heads, sweep_file)
    return 0


def _require(value: _Value | None, name: str) -> _Value:
    if not value:
        raise UnsupportedError(
            f"A sweep needs --{name}; --report FILE shows an existing sweep instead."
        )
    return value


# Measuring


def _sweep(settings: SweepSettings, sweep_file: SweepFile) -> None:
    """Answer the questions that the sweep file lacks."""
    draft, target = _require(settings.draft, "draft"), _require(settings.target, "target")
    source = _require(settings.questions, "questions")
    names = settings.heads if settings.tau else _require(settings.heads, "head")
    task = make_task(settings.task, settings.checker)
    selected = read_task_questions(source, task)[: settings.count]
    opened = OpenPair(drafter_folder(draft), target_folder(target))
    if names:
        opened.require_hidden_states()
    heads = {head.card.name: head for head in map(DecisionHead.load, names)}
    plan = plan_sweep(
        opened,
        heads,
        task,
        _settings(settings, heads),
        most=settings.max_tokens,
        whole=settings.whole,
        links=settings.links,
        sampling=_sampling(settings) if settings.tau else None,
    )
    selected = select_fitting(selected, opened.vocabularies, settings.max_tokens, opened.context)
    if not selected:
        raise UnsupportedError(
            f"All questions are too long for the models' context of {opened.context} tokens."
        )
    with sweep_file.writing(plan):
        _measure_pace(settings, sweep_file, opened)
        assert sweep_file.plan is not None
        if missing := [name for name in sweep_file.plan.heads if name not in heads]:
            raise UnsupportedError(
                f"{sweep_file.path} also has the head {missing[0]}: give it by --head, too."
            )
        _answer(settings, sweep_file, opened, task, selected, heads)


def _measure_pace(settings: SweepSettings, sweep_file: SweepFile, opened: OpenPair) -> None:
    """Store the models' pass times, as named or as measured now.

    Times that the file has are kept, unless a run has added a window that is wider than all timed
    passes.
    """
    assert sweep_file.plan is not None
    known, windows = sweep_file.pace, sweep_file.plan.windows
    timed = max(map(int, known["verify_s"]), default=0) if known else 0
    if settings.draft_ms and settings.verify_ms:
        if known is None:
            sweep_file.set_pace(asdict(pace_of(sweep_file, settings.draft_ms, settings.verify_ms)))
    elif timed <= max(windows):
        sweep_file.set_pace(asdict(measure_pace(opened, windows, settings)))


def _answer(
    settings: SweepSettings,
    sweep_file: SweepFile,
    opened: OpenPair,
    task: Task,
    selected: Sequence[Question],
    heads: Mapping[str, DecisionHead],
) -> None:
    """Answer the questions under the settings that they lack; store each one's counts."""
    plan = sweep_file.plan
    assert plan is not None
    answered = {key: len(counts) for key, counts in sweep_file.tallies.items()}
    remaining = sum(answered.get(each.key, 0) < len(plan.settings) for each in selected)
    if not remaining:
        return
    context = max(count_tokens(each, opened.vocabularies, plan.most) for each in selected)
    slots = min(settings.slots, remaining)
    readers = Readers(*opened.paths, slots=slots, context=context, engine=settings)
    whole = {question.key for question in selected[: settings.whole]}
    with ProgressDisplay() as display:
        report = display.counter("sweeping, questions", remaining)
        outcomes = sweep(readers, opened.vocabularies, task, selected, plan, heads, whole, answered)
        for number, (key, tallies) in enumerate(outcomes, 1):
            sweep_file.add(key, tallies)
            report(number)


def _settings(settings: SweepSettings, heads: dict[str, DecisionHead]) -> list[SweepSetting]:
    """List the settings of the sweep."""
    thresholds = {
        name: settings.thresholds or _curve_thresholds(head) for name, head in heads.items()
    }
    return settings_of(
        sorted({*settings.windows}),
        thresholds,
        settings.links,
        settings.tau,
        _baselines(settings, heads),
    )


def _sampling(settings: SweepSettings) -> dict[str, Any]:
    """Return the parameters of `adaptive` for the header."""
    relaxation = RelaxationOptions(lambdas=settings.lambdas).relaxation
    return {
        "temperature": settings.temperature,
        "draft_top_k": Adaptive.default_top_k,
        "seed": settings.seed,
        "lambdas": [relaxation.lambda1, relaxation.lambda2, relaxation.lambda3],
    }


def _baselines(
    settings: SweepSettings, heads: Mapping[str, DecisionHead]
) -> Callable[[str, float, LinkProfile], Sequence[Baseline]]:
    """Return a function from a head's name, a threshold and a link to the rules to compare."""
    if settings.mined is None:
        return lambda *_: ()
    mismatches = MinedMismatches.from_episodes(episodes(settings.mined))

    def rules(name: str, threshold: float, profile: LinkProfile) -> Sequence[Baseline]:
        if threshold in CERTAIN_THRESHOLDS:
            return ()  # all rules forgive all mismatches, or none
        return mismatches.baselines(heads[name], profile.channel, threshold)

    return rules


def _curve_thresholds(head: DecisionHead) -> list[float]:
    """Return the thresholds of the head's curve."""
    ordered = sorted({point.threshold for point in head.card.curve})
    if not ordered:
        raise UnsupportedError(
            f"The decision head {head.card.name} has no curve of thresholds: name them by "
            f"--thresholds."
        )
    return ordered


def pace_of(
    sweep_file: SweepFile, draft_ms: float | None, verify_ms: Mapping[int, float] | None
) -> ModelPace:
    """Return the models' pace: times that the user named, else times measured in this sweep."""
    known = sweep_file.pace or {"draft_s": None, "verify_s": {}}
    draft_s = draft_ms * 1e-3 if draft_ms else known["draft_s"]
    stated = {width: ms * 1e-3 for width, ms in (verify_ms or {}).items()}
    verify_s = stated or {int(width): value for width, value in known["verify_s"].items()}
    if draft_s is None or not verify_s:
        raise UnsupportedError(
            "The durations of the models' passes are unknown: give --draft-ms and --verify-ms."
        )
    return ModelPace(draft_s, verify_s)


def _update(names: Sequence[str], sweep_file: SweepFile) -> None:
    """Add the results of the sweep to the heads' curves, and their worth to their records."""
    plan, tallies = sweep_file.plan, list(sweep_file.tallies.values())
    assert plan is not None
    rows, compared = figures(plan, tallies), rivalries(plan, tallies)
    for name in names:
        head = DecisionHead.load(name)
        known = plan.heads.get(head.card.name)
        if known is None or known["sha256"] != head.card.sha256:
            raise UnsupportedError(f"The head {name} is not the head that this sweep measured.")
        points = curve(plan, rows, head.card.name, plan.windows[0])
        whole = {point.threshold: point for point in head.card.curve}
        whole |= {threshold: _curve_point(threshold, row) for threshold, row in points.items()}
        training, recommended = head.card.training, points.get(head.card.threshold)
        if recommended is not None:
            training = with_worth(training, recommended, compared)
        curve_points = [whole[at] for at in sorted(whole)]
        card = msgspec.structs.replace(head.card, curve=curve_points, training=training)
        DecisionHead(card, head.tensors).save(Path(name).parent)


def _curve_point(threshold: float, figure: Figure) -> CurvePoint:
    certain = threshold in CERTAIN_THRESHOLDS
    return CurvePoint(
        threshold=threshold,
        logit=None if certain else math.log(threshold) - math.log1p(-threshold),
        forgiven=figure.forgiven,
        accuracy=figure.accuracy,
        accepted_length=figure.aal,
    )
