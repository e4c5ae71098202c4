"""A long day in a few minutes: many devices, random prompts, cuts, aborts; what grows or fails?

    python benchmarks/soak.py [--minutes 15] [--devices 8] [--json PATH] [--quick]

One edge process, `emulation` in front of it, and so many `pilotfish device serve` processes
behind that, each asked by clients of the `openai` package: random prompts, lengths, protocols and
seeds. One answer in five is given up in the middle, and every ten seconds or so the link is cut for
up to three, with resets or in silence. No other error may come. Answers that are determined by
their seed must come out the same whenever they are asked for. Each process's memory is read every
second; after the warm-up (the longest request once for each client, then a sixth of the run) the
median of its own may not grow by 5 %. "file_mib" is apart: pages of the mapped weights, which come
in as tokens are met for the first time, and which the kernel may drop again.
"""

import json
import math
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai
from _common import (
    PROMPTS,
    Goal,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)
from _daemons import MEMORY, Seen, growth, memory_mib, services

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator

PROTOCOLS = ("auto", "greedy", "coupled", "tslt", "tree", "dssd", "stream")
SEEDS = 3
ABORTED = 0.2
SECOND_HALF = " Then say it again."
LANES = 2
LENGTHS, REPEATS = (16, 48, 96), (0, 0, 10, 40)  # tokens of an answer; of a prompt's second half


@dataclass
class Day:
    """What all clients share, and what they saw."""

    random: random.Random
    until_s: float = math.inf
    ready: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    texts: dict[tuple[str, int, int], str] = field(default_factory=dict)
    longest_s: float = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s


def client(port: int, day: Day, seed: int) -> None:
    """Ask one device until the day is over."""
    dice = random.Random(seed)
    api = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120
    )
    model = api.models.list().data[0].id
    longest = f"{PROMPTS[0]}{SECOND_HALF * max(REPEATS)}"
    request(api, model, longest, max(LENGTHS), "auto", 0, None)
    day.ready.wait()
    while not day.over:
        try:
            ask(api, model, day, dice)
        except Exception as error:
            day.counts["error"] += 1
            day.errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.5)


def ask(api: openai.OpenAI, model: str, day: Day, dice: random.Random) -> None:
    protocol = dice.choice(PROTOCOLS)
    prompt, seed, tokens = dice.choice(PROMPTS), dice.randrange(SEEDS), dice.choice(LENGTHS)
    prompt += SECOND_HALF * dice.choice(REPEATS)
    began = time.monotonic()
    end = dice.randrange(8) if dice.random() < ABORTED else None
    text = request(api, model, prompt, tokens, protocol, seed, end)
    if text is None:
        day.counts["aborted"] += 1
        return
    day.longest_s = max(day.longest_s, time.monotonic() - began)
    day.counts["answered"] += 1
    settled = protocol in ("coupled", "stream")  # by prompt and seed
    if settled and day.texts.setdefault((prompt, seed, tokens), text) != text:
        day.counts["differing"] += 1


def request(
    api: openai.OpenAI,
    model: str,
    prompt: str,
    tokens: int,
    protocol: str,
    seed: int,
    end: int | None,
) -> str | None:
    """The text of an answer; None if it was given up after so many chunks."""
    answer = api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        seed=seed,
        temperature=0.0 if protocol == "greedy" else 1.0,
        stream=True,
        extra_body={"pilotfish": {"protocol": protocol}},
    )
    pieces: list[str] = []
    with answer:
        for chunk in answer:
            if end is not None and len(pieces) >= end:
                return None
            pieces += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(pieces)


def cutter(link: Emulator, day: Day) -> None:
    while not day.over:
        time.sleep(day.random.uniform(5, 15))
        if not day.over:
            link.cut(day.random.uniform(0, 3), silent=day.random.random() < 0.5)
            day.counts["cut"] += 1


def watch(processes: dict[str, int], day: Day, minutes: float) -> Seen:
    """The memory of each process, second by second, with a word now and then."""
    seen: Seen = {name: [] for name in processes}
    began = reply = time.monotonic()
    while not day.over:
        time.sleep(1.0)
        for name, pid in processes.items():
            seen[name].append(memory_mib(pid))
        if (now := time.monotonic()) - reply >= 15:
            reply = now
            print(
                f"[{(now - began) / 60:.1f} of {minutes:g} min] {dict(day.counts)}, "
                f"edge {seen['edge'][-1][0]:.0f} MiB",
                file=sys.stderr,
            )
    return seen


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--minutes", type=float, help="how long (15; with --quick 1.5)")
    parser.add_argument("--devices", type=int, help="how many (8; with --quick 3)")
    args = parser.parse_args()
    minutes = args.minutes or (1.5 if args.quick else 15.0)
    devices = args.devices or (3 if args.quick else 8)
    drafter, target = pair(args)
    with (
        throwaway_keys() as folder,
        EdgeServer(
            target, keys=folder, sessions=2 * LANES * devices, sessions_per_client=200
        ) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.005)) as link,
        services(devices, drafter, link.endpoint, folder, "--lanes", LANES) as daemons,
    ):
        clients = [*daemons, *daemons]  # two a device
        day = Day(random.Random(1), ready=threading.Barrier(len(clients) + 1))
        work = [
            threading.Thread(target=client, args=(port, day, number))
            for number, port in enumerate(clients)
        ]
        for thread in work:
            thread.start()
        print("the longest request, once for each client …", file=sys.stderr)
        day.ready.wait()
        day.until_s = time.monotonic() + 60 * minutes
        work.append(threading.Thread(target=cutter, args=(link, day)))
        work[-1].start()
        devices_too = {f"device {i}": each.pid for i, each in enumerate(daemons.values())}
        processes = {"edge": edge.pid} | devices_too
        seen = watch(processes, day, minutes)
        for thread in work:
            thread.join()
    rows = growth(seen)
    summary: dict[str, Any] = {**day.counts, "longest_s": round(day.longest_s, 1)}
    print(json.dumps(summary), file=sys.stderr)
    for error, times in Counter(day.errors).most_common(10):
        print(f"{times} × {error}", file=sys.stderr)
    goals: list[Goal] = [
        at_most(
            "largest growth of a process after the warm-up", max(r["growth"] for r in rows), 0.05
        ),
        at_most("errors that were not provoked", day.counts["error"], 0),
        at_most("answers that differ from the same answer before", day.counts["differing"], 0),
    ]
    title = f"memory over {minutes:g} minutes, {devices} devices"
    return conclude(args, title, MEMORY, [*rows, {"process": "answers", **summary}], goals)


if __name__ == "__main__":
    sys.exit(main())
