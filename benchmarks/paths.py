"""Slow, long, lossy and broken paths under the kernel's own TCP: what each policy promises.

Both ends run in network namespaces with a path between them that is emulated packet by packet (see
docs/emulation.md); it takes root. Tiny models, so that the path is what takes the time. `up` and
`down` are the bytes that the application sent over all connections, `sent` what TCP made of them
with its repetitions; `ratio` compares the former with those of the same request over an ideal path.

slow: prompts of 12 and 40 kB over 64 kbit/s. rtt: long round trips. mtu: large packets vanish.
down: large replies. chat: an edge that has lost a long conversation, over a slow link. death: how
long until it shows. roam: another address in an answer. lossy, traces: answers for minutes over a
link that loses packets, or over a recorded one; see `_path_spells`.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from _common import Goal, Rows, Steps, at_most, conclude, options
from _path_cases import Row, down, mtu, rtt, slow
from _path_deaths import chat, death, roam
from _path_lab import Lab, laboratory
from _path_spells import answers_over, lossy

CASES: dict[str, Callable[[Lab, bool], Iterator[Row]]] = {
    "slow": slow,
    "rtt": rtt,
    "mtu": mtu,
    "down": down,
    "chat": chat,
    "death": death,
    "roam": roam,
    "lossy": lossy,
}
_COLUMNS = ("case", "what", "policy", "seconds", "code", "connections", "up", "up sent", "down")
_COLUMNS += ("down sent", "ratio", "said")
_SPELLS = ("what", "policy", "count", "failed", "p50 s", "longest gap s", "overdue s", "dead s")
_SPELLS += ("attempts", "cuts", "false cuts", "early cuts", "ratio", "ratio down")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument(
        "--cases", default=",".join(CASES), metavar="C,C,…", help="or traces (%(default)s)"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the release to measure"
    )
    parser.add_argument("--trace-up", metavar="FILE", help="for the case traces, Mahimahi's format")
    parser.add_argument("--trace-down", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=10.0, help="over traces (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and records there")
    args = parser.parse_args()
    names, rows = args.cases.split(","), []
    if "traces" in names and not (args.trace_up and args.trace_down):
        parser.error("the case traces needs --trace-up and --trace-down")
    with tempfile.TemporaryDirectory(prefix="pilotfish-paths-") as scratch:
        steps = Steps(len(names))
        with laboratory(args.python, (args.keep or Path(scratch)).resolve()) as lab:
            for name in names:
                steps.next(name)
                for row in _measured(name, lab, args):
                    rows.append({"case": name, **row})
                    print(rows[-1], file=sys.stderr)
    columns = _SPELLS if set(names) <= {"traces", "lossy"} else _COLUMNS
    return conclude(args, "kernel paths", columns, rows, _goals(rows))


def _measured(name: str, lab: Lab, args: argparse.Namespace) -> Iterator[Row]:
    if name != "traces":
        return CASES[name](lab, args.quick)
    traces = {"trace_up": args.trace_up, "trace_down": args.trace_down}
    return answers_over(lab, args.minutes * 60, lab.folder, **traces)


def _goals(rows: Rows) -> list[Goal]:
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    goals = [at_most("sent over needed", max(ratios), 1.2)] if ratios else []
    for row in rows:
        if "limit" in row:
            name = f"{row['case']}, {row['what']}, {row.get('policy', '')}: s"
            goals.append(at_most(name, row["seconds"], row["limit"]))
        if "false cuts" in row:
            goals.append(at_most("false cuts", row["false cuts"], 0))
    return goals


if __name__ == "__main__":
    sys.exit(main())
