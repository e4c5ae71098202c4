"""Answers under schemas: valid, the same under every protocol, and what constraints gain.

    python benchmarks/structured.py [valid] [speed] [--json PATH] [--quick]

valid    100 schemas (nesting, enums, patterns, numbers, arrays, $ref, oneOf) under `stream`,
         `greedy`, `coupled`, `tslt`, `tree` and `ahead`: every answer that ended is JSON of its
         schema, and `greedy`, `coupled`, `ahead` say what `stream` says
speed    tokens/s and α with drafts that know nothing of the grammar, with masked drafts, and with
         forced text drafted without a pass, at each --rtt; each end on a core of its own

Answers are checked by `jsonschema` (pip install jsonschema).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_least, at_most, options, pair, pair_options, show

from pilotfish import Device, EdgeServer
from pilotfish.cli.options import write_json
from pilotfish.device_runtime.draft_advice import DraftAdvice
from pilotfish.device_runtime.record import Generation
from pilotfish.emulation.emulator import Conditions, Emulator

TOKENS = 220
GAIN = 1.3  # at RTT 50, of constrained drafts over free ones
ASK = "Answer with one JSON object, and nothing else."
PROTOCOLS: dict[str, dict[str, Any]] = {
    "greedy": {"window": 4}, "coupled": {"window": 4, "temperature": 1.0},
    "tslt": {"window": 4, "temperature": 1.0},
    "tree": {"expansion": (2, 2, 1), "temperature": 1.0},
    "ahead": {}, "ahead, T 1": {"temperature": 1.0},
}  # fmt: skip
SAME = ("greedy", "coupled", "ahead", "ahead, T 1")

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def schemas() -> list[Schema]:
    """100 of them; what may be long is bounded, so that answers end."""
    words = [["red", "green", "blue"], ["yes", "no"], ["monday", "tuesday", "friday", "sunday"]]
    patterns = ["^[0-9]{3}-[0-9]{4}$", "^[A-Z]{2}[0-9]{2}$", "^(north|south)(east|west)?$",
                "^#[0-9a-f]{6}$"]  # fmt: skip
    leaves: list[Schema] = [
        _text(12), {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"},
        *({"enum": each} for each in words), *({"type": "string", "pattern": p} for p in patterns),
        {"type": "null"}, {"const": "fixed"}, {"type": "integer", "multipleOf": 5, "minimum": 0,
                                               "maximum": 100},
    ]  # fmt: skip
    pairs = list(zip(leaves, leaves[3:] + leaves[:3], strict=True))
    result = [_object(value=leaf) for leaf in leaves]
    result += [_object(name=_text(10), first=a, second=b) for a, b in pairs]
    result += [_object(outer=_object(inner=_object(leaf=leaf))) for leaf in leaves]
    result += [
        _object(items={"type": "array", "items": leaf, "minItems": low, "maxItems": low + 2})
        for leaf, low in zip(leaves, [0, 1, 2] * 5, strict=False)
    ]
    result += [_object(either={"oneOf": [_object(a=a), _object(b=b)]}) for a, b in pairs]
    result += [
        {**_object(head={"$ref": "#/$defs/part"}, rest={"$ref": "#/$defs/part"}),
         "$defs": {"part": _object(id=a, kind=b)}}
        for a, b in pairs
    ]  # fmt: skip
    result += [
        {**_object(tree={"$ref": "#/$defs/n"}), "$defs": {"n": {
            **_object(label={"enum": kinds}), "properties": {
                "label": {"enum": kinds}, "left": {"$ref": "#/$defs/n"}}}}}
        for kinds in words
    ]  # fmt: skip
    result += [
        {**_object(a=a, b=b), "required": ["a"], "properties": {"a": a, "b": b, "c": _text(6)}}
        for a, b in pairs
    ]
    result += [
        _object(**{f"k{n}": leaves[(i + n) % len(leaves)] for n in range(2 + i % 5)})
        for i in range(max(0, 100 - len(result)))
    ]
    return result[:100]


def valid(args: argparse.Namespace) -> tuple[Rows, list[Goal]]:
    """Check the answers to all schemas."""
    from jsonschema import validate

    draft, target = pair(args)
    every = schemas()[:: 10 if args.quick else 1][: args.schemas]
    wanted_value = [f"{prompt} {ASK}" for prompt in PROMPTS[: args.prompts]]
    steps = Steps(len(every) * len(wanted_value))
    rows = {
        name: {"protocol": name, "answers": 0, "ended": 0, "invalid": 0, "differ": 0}
        for name in ("stream", *PROTOCOLS)
    }
    with EdgeServer(target, threads=1) as edge, Device(draft, edge.endpoint, threads=1) as device:
        for at, (schema, prompt) in enumerate(product(every, wanted_value)):
            steps.next("schemas")
            wanted = {}
            for temperature in (0.0, 1.0):
                info = {"schema": schema, "max_tokens": TOKENS, "seed": at}
                info["temperature"] = temperature
                wanted[temperature] = device.generate(prompt, protocol="stream", **info)
                _note(rows["stream"], wanted[temperature], schema, validate)
            for name, ours in PROTOCOLS.items():
                info = {"schema": schema, "max_tokens": TOKENS, "seed": at, **ours}
                answer = device.generate(prompt, protocol=name.split(",")[0], **info)
                _note(rows[name], answer, schema, validate)
                if name in SAME:
                    same = wanted[ours.get("temperature", 0.0)].tokens == answer.tokens
                    rows[name]["differ"] += not same
    items = list(rows.values())
    return items, [
        at_most("answers that ended and are not of their schema",
                sum(row["invalid"] for row in items), 0),
        at_most("answers that differ from stream's", sum(row["differ"] for row in items), 0),
    ]  # fmt: skip


def _note(
    row: dict[str, Any], answer: Generation, schema: Schema, validate: Callable[..., None]
) -> None:
    row["answers"] += 1
    if answer.finish_reason != "stop":
        return
    row["ended"] += 1
    try:
        validate(json.loads(answer.text), schema)
    except Exception as error:
        row["invalid"] += 1
        print(f"{schema}: {answer.text!r}: {error}"[:500], file=sys.stderr)


class _Way(NamedTuple):
    """What the device's half of the grammar does: mask drafts, and draft what is forced."""

    masks: bool
    forces: bool


WAYS = {"free": _Way(False, False), "masked": _Way(True, False), "forced, too": _Way(True, True)}


@contextmanager
def _only(way: _Way) -> Iterator[None]:
    """Switch the masks or the forced tokens of the device's constraint off, as the case says."""
    forbid, forced = DraftAdvice.forbid, DraftAdvice.forced
    if not way.masks:
        DraftAdvice.forbid = lambda *info: ()
    if not way.forces:
        DraftAdvice.forced = lambda *info: ()
    try:
        yield
    finally:
        DraftAdvice.forbid, DraftAdvice.forced = forbid, forced


def speed(args: argparse.Namespace) -> tuple[Rows, list[Goal]]:
    """Compare the ways by tokens a second, medians of paired answers."""
    draft, target = pair(args)
    wanted = list(zip(schemas()[13::6], PROMPTS * 3, strict=False))[: 4 if args.quick else 12]
    protocols = {"greedy": {"window": 4}, "ahead": {}}
    steps = Steps(len(args.rtt) * len(wanted))
    rows: Rows = []
    with (
        EdgeServer(target, threads=1) as edge,
        Emulator(edge.endpoint, Conditions()) as link,
        Device(draft, link.endpoint, threads=1) as device,
    ):
        for ms in args.rtt:
            link.set(Conditions(rtt_s=ms * 1e-3))
            results: dict[tuple[str, str], list[Generation]] = {}
            for schema, prompt in wanted:
                steps.next(f"RTT {ms:g}")
                info: dict[str, Any] = {"schema": schema, "max_tokens": TOKENS}
                reply = f"{prompt} {ASK}"
                alone = device.generate(reply, protocol="stream", **info)
                results.setdefault(("stream", ""), []).append(alone)
                for (name, ours), (way, what) in product(protocols.items(), WAYS.items()):
                    with _only(what):
                        answer = device.generate(reply, protocol=name, **info, **ours)
                    results.setdefault((name, way), []).append(answer)
            rows += _rows(ms, results)
    return rows, [
        at_least(f"{row['protocol']}, RTT 50, masked and forced over free", row["over_free"], GAIN)
        for row in rows
        if row["rtt_ms"] == 50 and row["drafts"] == "forced, too"
    ]


def _rows(ms: float, options_value: dict[tuple[str, str], Sequence[Generation]]) -> Rows:
    def over(these: Sequence[Generation], those: Sequence[Generation]) -> float:
        pairs = zip(these, those, strict=True)
        return median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    return [
        {
            "rtt_ms": ms,
            "protocol": name,
            "drafts": way,
            "alpha": float(np.mean([each.acceptance for each in answers])),
            "tokens_per_s": median(each.tokens_per_s for each in answers),
            "over_stream": over(answers, options_value["stream", ""]),
            "over_free": over(answers, options_value[name, "free"]) if way else 1.0,
        }
        for (name, way), answers in options_value.items()
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="valid, speed (default: both)")
    parser.add_argument("--schemas", type=int, default=100, metavar="N", help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.0, 50.0], metavar="MS")
    args = parser.parse_args()
    tables = {"valid": valid, "speed": speed}
    if unknown := set(args.tables) - {*tables}:
        parser.error(f"there is no table {min(unknown)}: {', '.join(tables)}")
    rows: Rows = []
    goals: list[Goal] = []
    for name in args.tables or tables:
        measured, wanted = tables[name](args)
        show(args, f"constrained answers: {name}", list(measured[0]), measured)
        rows, goals = rows + measured, goals + wanted
    for goal in goals:
        mark = "met   " if goal["met"] else "MISSED"
        print(f"{mark} {goal['name']} {goal['goal']:g}: {goal['value']:g}")
    if args.json:
        write_json(args.json, {"rows": rows, "goals": goals, "machine": args.company.report()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
