"""Measure the settings of decentralized's table 1 that Pilotfish has, on this machine's pair.

Each setting is an option of Pilotfish, and stands beside the printed length and speed;
`field.papers.decentralized_printed` has the readings. The paper's data sets and judges are not part
of Pilotfish, so no accuracy is measured here.
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
from pilotfish.wire.protocols.adaptive import BUILT_IN

TOKENS = 40  # tokens of an answer
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
