"""What every choice costs, but for luck: acceptance, computing times and bytes as recorded.

Answers of some dozens of tokens differ by 10 % in how well they are drafted, and a machine changes
its pace by more from one minute to the next: the best of fifty fixed choices on a link is mostly
the luckiest. A `Table` has real rounds of every protocol and window over loopback, and tells
seconds a token on any link by the model (`speculation.latency`) from what they have in common: the
acceptance at each depth, over all windows of the protocol; its time per drafted level; target
passes as a line over the number of their tokens, of all protocols.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import chain, combinations
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from _common import PROMPTS, Rows, Steps

from pilotfish import Device
from pilotfish.device_runtime.alternatives import WINDOWS
from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan, plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.latency import Link, communication_s, streamed_token_s
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.protocol import VERDICT_BYTES, WINDOW_BYTES, PairSizes
from pilotfish.wire.request import Options, Request

PROTOCOLS = {0.0: ("greedy",), 1.0: ("coupled", "tslt", "tree", "dssd", "dsd")}
DRAFT_S, VERIFY_S = 0.010, 0.100  # the slow target: T_verify = 10 · T_draft


class Choice(NamedTuple):
    """A protocol, its window (0 under `stream`), and the temperature."""

    protocol: str
    window: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.protocol} {self.window}" if self.window else self.protocol

    @property
    def plan(self) -> Plan:
        """As `Device` makes it."""
        wanted: Options = {"protocol": self.protocol, "temperature": self.temperature, "seed": 0}
        if self.window:
            wanted = {**wanted, "window": self.window}
        return plan(Request.from_options(wanted))


def choices(temperature: float, *, stream: bool) -> list[Choice]:
    """All that "auto" may choose from."""
    drafting = PROTOCOLS[temperature]
    result = [Choice(name, window, temperature) for name in drafting for window in WINDOWS]
    return [*result, Choice(STREAM, 0, temperature)] if stream else result


class Table:
    """Recorded answers of every choice."""

    def __init__(self, device: Device, *, prompts: int, tokens: int, steps: Steps) -> None:
        self._tokens = tokens
        self.answers: dict[Choice, list[list[Round]]] = {}
        for temperature in PROTOCOLS:
            for choice in choices(temperature, stream=True):
                if choice.window in (0, 1):
                    steps.next(f"recording {choice.protocol}")
                self.answers[choice] = [
                    self._record(device, choice, seed) for seed in range(prompts)
                ]

    def _record(self, device: Device, choice: Choice, seed: int) -> list[Round]:
        wanted: Options = {
            "protocol": choice.protocol,
            "temperature": choice.temperature,
            "seed": 1000 * choice.window + seed,
            "max_tokens": self._tokens,
        }
        if choice.window:
            wanted = {**wanted, "window": choice.window}
        return device.generate(PROMPTS[seed], **wanted).rounds

    def _tokens_a_round(self, choice: Choice) -> float:
        """N = 1 + Σ_k Π_{i≤k} αᵢ, with each depth's α over all windows of the protocol."""
        reached, accepted = np.ones(choice.window), np.full(choice.window, 0.5)
        for item in chain(*(self._rounds(other) for other in self._alike(choice))):
            deepest = min(item.window, choice.window)
            reached[: min(deepest, item.accepted + 1)] += 1
            accepted[: min(deepest, item.accepted)] += 1
        return 1.0 + float(np.cumprod(accepted / reached).sum())

    def _alike(self, choice: Choice) -> list[Choice]:
        """Those of the same protocol and temperature."""
        return [other for other in self.answers if other[::2] == choice[::2]]

    def _rounds(self, choice: Choice) -> list[Round]:
        """All but each answer's first and last."""
        return [item for rounds in self.answers[choice] for item in rounds[1:-1]]

    def _level_s(self, choice: Choice) -> float:
        rounds = chain(*(self._rounds(other) for other in self._alike(choice)))
        return median(item.timings.draft / item.window for item in rounds if item.window)

    @cached_property
    def _pass_line(self) -> tuple[float, float]:
        """Seconds of a pass over no token, and of each token more (the median of all slopes)."""
        points = []
        for choice in self.answers:
            rounds = self._rounds(choice)
            if rounds:
                width = fmean(1 + item.nodes for item in rounds)
                points.append((width, median(item.timings.verify for item in rounds)))
        slope = median(
            (y2 - y1) / (x2 - x1)
            for (x1, y1), (x2, y2) in combinations(points, 2)
            if abs(x2 - x1) > 0.5
        )
        return median(y - slope * x for x, y in points), slope

    def token_s(
        self,
        choice: Choice,
        link: Link,
        draft_s: float | None = None,
        verify_s: float | None = None,
    ) -> float:
        """Seconds a token of this choice on this link; draft_s, verify_s: of other machines."""
        rounds = self._rounds(choice)
        nodes = fmean(item.nodes for item in rounds)
        base_s, slope_s = self._pass_line
        pass_s = base_s + slope_s * (1 + nodes) if verify_s is None else verify_s
        down = fmean(item.downlink_bytes for item in rounds)
        if choice.protocol == STREAM:
            return streamed_token_s(pass_s, down, link, self._tokens)
        level_s = self._level_s(choice) if draft_s is None else draft_s
        around_s = median(item.timings.encode + item.timings.settle for item in rounds)
        up = fmean(item.uplink_bytes for item in rounds)
        beyond = max(0.0, up - WINDOW_BYTES), max(0.0, down - VERDICT_BYTES)
        round_s = choice.window * level_s + around_s + pass_s + communication_s(*beyond, link)
        return round_s / self._tokens_a_round(choice)


def valued(
    table: Table, picked: Sequence[Choice], allowed: Sequence[Choice], link: Link, **other: float
) -> dict[str, object]:
    """What these picks cost on the link, against the best that was allowed."""
    costs = {choice: 1e3 * table.token_s(choice, link, **other) for choice in allowed}
    best = min(costs, key=costs.__getitem__)
    ours = fmean(costs[choice] for choice in picked)
    drafting = [cost for choice, cost in costs.items() if choice.window]
    alone_s = table.token_s(Choice(STREAM, 0, best.temperature), link, **other)
    return {
        "auto_ms": ours,
        "chose": ", ".join(dict.fromkeys(map(str, picked))),
        "best_ms": costs[best],
        "best": str(best),
        "behind": ours / costs[best] - 1.0,
        "stream_ms": 1e3 * alone_s,
        "pays": min(drafting) < 1e3 * alone_s,
        "fixed_ms": {str(choice): cost for choice, cost in costs.items()},
    }


def slow_target(table: Table, links: Mapping[str, Link], vocab_size: int) -> Rows:
    """A row for each link, temperature, and whether `stream` is to choose from."""
    slowed = {
        choice: [_slowed(rounds) for rounds in table.answers[choice]] for choice in table.answers
    }
    rows: Rows = []
    for name, link in links.items():
        for temperature in PROTOCOLS:
            for stream in (True, False):
                allowed = choices(temperature, stream=stream)
                picked = _pick(slowed, allowed, link, vocab_size)
                row = valued(table, picked[2:], allowed, link, draft_s=DRAFT_S, verify_s=VERIFY_S)
                about = {"part": "slow target", "link": name, "temperature": temperature}
                rows.append({**about, "stream_too": stream, **row})
    return rows


def _slowed(rounds: Sequence[Round]) -> list[Round]:
    """An answer with the computing times of a slow target in it."""
    copied = deepcopy(list(rounds))
    for item in copied:
        item.timings.draft, item.timings.verify = DRAFT_S * item.window, VERIFY_S
        item.pass_s = VERIFY_S
        item.timings.queue = item.timings.downlink = 0.0
    return copied


def _pick(
    answers: Mapping[Choice, list[list[Round]]],
    allowed: Sequence[Choice],
    link: Link,
    vocab_size: int,
) -> list[Choice]:
    """What "auto" chooses for six answers, seeing those recorded for what it chose."""
    widths = (1, 2, 4, 8, 16, 32)
    paces = dict.fromkeys(widths, DRAFT_S), dict.fromkeys(widths, VERIFY_S)
    evidence = Evidence(*paces, PairSizes(vocab_size, 0))
    state = LinkState(
        rtt=Reading(value=link.rtt_s, age_s=0.0, samples=5),
        up=Reading(value=link.up_bps, age_s=0.0, samples=5),
        down=Reading(value=link.down_bps, age_s=0.0, samples=5),
    )
    policy, plans, picked = PredictivePolicy(), [choice.plan for choice in allowed], []
    for turn in range(6):
        chosen, _ = policy.choose(Auto(), plans, state, evidence)
        choice = allowed[plans.index(chosen)]
        picked.append(choice)
        recorded = answers[choice]
        evidence.add(chosen, recorded[turn % len(recorded)])
    return picked
