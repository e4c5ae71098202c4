"""Figures about the source of a checkout: owners of a slot's content, types, options, code lines.

Nothing is imported: all figures come from syntax trees and texts. So old and new structures are
measured alike, and a name of the lists that does not exist simply does not count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.rooms import room_of

SLOT_METHODS = ("keep_path", "rollback")
# Classes that record which tokens a K/V slot holds, with the attributes that hold the record. A
# rename looks like a deletion: `measure` lists what is missing, and `per_slot` what may be new.
OWNERS = {
    "Scheduler": ("_held",),
    "LocalTarget": ("_chains",),
    "Holding": ("_agreed", "_in_tree", "_paths"),
    "StepSlots": ("_chains",),
    "ModelDrafter": ("_ids", "_chain_length", "_trunk", "_tree"),
    "_Slot": ("ids", "length"),
    "Slots": ("_trees", "_tokens"),
    "LlamaDecoder": ("_tokens",),
    "SlotContents": ("_ids", "_chains", "_parents"),
}
# What carries a session's work from the scheduler to the graph: in a process, what the scheduler
# takes, what it gives to a target, what an engine and its graph read; to a node, the message. What
# a target records of a pass while nodes compute it is listed apart.
TYPES = {
    "from job to graph": ("Job", "Batch", "Span", "Work", "Pass", "StatePass", "Run"),
    "from target to node": ("WorkFrames", "Item", "Step"),
    "of a pass under way at nodes": (
        *("RemotePass", "_PipelinePass", "_EnsemblePass", "_ReplicaPass", "_SentStep"),
        *("_OpenStep", "SlotGrowth"),
    ),
    "from graph to job": ("Output", "Scored", "StageResult", "Scores"),
}
TYPE_ROOMS = ("edge_runtime", "engines", "wire")
BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # tokens before a statement

Classes = Sequence[tuple[str, ast.ClassDef]]  # each class, with its file


def measure(package: Path, options: Sequence[str]) -> dict[str, Any]:
    """Measure the package in this folder. options: names of options of a request."""
    texts = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes = [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    return {
        "options": {name: mentions(texts, name) for name in options},
        "slot_methods": slot_methods(classes),
        "owners": owners(classes),
        "missing_owners": missing_owners(classes),
        "per_slot": per_slot(classes),
        "types": {name: existing(classes, types) for name, types in TYPES.items()},
        "rooms": rooms({path: code_lines(text) for path, text in texts.items()}),
    }


def mentions(texts: dict[str, str], name: str) -> list[str]:
    """List the files in which an option's name stands as a word, in code or prose."""
    return [path for path, text in texts.items() if re.search(rf"\b{re.escape(name)}\b", text)]


def slot_methods(classes: Classes) -> dict[str, list[str]]:
    """List the methods that have a caller say what a slot holds, inside and outside engines."""
    result: dict[str, list[str]] = {"in engines": [], "outside engines": []}
    for path, owner in classes:
        place = "in engines" if room_of(path) == "engines" else "outside engines"
        result[place] += [
            f"{path}:{owner.name}.{method.name}"
            for method in owner.body
            if isinstance(method, ast.FunctionDef) and method.name in SLOT_METHODS
        ]
    return result


def owners(classes: Classes) -> dict[str, list[str]]:
    """List the attributes of `OWNERS` that exist, by file and class."""
    result = {}
    for path, owner in classes:
        there = attributes(owner)
        if names := [name for name in OWNERS.get(owner.name, ()) if name in there]:
            result[f"{path}:{owner.name}"] = names
    return result


def missing_owners(classes: Classes) -> list[str]:
    """List the attributes of `OWNERS` that do not exist."""
    there = {
        f"{path.rpartition(':')[2]}.{name}"
        for path, names in owners(classes).items()
        for name in names
    }
    every = (f"{owner}.{name}" for owner, names in OWNERS.items() for name in names)
    return [name for name in every if name not in there]


def attributes(owner: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the attributes that a class declares or its methods set, with their first values."""
    result: dict[str, ast.expr | None] = {}
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            result[node.target.id] = node.value
    for node in ast.walk(owner):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in assigned(target, node.value)]
        for target, value in pairs:
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    result.setdefault(name, value)
    return result


def assigned(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Split the assignment of a tuple to a tuple."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            return list(zip(targets, values, strict=True))
        case ast.Tuple(elts=targets), _:
            return [(each, value) for each in targets]
    return [(target, value)]


def per_slot(classes: Classes) -> list[str]:
    """List the other attributes with one entry for each slot, of devices, edges and engines.

    The rule: the first value is a list times `slots`, a comprehension over `range(… slots)`, or an
    array of numpy whose shape names `slots`. Among them may be a new owner of a slot's content.
    """
    result = []
    for path, owner in classes:
        if room_of(path) in (*TYPE_ROOMS, "device_runtime", "drafting"):
            for name, value in attributes(owner).items():
                if has_entry_per_slot(value) and name not in OWNERS.get(owner.name, ()):
                    result.append(f"{path}:{owner.name}.{name}")
    return result


def has_entry_per_slot(value: ast.expr | None) -> bool:
    """Return whether an attribute's first value has one entry for each slot."""
    match value:
        case ast.BinOp(left=ast.List(), op=ast.Mult(), right=count):
            return names_slots(count)
        case ast.ListComp(generators=[ast.comprehension(iter=count)]):
            return names_slots(count)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np")), args=[shape, *_]):
            return names_slots(shape)
    return False


def names_slots(node: ast.expr) -> bool:
    """Return whether an expression contains the name or attribute `slots`."""
    return any(
        isinstance(each, ast.Name | ast.Attribute)
        and (each.id if isinstance(each, ast.Name) else each.attr).lstrip("_") == "slots"
        for each in ast.walk(node)
    )


def existing(classes: Classes, types: Sequence[str]) -> list[str]:
    """List the classes of these names that are defined in the rooms of a pass."""
    names = {owner.name for path, owner in classes if room_of(path) in TYPE_ROOMS}
    return [name for name in types if name in names]


def rooms(code: dict[str, int]) -> dict[str, dict[str, int]]:
    """Sum files and lines of code by room. code: lines of code by file."""
    result: dict[str, dict[str, int]] = {}
    for path, lines in code.items():
        for name in (room_of(path), "all"):
            room = result.setdefault(name, {"files": 0, "code": 0})
            room["files"] += 1
            room["code"] += lines
    return dict(sorted(result.items(), key=lambda item: -item[1]["code"]))


def code_lines(text: str) -> int:
    """Count the lines that are not blank and not only comment or docstring.

    A string that begins a statement is a docstring.
    """
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        docstring = token.type == tokenize.STRING and before in BEGINNINGS
        if token.type not in BEGINNINGS and token.string and not docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        before = token.type
    return len(lines)
