"""Measure the ablation of τ and the settings of table 1 of decentralized, on this machine's pair.

The ablation (§3.2): `adaptive` with τ from 0 to 0.8, with the built-in λ and without key tokens.
The paper prints neither its λ nor a deviation. Table 1: each setting that Pilotfish has an option
for, beside the printed length and speed; `field.papers.decentralized_printed` has the readings.

The paper's data sets and judges are not part of Pilotfish, so no accuracy is measured here.
"""

from collections.abc import Container, Iterator

from pilotfish.lab.field.papers.decentralized_printed import READINGS, WINDOW, printed_settings
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.settings_compared import (
    Options,
    answer_settings,
    compare_settings,
    interval_columns,
)
from pilotfish.lab.field.papers.sheet import Row
from pilotfish.speculation.adaptive import HIGHEST_RATIO
from pilotfish.wire.protocols.adaptive import BUILT_IN

TOKENS = 40  # tokens of an answer
TAUS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)
TAU_WINDOW = 4
LAMBDAS = {
    "built in": [BUILT_IN.lambda1, BUILT_IN.lambda2, BUILT_IN.lambda3],
    "no key token": [HIGHEST_RATIO, 1.0, 0.0],
}
_TOP_K = 10  # the paper does not print its top-k
_GREEDY_STREAM, _SAMPLED_STREAM = "stream at temperature 0", "stream at temperature 1"
_STREAMS: dict[str, Options] = {
    _GREEDY_STREAM: {"protocol": "stream", "temperature": 0.0},
    _SAMPLED_STREAM: {"protocol": "stream", "temperature": 1.0},
}
_STRICT = "t=1, qx=x"
_TSLT: Options = {"protocol": "tslt", "temperature": 1.0, "window": WINDOW}
SETTINGS: dict[str, Options] = {
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


def measure_tau(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Yield a row for each λ and τ; all rows of a λ are measured together."""
    for name, lambdas in LAMBDAS.items():
        missing = [tau for tau in TAUS if (name, tau) not in done]
        if not missing:
            continue
        settings = {_SAMPLED_STREAM: _STREAMS[_SAMPLED_STREAM]}
        for tau in TAUS:
            settings[f"τ = {tau:g}"] = {
                "protocol": "adaptive",
                "temperature": 1.0,
                "window": TAU_WINDOW,
                "tau": tau,
                "lambdas": lambdas,
            }
        sums = answer_settings(bench, settings, tokens=TOKENS)
        for tau in missing:
            values = compare_settings(sums[f"τ = {tau:g}"], sums["τ = 0"], sums[_SAMPLED_STREAM])
            yield {"lambdas": name, "tau": tau, **values}


def measure_settings(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Yield a row for each setting of `SETTINGS`; all are measured together."""
    missing = [name for name in SETTINGS if (name,) not in done]
    if not missing:
        return
    sums = answer_settings(bench, {**SETTINGS, **_STREAMS}, tokens=TOKENS)
    for name in missing:
        stream = sums[_SAMPLED_STREAM if SETTINGS[name]["temperature"] else _GREEDY_STREAM]
        values = compare_settings(sums[name], sums[_STRICT], stream)
        yield {"setting": name, "option": READINGS[name].option, **values}


TAU = Figure(
    key="tau",
    title=f"Ablation of τ (§3.2), measured: `adaptive` at temperature 1, γ = {TAU_WINDOW}",
    columns={
        "lambdas": ("λ", None),
        "tau": ("τ", 1),
        **interval_columns("tokens_round", "tokens a round", 2),
        **interval_columns("longer", "over τ = 0", 3),
        "acceptance": ("α", 3),
        "deviation": ("deviation", 4),
        **interval_columns("speed_strict", "speed over τ = 0", 2),
        "speed_stream": ("over stream", 2),
        "n": ("prompts", 0),
    },
    identity=("lambdas", "tau"),
    measure=measure_tau,
    minutes=8.0,
    note=(
        "The paper prints no numbers of this ablation but 15 to 20 % more speed for τ from 0.1 to "
        "0.3, and about 2.6× at most. Deviation: mean total variation of a verified position from "
        "the target's law, which the paper does not print. Speeds leave out the first round."
    ),
)
TABLE1 = Figure(
    key="table1",
    title=f"Table 1, measured: settings that Pilotfish has, γ = {WINDOW}",
    columns={
        "setting": ("setting", None),
        **interval_columns("tokens_round", "len", 2),
        "length_printed": ("printed", 2),
        **interval_columns("speed_stream", "×", 2),
        "speed_printed": ("printed", 2),
        "acceptance": ("α", 3),
        "deviation": ("deviation", 4),
        "printed_for": ("printed for", None),
        "n": ("prompts", 0),
    },
    identity=("setting",),
    printed=printed_settings,
    measure=measure_settings,
    minutes=5.0,
    note=(
        "Lengths include the correction or bonus token. The printed numbers are of 8B targets over "
        "four to eight nodes, ours of one target on this machine, without hops. The option of each "
        "setting is in JSON; topk 10 and τ 0.2 are ours."
    ),
)
