"""How large is the run file of a month of `field watch`, and how long do its writes take then?

    python benchmarks/watch_month.py [--days 30] [--json PATH] [--quick]

A few rounds of a real watch are recorded: a tiny pair, a link of 20 ms, a probe and four answers of
16 tokens a round. Then these rounds are written again and again, by the code that a watch writes
with (`RowBuffer`, `forget_old`), as if they were five minutes apart: 8,640 rounds are 30 days. A
probe also gets the values of a modem and of a receiver. Each of the cases bounds the file in
another way; the last one has the bounds that a watch has by default, and is 33 days long. The times
are those of the disk of the temporary folder ($TMPDIR); each write is synced.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _common import Goal, Rows, Steps, at_least, at_most, conclude, free_port, options
from _daemons import CommandProcess

from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Probe
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_facts import Facts, Watch
from pilotfish.lab.field.watch.retention import forget_old
from pilotfish.lab.field.watch.row_buffer import RowBuffer
from pilotfish.lab.field.watch.watch_file import reopen
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from tests.support.tiny import tiny_pair

EVERY_S, DAY_S = 300.0, 86400.0
RTT_S = 0.02
PROTOCOLS = ("stream", "greedy", "ahead", "auto")
SIGNAL: dict[str, float | str] = {
    "source": "ModemManager",
    "technology": "lte",
    "rsrp_dbm": -97.5,
    "rsrq_db": -11.2,
    "snr_db": 9.4,
    "rssi_dbm": -66.8,
}
POSITION: dict[str, float | str] = {
    "lat": 52.520008,
    "lon": 13.404954,
    "alt_m": 34.12,
    "error_m": 4.87,
    "speed_m_s": 0.13,
}
BEGUN = (
    *("id", "protocol", "window", "prompt", "repeat", "warm_up", "temperature", "seed"),
    *("started_unix_s", "point", "clock_s", "rtts", "rounds", "at_s"),
)  # fields of an answer that `end` does not take
COLUMNS = ("bounds", "days", "days kept", "largest MB", "kB a round", "write ms", "at the end ms",
           "longest ms", "open s")  # fmt: skip


@dataclass(frozen=True)
class Round:
    """A probe and its answers."""

    probe: Probe
    answers: list[Answer]


@dataclass(frozen=True)
class Case:
    """Bounds of a file, and for how many days it is written."""

    name: str
    days: float
    keep_s: float | None = None
    most_bytes: int | None = None


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--days", type=float, help="length (30; with --quick 3)")
    args = parser.parse_args()
    days = args.days or (3.0 if args.quick else 30.0)
    default = WatchSettings(edge="", out=Path())
    few_bytes = round(1e6 * days)  # about a quarter of what such a time takes
    cases = [
        Case("none", days),
        Case(f"--keep {days / 4:g}d", days, keep_s=days / 4 * DAY_S),
        Case(f"--most-bytes {few_bytes / 1e6:g}MB", days, most_bytes=few_bytes),
        Case("default", 1.1 * days, keep_s=default.keep_s, most_bytes=default.most_bytes),
    ]
    steps = Steps(1 + len(cases))
    rows: Rows = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="pilotfish-month-") as name:
        folder = Path(name)
        steps.next("recording real rounds")
        facts, rounds = real_rounds(folder)
        for case in cases:
            steps.next(f"bounds: {case.name}")
            row, of_case = write(folder / "month.pilotfish", case, facts, rounds)
            print(f"  {row}", file=sys.stderr)
            rows.append(row)
            goals += of_case
    return conclude(args, title(args, rounds), COLUMNS, rows, goals)


def title(args: argparse.Namespace, rounds: list[Round]) -> str:
    tokens = {answer.tokens for each in rounds for answer in each.answers}
    return f"a round: a probe and {len(PROTOCOLS)} answers of {max(tokens)} tokens"


def real_rounds(folder: Path) -> tuple[Facts, list[Round]]:
    """Watch a real edge for a short time; return the facts and the rounds of the file."""
    _, target = tiny_pair(folder / "pair")
    out, port, prompts = folder / "short.pilotfish", free_port(), folder / "prompts.txt"
    prompts.write_text("abc\nbcd ef\nfed\n")
    edge = CommandProcess(
        *("edge", "serve", "--target", target, "--threads", 1),
        *("--listen", f"tcp://127.0.0.1:{port}"),
        log=folder / "edge.log",
    )
    try:
        with Emulator(f"tcp://127.0.0.1:{port}", Conditions(rtt_s=RTT_S)) as link:
            command = [sys.executable, "-m", "pilotfish", "field", "watch", "--out", str(out)]
            command += ["--edge", link.endpoint, "--every", "6s", "--for", "36s", "--threads", "1"]
            command += ["--protocols", ",".join(PROTOCOLS), "--prompts", str(prompts)]
            subprocess.run(command, check=True, capture_output=True)
    finally:
        edge.kill()
    with Run.open(out) as run:
        answers = list(run.answers())
        rounds = [
            Round(probe, [each for each in answers if each.repeat == int(probe.clock_s // 6.0)])
            for probe in run.probes()
        ]
        whole = [each for each in rounds if len(each.answers) == len(PROTOCOLS)]
        if not whole:
            raise SystemExit("no round was whole: is the machine very busy?")
        return run.facts, whole


def write(
    path: Path, case: Case, facts: Facts, rounds: list[Round]
) -> tuple[dict[str, Any], list[Goal]]:
    """Write a file with the bounds of the case; return its figures, and how it keeps to them."""
    watch = Watch(every_s=EVERY_S, keep_s=case.keep_s, most_bytes=case.most_bytes)
    facts = replace(facts, watch=watch)
    rows = RowBuffer(Recorder.create(path, facts), lambda: reopen(path, facts))
    count, took_s, largest = round(case.days * DAY_S / EVERY_S), [], 0
    for number in range(count):
        clock_s = number * EVERY_S + 0.125
        took_s.append(timed(partial(write_round, rows, facts, rounds, number, clock_s)))
        largest = max(largest, size(path))
        if rows.problem:
            raise SystemExit(rows.problem)
    rows.close()
    open_s = timed(lambda: reopen(path, facts).close())
    with Run.open(path) as run:
        times_s = [probe.clock_s for probe in run.probes()]
    some = max(1, min(288, count // 3))
    first_s, last_s = np.array(took_s[:some]), np.array(took_s[-some:])
    row = {
        "bounds": case.name,
        "days": case.days,
        "days kept": round(len(times_s) * EVERY_S / DAY_S, 2),
        "largest MB": round(largest / 1e6, 1),
        "bytes at the end": size(path),
        "kB a round": round(size(path) / len(times_s) / 1e3, 1),
        "write ms": round(1e3 * float(np.median(first_s)), 1),
        "at the end ms": round(1e3 * float(np.median(last_s)), 1),
        "longest ms": round(1e3 * max(took_s), 1),
        "open s": round(open_s, 2),
    }
    path.unlink()
    return row, goals(case, row, largest, times_s)


def goals(case: Case, row: dict[str, Any], largest: int, times_s: list[float]) -> list[Goal]:
    name = f"bounds {case.name}"
    results = [
        at_least(f"{name}: days kept", row["days kept"], 1.0 / 288),
        at_most(f"{name}: ms to write a round at the end", row["at the end ms"], 50.0),
    ]
    if case.most_bytes is not None:
        results.append(at_most(f"{name}: largest file and log, bytes", largest, case.most_bytes))
    if case.keep_s is not None:
        age_s = times_s[-1] - times_s[0]
        results.append(at_most(f"{name}: age of the oldest row, s", age_s, case.keep_s + EVERY_S))
    return results


def write_round(
    rows: RowBuffer, facts: Facts, rounds: list[Round], number: int, clock_s: float
) -> None:
    """Write a round as a watch does."""
    template = rounds[number % len(rounds)]
    unix_s = facts.starts[0].unix_s + clock_s
    rows.add_probe(
        replace(
            template.probe,
            clock_s=clock_s,
            began_unix_s=unix_s,
            signal=dict(SIGNAL),
            position=dict(POSITION),
        )
    )
    for answer in template.answers:
        begun = replace(answer, clock_s=clock_s + 1, started_unix_s=unix_s + 1, repeat=number)
        answer_id = rows.begin(begun)
        for at, (at_s, round_) in enumerate(zip(answer.at_s, answer.rounds, strict=True)):
            rows.add_round(answer_id, at, at_s, round_)
        rows.add_rtts(answer_id, answer.rtts)
        columns = {each.name: getattr(answer, each.name) for each in fields(Answer)}
        rows.end(answer_id, **{key: columns[key] for key in columns if key not in BEGUN})
    assert facts.watch is not None
    rows.tidy(partial(forget_old, watch=facts.watch, clock_s=clock_s))


def size(path: Path) -> int:
    """Return the bytes of the file and of SQLite's log."""
    log = path.with_name(f"{path.name}-wal")
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def timed(act: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    sys.exit(main())
