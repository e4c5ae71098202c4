"""``pilotfish judge sweep``: what a head's thresholds cost and bring, over links and windows."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import msgspec

from pilotfish.base.errors import PairMismatchError, UnsupportedError
from pilotfish.cli.countdown import Countdown
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.judge.swept import draw, show
from pilotfish.cli.options import Commands, json_option
from pilotfish.edge_runtime.head import DecisionHead, list_shipped_heads
from pilotfish.edge_runtime.head_file import CurvePoint
from pilotfish.judge.costs import ModelPace, measure_pace
from pilotfish.judge.figures import curve, figures
from pilotfish.judge.question_reader import OpenPair, length, model_card
from pilotfish.judge.sweep_file import SweepFile, SweepHeader
from pilotfish.judge.sweeping import SweepSettings, settings_of, sweep
from pilotfish.judge.tasks import questions, task_named

_Value = TypeVar("_Value")
_EXAMPLE = """\
example:
  pilotfish judge sweep --draft drafter --target target --head heads/smol-qwen \\
      --questions dev.jsonl --windows 10,16 --links 500:5,20:50 --out sweep.jsonl --plot sweep.png
  pilotfish judge sweep --report sweep.jsonl

What was interrupted goes on where it stopped when the same command is given again.
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "sweep",
        help="hold a head's thresholds against greedy: accuracy, rounds, latency",
        description="Answers questions under each threshold, window and link, with both models,\n"
        "and says how many answers are right, how many rounds they take, and how long those would\n"
        "take over the links.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, SweepSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, SweepSettings)
    sweep_file = SweepFile(settings.report or _given(settings.out, "out"))
    if not settings.report:
        _sweep(settings, sweep_file)
    if not sweep_file.tallies:
        raise UnsupportedError(f"{sweep_file.path} holds no questions yet.")
    show(sweep_file, pace_of(sweep_file, settings.draft_ms, settings.verify_ms), args.json)
    if settings.plot:
        draw(settings.plot, sweep_file)
    if settings.update_head:
        _update(settings.heads, sweep_file)
    return 0


def _given(value: _Value | None, name: str) -> _Value:
    if not value:
        raise UnsupportedError(f"A sweep needs --{name}; --report FILE shows one that there is.")
    return value


# Running


def _sweep(told: SweepSettings, kept: SweepFile) -> None:
    """Answer the questions that the file has not."""
    draft, target = _given(told.draft, "draft"), _given(told.target, "target")
    names, asked_for = _given(told.heads, "head"), _given(told.questions, "questions")
    task = task_named(told.task, told.checker)
    wanted = questions(asked_for, task)[: told.count]
    opened = OpenPair(draft, target)
    opened.require_hidden_states()
    heads = {head.card.name: head for head in map(DecisionHead.load, names)}
    plan = _plan(told, opened, heads, task.instruction)
    wanted = opened.fitting(wanted, told.max_tokens, opened.context)
    if not wanted:
        raise UnsupportedError(
            f"All questions are too long for the models' {opened.context} tokens."
        )
    kept.begin(plan)
    if kept.pace is None and told.draft_ms and told.verify_ms:
        kept.set_pace(asdict(pace_of(kept, told.draft_ms, told.verify_ms)))
    elif kept.pace is None:
        kept.set_pace(asdict(measure_pace(draft, target, plan.windows, told)))
    left = [item for item in wanted if item.key not in kept.tallies]
    if not left:
        return
    context = max(length(item, opened.vocabularies, told.max_tokens) for item in wanted)
    readers = opened.readers(min(told.slots, len(left)), context, told)
    whole = {item.key for item in wanted[: told.whole]}
    with Countdown("sweeping, questions", len(left)) as countdown:
        result = sweep(readers, opened.vocabularies, task, left, plan, heads, whole)
        for number, (key, tallies) in enumerate(result, 1):
            kept.add(key, tallies)
            countdown.update(number)


def _plan(
    told: SweepSettings, opened: OpenPair, heads: dict[str, DecisionHead], instruction: str
) -> SweepHeader:
    """Describe what is swept; `PairMismatchError` for a head of another pair."""
    drafter, target = opened.drafter, opened.target
    for name, head in heads.items():
        head.check_target(target)
        if not head.supports(drafter.origin, drafter.dimensions.hidden):
            raise PairMismatchError(
                f"The decision head {name} was made for the drafter {head.card.drafter.model}, "
                f"not for {drafter.model}."
            )
    thresholds = {name: told.thresholds or _of_curve(head) for name, head in heads.items()}
    ends = (
        msgspec.to_builtins(model_card(item)) | {"vocabulary": item.vocab_size}
        for item in (drafter, target)
    )
    return SweepHeader(
        task=told.task,
        instruction=instruction,
        most=told.max_tokens,
        whole=told.whole,
        drafter=next(ends),
        target=next(ends),
        heads={
            name: {
                "sha256": head.card.sha256,
                "form": head.card.hidden,
                "recommended": head.card.threshold,
            }
            for name, head in heads.items()
        },
        settings=settings_of(sorted({*told.windows}), thresholds, told.links),
    )


def _of_curve(head: DecisionHead) -> list[float]:
    """List the thresholds of the head's own curve."""
    ordered = sorted({point.threshold for point in head.card.curve})
    if not ordered:
        raise UnsupportedError(
            f"The decision head {head.card.name} has no curve: name --thresholds."
        )
    return ordered


def pace_of(
    kept: SweepFile, draft_ms: float | None, verify_ms: Mapping[int, float] | None
) -> ModelPace:
    """Say how fast the models are: as stated, or else as measured for this sweep."""
    known = kept.pace or {"draft_s": None, "verify_s": {}}
    draft_s = draft_ms * 1e-3 if draft_ms else known["draft_s"]
    stated = {width: ms * 1e-3 for width, ms in (verify_ms or {}).items()}
    verify_s = stated or {int(width): value for width, value in known["verify_s"].items()}
    if draft_s is None or not verify_s:
        raise UnsupportedError("How fast are the models? Give --draft-ms and --verify-ms.")
    return ModelPace(draft_s, verify_s)


def _update(names: Sequence[str], kept: SweepFile) -> None:
    """Put what was swept into the heads' curves."""
    assert kept.plan is not None
    result = figures(kept.plan, list(kept.tallies.values()))
    for name in names:
        if name in list_shipped_heads():
            raise UnsupportedError(f"{name} came with Pilotfish: give the path of the head's file.")
        head = DecisionHead.load(name)
        known = kept.plan.heads.get(head.card.name)
        if known is None or known["sha256"] != head.card.sha256:
            raise UnsupportedError(f"The head {name} is not the one that was swept.")
        points = curve(kept.plan, result, head.card.name, kept.plan.windows[0])
        curve_ = {item.threshold: item for item in head.card.curve}
        for threshold, figure in points.items():
            curve_[threshold] = CurvePoint(
                threshold=threshold,
                logit=None
                if threshold in (0.0, 1.0)
                else math.log(threshold) - math.log1p(-threshold),
                forgiven=figure.forgiven,
                accuracy=figure.accuracy,
                accepted_length=figure.aal,
            )
        card = msgspec.structs.replace(head.card, curve=[curve_[at] for at in sorted(curve_)])
        DecisionHead(card, head.tensors).save(Path(name).parent)
