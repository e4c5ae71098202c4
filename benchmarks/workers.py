"""What a federation's workers upload, and what a round over them takes, in real answers.

    python benchmarks/workers.py [--json PATH] [--quick] [--draft DIR] [--workers DIR DIR …]

A device in this process, an edge in another, each worker in one of its own, CURVE between all, over
loopback; every model runs on one thread. By default the workers are the default weights in fp32 and
int8. Answers are drafted by `coupled` at temperature 1 in windows of 8, so that every worker tells
of 9 positions, the bonus position included.

"round_ms" is the pass and the rule of such a window, as the edge tells it; the first row is an edge
with the first worker's model in its own process. The other figures are of the texts of that row's
answers, verified in windows of 9 positions by the federated target itself, in this process:
"up_bytes" is what it counts to have received of a worker for a window, "percent" that of what
full distributions take (all tokens kept, in fp16, measured alike), "down_bytes" what it has sent.
"pass_ms" is such a pass, "compute_ms" of it the slowest worker's own, its model and its top K, and
"beyond_ms" the rest: the wire, decoding, the average.

Goals: at K = 64 a worker uploads at most 0.5 % of full distributions, and a pass takes at most 5 ms
more than its slowest worker's computing.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_most, conclude, options, throwaway_keys
from numpy.typing import NDArray

from pilotfish import Device, EdgeServer
from pilotfish.cli.export import default_artifact
from pilotfish.device_runtime.record import Generation
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.targets.federated import FederatedTarget, open_target
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work
from pilotfish.wire.keys import EdgeKeys, allow

WINDOW = 8
SESSIONS, CONTEXT = 2, 1024
COLUMNS = (
    *("workers", "K", "values", "up_bytes", "percent", "down_bytes", "windows"),
    *("pass_ms", "compute_ms", "beyond_ms", "rounds", "round_ms", "round_p90_ms"),
)


class Case(NamedTuple):
    """So many of the workers, with this K and format; none: the edge's own model."""

    workers: int
    top_k: int = 0
    values: str = ""


class Text(NamedTuple):
    """A prompt and an answer, u32 [n], and where the answer begins."""

    tokens: NDArray[np.uint32]
    begin: int


class Bench:
    """The workers, which serve one edge after another, and what is asked of it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.draft: Path = args.draft or default_artifact("int4")
        self.models: list[Path] = args.workers or [
            default_artifact("fp32"),
            default_artifact("int8"),
        ]
        self.vocab = Artifact.open(self.models[0]).manifest.vocab_size
        self._answers, self._tokens = (2, 48) if args.quick else (6, 96)
        self._folder = folder
        self._served: list[EdgeServer] = []
        self._texts: list[Text] = []

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Have them serve."""
        with ExitStack() as stack:
            for model in self.models:
                worker = EdgeServer(
                    model, keys=self._folder, action="worker", threads=1, sessions=SESSIONS
                )
                self._served.append(stack.enter_context(worker))
            yield

    def row(self, case: Case) -> dict[str, Any]:
        """The figures of one case."""
        results = {"workers": case.workers, "K": case.top_k, "values": case.values}
        if not case.workers:
            return results | self._rounds({})
        listed = self._list(case)
        return results | self._uploads(case, listed) | self._rounds({"federate": listed})

    def _rounds(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Rounds of real answers at an edge process."""
        answers = []
        with (
            EdgeServer(
                self.models[0], keys=self._folder, threads=1, sessions=SESSIONS, **flags
            ) as edge,
            Device(self.draft, edge.endpoint, self._folder, threads=1) as device,
        ):
            self._answer(device, 0, 24)  # fresh engines are slow
            for number in range(1, 1 + self._answers):
                answers.append(self._answer(device, number, self._tokens))
                if not flags:
                    prompt = device.prompt(PROMPTS[number % len(PROMPTS)]).ids
                    tokens = np.concatenate([prompt, answers[-1].tokens]).astype(np.uint32)
                    self._texts.append(Text(tokens, len(prompt)))
        # the first round of an answer waits for its prompt to be read
        rounds = [each for answer in answers for each in answer.rounds[1:]]
        taken_ms = [1e3 * each.timings.verify for each in rounds if each.nodes == WINDOW]
        return {
            "rounds": len(taken_ms),
            "round_ms": float(np.median(taken_ms)),
            "round_p90_ms": float(np.percentile(taken_ms, 90)),
        }

    def _answer(self, device: Device, number: int, tokens: int) -> Generation:
        return device.generate(
            PROMPTS[number % len(PROMPTS)],
            protocol="coupled",
            temperature=1.0,
            seed=number,
            window=WINDOW,
            max_tokens=tokens,
        )

    def _uploads(self, case: Case, listed: Path) -> dict[str, Any]:
        """The texts in windows, by the target that an edge would have."""
        edge_metrics = EdgeMetrics()
        config = EdgeConfig(
            target=self.models[0],
            federate=listed,
            limits=EdgeLimits(sessions=SESSIONS, context=CONTEXT),
        )
        keys = EdgeKeys.load(self._folder)
        target = open_target(
            TargetOptions(config, Artifact.open(self.models[0]), keys, edge_metrics)
        )
        try:
            seen = [each for text in self._texts for each in passes(target, edge_metrics, text)]
        finally:
            target.close()
        pass_s, compute_s, up, down = np.median(np.array(seen), axis=0)
        return {
            "windows": len(seen),
            "up_bytes": float(up),
            "down_bytes": float(down),
            "pass_ms": 1e3 * pass_s,
            "compute_ms": 1e3 * compute_s,
            "beyond_ms": 1e3 * float(np.median([item[0] - item[1] for item in seen])),
        }

    def _list(self, case: Case) -> Path:
        path = self._folder / "workers.toml"
        lines = [f"kept = {case.top_k}", f'values = "{case.values}"']
        for index, worker in enumerate(self._served[: case.workers]):
            lines += ["[[worker]]", f'name = "{index}"', f'address = "{worker.endpoint}"']
            lines += ['key = "edge.pub"']
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o644)
        return path


def passes(
    target: FederatedTarget, metrics: EdgeMetrics, text: Text
) -> Iterator[tuple[float, float, float, float]]:
    """Of each window: seconds, those of the slowest worker, bytes from a worker and to one."""
    number = text.begin
    target.run(number, [Work(0, text.tokens[: text.begin], 0)])
    for begin in range(text.begin, len(text.tokens) - WINDOW, WINDOW + 1):
        end, number = begin + WINDOW + 1, number + 1
        work = Work(0, text.tokens[:end], WINDOW + 1, temperature=1.0)
        before = counted(metrics)
        begun_s = time.perf_counter()
        target.run(number, [work])
        took_s = time.perf_counter() - begun_s
        compute_s, up, down = counted(metrics) - before
        yield took_s, max(compute_s), float(np.mean(up)), float(np.mean(down))


def counted(metrics: EdgeMetrics) -> NDArray[np.float64]:
    """Seconds computed, bytes received and bytes sent, of each worker; f64 [3, workers]."""
    names = sorted(metrics.node_bytes_out)
    counts = (metrics.node_compute_s, metrics.node_bytes_in, metrics.node_bytes_out)
    return np.array([[float(count[name]) for name in names] for count in counts])


def judge(rows: Rows) -> list[Goal]:
    """The goals, which are those of K = 64 in fp16."""
    result = [row for row in rows if (row["K"], row["values"]) == (64, "fp16")]
    return [
        *(
            at_most("K = 64 in fp16: of full distributions, in %", row["percent"], 0.5)
            for row in result[-1:]
        ),
        *(
            at_most(
                f"{row['workers']} workers, K = 64: beyond computing, in ms", row["beyond_ms"], 5
            )
            for row in result
        ),
    ]


def main() -> int:
    parser = options(__doc__)
    add = parser.add_argument
    add("--draft", type=Path, metavar="DIR", help="the drafter's artifact (default: int4)")
    add("--workers", type=Path, nargs="+", metavar="DIR", help="(default: fp32 and int8)")
    args = parser.parse_args()
    with throwaway_keys() as folder:
        allow(folder, folder / "edge.pub", "edge")
        bench = Bench(args, folder)
        most = len(bench.models)
        cases = [
            Case(0),
            *(Case(count, 64, "fp16") for count in range(1, most)),
            *(Case(most, 64, values) for values in ("fp16", "levels", "fp32")),
            Case(most, 1024, "fp16"),
            *(Case(most, bench.vocab, values) for values in ("fp16", "fp32")),
        ]
        steps, rows = Steps(len(cases)), []
        with bench.workers():
            for case in cases:
                steps.next(f"{case.workers} workers, K = {case.top_k} {case.values}")
                rows.append(bench.row(case))
    (full,) = (row for row in rows if (row["K"], row["values"]) == (bench.vocab, "fp16"))
    for row in rows[1:]:
        row["percent"] = 100.0 * row["up_bytes"] / full["up_bytes"]
    return conclude(args, "a federation's uploads and rounds", COLUMNS, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
