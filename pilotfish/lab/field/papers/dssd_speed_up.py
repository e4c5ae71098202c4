"""Tables 2 and 3 of dssd, measured: real rounds of `dsd` and `dssd` over an emulated link.

As in the paper: temperature 1, top-k 10, windows γ of 4, 6 and 8, NTT (the RTT) of 0, 20 and 50 ms,
10, 50 and 100 Mbit/s each way. The speed-up is relative to the target alone, without a link. Unlike
in the paper, answers are short, because a round of `dsd` takes more than a second at 10 Mbit/s.

Table 2 is about equal devices, as drafter and target are here. Table 3 is about a slower device,
and §4.2 prints the ratio c = T_SLM/T_LLM of its pairs. Here c is larger, since both models have the
same size. So Table 3 takes the measured rounds with the drafter's time at the paper's c: that
speed-up is modelled.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from pilotfish.device_runtime.device import Device
from pilotfish.emulation.emulator import Conditions
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.measured_rounds import (
    AnswerProgress,
    RoundSums,
    connected,
    point,
    resampled,
    take_turns,
)
from pilotfish.lab.field.papers.sheet import Row, Value, interval, interval_columns
from pilotfish.speculation.latency import Link, communication_s
from pilotfish.wire.protocols import STREAM

_PROTOCOLS = ("dsd", "dssd")
_PRINTED_TOKENS = 128  # tokens of the paper's answers, for which it prints T_com
_TOKENS = 32
_PROMPTS = 6
_C = {"67b": 0.1, "13b": 0.05}  # c of the printed pairs (§4.2)
_LABEL = "answering over emulated links"


class _Cell(NamedTuple):
    """The link and the window of a table's row."""

    ntt_ms: int
    mbps: int
    gamma: int


_TABLE2_CELLS = [_Cell(*cell) for cell in product((0, 20, 50), (10, 50, 100), (4, 6, 8))]
_TABLE3_CELLS = [
    _Cell(0, 100, 8), _Cell(20, 50, 8), _Cell(20, 100, 4), _Cell(20, 100, 6), _Cell(20, 100, 8),
]  # fmt: skip


def _by_link(cells: Iterable[_Cell]) -> dict[tuple[int, int], list[_Cell]]:
    groups: dict[tuple[int, int], list[_Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.ntt_ms, cell.mbps), []).append(cell)
    return groups


def _identity(protocol: str, cell: _Cell) -> Identity:
    return (protocol, *cell)


def _measured(bench: Bench, done: Container[Identity], *, cells: Sequence[_Cell]) -> Iterator[Row]:
    """Yield the rows of one link after the other."""
    missing = [
        cell
        for cell in cells
        if any(_identity(protocol, cell) not in done for protocol in _PROTOCOLS)
    ]
    if not missing:
        return
    prompts = bench.prompts[:_PROMPTS]
    links = _by_link(missing)
    total = len(prompts) * sum(1 + len(_PROTOCOLS) * len(group) for group in links.values())
    progress = AnswerProgress(bench.report, _LABEL, total)
    with connected(bench) as (device, emulator):
        _warm_up(device, prompts[0])
        for (ntt_ms, mbps), group in links.items():
            rate = mbps * 1e6
            emulator.set(Conditions(rtt_s=ntt_ms * 1e-3, up_bps=rate, down_bps=rate))
            cases: dict[str, Mapping[str, Any]] = {STREAM: _options(STREAM)}
            cases |= {
                f"{protocol} {cell.gamma}": _options(protocol, cell.gamma)
                for cell in group
                for protocol in _PROTOCOLS
            }
            sums = take_turns(
                device, prompts, cases, tokens=_TOKENS, seed=bench.seed, progress=progress
            )
            alone = resampled(sums[STREAM])
            for cell, protocol in product(group, _PROTOCOLS):
                if _identity(protocol, cell) not in done:
                    rounds = resampled(sums[f"{protocol} {cell.gamma}"])
                    yield _row(protocol, cell, len(prompts), rounds, alone)


def _options(protocol: str, window: int | None = None) -> dict[str, Any]:
    shape = {} if window is None else {"window": window}
    return {"protocol": protocol, "top_k": 10, "temperature": 1.0, **shape}


def _warm_up(device: Device, prompt: str) -> None:
    """Make the first passes of each kind, which are slow."""
    for protocol, window in ((STREAM, None), ("dsd", 8), ("dssd", 8)):
        device.generate(prompt, max_tokens=10, **_options(protocol, window))


def _row(protocol: str, cell: _Cell, n: int, rounds: RoundSums, alone: RoundSums) -> Row:
    alone_s = alone.edge_s / alone.tokens
    link = Link(rtt_s=cell.ntt_ms * 1e-3, up_bps=cell.mbps * 1e6, down_bps=cell.mbps * 1e6)
    modelled_s = communication_s(rounds.up_bytes, rounds.down_bytes, link, rounds.rounds)
    per_answer = _PRINTED_TOKENS / rounds.tokens
    row = {
        "protocol": protocol,
        "ntt_ms": cell.ntt_ms,
        "bandwidth_mbps": cell.mbps,
        "gamma": cell.gamma,
        "n": n,
        **interval("speed_up", rounds.tokens * alone_s / (rounds.compute_s + rounds.link_s)),
        **interval("com_s", rounds.link_s * per_answer),
        "com_modelled_s": point(modelled_s * per_answer),
        "alpha": point(rounds.alpha),
        "rounds": point(rounds.rounds * per_answer),
        "up_bytes": point(rounds.up_bytes / rounds.rounds),
        "down_bytes": point(rounds.down_bytes / rounds.rounds),
        "c": point(rounds.draft_s / (rounds.rounds * cell.gamma) / alone_s),
        "alone_ms": 1e3 * point(alone_s),
    }
    for target, c in _C.items():
        draft_s = c * alone_s * cell.gamma * rounds.rounds
        total_s = draft_s + rounds.edge_s + rounds.other_s + rounds.link_s
        row |= interval(f"speed_up_{target}", rounds.tokens * alone_s / total_s)
    return row


_IDENTITY = ("protocol", "ntt_ms", "bandwidth_mbps", "gamma")
_BEGIN: dict[str, tuple[str, int | None]] = {
    "protocol": ("", None),
    "ntt_ms": ("NTT, ms", 0),
    "bandwidth_mbps": ("Mbit/s", 0),
    "gamma": ("γ", 0),
}
_TABLE2_COLUMNS: dict[str, tuple[str, int | None]] = {
    **interval_columns("speed_up", "speed-up", 2),
    "speed_up_67b_printed": ("6.7B", 2),
    "speed_up_13b_printed": ("13B", 2),
    "com_s": ("T_com, s", 2),
    "com_modelled_s": ("by (3)", 2),
    "com_67b_printed_s": ("6.7B", 2),
    "com_13b_printed_s": ("13B", 2),
}
_TABLE3_COLUMNS: dict[str, tuple[str, int | None]] = {
    "speed_up": ("speed-up", 2),
    **interval_columns("speed_up_67b", "c = 0.1", 2),
    "speed_up_67b_printed": ("6.7B", 2),
    "speed_up_13b": ("c = 0.05", 2),
    "speed_up_13b_printed": ("13B", 2),
}
_NOTE = (
    "6.7B, 13B: as printed, for those targets, with α of 0.61 and 0.53. JSON has α, c and bytes."
)


def _printed(
    table: Sequence[Sequence[Any]], pairs: Sequence[tuple[str, str]], names: Sequence[str]
) -> list[dict[str, Value]]:
    """Return a printed table's rows. A cell that is printed twice has both values.

    pairs: protocol and target of the table's columns. names: columns of a cell's numbers, in which
    ``{}`` stands for the target.
    """
    rows: dict[Identity, dict[str, Value]] = {}
    for ntt_ms, mbps, gamma, *values in table:
        for (protocol, model), value in zip(pairs, values, strict=True):
            identity = (protocol, ntt_ms, mbps, gamma)
            row = rows.setdefault(identity, dict(zip(_IDENTITY, identity, strict=True)))
            target = model.lower().replace(".", "")
            numbers = value if isinstance(value, tuple) else (value,)
            for name, number in zip(names, numbers, strict=True):
                key = name.format(target)
                row[key] = f"{row[key]:.2f} / {number:.2f}" if key in row else number
    return list(rows.values())


def table2_figure(table: Sequence[Sequence[Any]], pairs: Sequence[tuple[str, str]]) -> Figure:
    """Make the figure of Table 2. table, pairs: the printed rows, as `_printed` takes them."""
    return Figure(
        key="table2",
        title="Table 2, measured over emulated links: equal devices",
        columns={**_BEGIN, **_TABLE2_COLUMNS},
        identity=_IDENTITY,
        printed=partial(_printed, table, pairs, ("com_{}_printed_s", "speed_up_{}_printed")),
        measure=partial(_measured, cells=_TABLE2_CELLS),
        minutes=6.0,
        note=f"{_NOTE} T_com: for {_PRINTED_TOKENS} tokens; by (3): modelled from the bytes sent.",
    )


def table3_figure(table: Sequence[Sequence[Any]], pairs: Sequence[tuple[str, str]]) -> Figure:
    """Make the figure of Table 3. table, pairs: the printed rows, as `_printed` takes them."""
    return Figure(
        key="table3",
        title="Table 3, measured, and modelled for the paper's drafters",
        columns={**_BEGIN, **_TABLE3_COLUMNS},
        identity=_IDENTITY,
        printed=partial(_printed, table, pairs, ("speed_up_{}_printed",)),
        measure=partial(_measured, cells=_TABLE3_CELLS),
        minutes=1.0,
        note=(
            f"{_NOTE} Speed-up: all times are measured. c = 0.1, c = 0.05: modelled, with "
            "T_SLM = c·T_LLM as in the paper's pairs, and all other times as measured."
        ),
    )
