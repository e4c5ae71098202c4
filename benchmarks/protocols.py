"""All protocols in one table from one run: acceptance, bytes and speed against the target alone.

    python benchmarks/protocols.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

Real rounds of four draft tokens (of at most sixteen where the window is "auto") over an edge
process, with CURVE over loopback, temperature 1; greedy and its baseline at temperature 0. The
protocols take turns prompt by prompt. "alpha" is the share accepted of the positions that were
verified, bytes are frames as sent, "draft_ms" and "verify_ms" medians of a round; "tokens_per_s"
and "speedup", over `stream` at the same temperature, leave out each answer's first round.

The columns "modelled" are not measured. They are the speed-up over the target alone on a link of 1
or 10 Mbit/s each way with an RTT of 50 ms, by the papers' cost model with what was measured here:
N = tokens per round, T = draft + T_comm + verify, T_comm = RTT + 8·(bytes up + bytes down)/R, over
1/T_LLM (tslt (5) and (10), dssd §2; DESIGN §6.3). On this machine drafter and target are of the
same size and share its cores, so that the drafter saves little: the figures compare protocols, and
no goal hangs on them.
"""

import sys

import numpy as np
from _cases import Case, connected, take_turns
from _common import Rows, Steps, conclude, options, pair, pair_options

from device_runtime.plan import Options

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
    "tslt, K=64, auto": {"protocol": "tslt", "draft_top_k": 64, "window": "auto"},
    "coupled, auto": {"protocol": "coupled", "window": "auto"},
}
RTT_S = 0.05
RATES_MBPS = (1, 10)  # each way
COLUMNS = (
    *("protocol", "window", "alpha", "tokens_per_round", "bytes_up", "bytes_down"),
    *("draft_ms", "verify_ms", "tokens_per_s", "speedup"),
    *(f"modelled_{rate}M" for rate in RATES_MBPS),
)


def row(case: Case, alone: Case) -> dict[str, float | int | str]:
    """The figures of a case; ``alone`` is `stream` at the same temperature."""
    tokens = float(np.mean([len(r.tokens) for r in case.rounds]))
    up, down = case.mean("uplink_bytes"), case.mean("downlink_bytes")
    figures: dict[str, float | int | str] = {
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
    if case.options["protocol"] != "stream":  # its tokens come one after the other, without asking
        computed = case.stage_ms("draft") + case.stage_ms("verify")
        for rate in RATES_MBPS:
            link = (RTT_S + 8.0 * (up + down) / (rate * 1e6)) * 1e3
            gain = tokens / (computed + link) * alone.stage_ms("verify")
            figures[f"modelled_{rate}M"] = gain
    return figures


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    drafter, target = pair(args)
    prompts, tokens = (3, 40) if args.quick else (8, 128)
    cases = [Case(name, wanted) for name, wanted in CASES.items()]
    with connected(drafter, target) as device:
        take_turns(cases, device, prompts=prompts, tokens=tokens, steps=Steps(prompts))
    alone = {
        case.options.get("temperature", 1.0): case
        for case in cases
        if case.options["protocol"] == "stream"
    }
    rows: Rows = [row(case, alone[case.options.get("temperature", 1.0)]) for case in cases]
    return conclude(args, "protocols, from one run", COLUMNS, rows, goals=[])


if __name__ == "__main__":
    sys.exit(main())
