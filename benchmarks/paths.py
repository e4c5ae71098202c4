"""Slow, long, lossy and broken paths under the kernel's own TCP: what each policy promises.

Both ends run in network namespaces with a path between them that is emulated packet by packet (see
docs/emulation.md); it takes root. Tiny models, so that the path is what takes the time. `sent over
needed` compares the payload of all connections, with repetitions, with that of the same request
over an ideal path.

slow: prompts of 12 and 40 kB over 64 kbit/s. rtt: long round trips. mtu: large packets vanish.
down: large replies. chat: an edge that has lost a long conversation, over a slow link. death: how
long until it shows. traces: answers over a recorded link, see `_path_traces`.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import Goal, Rows, Steps, at_most, conclude, options
from _path_lab import Lab, Outcome, laboratory, letters
from _path_traces import traced

POLICIES = ("fail", "local", "wait")
PATIENCE_S = 20
PIECES = ("--max-tokens", 8)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="(%(default)s)")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the release to measure"
    )
    parser.add_argument("--trace-up", metavar="FILE", help="for the case traces, Mahimahi's format")
    parser.add_argument("--trace-down", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=10.0, help="over traces (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    args = parser.parse_args()
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="pilotfish-paths-") as scratch:
        folder = args.keep or Path(scratch)
        names = args.cases.split(",")
        steps = Steps(len(names))
        with laboratory(args.python, folder.resolve()) as lab:
            for name in names:
                steps.next(name)
                for row in _case(name, lab, args):
                    rows.append({"case": name, **row})
                    print(rows[-1], file=sys.stderr)
    if "traces" in names:
        columns = ("what", "policy", "count", "failed", "p50 s", "longest gap s", "overdue s")
        columns += (
            "dead s",
            "connections",
            "cuts",
            "false cuts",
            "early cuts",
            "ratio",
            "ratio down",
        )
        return conclude(args, "answers over traces", columns, rows, _goals(rows))
    columns = ("case", "what", "policy", "seconds", "code", "connections", "up", "down", "ratio")
    return conclude(args, "kernel paths", (*columns, "said"), rows, _goals(rows))


def _case(name: str, lab: Lab, args: argparse.Namespace) -> Rows:
    if name != "traces":
        return CASES[name](lab, args.quick)
    return traced(lab, args.minutes * 60, args.trace_up, args.trace_down, lab.folder)


def _goals(rows: Rows) -> list[Goal]:
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    goals = [at_most("sent over needed", max(ratios), 1.2)] if ratios else []
    goals += [
        at_most(
            f"{row['case']}, {row['what']}, {row.get('policy', '')}: s",
            row["seconds"],
            row["limit"],
        )
        for row in rows
        if "limit" in row
    ]
    return goals


def _row(what: str, policy: str, outcome: Outcome) -> dict[str, object]:
    return {
        "what": what,
        "policy": policy,
        "seconds": outcome.seconds,
        "code": outcome.code,
        "connections": len(outcome.connections),
        "up": outcome.up_bytes,
        "down": outcome.down_bytes,
        "ends": [each.ended_by for each in outcome.connections],
        "said": outcome.said[:160],
    }


def slow(lab: Lab, quick: bool) -> Rows:
    """A prompt that takes seconds to cross."""
    rows = []
    for size in (9_000,) if quick else (9_000, 30_000):
        prompt = letters(size)
        lab.path.set(up_bps=None, down_bps=None, rtt_s=0.0)
        ideal = lab.ask(prompt, "wait", *PIECES)
        lab.path.set(up_bps=64e3, down_bps=1e6, rtt_s=0.1)
        for policy in POLICIES:
            outcome = lab.ask(prompt, policy, "--patience", PATIENCE_S, *PIECES)
            crossing_s = ideal.seconds + ideal.up_bytes * 8 / 64e3
            rows.append(
                _row(f"{ideal.up_bytes / 1e3:.0f} kB up, 64 kbit/s", policy, outcome)
                | {"ratio": outcome.up_bytes / ideal.up_bytes, "limit": 1.5 * crossing_s + 3}
            )
    return rows


def rtt(lab: Lab, quick: bool) -> Rows:
    """Long round trips: a satellite's, and worse."""
    rows = []
    lab.path.set(up_bps=None, down_bps=None)
    for rtt_s in (0.7, 1.5) if quick else (0.7, 1.5, 3.0):
        lab.path.set(rtt_s=rtt_s)
        what = f"RTT {rtt_s:g} s"
        probe = lab.run("probe", lab.endpoint, "--keys", lab.keys, within_s=120)
        rows.append(_row(f"{what}: probe", "", probe))
        policies = ("wait",) if rtt_s > 2 else ("fail", "wait")
        rows += [
            _row(what, policy, lab.ask("hi", policy, "--patience", 60, *PIECES))
            for policy in policies
        ]
        if rtt_s < 2:
            out = lab.folder / f"run-{rtt_s}.pilotfish"
            words = ["--protocols", "greedy", "--windows", 4, "--repeat", 1, "--warm-up", 0]
            words += ["--max-tokens", 8, "--draft", lab.folder / "draft", "--keys", lab.keys]
            words += ["--edge", lab.endpoint, "--out", out]
            rows.append(_row(f"{what}: field measure", "", lab.run("field", "measure", *words)))
    lab.path.set(rtt_s=0.0)
    return rows


def mtu(lab: Lab, quick: bool) -> Rows:
    """Packets above 600 bytes vanish, in one direction."""
    rows = []
    prompt = letters(3_600)
    lab.path.set(rtt_s=0.02)
    ideal = lab.ask(prompt, "wait", *PIECES)
    for way in ("up", "down"):
        lab.path.set(**{f"mtu_{way}": 600})
        probe = lab.run("probe", lab.endpoint, "--keys", lab.keys, within_s=60)
        rows.append(_row(f"hole {way}: probe", "", probe))
        lab.path.set(**{f"mtu_{way}": 1500})
    lab.path.set(mtu_up=600)
    for policy in POLICIES:
        outcome = lab.ask(prompt, policy, "--patience", PATIENCE_S, *PIECES, within_s=60)
        ratio = outcome.up_bytes / ideal.up_bytes
        rows.append(_row("hole up, 5 kB", policy, outcome) | {"ratio": ratio})
    lab.path.set(mtu_up=1500)
    return rows


def down(lab: Lab, quick: bool) -> Rows:
    """A reply that takes seconds to cross, or cannot: the scores of a prompt's tokens."""
    rows: Rows = []
    ideal = 0
    for what, conditions, words in (
        ("ideal", {}, 600),
        ("2 Mbit/s down", {"down_bps": 2e6, "up_bps": 1e6, "rtt_s": 0.1}, 600),
        ("1 Mbit/s down", {"down_bps": 1e6, "up_bps": 1e6, "rtt_s": 0.1}, 600),
        ("hole down", {"mtu_down": 600, "rtt_s": 0.02}, 100),
    ):
        for policy in ("wait",) if what == "ideal" else ("wait", "fail"):
            lab.path.cut()
            lab.path.restore()
            before = len(lab.path.connections())
            with lab.service(policy, "--patience", PATIENCE_S) as service:
                service.await_edge(True)
                lab.path.set(**conditions)
                seen = service.scores(words)
            mine = lab.path.connections()[before:]
            row: dict[str, object] = {
                "what": f"{what}, scores of {words} words",
                "policy": policy,
                "seconds": seen.ended_s - seen.begun_s,
                "connections": len(mine),
                "up": sum(each.up_bytes for each in mine),
                "down": sum(each.down_bytes for each in mine),
                "ends": [each.ended_by for each in mine],
                "said": seen.error[:160],
            }
            ideal = ideal or sum(each.down_bytes for each in mine)
            if words == 600:
                row["ratio"] = sum(each.down_bytes for each in mine) / ideal
            rows.append(row)
            lab.path.set(up_bps=None, down_bps=None, rtt_s=0.0, mtu_down=1500)
    return rows


def chat(lab: Lab, quick: bool) -> Rows:
    """The edge dies in a long conversation, comes back, and hears all of it over a slow link."""
    rows = []
    for rate_bps in (256e3,) if quick else (256e3, 64e3):
        lab.path.set(up_bps=None, down_bps=None, rtt_s=0.05)
        with lab.service("wait", "--patience", 120, "--max-tokens", 8000) as service:
            service.answer(letters(30_000), 8)
            seen, thread = service.begin(letters(30_000), 2000)
            while not seen.pieces_s:
                time.sleep(0.05)
            before = lab.path.up().sent_bytes
            lab.path.set(up_bps=rate_bps, down_bps=1e6)
            lab.signal_edge(signal.SIGKILL)
            lab.stop_edge()
            lab.start_edge()
            back_s, count = time.monotonic(), len(seen.pieces_s)
            while thread.is_alive() and len(seen.pieces_s) <= count + 1:
                if time.monotonic() - back_s > 200:
                    break
                time.sleep(0.05)
            row = {
                "what": f"40 kB again, {rate_bps / 1e3:g} kbit/s",
                "policy": "wait",
                "seconds": time.monotonic() - back_s,
                "up": lab.path.up().sent_bytes - before,
                "said": seen.error or "went on",
            }
            lab.path.set(up_bps=None, down_bps=None)
            rows.append(row)
        thread.join(30)
    return rows


def death(lab: Lab, quick: bool) -> Rows:
    """Until a dead edge shows on a LAN, and until `fail` ends an answer."""
    lab.path.set(rtt_s=0.02)  # so that an answer lasts

    def frozen() -> None:
        lab.signal_edge(signal.SIGSTOP)

    def thawed() -> None:
        lab.signal_edge(signal.SIGCONT)

    def killed() -> None:
        lab.signal_edge(signal.SIGKILL)

    def restarted() -> None:
        lab.stop_edge()
        lab.start_edge()

    rows: Rows = []
    ways: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("path cut", lab.path.cut, lab.path.restore),
        ("edge frozen", frozen, thawed),
        ("edge killed", killed, restarted),
    ]
    for what, kill, undo in ways:
        for _ in range(1 if quick else 3):
            with lab.service("fail") as service:
                service.await_edge(True)
                time.sleep(1.0)
                kill()
                noticed = service.await_edge(False)
                undo()
                rows.append({"what": f"{what}: idle", "seconds": noticed or -1.0})
                service.await_edge(True)
                seen, thread = service.begin("hi", 6000)
                time.sleep(1.5)
                kill()
                at_s = time.monotonic()
                noticed = service.await_edge(False)
                thread.join(60)
                undo()
                ended = seen.ended_s - at_s
                rows.append({"what": f"{what}: answering", "seconds": noticed or -1.0})
                rows.append(
                    {
                        "what": f"{what}: ended",
                        "policy": "fail",
                        "seconds": ended,
                        "said": seen.error[:100],
                    }
                )
    return rows


CASES: dict[str, Callable[[Lab, bool], Rows]] = {
    "slow": slow,
    "rtt": rtt,
    "mtu": mtu,
    "down": down,
    "chat": chat,
    "death": death,
}


if __name__ == "__main__":
    sys.exit(main())
