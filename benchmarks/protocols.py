"""All protocols in one table from one run: acceptance, bytes and speed against the target alone.

    python benchmarks/protocols.py [--json PATH] [--quick] [--draft DIR|PRECISION …] [--target DIR]
                                   [--rtt MS …] [--only PROTOCOL,…] [--apart]

Real rounds of four draft tokens (of at most sixteen where the window is "auto") over an edge
process, with CURVE over loopback, temperature 1; greedy and its baseline at temperature 0. The
protocols take turns prompt by prompt. "alpha" is the share accepted of the positions that were
verified, bytes are frames as sent, "draft_ms" and "verify_ms" medians of a round; "tokens_per_s"
and "speedup", over `stream` at the same temperature, leave out each answer's first round.

Several drafters, each a folder or a precision of the default model, take turns as well, so that
before and after stand in one run. Each RTT is a link of `emulation`, 0 none. With --apart the
edge has one half of the cores and the devices have the other, as two machines would.

The columns "modelled" are not measured. They are the speed-up over the target alone on a link of 1
or 10 Mbit/s each way with an RTT of 50 ms, by the papers' cost model with what was measured here:
N = tokens per round, T = draft + T_comm + verify, T_comm = RTT + 8·(bytes up + bytes down)/R, over
1/T_LLM (tslt (5) and (10), dssd §2; docs/papers.md, corrections). No goal hangs on these figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from _cases import Case, connected_all, take_turns
from _common import Rows, Steps, conclude, options

from pilotfish import Device
from pilotfish.cli.export import default_artifact, default_pair
from pilotfish.engines.manifest import Precision
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.request import AUTO, Options

CASES: dict[str, Options] = {
    "stream, T=0": {"protocol": "stream", "temperature": 0.0},
    "greedy, T=0": {"protocol": "greedy", "temperature": 0.0},
    "stream": {"protocol": "stream"},
    "dsd": {"protocol": "dsd"},
    "tslt, K=32": {"protocol": "tslt", "draft_top_k": 32},
    "tslt, K=64": {"protocol": "tslt", "draft_top_k": 64},
    "tslt, K=320": {"protocol": "tslt", "draft_top_k": 320},
    "tslt, ρ=0.95": {"protocol": "tslt", "draft_top_p": 0.95},
    "dssd": {"protocol": "dssd"},
    "coupled": {"protocol": "coupled"},
    "tree ⟨2,2,1,1⟩": {"protocol": "tree"},
    "greedy 8, T=0": {"protocol": "greedy", "window": 8, "temperature": 0.0},
    "coupled 8": {"protocol": "coupled", "window": 8},
    "tslt, K=64, auto": {"protocol": "tslt", "draft_top_k": 64, "window": "auto"},
    "coupled, auto": {"protocol": "coupled", "window": "auto"},
    "auto, T=0": {"protocol": AUTO, "temperature": 0.0},
    "auto": {"protocol": AUTO},
}
RTT_S = 0.05
RATES_MBPS = (1, 10)  # each way
COLUMNS = (
    *(
        "rtt_ms",
        "drafter",
        "protocol",
        "window",
        "alpha",
        "tokens_per_round",
        "bytes_up",
        "bytes_down",
    ),
    *("draft_ms", "verify_ms", "tokens_per_s", "speedup"),
    *(f"modelled_{rate}M" for rate in RATES_MBPS),
)


def row(case: Case, alone: Case, drafter: str, rtt_ms: float) -> dict[str, float | int | str]:
    """The figures of a case; ``alone`` is `stream` at the same temperature."""
    tokens = float(np.mean([len(r.tokens) for r in case.rounds]))
    up, down = case.mean("uplink_bytes"), case.mean("downlink_bytes")
    figures: dict[str, float | int | str] = {
        "rtt_ms": rtt_ms,
        "drafter": drafter,
        "protocol": case.name,
        "rounds": len(case.rounds),
        "window": case.mean("window"),
        "alpha": case.acceptance,
        "tokens_per_round": tokens,
        "bytes_up": up,
        "bytes_down": down,
        "draft_ms": case.stage_ms("draft"),
        "verify_ms": case.stage_ms("verify"),
        "tokens_per_s": case.tokens_per_s,
        "speedup": case.tokens_per_s / alone.tokens_per_s,
    }
    # tokens of `stream`, which auto may choose, come one after the other, without asking
    if case.options["protocol"] not in (STREAM, AUTO):
        computed = case.stage_ms("draft") + case.stage_ms("verify")
        for rate in RATES_MBPS:
            link = (RTT_S + 8.0 * (up + down) / (rate * 1e6)) * 1e3
            gain = tokens / (computed + link) * alone.stage_ms("verify")
            figures[f"modelled_{rate}M"] = gain
    return figures


def on_link(args: argparse.Namespace, rtt_ms: float, wanted: Sequence[str], steps: Steps) -> Rows:
    """All rows of one link."""
    prompts, tokens = (3, 40) if args.quick else (8, 128)
    drafters = [named(text) for text in args.draft] or [("default", default_pair()[0])]
    target = args.target or default_pair()[1]
    paths = [path for _, path in drafters]
    results: list[tuple[str, Case, Device]] = []
    with connected_all(paths, target, rtt_s=rtt_ms * 1e-3, apart=args.apart) as devices:
        named_devices = [
            (name, device) for (name, _), device in zip(drafters, devices, strict=True)
        ]
        for case in wanted:  # one after the other on all drafters, so that load falls on all alike
            if CASES[case]["protocol"] == STREAM:  # nothing is drafted: once is enough
                results.append(("-", Case(case, CASES[case]), devices[0]))
            else:
                results += [
                    (name, Case(case, CASES[case]), device) for name, device in named_devices
                ]
        turns = [(case, device) for _, case, device in results]
        take_turns(turns, prompts=prompts, tokens=tokens, steps=steps)
    alone_at = {
        case.options.get("temperature", 1.0): case
        for _, case, _ in results
        if case.options["protocol"] == STREAM
    }
    return [
        row(case, alone_at[case.options.get("temperature", 1.0)], name, rtt_ms)
        for name, case, _ in results
    ]


def named(text: str) -> tuple[str, Path]:
    """A drafter and what to call it: the default model in a precision, or a folder."""
    for precision in get_args(Precision):
        if text == precision:
            return text, default_artifact(precision)
    return Path(text).name, Path(text)


def main() -> int:
    parser = options(__doc__)
    add = parser.add_argument
    add("--draft", action="append", default=[], metavar="DIR|PRECISION", help="may be repeated")
    add("--target", type=Path, metavar="DIR", help="default: the one of `pilotfish demo`")
    add("--rtt", type=float, nargs="+", default=[0.0], metavar="MS", help="of the link (0)")
    add("--only", type=lambda text: text.split(","), metavar="P,…", help="these, beside stream")
    add("--apart", action="store_true", help="each end has a half of the cores")
    args = parser.parse_args()
    wanted = [
        name
        for name, case in CASES.items()
        if args.only is None or case["protocol"] in (STREAM, *args.only)
    ]
    steps = Steps(len(args.rtt) * (3 if args.quick else 8))
    rows: Rows = []
    for rtt_ms in args.rtt:
        rows += on_link(args, rtt_ms, wanted, steps)
    return conclude(args, "protocols, from one run", COLUMNS, rows, goals=[])


if __name__ == "__main__":
    sys.exit(main())
