"""A predicted answer against `stream`: edits of real files, with the old text as the prediction.

    python benchmarks/prediction.py --target DIR [--edits N] [--lines N] [--tokens N] [--rtt MS]
        [--json PATH] [--quick]

Each edit asks the target to repeat ``--lines`` of a module of Python's standard library with one
change: a function renamed, removed, described in German, with one more argument, or with a comment
before it. The lines begin a little before the module's first function, and the answer is cut after
``--tokens`` (0: not at all), so that it has the place of the edit. Each end has cores of its own
and one thread; between them is an emulated link. The device has no model. An edit's four ways take
turns after its prompt was read once:

    stream   the target alone
    none     `ahead` with the edge's hints, without a prediction: repetitions of the prompt
    right    the same with the old lines as the prediction
    wrong    the same with the lines of another module

Then questions, whose prompts have nothing to repeat: `stream`, `ahead` without a prediction, and
with a wrong one. "right", "wrong" and "none" are tokens/s over those of `stream` on the same
prompt, from the first message of tokens on. "right_cpu" and so forth are the same by the CPU time
of the edge and of whole answers, for machines with other work. "taken" is the share of the answer's
tokens that the right prediction has. "gap" is the largest distance, in logits, of the two tokens
where an answer parts from `stream`'s text, if one does: a target computes passes of several tokens
with other rounding.
"""

import inspect
import os
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _common import (
    PROMPTS,
    Rows,
    Steps,
    at_least,
    at_most,
    conclude,
    options,
    show,
    throwaway_keys,
)
from _parting import scores_at

from pilotfish import Device, EdgeServer
from pilotfish.base.cpus import pinned, split_cpus
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.texts.text_memory import OFF
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.engines.onnx_decoder import Decoder

BEFORE = 3  # lines of a file that are before its first function
GAP = 0.05  # logits; of targets in int8, whose passes over several tokens round differently
MODULES = [
    "textwrap",
    "bisect",
    "heapq",
    "shlex",
    "copy",
    "csv",
    "calendar",
    "fnmatch",
    "glob",
    "queue",
    "sched",
    "contextlib",
    "colorsys",
    "linecache",
    "posixpath",
    "reprlib",
    "pprint",
    "getpass",
    "tempfile",
    "gzip",
]
EDITS = {
    "rename": "Rename the function {name} to checked_{name} everywhere.",
    "argument": "Add the argument strict=False to the function {name}, after its other arguments.",
    "remove": "Remove the function {name}, and no other function.",
    "translate": "Put a docstring of one line, in German, into the function {name}.",
    "comment": "Add the comment '# This function was reviewed.' in the line before def {name}.",
}


class Edit(NamedTuple):
    """A change of a file. old: the file's lines; other: lines of another file."""

    kind: str
    module: str
    prompt: str
    old: str
    other: str


def excerpt(module: str, length: int) -> tuple[str, str]:
    """Return so many lines of a module's source, and the name of their first function."""
    lines = inspect.getsource(import_module(module)).splitlines(keepends=True)
    first = next(at for at, line in enumerate(lines) if re.match(r"\s*def \w", line))
    name = re.split(r"def |\(", lines[first])[1]
    begin = max(0, first - BEFORE)
    return "".join(lines[begin : begin + length]), name


def edits(count: int, length: int) -> list[Edit]:
    """Return the edits, of each kind in turn."""
    made = []
    for at, module in enumerate(MODULES[:count]):
        old, name = excerpt(module, length)
        other, _ = excerpt(MODULES[(at + 7) % len(MODULES)], length)
        kind = [*EDITS][at % len(EDITS)]
        prompt = (
            f"{EDITS[kind].format(name=name)} Keep every other line exactly as it is, and write "
            f"the whole file.\n\n```python\n{old}```"
        )
        made.append(Edit(kind, module, prompt, old, other))
    return made


def tokens_per_s(answer: Generation) -> float:
    """From the first message of tokens on, so that reading the prompt does not count."""
    after_s = answer.total_s - answer.first_token_s
    return (len(answer.tokens) - len(answer.rounds[0].tokens)) / max(after_s, 1e-9)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A device, its edge's process, and the target that judges where answers part.

    tokens: most of an answer; 0: no limit.
    """

    def __init__(self, device: Device, edge_pid: int, target: Path, tokens: int) -> None:
        self._device, self._edge_pid, self._target = device, edge_pid, target
        self._tokens = tokens or None
        self._reference: Decoder | None = None

    def run_ways(
        self, prompt: str, ways: dict[str, dict[str, Any]], turn: int, most: int | None = None
    ) -> dict[str, Any]:
        """Answer in all ways, each time another one first; return the row of figures."""
        self._ask(prompt, protocol="stream", max_tokens=2)  # reads the prompt
        names = [*ways]
        at = turn % len(names)
        answers: dict[str, Generation] = {}
        spent_s: dict[str, float] = {}
        for name in (*names[at:], *names[:at]):
            before_s = cpu_s(self._edge_pid)
            answers[name] = self._ask(prompt, max_tokens=most or self._tokens, **ways[name])
            spent_s[name] = (cpu_s(self._edge_pid) - before_s) / len(answers[name].tokens)
        plain = answers["stream"]
        row: dict[str, Any] = {"tokens": len(plain.tokens), "tokens_per_s": tokens_per_s(plain)}
        for name in names[1:]:
            answer = answers[name]
            row[name] = tokens_per_s(answer) / tokens_per_s(plain)
            row[f"{name}_cpu"] = spent_s["stream"] / spent_s[name]
            row[f"{name}_passes"] = len(answer.rounds)
        if "right" in answers:
            row["taken"] = answers["right"].accepted_prediction_tokens / len(plain.tokens)
        row["gap"] = max(self._gap(prompt, plain.tokens, each.tokens) for each in answers.values())
        return row

    def _ask(self, prompt: str, **changes: Any) -> Generation:
        return self._device.generate(prompt, temperature=0.0, **changes)

    def _gap(self, prompt: str, wanted: Sequence[int], got: Sequence[int]) -> float:
        """Return how far apart the target's logits are where two answers part; 0 if they do not."""
        at = next((at for at, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
        if at is None:
            return 0.0
        self._reference = self._reference or Decoder(self._target, context=8192)
        ids = np.array([*self._device.prompt(prompt).ids, *wanted[:at]], np.int64)
        scores = scores_at(self._reference, ids, None)
        return abs(float(scores[wanted[at]] - scores[got[at]]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = options(__doc__ or "")
    parser.add_argument(
        "--target", type=Path, metavar="DIR", required=True, help="the artifact of a coder"
    )
    parser.add_argument("--edits", type=int, default=20, help="of 20 (%(default)s)")
    parser.add_argument("--lines", type=int, default=200, help="of a file (%(default)s)")
    parser.add_argument("--tokens", type=int, default=320, help="of an answer (%(default)s)")
    parser.add_argument("--rtt", type=float, default=50.0, metavar="MS", help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.quick:
        args.edits, args.lines, args.tokens = 3, 60, 96
    wanted = edits(args.edits, args.lines)
    questions = PROMPTS[: max(2, args.edits // 4)]
    steps = Steps(len(wanted) + len(questions))
    rows: Rows = []
    others: Rows = []
    theirs, ours = split_cpus()
    hints = {"protocol": "ahead", "hints": "edge"}
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        edge = stack.enter_context(
            EdgeServer(args.target, keys=folder, cores=theirs, threads=1, context=8192, sessions=1)
        )
        link = stack.enter_context(Emulator(edge.endpoint, Conditions(rtt_s=args.rtt * 1e-3)))
        stack.enter_context(pinned(ours))
        device = stack.enter_context(
            Device(
                "text", link.endpoint, folder, threads=1, texts=OFF,
                on_link_loss="wait", patience_s=1800,
            )
        )  # fmt: skip
        bench = Bench(device, edge.pid, args.target, args.tokens)
        for turn, edit in enumerate(wanted):
            steps.next(f"{edit.kind} in {edit.module}")
            ways = {
                "stream": {"protocol": "stream"},
                "wrong": {**hints, "prediction": edit.other},
                "none": hints,
                "right": {**hints, "prediction": edit.old},
            }
            row = bench.run_ways(edit.prompt, ways, turn)
            rows.append({"edit": edit.kind, "module": edit.module, **row})
        for turn, question in enumerate(questions):
            steps.next("a question")
            ways = {
                "stream": {"protocol": "stream"},
                "wrong": {**hints, "prediction": wanted[turn % len(wanted)].old},
                "none": hints,
            }
            others.append(bench.run_ways(question, ways, turn, min(args.tokens or 128, 128)))
    show(args, "questions", ("tokens", "tokens_per_s", *ratios("wrong", "none"), "gap"), others)
    goals = [
        at_least("a right prediction: times stream, median", _median(rows, "right"), 2.5),
        at_least(
            "a wrong prediction, over none, median",
            statistics.median(row["wrong"] / row["none"] for row in (*rows, *others)),
            0.98,
        ),
        at_least("a wrong prediction, questions: times stream", _median(others, "wrong"), 0.98),
        at_most(
            "the largest gap where an answer parts from stream's text, logits",
            max(row["gap"] for row in (*rows, *others)),
            GAP,
        ),
    ]
    columns = ("edit", "module", "tokens", "tokens_per_s", *ratios("right", "none", "wrong"))
    title = f"edits, RTT {args.rtt:g} ms, answers of at most {args.tokens} tokens"
    return conclude(args, title, (*columns, "taken", "gap"), rows, goals)


def ratios(*names: str) -> list[str]:
    """The columns of these ways."""
    return [column for name in names for column in (name, f"{name}_cpu")]


def _median(rows: Rows, name: str) -> float:
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
