"""Table I and figures 4, 5 and 7 of wisv, measured with a pair and its decision head.

In:  a bench with a judge (`field.papers.judged`). Out: a row for each window, link and method.

All four come from the same answers at temperature 0: under `greedy`, and with the head, which reads
the link of the row. Tokens, rounds, right answers and forgiven mismatches are counted; bytes
follow from the counted rounds. Seconds are modelled: the paper's links, and the processor time of
passes on one core of this machine. The head has the threshold that its card recommends.

Figure 5 compares with the same head where the link is unknown to it. The paper compares with
another head, trained without relabelling, which the package does not ship.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from pilotfish.device_runtime.choice.threshold import RTT_S
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.judged import JudgedAnswers, JudgedSetting
from pilotfish.lab.field.papers.sheet import Row, Value, interval, interval_columns
from pilotfish.lab.field.papers.wisv_plots import draw_ablation, draw_latency, draw_testbed
from pilotfish.lab.field.papers.wisv_printed import (
    METHODS,
    RATES_MBPS,
    SETTINGS,
    TABLE1_RTT_MS,
    WINDOWS,
    printed_figure4,
    printed_table1,
)
from pilotfish.lab.field.resampling import Floats, resample_weights
from pilotfish.speculation.latency import Link
from pilotfish.wire.protocols import Greedy, WisvFull, WisvSelective
from pilotfish.wire.protocols.dsd import Dsd

ALL_WINDOWS = (4, *WINDOWS)  # the paper's, and one that fits the short runs of the default pair
PROTOCOLS = dict(zip(METHODS, (Greedy.name, Dsd.name, WisvFull.name), strict=True))
# figure 7: distance (m), rate (Mbit/s), RTT (ms); the RTTs are ours, one on each side of the rule
TESTBED = ((20, 172, 20), (2, 498, 5))


def link_of(mbps: float, rtt_ms: float) -> Link:
    """Return a link with the same rate both ways, without loss."""
    return Link(rtt_s=rtt_ms * 1e-3, up_bps=mbps * 1e6, down_bps=mbps * 1e6)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Answers beside those of `greedy` with the same window; resampled over the questions."""

    answers: JudgedAnswers
    greedy: JudgedAnswers

    @property
    def n(self) -> int:
        """The number of questions."""
        return len(self.answers.right)

    def sums(self, values: Floats) -> Floats:
        """Sum over all questions (first value) and over each resample of them."""
        weights = resample_weights(self.n)
        total: Floats = weights @ values
        return total

    @property
    def aal(self) -> Floats:
        """Tokens of a round."""
        return self.sums(self.answers.tokens) / self.sums(self.answers.rounds)

    def counted(self) -> dict[str, Value]:
        """Return the cells of what was counted; right and gained are in per cent and points."""
        before = self.sums(self.greedy.rounds)
        aal_before = self.sums(self.greedy.tokens) / before
        rounds = self.sums(self.answers.rounds)
        right = self.sums(self.answers.right)
        mismatches = float(self.answers.mismatches.sum())
        return {
            "n": self.n,
            **interval("right", 100.0 * right / self.n),
            **interval("gained", 100.0 * (right - self.sums(self.greedy.right)) / self.n),
            **interval("aal", self.aal),
            **interval("aal_over_greedy", self.aal / aal_before),
            **interval("rounds", rounds / self.n),
            **interval("rounds_over_greedy", rounds / before),
            "forgiven": float(self.answers.forgiven.sum()) / max(mismatches, 1.0),
        }

    def seconds(self, protocol: str, link: Link) -> Floats:
        """Compute the modelled seconds of all answers."""
        return self.sums(self.answers.costs(protocol, link).seconds)

    def greedy_seconds(self, link: Link) -> Floats:
        """Compute the modelled seconds of `greedy`."""
        return self.sums(self.greedy.costs(Greedy.name, link).seconds)

    def modelled(self, protocol: str, link: Link) -> dict[str, Value]:
        """Return the cells of latency, throughput and bytes over a link, and of pass times."""
        costs, seconds = self.answers.costs(protocol, link), self.seconds(protocol, link)
        rounds = float(self.answers.rounds.sum())
        return {
            **interval("latency_s", seconds / self.n),
            **interval("latency_over_greedy", seconds / self.greedy_seconds(link)),
            "throughput_tps": float(self.answers.tokens.sum() / seconds[0]),
            "up_bytes": float(costs.up.sum()) / rounds,
            "down_bytes": float(costs.down.sum()) / rounds,
            "draft_ms": 1e3 * costs.draft_s,
            "verify_ms": 1e3 * costs.verify_s,
        }


class Measurement:
    """The answers that the figures share: within a process they are made once for each bench."""

    def __init__(self) -> None:
        self._answers: dict[tuple[object, ...], Mapping[JudgedSetting, JudgedAnswers]] = {}

    def answers(self, bench: Bench) -> Mapping[JudgedSetting, JudgedAnswers]:
        """Return the answers by setting; answer the questions unless that was done before."""
        judge = bench.expect_judge()
        key = (*bench.pair.paths, judge.digest, tuple(bench.prompts), bench.seed)
        if key not in self._answers:
            links = [link_of(*link) for link in (*SETTINGS, *(each[1:] for each in TESTBED))]
            settings = [JudgedSetting(window) for window in ALL_WINDOWS]
            settings += [
                JudgedSetting(window, judge.threshold, link)
                for link in (*links, None)
                for window in ALL_WINDOWS
            ]
            answers = judge.answer(bench, settings, costs=True)
            self._answers[key] = dict(zip(settings, answers, strict=True))
        return self._answers[key]

    def judged(self, bench: Bench, window: int, link: Link | None) -> Comparison:
        """Return the head's answers at a window; link: the one that it reads."""
        answers = self.answers(bench)
        setting = JudgedSetting(window, bench.expect_judge().threshold, link)
        return Comparison(answers[setting], answers[JudgedSetting(window)])

    def greedy(self, bench: Bench, window: int) -> Comparison:
        """Return the answers of `greedy` at a window; `dsd` has the same."""
        answers = self.answers(bench)[JudgedSetting(window)]
        return Comparison(answers, answers)


_SHARED = Measurement()


def _table1(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    for window, (method, protocol), mbps in product(ALL_WINDOWS, PROTOCOLS.items(), RATES_MBPS):
        if (window, method, mbps) in done:
            continue
        link = link_of(mbps, TABLE1_RTT_MS)
        compared = (
            _SHARED.judged(bench, window, link)
            if method == "wisv"
            else _SHARED.greedy(bench, window)
        )
        yield {
            "window": window,
            "method": method,
            "rate_mbps": mbps,
            **compared.counted(),
            **compared.modelled(protocol, link),
        }


def _figure4(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    for (mbps, rtt_ms), window in product(SETTINGS, ALL_WINDOWS):
        if (mbps, rtt_ms, window) in done:
            continue
        link = link_of(mbps, rtt_ms)
        judged, greedy = _SHARED.judged(bench, window, link), _SHARED.greedy(bench, window)
        before = greedy.greedy_seconds(link)
        seconds = {
            "greedy": before,
            "reject": greedy.seconds(Dsd.name, link),
            "fh": judged.seconds(WisvFull.name, link),
            "sh": judged.seconds(WisvSelective.name, link),
        }
        row: dict[str, Value] = {"rate_mbps": mbps, "rtt_ms": rtt_ms, "window": window}
        row["n"] = judged.n
        for method, values in seconds.items():
            row |= interval(f"{method}_s", values / judged.n)
            if method != "greedy":
                row |= interval(f"{method}_over_greedy", values / before)
        yield row


def _figure5(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    for mbps, window in product(RATES_MBPS, ALL_WINDOWS):
        if (mbps, window) in done:
            continue
        link = link_of(mbps, TABLE1_RTT_MS)
        pair = {
            "with_link": _SHARED.judged(bench, window, link),
            "without_link": _SHARED.judged(bench, window, None),
        }
        row: dict[str, Value] = {"rate_mbps": mbps, "window": window, "n": pair["with_link"].n}
        for name, compared in pair.items():
            counted = compared.counted()
            seconds = compared.seconds(WisvFull.name, link)
            row |= interval(f"aal_{name}", compared.aal)
            row |= interval(f"latency_{name}_s", seconds / compared.n)
            row |= {f"right_{name}": counted["right"], f"forgiven_{name}": counted["forgiven"]}
        row |= interval("aal_gained", pair["with_link"].aal / pair["without_link"].aal)
        yield row


def _figure7(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    for window, (distance_m, mbps, rtt_ms) in product(ALL_WINDOWS, TESTBED):
        if (window, distance_m) in done:
            continue
        link = link_of(mbps, rtt_ms)
        upload, protocol = (
            ("FH", WisvFull.name) if link.rtt_s > RTT_S else ("SH", WisvSelective.name)
        )
        compared = _SHARED.judged(bench, window, link)
        yield {
            "window": window,
            "distance_m": distance_m,
            "rate_mbps": mbps,
            "rtt_ms": rtt_ms,
            "upload": upload,
            "protocol": protocol,
            **compared.counted(),
            **compared.modelled(protocol, link),
            **interval("greedy_s", compared.greedy_seconds(link) / compared.n),
        }


_NOTE = (
    "The paper's numbers are of Llama-3.2-1B and -3.1-8B on GSM8K, ours of the default pair of "
    "wisv on the task facts. Counted: tokens, rounds, forgiven mismatches, right answers. "
    "Modelled: seconds, from the processor time of passes on one core and the bytes of the frames. "
)
_MINUTES = 2.0

TABLE1 = Figure(
    key="table1",
    title="Table I, measured: AAL, rounds, and latency at an RTT of 50 ms; WISV uploads as FH",
    columns={
        "window": ("L", 0),
        "method": ("", None),
        "rate_mbps": ("Mbit/s", 0),
        **interval_columns("aal", "AAL", 2),
        "aal_printed": ("paper", 2),
        **interval_columns("aal_over_greedy", "ratio", 2),
        "aal_over_greedy_printed": ("paper", 2),
        "rounds": ("rounds", 1),
        "rounds_printed": ("paper", 1),
        **interval_columns("latency_over_greedy", "T", 2),
        "latency_over_greedy_printed": ("paper", 2),
    },
    identity=("window", "method", "rate_mbps"),
    printed=printed_table1,
    measure=_table1,
    minutes=_MINUTES,
    note=_NOTE
    + "Ratio, T: AAL and latency over those of greedy with the same L. JSON has seconds and "
    "tokens/s, ours and the paper's, and our right answers and bytes.",
)
FIGURE4 = Figure(
    key="figure4",
    title="Figure 4, modelled from measured rounds: latency of an answer by window and link",
    columns={
        "rate_mbps": ("Mbit/s", 0),
        "rtt_ms": ("RTT, ms", 0),
        "window": ("L", 0),
        "greedy_s": ("greedy, s", 2),
        "reject_over_greedy": ("reject", 2),
        "reject_over_greedy_printed": ("paper", 2),
        **interval_columns("fh_over_greedy", "FH", 2),
        "fh_over_greedy_printed": ("paper", 2),
        **interval_columns("sh_over_greedy", "SH", 2),
    },
    identity=("rate_mbps", "rtt_ms", "window"),
    printed=printed_figure4,
    measure=_figure4,
    draw=draw_latency,
    minutes=_MINUTES,
    note=_NOTE + "Reject, FH, SH: latency over that of greedy; JSON has seconds. Paper: the ratios "
    "of Table I, which has an RTT of 50 ms.",
)
FIGURE5 = Figure(
    key="figure5",
    title="Figure 5, measured: a head that reads the link, and the same head without it",
    columns={
        "rate_mbps": ("Mbit/s", 0),
        "window": ("L", 0),
        "aal_with_link": ("AAL", 3),
        "aal_without_link": ("without", 3),
        **interval_columns("aal_gained", "ratio", 3),
        "forgiven_with_link": ("forgiven", 3),
        "forgiven_without_link": ("without", 3),
        "latency_with_link_s": ("T, s", 3),
        "latency_without_link_s": ("without", 3),
    },
    identity=("rate_mbps", "window"),
    measure=_figure5,
    draw=draw_ablation,
    minutes=_MINUTES,
    note=_NOTE
    + "The paper prints no numbers, and its other curve is another head, trained without "
    "relabelling, which the package does not ship. RTT 50 ms, FH.",
)
FIGURE7 = Figure(
    key="figure7",
    title="Figure 7, modelled from measured rounds: upload chosen by the RTT, two distances",
    columns={
        "window": ("L", 0),
        "distance_m": ("m", 0),
        "rate_mbps": ("Mbit/s", 0),
        "rtt_ms": ("RTT, ms", 0),
        "upload": ("", None),
        "greedy_s": ("greedy, s", 2),
        "latency_s": ("wisv, s", 2),
        **interval_columns("latency_over_greedy", "ratio", 2),
        **interval_columns("aal", "AAL", 2),
        **interval_columns("gained", "points", 1),
    },
    identity=("window", "distance_m"),
    measure=_figure7,
    draw=draw_testbed,
    minutes=_MINUTES,
    note=_NOTE + "The paper prints both rates, and one number: at most 35.41 % less latency, with "
    "Qwen at L = 64. The RTTs are ours, one on each side of the rule's 10 ms. Points: per cent of "
    "right answers, less those of greedy.",
)
