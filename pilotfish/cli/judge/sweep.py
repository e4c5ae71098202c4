"""``pilotfish judge sweep``: what a head's thresholds cost and bring, over links and windows."""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.cli.countdown import Countdown
from pilotfish.cli.judge.swept import draw, show
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    json_option,
    positive,
    share,
)
from pilotfish.device_runtime.bridge import Pair
from pilotfish.edge_runtime.head import DecisionHead, shipped
from pilotfish.edge_runtime.head_file import CurvePoint
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.judge.costs import Pace, measured
from pilotfish.judge.figures import curve, figures
from pilotfish.judge.reading import Readers
from pilotfish.judge.speakers import length
from pilotfish.judge.sweeping import LinkProfile, SweepFile, SweepHeader, settings_of, sweep
from pilotfish.judge.tasks import TASKS, questions, task_named
from pilotfish.wire.errors import PairMismatchError, UnsupportedError
from pilotfish.wire.messages import MAX_WINDOW

QUANTILES = "quantiles"
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
        description="Answers questions under each threshold, window and link, with both models, "
        "and says how many answers are right, how many rounds they take, and how long those would "
        "take over the links.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--draft", type=Path, metavar="DIR", help="drafter's artifact")
    add("--target", type=Path, metavar="DIR", help="target's artifact")
    add(
        "--head",
        dest="heads",
        action="append",
        default=[],
        metavar="NAME",
        help="a head: its name, or the path of its files; may be repeated",
    )
    add("--questions", type=Path, metavar="FILE", help='JSON lines with "question" and "answer"')
    add("--count", type=between(1), metavar="N", help="the first N questions (default: all)")
    add("--task", choices=tuple(TASKS), default="gsm8k", help="see judge mine (%(default)s)")
    add("--checker", type=shlex.split, default=[], metavar="COMMAND", help="of task command")
    add(
        "--thresholds",
        type=_thresholds,
        default=QUANTILES,
        metavar="ρ,ρ,…",
        help="from 0, reject each mismatch, to 1, none; quantiles: those of each head's own curve "
        "(default)",
    )
    add(
        "--windows", type=_windows, default="10", metavar="γ,γ,…", help="draft tokens (%(default)s)"
    )
    add(
        "--links",
        type=_profiles,
        default="500:5,500:50,20:5,20:50",
        metavar="R:T,…",
        help="rates in Mbit/s and RTTs in ms (%(default)s)",
    )
    add("--max-tokens", type=between(1), default=160, metavar="N", help="an answer's (%(default)s)")
    add("--slots", type=between(1, 256), default=8, metavar="N", help="questions at a time (8)")
    add(
        "--whole",
        type=between(0),
        default=2,
        metavar="N",
        help="of so many questions look at windows behind rejections too, which tells how many "
        "states wisv-selective asks for (%(default)s)",
    )
    add("--draft-ms", type=positive, metavar="X", help="a drafter's pass (default: measured here)")
    add(
        "--verify-ms",
        type=passes,
        metavar="WIDTH:X,…",
        help="a target's pass over WIDTH tokens (default: measured here)",
    )
    add("--out", type=Path, metavar="FILE", help="a line of JSON a question")
    add("--report", type=Path, metavar="FILE", help="only show what is in such a file")
    add("--plot", type=Path, metavar="FILE", help="accuracy over threshold, as PNG")
    add(
        "--update-head",
        action="store_true",
        help="write what the first window did over the poorest link into each head's curve",
    )
    engine_options(parser)
    json_option(parser)
    parser.set_defaults(run=_run)


def _thresholds(text: str) -> list[float] | str:
    return text if text == QUANTILES else sorted({share(part) for part in text.split(",")})


def _windows(text: str) -> list[int]:
    sizes = between(1, MAX_WINDOW)
    return sorted({sizes(part) for part in text.split(",")})


def _profiles(text: str) -> list[LinkProfile]:
    """An argparse type: ``500:5,20:50``, Mbit/s and milliseconds."""
    parts = [part.split(":") for part in text.split(",")]
    if any(len(part) != 2 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of links; write 500:5,20:50")
    return list(dict.fromkeys(LinkProfile(positive(mbps), positive(rtt)) for mbps, rtt in parts))


def passes(text: str) -> dict[int, float]:
    """An argparse type: ``1:80,11:95``, tokens and milliseconds."""
    parts = [part.split(":") for part in text.split(",")]
    if any(len(part) != 2 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of passes; write 1:80,11:95")
    return {between(1)(width): positive(ms) for width, ms in parts}


def _run(args: argparse.Namespace) -> int:
    if args.report:
        kept = SweepFile(args.report)
    else:
        kept = SweepFile(_given(args, "out"))
        _sweep(args, kept)
    if not kept.tallies:
        raise UnsupportedError(f"{kept.path} holds no questions yet.")
    show(kept, pace_of(kept, args), args.json)
    if args.plot:
        draw(args.plot, kept)
    if args.update_head:
        _update(args.heads, kept)
    return 0


def _given(args: argparse.Namespace, *names: str) -> Any:
    """Of these options the last one's value; `UnsupportedError` if one is missing."""
    for name in names:
        if not getattr(args, name):
            raise UnsupportedError(
                f"A sweep needs --{name.removesuffix('s') if name == 'heads' else name}; "
                "--report FILE shows one that there is."
            )
    return getattr(args, names[-1])


# Running


def _sweep(args: argparse.Namespace, kept: SweepFile) -> None:
    """Answer the questions that the file has not."""
    _given(args, "draft", "target", "heads", "questions")
    task = task_named(args.task, args.checker)
    asked = questions(args.questions, task)[: args.count]
    ends = [Artifact.open(path) for path in (args.draft, args.target)]
    pair = Pair(*(Vocabulary.of(end) for end in ends))
    heads = {head.card.name: head for head in map(DecisionHead.load, args.heads)}
    plan = _plan(args, ends, heads, task.instruction)
    lengths = {one.key: length(one, pair, args.max_tokens) for one in asked}
    most = min(end.manifest.dimensions.context for end in ends)
    asked = [one for one in asked if lengths[one.key] <= most]
    if not asked:
        raise UnsupportedError(f"All questions are too long for the models' {most} tokens.")
    kept.begin(plan)
    if kept.pace is None and args.draft_ms and args.verify_ms:
        kept.timed(asdict(pace_of(kept, args)))
    elif kept.pace is None:
        found = measured(
            args.draft, args.target, args.windows, threads=args.threads, provider=args.provider
        )
        kept.timed(asdict(found))
    left = [one for one in asked if one.key not in kept.tallies]
    if not left:
        return
    readers = Readers.open(
        args.draft,
        args.target,
        slots=min(args.slots, len(left)),
        context=max(lengths.values()),
        threads=args.threads,
        provider=args.provider,
    )
    whole = {one.key for one in asked[: args.whole]}
    with Countdown("sweeping, questions", len(left)) as countdown:
        found_ = sweep(
            readers, pair, task, left, plan, heads, ends=pair.target.eos_ids, whole=whole
        )
        for number, (question, tallies) in enumerate(found_, 1):
            kept.add(question.key, tallies)
            countdown.at(number)


def _plan(
    args: argparse.Namespace,
    ends: Sequence[Artifact],
    heads: dict[str, DecisionHead],
    instruction: str,
) -> SweepHeader:
    """What is swept; `PairMismatchError` for a head of another pair."""
    drafter, target = (end.manifest for end in ends)
    for name, head in heads.items():
        head.suits(target)
        if not head.serves(drafter.origin, drafter.dimensions.hidden):
            raise PairMismatchError(
                f"The decision head {name} was made for the drafter {head.card.drafter.model}, "
                f"not for {drafter.model}."
            )
    thresholds = {name: _of_head(args.thresholds, head) for name, head in heads.items()}
    told = [
        {
            "model": one.model,
            "origin": one.origin,
            "precision": one.precision,
            "hidden": one.dimensions.hidden,
            "vocabulary": one.vocab_size,
        }
        for one in (drafter, target)
    ]
    return SweepHeader(
        task=args.task,
        instruction=instruction,
        most=args.max_tokens,
        whole=args.whole,
        drafter=told[0],
        target=told[1],
        heads={
            name: {
                "sha256": head.card.sha256,
                "form": head.card.hidden,
                "recommended": head.card.threshold,
            }
            for name, head in heads.items()
        },
        settings=settings_of(args.windows, thresholds, args.links),
    )


def _of_head(wanted: list[float] | str, head: DecisionHead) -> list[float]:
    if not isinstance(wanted, str):
        return wanted
    found = sorted({point.threshold for point in head.card.curve})
    if not found:
        raise UnsupportedError(
            f"The decision head {head.card.name} has no curve: name --thresholds."
        )
    return found


def pace_of(kept: SweepFile, args: argparse.Namespace) -> Pace:
    """How fast the models are: as stated, or else as measured for this sweep."""
    known = kept.pace or {"draft_s": None, "verify_s": {}}
    draft_s = args.draft_ms * 1e-3 if args.draft_ms else known["draft_s"]
    stated = {width: ms * 1e-3 for width, ms in (args.verify_ms or {}).items()}
    verify_s = stated or {int(width): value for width, value in known["verify_s"].items()}
    if draft_s is None or not verify_s:
        raise UnsupportedError("How fast are the models? Give --draft-ms and --verify-ms.")
    return Pace(draft_s, verify_s)


def _update(names: Sequence[str], kept: SweepFile) -> None:
    """Put what was swept into the heads' curves."""
    assert kept.plan is not None
    found = figures(kept.plan, list(kept.tallies.values()))
    for name in names:
        if name in shipped():
            raise UnsupportedError(f"{name} came with Pilotfish: give the path of the head's file.")
        head = DecisionHead.load(name)
        known = kept.plan.heads.get(head.card.name)
        if known is None or known["sha256"] != head.card.sha256:
            raise UnsupportedError(f"The head {name} is not the one that was swept.")
        points = curve(kept.plan, found, head.card.name, kept.plan.windows[0])
        curve_ = {one.threshold: one for one in head.card.curve}
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
