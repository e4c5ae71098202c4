"""wisv's figure 7: `auto` by the paper's rule over two channels, in real time.

    python benchmarks/channels.py --draft DIR --target DIR --head NAME --questions FILE [--count N]
        [--threshold T] [--window W …] [--channel MBPS:MS …] [--tokens N] [--json PATH] [--quick]

A device, an edge with the head and between them, on the same machine, the product's emulator with
the paper's uplink rates: 172 Mbit/s (20 m from the router) and 498 Mbit/s (2 m). It tells neither
downlink rates nor RTTs: the same rates, and 20 and 5 ms, one on each side of its rule's 10 ms, are
ours. On each question `greedy` and `auto` take turns, `auto` with policy "threshold" between
`wisv-full` and `wisv-selective`, which measures the RTT before each request. Times are as spent,
without the reading of the prompt: the emulator is real time, the models run on this machine and
share it. "ratio" is `auto`'s time over `greedy`'s on the same question, median and quartiles over
questions.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import (
    Goal,
    Rows,
    Steps,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)

from pilotfish import Device, EdgeServer, Generation
from pilotfish.device_runtime.plan import Auto
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.judge.tasks import Gsm8k, Question, read_task_questions
from pilotfish.wire.request import Options

CHANNELS = ("172:20", "498:5")
BY_RULE = Auto(among=["wisv-full", "wisv-selective"], policy="threshold")
COLUMNS = (
    *("channel", "window", "method", "chose", "n", "right", "tokens", "rounds", "aal", "forgiven"),
    *("latency_s", "tokens_per_s", "ratio", "ratio_low", "ratio_high"),
)


def channel(text: str) -> tuple[str, Conditions]:
    """An argparse type: Mbit/s up and down, and the RTT in milliseconds."""
    mbps, rtt_ms = map(float, text.split(":"))
    return text, Conditions(rtt_s=rtt_ms * 1e-3, up_bps=mbps * 1e6, down_bps=mbps * 1e6)


def measured(
    args: argparse.Namespace, questions: Sequence[Question], steps: Steps
) -> dict[tuple[str, int, str], list[Generation]]:
    """The answers of every channel, window and method, question by question."""
    drafter, target = pair(args)
    results: dict[tuple[str, int, str], list[Generation]] = {}
    with throwaway_keys() as folder, EdgeServer(target, keys=folder, head=args.head) as edge:
        for name, conditions in args.channel:
            # a device for each: what one has measured of a channel is not the other's
            with (
                Emulator(edge.endpoint, conditions) as road,
                Device(drafter, road.endpoint, folder) as device,
            ):
                for window in args.window:  # the first passes of fresh engines are slow ones
                    device.generate("Hello!", protocol=BY_RULE, window=window, max_tokens=window)
                for number, question in enumerate(questions):
                    device.generate(
                        question.message, protocol="greedy", max_tokens=1
                    )  # both ends read the prompt
                    for window in args.window:
                        steps.next(f"{name}, window {window}, {question.key}")
                        for method, wanted in _ways(args, window, turned=number % 2 > 0):
                            answer = device.generate(question.message, **wanted)
                            results.setdefault((name, window, method), []).append(answer)
    return results


def _ways(args: argparse.Namespace, window: int, *, turned: bool) -> Iterable[tuple[str, Options]]:
    """The two methods, in the order in which they have their turns."""
    usual: Options = {"window": window, "max_tokens": args.tokens}
    ways: list[tuple[str, Options]] = [
        ("greedy", {"protocol": "greedy", **usual}),
        ("auto", {"protocol": BY_RULE, "threshold": args.threshold, **usual}),
    ]
    return reversed(ways) if turned else ways


def row(
    key: tuple[str, int, str],
    answers: Sequence[Generation],
    greedy: Sequence[Generation],
    questions: Sequence[Question],
) -> dict[str, Any]:
    """Of one channel, window and method."""
    name, window, method = key
    task = Gsm8k()
    right = [
        task.right(question, task.outcome(question, answer.text))
        for question, answer in zip(questions, answers, strict=True)
    ]
    rounds = sum(len(item.rounds) for item in answers)
    tokens = sum(len(item.tokens) for item in answers)
    seconds = sum(item.total_s for item in answers)
    ratios = [a.total_s / g.total_s for a, g in zip(answers, greedy, strict=True)]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    chose = Counter(item.protocol for item in answers)
    return {
        "channel": name,
        "window": window,
        "method": method,
        "chose": ", ".join(f"{count} {protocol}" for protocol, count in chose.most_common()),
        "n": len(answers),
        "right": sum(right),
        "tokens": tokens / len(answers),
        "rounds": rounds / len(answers),
        "aal": tokens / rounds,
        "forgiven": sum(item.notes["forgiven"] for item in answers) / len(answers),
        "latency_s": seconds / len(answers),
        "tokens_per_s": tokens / seconds,
        "ratio": median,
        "ratio_low": low,
        "ratio_high": high,
    }


def goals(rows: Rows) -> list[Goal]:
    """The paper's `auto` is faster than `greedy` in every group of bars."""
    autos = [item for item in rows if item["method"] == "auto"]
    return [
        at_most(f"auto over greedy, {item['channel']}, window {item['window']}", item["ratio"], 1.0)
        for item in autos
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    add = parser.add_argument
    add("--head", required=True, metavar="NAME", help="the edge's decision head")
    add("--questions", type=Path, required=True, metavar="FILE", help="as judge mine takes them")
    add("--count", type=int, default=10, metavar="N", help="questions (%(default)s)")
    add("--threshold", type=float, metavar="T", help="of the head (default: its own)")
    add(
        "--window",
        type=int,
        nargs="+",
        default=[10, 16, 24, 32, 64],
        metavar="W",
        help="draft tokens a round (10 16 24 32 64)",
    )
    add(
        "--channel",
        type=channel,
        nargs="+",
        default=[channel(item) for item in CHANNELS],
        metavar="MBPS:MS",
        help=f"rate both ways and RTT ({' '.join(CHANNELS)})",
    )
    add("--tokens", type=int, default=160, metavar="N", help="of an answer (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.count, args.window = 2, args.window[:1]
    wanted = read_task_questions(args.questions, Gsm8k())[: args.count]
    steps = Steps(len(args.channel) * len(args.window) * len(wanted))
    result = measured(args, wanted, steps)
    rows = [
        row(key, answers, result[(*key[:2], "greedy")], wanted) for key, answers in result.items()
    ]
    title = "figure 7: auto by the paper's rule over two emulated channels, as spent"
    return conclude(args, title, COLUMNS, rows, goals(rows))


if __name__ == "__main__":
    sys.exit(main())
