"""Tables of `ahead.py` that are no grid: whose hints, and first tokens."""

import argparse
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from _ahead_cells import Cell, Ends, Spread, Texts, Way, ends, measured, options_of
from _ahead_prompts import REPEATING, long_prompt
from _common import Goal, Rows, Steps, at_most

from pilotfish.emulation.emulator import Conditions
from pilotfish.wire.protocols import STREAM

FIRST_MOST = 1.05
LONG = 1500  # tokens of a prompt
Measured = tuple[str, Rows, Rows, list[Goal]]


class Bench(NamedTuple):
    """What was asked of the benchmark."""

    args: argparse.Namespace

    @property
    def drafter(self) -> Path:
        """The first one that was named."""
        path: Path = next(iter(self.args.drafters.values()))
        return path

    def options(self, **more: Any) -> dict[str, Any]:
        """Those of `ahead`; what stands in its place has no options of its own."""
        protocol = self.args.protocol
        return {"protocol": protocol, **(more if protocol == "ahead" else {})}


# Hints of the edge's own


def own_figures(bench: Bench) -> Measured:
    """Whose hints, by kind of prompt and RTT; two edges, one of which hosts the drafter."""
    args = bench.args
    rtts = args.rtt or ((50.0,) if args.quick else (20.0, 50.0, 100.0))
    count = 1 if args.quick else 4
    rows: Rows = []
    texts, steps = Texts(args.target), Steps(len(rtts) * len(REPEATING) * count)
    drafters = {"device": bench.drafter}
    with (
        ends(drafters, args.target) as plain,
        # on both cores: where it drafts, the device does not
        ends(drafters, args.target, shared=True, draft=bench.drafter) as hosted,
    ):
        for ms in rtts:
            for both in (plain, hosted):
                both.change(Conditions(rtt_s=ms * 1e-3))
            for kind, wanted in REPEATING.items():
                every = _source_name(bench, plain, hosted)
                cell = measured(
                    every, wanted[:count], temperature=0.0, tokens=args.tokens, steps=steps,
                    label=f"own: RTT {ms:g}, {kind}",
                )  # fmt: skip
                rows.append(_own_row(ms, kind, cell, texts.compared(cell, wanted, 0.0)))
    for_people = [
        {"RTT": f"{row['rtt_ms']:g}", "prompts": row["kind"]}
        | {name: str(Spread(*each.values())) for name, each in row["times"].items()}
        | {"sources (all)": row["sources"], "texts": options_of(row["texts"])}
        for row in rows
    ]
    differ = sum(row["texts"]["differ"] for row in rows)
    return (
        "whose hints, over stream", rows, for_people,
        [at_most("own: texts that differ", differ, 0)],
    )  # fmt: skip


def _source_name(bench: Bench, plain: Ends, hosted: Ends) -> list[Way]:
    device, there = plain.devices["device"], hosted.devices["device"]
    return [
        Way(STREAM, device, {"protocol": STREAM}),
        Way("device", device, bench.options(hints="device")),
        Way("device and text", device, bench.options(hints="all")),
        Way("text", device, bench.options(hints="edge")),
        Way("drafter at the edge", there, bench.options(hints="edge")),
        Way("all", there, bench.options(hints="all")),
    ]


def _own_row(ms: float, kind: str, cell: Cell, texts: dict[str, int]) -> dict[str, Any]:
    last = list(cell.all)[-1]
    shares = {name: item.sources() for name, item in cell.all.items() if name != STREAM}
    return {
        "table": "own",
        "rtt_ms": ms,
        "kind": kind,
        "times": {name: cell.times(name)._asdict() for name in cell.all if name != STREAM},
        "a_token": {name: item.a_token() for name, item in cell.all.items()},
        "accepted_by_source": shares,
        "sources": ", ".join(f"{name} {share:.2f}" for name, share in shares[last].items()),
        "texts": texts,
    }


# First tokens


def first(bench: Bench) -> Measured:
    """Prompts that neither end knows; ways take turns, with another prompt between any two."""
    args = bench.args
    prompts = 2 if args.quick else 6
    rtt_ms = (args.rtt or [20.0])[0]
    every = {STREAM: {"protocol": STREAM}, "ahead": bench.options()}
    taken: dict[str, list[float]] = {name: [] for name in every}
    steps = Steps(prompts)
    with ends(args.drafters, args.target) as both:
        both.change(Conditions(rtt_s=rtt_ms * 1e-3))
        device = next(iter(both.devices.values()))
        for number in range(prompts):
            steps.next("a long prompt")
            prompt = long_prompt(number, LONG, lambda text: len(device.prompt(text).ids))
            names = list(every)[:: 1 if number % 2 else -1]
            for name in names:
                device.generate(f"Forget {number}.", protocol="greedy", max_tokens=1)
                answer = device.generate(prompt, max_tokens=24, **every[name])
                taken[name].append(answer.first_token_s)
    ratio = Spread.of([b / a for a, b in zip(*taken.values(), strict=True)])
    rows: Rows = [
        {"table": "first", "rtt_ms": rtt_ms, "tokens": LONG, "ratio": ratio._asdict()}
        | {f"{name}_s": median(each) for name, each in taken.items()}
    ]
    for_people = [
        {"RTT": f"{rtt_ms:g}", "prompt": f"{LONG} tokens"}
        | {name: f"{median(each):.2f} s" for name, each in taken.items()}
        | {"ahead/stream": str(ratio)}
    ]
    goal = at_most("first: ahead's first token over stream's", ratio.mid, FIRST_MOST)
    return "first token", rows, for_people, [goal]
