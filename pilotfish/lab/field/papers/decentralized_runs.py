"""Measure the settings of decentralized's table 1 that Pilotfish has, on this machine's pair.

Each setting is an option of Pilotfish, and stands beside the printed length and speed;
`field.papers.decentralized_printed` has the readings. The paper's data sets and judges are not part
of Pilotfish, so no accuracy is measured here.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from pilotfish.lab.field.papers.decentralized_printed import READINGS, WINDOW, printed_settings
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.measured_rounds import (
    AnswerProgress,
    connected,
    point,
    resampled,
    take_turns,
)
from pilotfish.lab.field.papers.sheet import Row, interval, interval_columns
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.adaptive import BUILT_IN

TOKENS = 48  # tokens of an answer
_TOP_K = 10  # the paper does not print its top-k
_LABEL = "answering prompts"
_STRICT = "t=1, qx=x"
_TSLT: Mapping[str, Any] = {"protocol": "tslt", "temperature": 1.0, "window": WINDOW}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "t=0, qx=1": {"protocol": "greedy", "temperature": 0.0, "window": WINDOW},
    "t=1, qx=1": {**_TSLT, "draft_temperature": 0.0},
    _STRICT: _TSLT,
    "t=1, qx=x, topk": {**_TSLT, "draft_top_k": _TOP_K},
    "t=1, qx=x, topk, τ": {
        **_TSLT,
        "protocol": "adaptive",
        "draft_top_k": _TOP_K,
        "tau": BUILT_IN.tau,
    },
}


def measure(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Yield a row for each setting that is not in ``done``; all are measured together."""
    missing = [name for name in SETTINGS if (name,) not in done]
    if not missing:
        return
    cases: dict[str, Mapping[str, Any]] = {STREAM: {"protocol": STREAM}, **SETTINGS}
    progress = AnswerProgress(bench.report, _LABEL, len(bench.prompts) * len(cases))
    with connected(bench) as (device, _):
        answers = take_turns(
            device, bench.prompts, cases, tokens=TOKENS, seed=bench.seed, progress=progress
        )
    sums = {name: resampled(each) for name, each in answers.items()}
    token_s = sums[STREAM].edge_s / sums[STREAM].tokens
    length = {name: each.tokens / each.rounds for name, each in sums.items()}
    for name in missing:
        each = sums[name]
        speed = token_s * each.tokens / (each.compute_s + each.link_s)
        yield {
            "setting": name,
            "option": READINGS[name].option,
            "n": len(bench.prompts),
            "rounds": int(point(each.rounds)),
            **interval("length", length[name]),
            **interval("longer", length[name] / length[_STRICT]),
            **interval("speed", speed),
            **interval("alpha", each.alpha),
        }


TABLE1 = Figure(
    key="table1",
    title=f"Table 1, measured: settings that Pilotfish has, γ = {WINDOW}",
    columns={
        "setting": ("setting", None),
        **interval_columns("length", "len", 2),
        "length_printed": ("printed", 2),
        **interval_columns("speed", "×", 2),
        "speed_printed": ("printed", 2),
        "alpha": ("α", 3),
        "printed_for": ("printed for", None),
        "n": ("prompts", 0),
    },
    identity=("setting",),
    printed=printed_settings,
    measure=measure,
    minutes=4.0,
    note=(
        "Lengths include the correction or bonus token; ×: speed relative to the target's passes "
        "for one token. The printed numbers are of 8B targets over four to eight nodes, ours of "
        "one target on this machine, without hops. JSON has each setting's option; top-k 10 and τ "
        "are ours."
    ),
)
