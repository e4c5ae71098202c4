"""Tables of `ahead.py` with many devices at one edge, and with a hostile one."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _ahead_cells import Spread
from _ahead_fleet import Fleet, Served, fleet
from _ahead_prompts import questions
from _ahead_replayed import Pace, record, save
from _ahead_tables import Bench, Measured
from _common import Rows, Steps, at_least, at_most
from _daemons import memory_mib

from pilotfish.engines.artifact import Artifact
from pilotfish.wire.protocols import STREAM

OTHERS_KEEP, GROWTH_MOST = 0.97, 0.05
FLEET_RTT_MS, FLEET_DRAFTER = 50.0, Pace(0.006)
# A GPU's, and that of an edge at its limit, where the rows make the time.
FLEET_PACES = {"GPU": Pace(0.025, 0.0003), "at its limit": Pace(0.004, 0.004)}

# Many devices


@contextmanager
def _recording(bench: Bench, questions: Sequence[Any], tokens: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        recorded = record(bench.drafter, bench.args.target, questions, tokens)
        yield save(Path(name) / "texts.npz", recorded)


def fleets(bench: Bench) -> Measured:
    """Total tokens a second of a fleet that answers in one way, and of `stream` beside `ahead`."""
    args = bench.args
    sizes = args.devices or ([8] if args.quick else [8, 16])
    turns, seconds = (1, 4.0) if args.quick else (3, 8.0)
    wanted = questions(args.questions, args.prompts)
    steps = Steps(len(sizes) * len(FLEET_PACES))
    rows: Rows = []
    rtt_s = (args.rtt or [FLEET_RTT_MS])[0] * 1e-3
    with _recording(bench, wanted, args.tokens) as recording:
        for size in sizes:
            for name, pace in FLEET_PACES.items():
                steps.next(f"fleet: {size} devices, {name}")
                with fleet(
                    bench.drafter, args.target, recording, wanted, devices=size,
                    drafter_pace=FLEET_DRAFTER, target_pace=pace, rtt_s=rtt_s,
                ) as (devices, _):  # fmt: skip
                    row = _served(bench, devices, turns, seconds)
                rows.append({"table": "fleet", "devices": size, "pace": f"{name}: {pace}"} | row)
    for_people = [
        {"devices": row["devices"], "replayed pass": row["pace"]}
        | {name: _served_in_words(each) for name, each in row["ways"].items()}
        | {"stream beside ahead": f"{row['others']:.3f}", "errors": row["errors"]}
        for row in rows
    ]
    results = []
    for row in rows:
        where = f"{row['devices']} devices, {row['pace']}"
        total = row["ways"]["ahead"]["total"] / row["ways"][STREAM]["total"]
        results.append(at_least(f"fleet: ahead over stream, {where}", total, OTHERS_KEEP))
        if "limit" in row["pace"]:
            results.append(at_least(f"fleet: others, {where}", row["others"], OTHERS_KEEP))
    title = (
        f"fleets, replayed, RTT {1e3 * rtt_s:g} ms, {FLEET_DRAFTER} a draft: total tokens/s "
        "(edge ms, rows, passes a token)"
    )
    return title, rows, for_people, results


def _served(bench: Bench, devices: Fleet, turns: int, seconds: float) -> dict[str, Any]:
    size, tokens = devices.size, bench.args.tokens
    same = {"max_tokens": tokens}
    alone = {"protocol": STREAM, **same}
    ahead = bench.options() | same
    every: dict[str, list[dict[str, Any]]] = {STREAM: [alone] * size}
    for window in (2, 4) if bench.args.quick else (2, 4, 8):
        every[f"γ {window}"] = [{"protocol": "greedy", "window": window, **same}] * size
    every |= {"ahead": [ahead] * size, "half": [ahead, alone] * (size // 2)}
    seen: dict[str, list[Any]] = {name: [] for name in every}
    for _ in range(turns):
        for name, ways in every.items():
            seen[name].append(devices.run(ways, seconds))
    others = [
        sum(half.rates[1::2]) / sum(all_.rates[1::2])
        for half, all_ in zip(seen["half"], seen[STREAM], strict=True)
    ]
    results: dict[str, Any] = {"ways": {}, "others": median(others)}
    for name, each in seen.items():
        tokens = max(1, sum(item.tokens for item in each))
        results["ways"][name] = {
            "total": median(item.total for item in each),
            "least": min(min(item.rates) for item in each),
            "edge_ms": 1e3 * sum(item.counts.busy_s for item in each) / tokens,
            "rows": sum(item.counts.rows for item in each) / tokens,
            "passes": sum(item.counts.passes for item in each) / tokens,
        }
    results["errors"] = sum(len(item.errors) for each in seen.values() for item in each)
    return results


def _served_in_words(each: dict[str, Any]) -> str:
    a_token = f"{each['edge_ms']:.2f}, {each['rows']:.2f}, {each['passes']:.2f}"
    return f"{each['total']:.0f} ({a_token})"


# A hostile device


def hostile(bench: Bench) -> Measured:
    """Honest streams while a device beside them only streams, and while it hints nonsense."""
    args = bench.args
    size, turns, seconds = (4, 2, 4.0) if args.quick else (4, 6, 8.0)
    wanted = questions(args.questions, 4)
    rows: Rows = []
    with _recording(bench, wanted, args.tokens) as recording:
        for name, pace in {"real": None, "replayed": FLEET_PACES["GPU"]}.items():
            with fleet(
                bench.drafter, args.target, recording, wanted, devices=size, spare_keys=1,
                drafter_pace=FLEET_DRAFTER, target_pace=pace, rtt_s=0.0,
            ) as (devices, spare):  # fmt: skip
                results = _attacked(bench, devices, spare[0], recording, turns, seconds)
            rows += [{"table": "hostile", "target": name, "streams": size} | row for row in results]
    for_people = [
        {
            "target": row["target"],
            "nonsense": row["mode"],
            "honest streams": row["streams"],
            "tokens/s": f"{row['quiet']:.1f}",
            "beside it": f"{row['beside']:.1f}",
            "ratio": str(Spread(*row["ratio"].values())),
            "rows, ms a pass": "; ".join(f"{rows:.1f}, {ms:.1f}" for rows, ms in row["passes"]),
            "hints/s": f"{row['hints_per_s']:.0f}",
            "edge MiB, early and late": f"{row['early_mib']:.0f}, {row['late_mib']:.0f}",
        }
        for row in rows
    ]
    results = []
    for row in rows:
        growth = row["late_mib"] / row["early_mib"] - 1.0
        what = f"hostile, {row['target']} target, {row['mode']}"
        results.append(at_least(f"{what}: others' tokens/s", row["ratio"]["mid"], OTHERS_KEEP))
        results.append(at_most(f"{what}: growth of the edge's memory", growth, GROWTH_MOST))
    return "a device that hints nonsense", rows, for_people, results


def _attacked(
    bench: Bench, devices: Fleet, folder: Path, recording: Path, turns: int, seconds: float
) -> Rows:
    """A row for each kind of nonsense; memory is looked at as each turn of it ends.

    A flood is compared with the same work without sending: cores may share what they compute with.
    """
    ways = [{"protocol": STREAM, "max_tokens": bench.args.tokens}] * devices.size
    steps, rows = Steps(2 * turns), list[dict[str, Any]]()
    with _intruder(bench, devices, folder, recording) as process:
        devices.run(ways, seconds)
        for mode, instead in (("flood", "spin"), ("steady", "rest")):
            quiet, neighbour, memory, sent = [], [], [], 0
            for _ in range(turns):
                steps.next(f"hostile: without, and with a {mode}")
                options_of(process, instead)
                quiet.append(devices.run(ways, seconds))
                before = options_of(process, "rest")
                begun_s = time.monotonic()
                options_of(process, mode)
                neighbour.append(devices.run(ways, seconds))
                memory.append(memory_mib(devices.edge.pid)[0])
                sent += options_of(process, "rest")["sent"] - before["sent"]
                hinted_s = time.monotonic() - begun_s
            half = len(memory) // 2
            rows.append(
                {
                    "mode": mode,
                    "quiet": median(item.total for item in quiet),
                    "beside": median(item.total for item in neighbour),
                    "ratio": Spread.of(
                        [b.total / a.total for a, b in zip(quiet, neighbour, strict=True)]
                    )._asdict(),
                    "passes": [_a_pass(quiet), _a_pass(neighbour)],
                    "hints_per_s": sent / (turns * hinted_s),
                    "early_mib": median(memory[:half]),
                    "late_mib": median(memory[half:]),
                    "memory_mib": memory,
                }
            )
    return rows


def _a_pass(served: Sequence[Served]) -> tuple[float, float]:
    """Rows and milliseconds of a pass."""
    passes = max(1.0, sum(item.counts.passes for item in served))
    rows = sum(item.counts.rows for item in served) / passes
    return rows, 1e3 * sum(item.counts.busy_s for item in served) / passes


def options_of(process: "subprocess.Popen[str]", mode: str) -> dict[str, Any]:
    """Tell the device what to do; at "rest" it says what it has done."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(mode, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline()) if mode == "rest" else {}


@contextmanager
def _intruder(
    bench: Bench, devices: Fleet, folder: Path, recording: Path
) -> "Iterator[subprocess.Popen[str]]":
    vocab = Artifact.open(bench.args.target).manifest.vocab_size
    words = [devices.edge.endpoint, folder, recording, bench.args.protocol, vocab]
    script = Path(__file__).with_name("_ahead_hostile.py")
    process = subprocess.Popen(
        [sys.executable, script, *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.sched_setaffinity(process.pid, {sorted(os.sched_getaffinity(0))[-1]})
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
