"""Cases of `paths`: answers over one link for minutes, by three services, one for each policy.

Each asks every few seconds, most times briefly, every sixth time with 4 kB. What crossed is kept by
tenths of a second, so it can be told from outside when the path was dead, and for how long.

A connection that ended while its packets still arrived both ways is a false cut; one whose packets
arrived later an early one. Second connections that were tried beside a quiet one, and dropped when
that moved again, are attempts.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from _path_cases import Row
from _path_lab import (
    SERVICE_PORT,
    Answer,
    Connection,
    Lab,
    Service,
    letters,
)

POLICIES = ("fail", "local", "wait")
PATIENCE_S = 60
PAUSE_S = 3.0
_SHORT, _LONG = letters(150), letters(3_000)
_TOKENS = 24
_BASE_S = 90.0
_ALIVE_S = 0.95
_HANDSHAKE_BYTES = 2_500  # and some heartbeats; a connection that carried answers has sent more
NOTICE_S = 1.2  # until a path that is gone shows, on a LAN
PROMISES_S = {"fail": 2.2, "local": 1.0, "wait": PATIENCE_S}


def lossy(lab: Lab, quick: bool) -> Iterator[Row]:
    """A link that loses packets and lets some overtake others."""
    link = {"loss": 0.03, "reorder": 0.05, "rtt_s": 0.1, "up_bps": 256e3, "down_bps": 1e6}
    return answers_over(lab, 60.0 if quick else 300.0, lab.folder, **link)


def answers_over(lab: Lab, seconds: float, keep: Path, **conditions: Any) -> Iterator[Row]:
    """Run the services over such a path; one row a policy, and one of all connections.

    keep: gets ``answers.json``, ``timeline.json`` and ``connections.json``.
    """
    with ExitStack() as stack:
        services = {
            policy: stack.enter_context(
                lab.service(policy, "--patience", PATIENCE_S, port=SERVICE_PORT + number)
            )
            for number, policy in enumerate(POLICIES)
        }
        for service in services.values():
            service.answer(_LONG, _TOKENS)  # the first reads tables, and greets
        lab.path.set(rtt_s=0.05)
        base = _spell(lab, services, _BASE_S)
        lab.path.set(**conditions)
        begun_s = lab.path.since_s
        spell = _spell(lab, services, seconds)
        ended_s = time.monotonic()
        timeline = lab.path.timeline()
        connections = lab.path.connections()
    lab.idealise()
    record = {
        "begun_s": begun_s,
        "ended_s": ended_s,
        "answers": {policy: list(map(asdict, each)) for policy, each in spell.answers.items()},
    }
    (keep / "answers.json").write_text(json.dumps(record))
    (keep / "timeline.json").write_text(json.dumps(timeline))
    (keep / "connections.json").write_text(json.dumps([asdict(each) for each in connections]))
    for policy in POLICIES:
        yield _row(policy, spell.answers[policy], timeline)
    over = [each for each in connections if each.ended_s and begun_s < each.ended_s < ended_s]
    ours = [each for each in over if each.up.length > _HANDSHAKE_BYTES]
    needed = {way: base.sent[way] / base.count * spell.count for way in base.sent}
    yield {
        "what": "all connections",
        "connections": sum(begun_s < each.begun_s < ended_s for each in connections),
        "attempts": len(over) - len(ours),
        "cuts": len(ours),
        "false cuts": sum(map(_was_alive, ours)),
        "early cuts": sum(not _was_alive(each) and each.after_end > 0 for each in ours),
        "up": spell.sent["up"],
        "down": spell.sent["down"],
        "ratio": spell.sent["up"] / needed["up"],
        "ratio down": spell.sent["down"] / needed["down"],
    }


class _Spell:
    """What was asked in some time, and what the streams of all connections carried of it."""

    def __init__(self, answers: dict[str, list[Answer]], sent: dict[str, int]) -> None:
        self.answers, self.sent = answers, sent

    @property
    def count(self) -> int:
        """How many answers were asked for."""
        return sum(map(len, self.answers.values()))


def _spell(lab: Lab, services: dict[str, Service], seconds: float) -> _Spell:
    """Ask for so long."""
    before = _sent(lab)
    until_s = time.monotonic() + seconds
    answers: dict[str, list[Answer]] = {policy: [] for policy in services}

    def ask(policy: str) -> None:
        number = 0
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            prompt = _LONG if number % 6 == 5 else _SHORT
            answers[policy].append(services[policy].answer(prompt + str(number), _TOKENS))
            number += 1
            time.sleep(max(0.5, begun_s + PAUSE_S - time.monotonic()))

    threads = [threading.Thread(target=ask, args=(policy,)) for policy in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = _sent(lab)
    return _Spell(answers, {way: after[way] - before[way] for way in after})


def _sent(lab: Lab) -> dict[str, int]:
    connections = lab.path.connections()
    return {
        "up": sum(each.up.length for each in connections),
        "down": sum(each.down.length for each in connections),
    }


def _row(
    policy: str, answers: list[Answer], timeline: dict[str, dict[float, int]]
) -> dict[str, Any]:
    """Compare the answers with what the policy promises."""
    failed = [each for each in answers if each.error]
    dead = [dead_s(timeline, each.begun_s, each.ended_s) for each in failed]
    overdue = [
        each.ended_s - (each.pieces_s or [each.begun_s])[-1] - PROMISES_S[policy] - NOTICE_S
        for each in failed
    ]
    return {
        "what": "answers",
        "policy": policy,
        "count": len(answers),
        "failed": len(failed),
        "p50 s": median(each.ended_s - each.begun_s for each in answers),
        "longest s": max(each.ended_s - each.begun_s for each in answers),
        "longest gap s": max(each.longest_gap_s for each in answers),
        # of a failure: how long after its promise it came, and how long the path was dead at least
        "overdue s": max(overdue, default=0.0),
        "dead s": min(dead, default=0.0),
    }


def dead_s(timeline: dict[str, dict[float, int]], begun_s: float, ended_s: float) -> float:
    """Return the longest time in which nothing arrived in one direction or the other."""
    longest = 0.0
    for way in ("up", "down"):
        times = [at for at in timeline[way] if begun_s - 15 < at < ended_s + 0.1]
        edges = [*sorted(times), ended_s]
        gaps = [after - max(before, begun_s - 15) for before, after in pairwise(edges)]
        longest = max([longest, *gaps])
    return longest


def _was_alive(connection: Connection) -> bool:
    """Whether its packets arrived both ways in its last second, for all that ended it."""
    return all((way.quiet_s or 0.0) < _ALIVE_S for way in (connection.up, connection.down))
