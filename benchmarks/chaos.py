"""Everything goes wrong, under every protocol: does any text change, anything fail or grow?

    python benchmarks/chaos.py [--minutes 8] [--window 4] [--seed 0] [--json PATH] [--quick]

One edge, `emulation` in front of it, and two `pilotfish device serve` processes behind that,
each asked by two clients at once: fixed prompts and seeds, under all protocols and `auto`. First
each answer is asked for on a quiet link. Then, every few seconds, one of these befalls them: the
edge is killed (SIGKILL) and started anew at the same address; the link is cut, with resets or in
silence; it lets nothing pass for a while; the edge stands still (SIGSTOP, SIGCONT); the edge or a
device reads its configuration again (SIGHUP). Every answer must be the one of the quiet link.

An edge that was killed reads a conversation anew, in passes of other shapes, whose logits differ by
about 1e-5: two tokens nearer than that to each other are a tie, and may change places. Where a text
parts under a protocol whose choice is the target's argmax (of logits, or of logits and noise), the
target is asked for its scores there: only a tie is let pass, and it is shown. What parts under
another protocol counts as a difference.

No process may write a traceback, and no request may fail. Memory is read every second, of the edge
from its last start on; after that, and for devices after the warm-up, it may not grow by 5 %.
"""

import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import openai
from _common import (
    PROMPTS,
    Goal,
    at_most,
    conclude,
    free_port,
    options,
    pair,
    pair_options,
    throwaway_keys,
)
from _daemons import MEMORY, START_S, CommandProcess, Seen, growth, memory_mib, services
from _parting import Parting, random_head

from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, names
from pilotfish.wire.request import AUTO

PROTOCOLS = (AUTO, *names())
# where each position's token is the argmax of the target's scores
BY_SCORE = {AUTO, "coupled", "greedy", "stream"}
CLIENTS = 2  # of each device
DEVICES = 2
LANES = 2
CALM = 0.7  # after so much of the time no edge is killed any more, so that it can grow
TOKENS = 32
QUIET = Conditions(rtt_s=0.005)
STALLED_BPS = 1.0


class Wish(NamedTuple):
    """What an answer follows from."""

    protocol: str
    prompt: str
    seed: int
    window: int

    @property
    def temperature(self) -> float:
        """0 for those that refuse to sample."""
        exchange = PROTOCOL_REGISTRY.get(self.protocol)
        cold = self.protocol == "greedy" or bool(exchange and exchange.requires)
        return 0.0 if cold else 1.0


@dataclass
class Day:
    """What all share, and what they saw."""

    wishes: list[Wish]
    texts: dict[Wish, str] = field(default_factory=dict)
    until_s: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)  # by protocol
    other: list[tuple[Wish, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    befallen: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s


# Asking


def connected(port: int) -> openai.OpenAI:
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=180)


def requests(api: openai.OpenAI, wish: Wish) -> str:
    """The text of the answer."""
    extension: dict[str, Any] = {"protocol": wish.protocol}
    exchange = PROTOCOL_REGISTRY.get(wish.protocol)
    if exchange is not None and wish.protocol != "tree":
        extension["window"] = wish.window
    answer = api.chat.completions.create(
        model="pilotfish",
        messages=[{"role": "user", "content": wish.prompt}],
        max_tokens=TOKENS,
        seed=wish.seed,
        temperature=wish.temperature,
        extra_body={"pilotfish": extension},
    )
    return answer.choices[0].message.content or ""


def client(port: int, day: Day, seed: int) -> None:
    """Ask one device until the day is over."""
    api, dice = connected(port), random.Random(seed)
    while not day.over:
        wish = dice.choice(day.wishes)
        began_s = time.monotonic()
        try:
            text = requests(api, wish)
        except openai.OpenAIError as error:
            day.errors.append(f"{wish.protocol}: {type(error).__name__}: {error}")
            time.sleep(0.5)
            continue
        day.longest_s = max(day.longest_s, time.monotonic() - began_s)
        day.answers[wish.protocol] += 1
        if text != day.texts[wish]:
            day.other.append((wish, text))


# What befalls them


@dataclass
class Scene:
    """What can be disturbed, and the dice that say how."""

    edge: CommandProcess
    devices: list[CommandProcess]
    link: Emulator
    dice: random.Random

    def kill(self) -> None:
        self.edge.kill()
        self.edge.start()

    def cut(self) -> None:
        self.link.cut(self.dice.uniform(0, 2))

    def cut_in_silence(self) -> None:
        self.link.cut(self.dice.uniform(0, 3), silent=True)

    def stall(self) -> None:
        self.link.set(up_bps=STALLED_BPS, down_bps=STALLED_BPS)
        time.sleep(self.dice.uniform(0.5, 4))
        self.link.set(QUIET)

    def stop(self) -> None:
        self.edge.tell(signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.1, 4))
        self.edge.tell(signal.SIGCONT)

    def reload(self) -> None:
        self.dice.choice([self.edge, *self.devices]).tell(signal.SIGHUP)


def trouble(scene: Scene, day: Day, until_calm_s: float, warm: Callable[[], bool]) -> None:
    """Befall them until the day is over."""
    ways = [scene.kill, scene.cut, scene.cut_in_silence, scene.stall, scene.stop, scene.reload]
    while not day.over:
        time.sleep(scene.dice.uniform(0.5, 5))
        way = scene.dice.choice(ways)
        if way == scene.kill and time.monotonic() > until_calm_s:
            continue
        if way == scene.reload and not warm():
            continue  # an edge that still loads has not taken the signal over
        if not day.over:
            way()
            day.befallen[way.__name__] += 1


# Watching


def watch(scene: Scene, day: Day, minutes: float) -> Seen:
    """The memory of each process, second by second, of an edge since it was started last."""
    names = {f"device {at + 1}": daemon for at, daemon in enumerate(scene.devices)}
    seen: Seen = {name: [] for name in ("edge", *names)}
    edge_pid, said_s = scene.edge.pid, time.monotonic()
    began_s = said_s
    while not day.over:
        time.sleep(1.0)
        if scene.edge.pid != edge_pid:
            edge_pid, seen["edge"] = scene.edge.pid, []
        for name, daemon in {"edge": scene.edge, **names}.items():
            try:
                seen[name].append(memory_mib(daemon.pid))
            except (OSError, ValueError):  # it is being killed
                continue
        if time.monotonic() - said_s >= 15:
            said_s = time.monotonic()
            print(
                f"[{(said_s - began_s) / 60:.1f} of {minutes:g} min] {day.answers.total()} answers,"
                f" {len(day.other)} other texts, {len(day.errors)} errors, {dict(day.befallen)}",
                file=sys.stderr,
            )
    return seen


@contextmanager
def scene_of(
    drafter: Path, target: Path, folder: Path, logs: Path, dice: random.Random
) -> Iterator[tuple[Scene, list[int]]]:
    """All processes, and the ports of the devices."""
    where = f"tcp://127.0.0.1:{free_port()}"
    head = random_head(drafter, target).save(logs)
    words = ["edge", "serve", "--target", target, "--keys", folder, "--listen", where]
    words += ["--head", head, "--sessions", 64, "--sessions-per-client", 64, "--threads", 1]
    edge = CommandProcess(*words, log=logs / "edge.log")
    try:
        with (
            Emulator(where, QUIET) as link,
            services(
                DEVICES, drafter, link.endpoint, folder, "--lanes", LANES, logs=logs
            ) as daemons,
        ):
            yield Scene(edge, list(daemons.values()), link, dice), list(daemons)
    finally:
        edge.end()


def served(log: Path, starts: int) -> bool:
    """Whether so many starts of the edge have come to serving."""
    return log.read_text(errors="replace").count("the edge serves on") >= starts


def tracebacks(logs: Path) -> list[str]:
    """The last line of each traceback in any log, with the log's name."""
    results = []
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if line.startswith("Traceback") or "panicked at" in line:
                end = next((e for e in lines[at + 1 :] if not e.startswith(" ")), line)
                results.append(f"{log.stem}: {end}")
    return results


def live(scene: Scene, ports: list[int], day: Day, minutes: float) -> Seen:
    """The quiet answers, and then the day."""
    quiet = connected(ports[0])
    for at, wish in enumerate(day.wishes):
        print(f"\r[{at + 1}/{len(day.wishes)}] on a quiet link", end="", file=sys.stderr)
        day.texts[wish] = requests(quiet, wish)
    print(file=sys.stderr)
    began_s = time.monotonic()
    day.until_s = began_s + 60 * minutes
    work = [
        threading.Thread(target=client, args=(port, day, 10 * at + number))
        for at, port in enumerate(ports)
        for number in range(CLIENTS)
    ]
    log = scene.edge.log
    assert log is not None

    def warm() -> bool:
        return served(log, 1 + day.befallen["kill"])

    calm_s = began_s + 60 * minutes * CALM
    work.append(threading.Thread(target=trouble, args=(scene, day, calm_s, warm)))
    for thread in work:
        thread.start()
    seen = watch(scene, day, minutes)
    for thread in work:
        thread.join(START_S)
    return seen


def message_of(day: Day, parting: Parting) -> Mapping[str, list[str]]:
    """The other texts by what they are: `tie` or `differ`, each with where it parted."""
    results: dict[str, list[str]] = {"tie": [], "differ": []}
    for wish, text in day.other:
        scored = wish.protocol in BY_SCORE or wish.temperature == 0.0
        seed = wish.seed if wish.temperature else None
        verdict, where = "differ", f"{text!r} instead of {day.texts[wish]!r}"
        if scored and wish.protocol != LOCAL:
            verdict, where = parting.judge(wish.prompt, day.texts[wish], text, seed)
        results[verdict].append(f"{wish.protocol}, seed {wish.seed}: {where}")
    return results


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--minutes", type=float, help="how long (8; with --quick 1)")
    parser.add_argument("--window", type=int, default=4, help="γ (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    args = parser.parse_args()
    minutes = args.minutes or (1.0 if args.quick else 8.0)
    drafter, target = pair(args)
    prompts = PROMPTS[: 1 if args.quick else 3]
    wishes = [
        Wish(protocol, prompt, seed, args.window)
        for protocol in PROTOCOLS
        for seed, prompt in enumerate(prompts)
    ]
    day = Day(wishes)
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="pilotfish-chaos-") as name, throwaway_keys() as folder:
        logs = Path(name)
        with scene_of(drafter, target, folder, logs, dice) as (scene, ports):
            seen = live(scene, ports, day, minutes)
        broken = tracebacks(logs)
    other = message_of(day, Parting(drafter, target))
    rows = growth(seen)
    summary = {
        "answers": day.answers.total(), "by_protocol": dict(day.answers),
        "befallen": dict(day.befallen), "longest_s": round(day.longest_s, 1), **other,
    }  # fmt: skip
    print(json.dumps(summary, ensure_ascii=False), file=sys.stderr)
    for line, times in Counter([*broken, *day.errors]).most_common(10):
        print(f"{times} × {line}", file=sys.stderr)
    goals: list[Goal] = [
        at_most("answers with another text that no tie explains", len(other["differ"]), 0),
        at_most("requests that failed", len(day.errors), 0),
        at_most("tracebacks", len(broken), 0),
        at_most("largest growth of a process", max(row["growth"] for row in rows), 0.05),
        at_most("protocols never asked for", len(PROTOCOLS) - len(day.answers), 0),
    ]
    title = f"{day.answers.total()} answers in {minutes:g} minutes of {dict(day.befallen)}"
    return conclude(args, title, MEMORY, [*rows, {"process": "answers", **summary}], goals, rows)


if __name__ == "__main__":
    sys.exit(main())
