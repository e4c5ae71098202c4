"""Protocol "auto" against every fixed choice: what it costs to let it choose.

    python benchmarks/auto.py [--json PATH] [--quick] [--draft DIR] [--target DIR]
                              [--rtt MS …] [--rate MBPS …] [--prompts N] [--tokens N]
                              [--trace-up FILE --trace-down FILE]

1. "measured". The default pair over emulated links (RTT 0, 20, 50 ms by 10, 50, 100 Mbit/s unless
   others are named, and one Mahimahi trace if it is named): "auto" and fixed protocols and windows
   take turns prompt by prompt, at temperature 0 and at 1, with `stream` to choose from and without.
   "auto_ms" is an answer's whole time over its tokens, "behind" how far that is behind the best
   fixed choice of the same link. That best one is the luckiest of many: its texts happened to be
   drafted well. So in "behind_other" each prompt's fixed choice is picked by the other prompts.
   After a link has changed, "auto" has two answers that do not count. A trace begins anew with each
   prompt.
2. "valued". What "auto" chose there, and everything that it might have chosen, by one table of
   costs that luck has little part in (`_auto_valued.py`). This is what the goal is about.
3. "slow target". The same table with 10 ms for a drafted token and 100 ms for a target pass; "auto"
   sees the recorded rounds with these times in them.
4. "followed". The link changes in the middle of an answer; what those before and after chose.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _auto_valued import Choice, Table, choices, slow_target, valued
from _cases import Case
from _common import PROMPTS, Goal, Rows, Steps, at_most, conclude, options, pair, pair_options
from links import RATES_MBPS, RTTS_MS, emulated

from pilotfish import Device
from pilotfish.device_runtime.plan import Auto
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.speculation.latency import Link
from pilotfish.wire.request import Options

DRAFTING = {0.0: ("greedy",), 1.0: ("coupled", "tslt", "tree", "dssd", "dsd")}
FIXED: dict[float, dict[str, tuple[int, ...]]] = {
    0.0: {"stream": (0,), "greedy": (1, 2, 4, 8)},
    1.0: {
        "stream": (0,),
        "coupled": (1, 2, 4, 8),
        "tslt": (1, 2, 4),
        "tree": (3,),
        "dssd": (2, 4),
        "dsd": (2,),
    },
}
COLUMNS = (
    *("part", "link", "temperature", "stream_too", "auto_ms", "chose", "best_ms", "best"),
    *("behind", "behind_other", "stream_ms", "pays"),
)


def named(protocol: str, window: int) -> str:
    """As tables say it."""
    return f"{protocol} {window}" if window else protocol


def fixed_cases(temperature: float) -> list[Case]:
    """One case for each fixed choice."""
    results = []
    for protocol, windows in FIXED[temperature].items():
        for window in windows:
            wanted: Options = {"protocol": protocol, "temperature": temperature}
            if window:
                wanted["window"] = window
            results.append(Case(named(protocol, window), wanted))
    return results


def auto_cases(temperature: float) -> list[Case]:
    """With `stream` to choose from, and without."""
    drafting = DRAFTING[temperature]
    return [
        Case(
            f"auto{', stream too' if more else ''}",
            {"protocol": Auto(among=[*drafting, *more]), "temperature": temperature},
        )
        for more in (("stream",), ())
    ]


def ms_per_token(case: Case, prompts: Sequence[int]) -> float:
    """Over the answers to these prompts."""
    answers = [case.generations[at] for at in prompts]
    return 1e3 * sum(a.total_s for a in answers) / sum(len(a.tokens) for a in answers)


def behind_other(auto: Case, fixed: Sequence[Case]) -> float:
    """How far behind the fixed choice that the other prompts would have picked."""
    ours = theirs = 0.0
    everything = range(len(auto.generations))
    for held_out in everything:
        others = [at for at in everything if at != held_out]
        best = min(fixed, key=lambda case: ms_per_token(case, others))
        ours += ms_per_token(auto, [held_out])
        theirs += ms_per_token(best, [held_out])
    return ours / theirs - 1.0


def measured(
    device: Device,
    emulator: Emulator,
    conditions: Conditions,
    temperature: float,
    *,
    prompts: int,
    tokens: int,
    shift: int,
) -> Rows:
    """One link, one temperature: a row for "auto" with `stream` and one for without."""
    emulator.set(conditions)
    fixed, autos = fixed_cases(temperature), auto_cases(temperature)
    cases = [*fixed, *autos]
    for case in autos:
        for seed in (90, 91):
            case.run(device, PROMPTS[seed % len(PROMPTS)], seed, tokens)
        case.generations.clear()
    for turn in range(prompts):
        emulator.set(conditions)  # a trace begins anew
        first = (turn * 7 + shift) % len(cases)
        for case in (*cases[first:], *cases[:first]):
            case.run(device, PROMPTS[turn], 100 * shift + turn, tokens)
    everything = range(prompts)
    costs = {case.name: ms_per_token(case, everything) for case in cases}
    rows: Rows = []
    for auto in autos:
        with_stream = "stream" in auto.name
        allowed = [case for case in fixed if with_stream or case.name != "stream"]
        best = min(allowed, key=lambda case: costs[case.name])
        drafting = min(costs[case.name] for case in fixed if case.name != "stream")
        picked = [
            Choice(g.choice.protocol, g.choice.window, temperature)
            for g in auto.generations
            if g.choice is not None
        ]
        rows.append(
            {
                "part": "measured",
                "temperature": temperature,
                "stream_too": with_stream,
                "auto_ms": costs[auto.name],
                "chose": ", ".join(dict.fromkeys(map(str, picked))),
                "best_ms": costs[best.name],
                "best": best.name,
                "behind": costs[auto.name] / costs[best.name] - 1.0,
                "behind_other": behind_other(auto, allowed),
                "stream_ms": costs["stream"],
                "pays": drafting < costs["stream"],
                "picked": picked,
                "pings": sum(g.probing.pings for g in auto.generations),
                "fixed_ms": {case.name: costs[case.name] for case in fixed},
            }
        )
    return rows


def followed(device: Device, link: Emulator, *, tokens: int) -> Rows:
    """The link changes in the middle of the third of eight answers."""
    near = Conditions(up_bps=100e6, down_bps=100e6)
    far = Conditions(rtt_s=0.05, up_bps=10e6, down_bps=10e6)
    rows: Rows = []
    for before, after in ((near, far), (far, near)):
        link.set(before)
        auto = Case("auto", {"protocol": Auto(among=["coupled"])})
        for seed in range(8):
            wanted: Options = {**auto.options, "temperature": 1.0, "seed": seed}
            pieces = device.stream(PROMPTS[seed % len(PROMPTS)], **wanted, max_tokens=tokens)
            next(pieces)
            if seed == 2:
                link.set(after)
            for _ in pieces:
                pass
            answer = device.last
            assert answer is not None
            assert answer.choice is not None
            assert answer.link is not None
            rtt = answer.link.rtt
            rows.append(
                {
                    "part": "followed",
                    "link": f"RTT {'→'.join(f'{c.rtt_s * 1e3:g}' for c in (before, after))} ms",
                    "answer": seed,
                    "chose": named(answer.choice.protocol, answer.choice.window),
                    "told_rtt_ms": None if rtt is None else rtt.value * 1e3,
                    "auto_ms": 1e3 * answer.total_s / len(answer.tokens),
                }
            )
    return rows


def links(args: argparse.Namespace) -> dict[str, Conditions]:
    """The emulated links by name."""
    results = {
        f"{rtt:g} ms, {rate:g} Mbit/s": Conditions(
            rtt_s=rtt * 1e-3, up_bps=rate * 1e6, down_bps=rate * 1e6
        )
        for rtt in args.rtt
        for rate in args.rate
    }
    if args.trace_up is not None and args.trace_down is not None:
        results[f"20 ms, {args.trace_up.stem}"] = Conditions(
            rtt_s=0.02, trace_up=args.trace_up, trace_down=args.trace_down
        )
    return results


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    for name, unit, values in (("rtt", "MS", RTTS_MS), ("rate", "MBPS", RATES_MBPS)):
        parser.add_argument(
            f"--{name}", type=float, nargs="+", default=values, metavar=unit, help="of the links"
        )
    parser.add_argument("--prompts", type=int, metavar="N", help="for each choice (default: 3)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each answer (default: 40)")
    for way in ("up", "down"):
        parser.add_argument(f"--trace-{way}", type=Path, metavar="FILE", help="a Mahimahi trace")
    args = parser.parse_args()
    prompts, tokens = (2, 24) if args.quick else (3, 40)
    prompts, tokens = args.prompts or prompts, args.tokens or tokens
    wanted = links(args)
    steps = Steps(len(wanted) + 9)
    rows: Rows = []
    with emulated(*pair(args)) as (device, link):
        device.generate(PROMPTS[0], protocol="greedy", max_tokens=8)
        for shift, (name, conditions) in enumerate(wanted.items()):
            steps.next(name)
            for temperature in FIXED:
                result = measured(
                    device,
                    link,
                    conditions,
                    temperature,
                    prompts=prompts,
                    tokens=tokens,
                    shift=shift,
                )
                rows += [{"link": name, **row} for row in result]
        steps.next("a link that changes in the middle of an answer")
        rows += followed(device, link, tokens=tokens)
        link.set(Conditions())
        table = Table(device, prompts=prompts, tokens=tokens, steps=steps)
        assert device.welcome is not None
        vocab_size = device.welcome.vocab_size
    rated = {
        name: Link(rtt_s=item.rtt_s, up_bps=item.up_bps, down_bps=item.down_bps)
        for name, item in wanted.items()
        if item.up_bps is not None and item.down_bps is not None
    }
    for row in [row for row in rows if row["link"] in rated]:
        allowed = choices(row["temperature"], stream=row["stream_too"])
        about = {key: row[key] for key in ("link", "temperature", "stream_too")}
        rows.append(
            {"part": "valued", **about} | valued(table, row["picked"], allowed, rated[row["link"]])
        )
    rows += slow_target(table, rated, vocab_size)
    goals: list[Goal] = [
        at_most(
            f"{part}, stream {'too' if too else 'left out'}: how far auto is behind",
            max(r[column] for r in rows if r["part"] == part and r["stream_too"] == too),
            0.10,
        )
        for part, column in (
            ("measured", "behind_other"),
            ("valued", "behind"),
            ("slow target", "behind"),
        )
        for too in (True, False)
    ]
    return conclude(args, "auto against fixed choices", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
