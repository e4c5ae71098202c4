"""Cases of `paths`: messages that take long to cross, or cannot."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from _path_lab import Connection, Lab, Outcome, letters

Row = dict[str, Any]

POLICIES = ("fail", "local", "wait")
PATIENCE_S = 20
BRIEF = ("--max-tokens", 8)


def crossed(connections: Sequence[Connection]) -> Row:
    """Return what these connections carried, and how they ended."""
    return {
        "connections": len(connections),
        "up": sum(each.up.length for each in connections),
        "up sent": sum(each.up.sent_bytes for each in connections),
        "down": sum(each.down.length for each in connections),
        "down sent": sum(each.down.sent_bytes for each in connections),
        "ends": dict(Counter(each.ended_by for each in connections)),
    }


def _row(what: str, policy: str, outcome: Outcome) -> Row:
    return {
        "what": what,
        "policy": policy,
        "seconds": outcome.seconds,
        "code": outcome.code,
        **crossed(outcome.connections),
        "said": outcome.message[:160],
    }


def slow(lab: Lab, quick: bool) -> Iterator[Row]:
    """A prompt that takes seconds to cross."""
    for size in (9_000,) if quick else (9_000, 30_000):
        prompt = letters(size)
        lab.idealise()
        ideal = lab.ask(prompt, "wait", *BRIEF)
        needed = crossed(ideal.connections)["up"]
        yield _row(f"{needed / 1e3:.0f} kB up, ideal", "wait", ideal)
        lab.path.set(up_bps=64e3, down_bps=1e6, rtt_s=0.1)
        for policy in POLICIES:
            outcome = lab.ask(prompt, policy, "--patience", PATIENCE_S, *BRIEF)
            row = _row(f"{needed / 1e3:.0f} kB up, 64 kbit/s", policy, outcome)
            row["ratio"] = row["up"] / needed
            row["limit"] = 1.5 * (ideal.seconds + needed * 8 / 64e3) + 3
            yield row
    lab.idealise()


def rtt(lab: Lab, quick: bool) -> Iterator[Row]:
    """Long round trips: a satellite's, and worse."""
    for rtt_s in (0.7, 1.5) if quick else (0.7, 1.5, 3.0):
        lab.path.set(rtt_s=rtt_s)
        what = f"RTT {rtt_s:g} s"
        words = ["probe", lab.endpoint, "--keys", lab.keys]
        yield _row(f"{what}: probe", "", lab.run(*words, within_s=120))
        for policy in ("wait",) if rtt_s > 2 else ("fail", "wait"):
            yield _row(what, policy, lab.ask("hi", policy, "--patience", 60, *BRIEF))
        if rtt_s < 2:
            out = lab.folder / f"run-{rtt_s}.pilotfish"
            words = ["--protocols", "greedy", "--windows", 4, "--repeat", 1, "--warm-up", 0]
            words += ["--max-tokens", 8, "--draft", lab.folder / "draft", "--keys", lab.keys]
            words += ["--edge", lab.endpoint, "--out", out]
            yield _row(f"{what}: field measure", "", lab.run("field", "measure", *words))
    lab.idealise()


def mtu(lab: Lab, quick: bool) -> Iterator[Row]:
    """Packets above 600 bytes vanish, in one direction."""
    prompt = letters(3_600)
    lab.path.set(rtt_s=0.02)
    needed = crossed(lab.ask(prompt, "wait", *BRIEF).connections)["up"]
    for way in ("up", "down"):
        lab.path.set(**{f"mtu_{way}": 600})
        probe = lab.run("probe", lab.endpoint, "--keys", lab.keys, within_s=60)
        yield _row(f"hole {way}: probe", "", probe)
        lab.path.set(**{f"mtu_{way}": 1500})
    lab.path.set(mtu_up=600)
    for policy in POLICIES:
        outcome = lab.ask(prompt, policy, "--patience", PATIENCE_S, *BRIEF, within_s=60)
        row = _row("hole up, 5 kB", policy, outcome)
        yield row | {"ratio": row["up"] / needed}
    lab.idealise()


def down(lab: Lab, quick: bool) -> Iterator[Row]:
    """A reply that takes seconds to cross, or cannot: the scores of a prompt's tokens."""
    needed: dict[int, int] = {}
    megabit = {"up_bps": 1e6, "rtt_s": 0.1}
    for what, conditions, words in (
        ("ideal", {}, 600),
        ("ideal", {}, 100),
        ("2 Mbit/s down", megabit | {"down_bps": 2e6}, 600),
        ("1 Mbit/s down", megabit | {"down_bps": 1e6}, 600),
        ("hole down", {"mtu_down": 600, "rtt_s": 0.02}, 100),
    ):
        for policy in ("wait",) if what == "ideal" else ("wait", "fail"):
            lab.path.forget()
            before = len(lab.path.connections())
            with lab.service(policy, "--patience", PATIENCE_S) as service:
                service.await_edge(True)
                lab.path.set(**conditions)
                seen = service.scores(words)
            row = {
                "what": f"{what}, scores of {words} words",
                "policy": policy,
                "seconds": seen.ended_s - seen.begun_s,
                **crossed(lab.path.connections()[before:]),
                "said": seen.error[:160],
            }
            row["ratio"] = row["down"] / needed.setdefault(words, row["down"])
            lab.idealise()
            yield row
