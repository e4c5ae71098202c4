"""wisv's Table I and figures 3 to 5 for a pair and its head: what forgiving saves, and costs.

    python benchmarks/wisv.py --draft DIR --target DIR --head NAME [--ablation NAME …]
        --questions FILE [--count N] [--thresholds T,T,…] [--threshold T] --out FILE
        [--draft-ms X --verify-ms W:X,W:X,…] [--json PATH] [--quick]
    python benchmarks/wisv.py --report FILE --head NAME [--ablation NAME …] [--json PATH]

`pilotfish judge sweep` over windows 10, 16, 24, 32, 64 at 500 and 20 Mbit/s and RTTs of 5 and
50 ms ("500:5"): accuracy, tokens and rounds are those of the real models, seconds are modelled
(`judge.costs`; as on other machines with --draft-ms and --verify-ms). --out is a sweep's file: what
was interrupted goes on there, and `pilotfish judge sweep --report` shows all of it.

The last table is Table I and figure 4: each window, link and method at one threshold, the head's
recommended one unless --threshold says another. "dsd" has the rounds of "greedy", for at
temperature 0 they accept alike. "gained" is in points of accuracy, "aal_gained" and "rounds_saved"
in per cent of greedy's; "low" to "high" are paired 95 % intervals over questions, of all three in
the JSON. Figure 3 is accuracy by threshold, figure 5 a head against its ablations: the same
threshold over every link, so that "forgiven" shows what the link alone does.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import Goal, Rows, at_least, at_most, conclude, options, pair, pair_options, show

from pilotfish.cli import main as pilotfish
from pilotfish.cli.judge.sweep import pace_of
from pilotfish.lab.judge.costs import DSD, FULL, GREEDY, SELECTIVE, Cost
from pilotfish.lab.judge.figures import Figure, costs, figures
from pilotfish.lab.judge.sweep_file import LinkProfile, SweepFile, SweepHeader, SweepSetting
from pilotfish.lab.judge.sweeping import passes

WINDOWS = (10, 16, 24, 32, 64)
LINKS = ("500:5", "500:50", "20:5", "20:50")
AAL_GAINED, ROUNDS_SAVED, LOST = 60.8, 37.3, 1.0  # per cent, per cent, points: §VI-B
NOTICED = 1.0  # points of the forgiven share: an effect of the link, or none
TABLE1 = [
    *("link", "window", "method", "right", "gained", "gained_low", "gained_high", "aal"),
    *("aal_gained", "rounds", "rounds_saved", "latency_s", "tokens_per_s"),
]
FIGURE3 = [
    *("link", "window", "threshold", "forgiven", "right", "right_greedy", "gained"),
    *("gained_low", "gained_high", "aal"),
]
FIGURE5 = ["head", "window", "link", "threshold", "forgiven", "right", "aal", "latency_s"]


class Swept:
    """A sweep's figures, by what they are of."""

    def __init__(self, remaining: SweepFile, args: argparse.Namespace) -> None:
        if remaining.plan is None or not remaining.tallies:
            raise SystemExit(f"The sweep file {remaining.path} has no answered question yet.")
        self.plan: SweepHeader = remaining.plan
        tallies = list(remaining.tallies.values())
        self._figures = figures(self.plan, tallies)
        self._costs = costs(self.plan, tallies, pace_of(remaining, args.draft_ms, args.verify_ms))

    def of(
        self,
        window: int,
        profile: LinkProfile,
        head: str | None = None,
        threshold: float | None = None,
    ) -> tuple[Figure, Mapping[str, Cost]]:
        """One setting; `greedy`'s without a head."""
        wanted = SweepSetting(window, head, threshold, profile if head else None)
        at = self.plan.settings.index(wanted)
        return self._figures[at], self._costs[at, profile]

    def thresholds(self, head: str) -> list[float]:
        """The head's, ascending."""
        return sorted(self._swept(head))

    def nearest(self, head: str, threshold: float | None) -> float:
        """The one of the sweep that is nearest to this, or to the head's recommended one."""
        wanted = self.plan.heads[head]["recommended"] if threshold is None else threshold
        return min(self._swept(head), key=lambda item: abs(item - wanted))

    def _swept(self, head: str) -> set[float]:
        return {
            setting.threshold
            for setting in self.plan.settings
            if setting.head == head and setting.threshold is not None
        }


def table1(swept: Swept, head: str, threshold: float) -> Rows:
    """Table I and figure 4."""
    rows: Rows = []
    for profile in swept.plan.profiles:
        for window in swept.plan.windows:
            plain, plain_costs = swept.of(window, profile)
            judged, judged_costs = swept.of(window, profile, head, threshold)
            for method in (GREEDY, DSD):
                rows.append(_row(profile, method, plain, plain_costs[method]))
            for method in (FULL, SELECTIVE):
                rows.append(_row(profile, method, judged, judged_costs[method]) | _held(judged))
    return rows


def _row(profile: LinkProfile, method: str, figure: Figure, cost: Cost) -> dict[str, Any]:
    return {
        "link": f"{profile.mbps:g}:{profile.rtt_ms:g}",
        "mbps": profile.mbps,
        "rtt_ms": profile.rtt_ms,
        "window": figure.setting.window,
        "method": method,
        "n": figure.n,
        "right": 100.0 * figure.accuracy,
        "aal": figure.aal,
        "rounds": figure.rounds,
        "latency_s": cost.seconds,
        "tokens_per_s": figure.tokens / cost.seconds,
        "up_bytes": cost.up,
        "down_bytes": cost.down,
        "exchanges": cost.exchanges,
    }


def _held(figure: Figure) -> dict[str, Any]:
    """Against `greedy`, in points and per cent."""
    info: dict[str, Any] = {
        "threshold": figure.setting.threshold,
        "forgiven": 100.0 * figure.forgiven,
        "gained": 100.0 * figure.gained,
        "aal_gained": 100.0 * figure.aal_gained,
        "rounds_saved": 100.0 * figure.rounds_saved,
    }
    for name, (low, high) in (
        ("gained", figure.gained_within),
        ("aal", figure.aal_within),
        ("saved", figure.saved_within),
    ):
        info |= {f"{name}_low": 100.0 * low, f"{name}_high": 100.0 * high}
    return info


def figure3(swept: Swept, head: str) -> Rows:
    """Accuracy by threshold, at the first window."""
    window = swept.plan.windows[0]
    rows: Rows = []
    for profile in swept.plan.profiles:
        plain, _ = swept.of(window, profile)
        for threshold in swept.thresholds(head):
            item, cost = swept.of(window, profile, head, threshold)
            row = _row(profile, FULL, item, cost[FULL]) | _held(item)
            rows.append({**row, "right_greedy": 100.0 * plain.accuracy})
    return rows


def figure5(swept: Swept, heads: Sequence[str], threshold: float | None) -> Rows:
    """Each head at its threshold over every link."""
    rows: Rows = []
    for head in heads:
        at = swept.nearest(head, threshold)
        for window in swept.plan.windows:
            for profile in swept.plan.profiles:
                item, cost = swept.of(window, profile, head, at)
                row = _row(profile, FULL, item, cost[FULL]) | _held(item)
                rows.append({**row, "head": head})
    return rows


def moved(rows: Rows, head: str) -> float:
    """Points by which the head forgives more at the lowest rate than at the highest, on average."""
    ours = [row for row in rows if row["head"] == head]
    low, high = (pick(row["mbps"] for row in ours) for pick in (min, max))
    slow, fast = (
        [float(row["forgiven"]) for row in ours if row["mbps"] == rate] for rate in (low, high)
    )
    return sum(slow) / len(slow) - sum(fast) / len(fast)


def goals(table: Rows, fifth: Rows, heads: Sequence[str]) -> list[Goal]:
    """The paper's figures, and what the link should and should not do."""
    judged = [row for row in table if row["method"] == FULL]
    best = max(judged, key=lambda row: row["aal_gained"])
    where = f"window {best['window']}, {best['link']}"
    results = [
        at_least(f"AAL over greedy's, %, {where}", best["aal_gained"], AAL_GAINED),
        at_least(f"rounds saved, %, {where}", best["rounds_saved"], ROUNDS_SAVED),
        at_least(f"points of accuracy gained, {where}", best["gained"], -LOST),
        at_least("the same, worst", min(row["gained"] for row in judged), -LOST),
        at_least("forgiven at the low rate, points more", moved(fifth, heads[0]), NOTICED),
    ]
    return results + [
        at_most(f"the same of {head}, either way", abs(moved(fifth, head)), NOTICED)
        for head in heads[1:]
    ]


def measure(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Sweep, as a user does."""
    drafter, target = pair(args)
    windows, links = (WINDOWS[:2], LINKS[::3]) if args.quick else (WINDOWS, LINKS)
    values = {
        "draft": drafter,
        "target": target,
        "questions": args.questions,
        "count": args.count,
        "task": args.task,
        "thresholds": args.thresholds,
        "windows": ",".join(map(str, windows)),
        "links": ",".join(links),
        "max-tokens": args.max_tokens,
        "slots": args.slots,
        "out": args.out,
        "json": args.out.with_suffix(".json"),
    }
    if args.draft_ms and args.verify_ms:
        values["draft-ms"] = args.draft_ms
        values["verify-ms"] = ",".join(f"{width}:{ms}" for width, ms in args.verify_ms.items())
    words = [word for name, value in values.items() if value for word in (f"--{name}", str(value))]
    heads = [word for name in names for word in ("--head", name)]
    if code := pilotfish(["judge", "sweep", *words, *heads]):
        raise SystemExit(code)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    add = parser.add_argument
    add("--head", required=True, metavar="NAME", help="the head: name, or path of its files")
    add("--ablation", action="append", default=[], metavar="NAME", help="another, for figure 5")
    add("--questions", type=Path, metavar="FILE", help='JSON lines, "question" and "answer"')
    add("--count", type=int, metavar="N", help="the first N of them (default: all)")
    add("--task", default="gsm8k", help="see pilotfish judge mine (%(default)s)")
    add("--thresholds", metavar="T,T,…", help="to sweep (default: the quantiles of the curve)")
    add("--threshold", type=float, metavar="T", help="of Table I (default: recommended)")
    add("--max-tokens", type=int, default=160, metavar="N", help="an answer's (%(default)s)")
    add("--slots", type=int, default=8, metavar="N", help="questions at a time (%(default)s)")
    add("--draft-ms", type=float, metavar="X", help="a drafter's pass (default: measured)")
    add("--verify-ms", type=passes, metavar="W:X,…", help="the target's over W tokens")
    add("--out", type=Path, metavar="FILE", help="the sweep's file")
    add("--report", type=Path, metavar="FILE", help="only show what is there")
    args = parser.parse_args()
    if not args.report:
        if not args.questions or not args.out:
            parser.error("--questions and --out are needed, or --report")
        if args.quick:
            args.count = 2
        measure(args, [args.head, *args.ablation])
    swept = Swept(SweepFile(args.report or args.out), args)
    heads = [Path(name).name.removesuffix(".json") for name in (args.head, *args.ablation)]
    unknown = [name for name in heads if name not in swept.plan.heads]
    if unknown:
        parser.error(f"{unknown[0]} is not in this sweep: {', '.join(swept.plan.heads)}")
    threshold = swept.nearest(heads[0], args.threshold)
    table, fifth = table1(swept, heads[0], threshold), figure5(swept, heads, args.threshold)
    n = table[0]["n"]
    show(args, f"figure 3: accuracy by threshold, n = {n}", FIGURE3, figure3(swept, heads[0]))
    show(args, f"figure 5: heads over links, modelled latency, n = {n}", FIGURE5, fifth)
    title = f"Table I, figure 4: {heads[0]} at {threshold:.3g}, modelled latency, n = {n}"
    return conclude(args, title, TABLE1, table, goals(table, fifth, heads))


if __name__ == "__main__":
    sys.exit(main())
