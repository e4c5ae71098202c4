"""Whether `field load` and an outside load generator, GuideLLM, measure the same.

    python benchmarks/load_agreement.py --guidellm PATH [--devices N] [--down BPS] [--json PATH]

A device service with N lanes streams from an edge. Three load generators take turns, each with N
questions under way, without time to think, over the same prompts and lengths: GuideLLM over HTTP,
`field load --service` over HTTP, and `field load --edge` on the wire. What the HTTP path costs is
the difference of the last two.

The link to the edge has a rate (--down), which is what limits: so the times hardly depend on what
else this machine does, and differences are the generators'. With --down 0 the target limits.

Goals: of `field load --service` and GuideLLM, time to the first token, milliseconds per token and
tokens/s agree within 3 % (medians over turns).

PATH is the command `guidellm` of a virtual environment of its own (pip install guidellm); tried
with 0.8.1. It needs no network here. This benchmark is no part of the CI.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from _common import Goal, Rows, Steps, at_most, conclude, free_port, options, pair, pair_options
from _daemons import CommandProcess, wait_until_healthy

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.load.figures import figures
from pilotfish.lab.field.load.results import Results

PROMPTS = (
    "Describe how a lighthouse works, for a curious child.",
    "Explain what a hash table is, and when it is slow.",
    "Write a short story about a fish that follows a shark.",
    "What should one check before a long drive?",
    "Compare trains and planes for a trip of 600 km.",
)
FIGURES = ("first_ms", "token_ms", "tokens_per_s")
COLUMNS = ("generator", "turn", "answers", *FIGURES)
WITHIN = 0.03


class Bench:
    """An edge, a link and a service; each method is one turn of a generator."""

    def __init__(
        self, folder: Path, edge: str, service: str, devices: int, tokens: int, answers: int
    ) -> None:
        self._folder, self._edge, self._service = folder, edge, service
        self._devices, self._tokens, self._answers = devices, tokens, answers
        self._prompts = folder / "prompts.jsonl"
        self._prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))

    def guidellm(self, command: str, turn: int) -> dict[str, float]:
        """GuideLLM's figures; it counts answers that began after all lanes were busy."""
        # every prompt as often as it is asked, so that the data does not end before the run
        data, out = self._folder / "data.jsonl", self._folder / f"guidellm-{turn}.json"
        text = self._prompts.read_text()
        data.write_text(text * -(-self._answers // len(PROMPTS)))
        backend = f"kind=openai_http,target={self._service},model=pilotfish"
        backend += f",request_format=/v1/chat/completions,max_tokens={self._tokens}"
        backend += ",extras.body.temperature=0"
        words = [command, "run", "--backend", backend]
        words += ["--profile", f"kind=concurrent,streams={self._devices}"]
        words += ["--constraint", f"kind=max_requests,count={self._answers}"]
        words += ["--data", f"kind=json_file,path={data}", "--disable-console"]
        words += ["--output", f"kind=json,path={out}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        metrics = benchmark["metrics"]
        requests = benchmark["requests"]["successful"]
        return {
            "answers": len(requests),
            "first_ms": median(each["time_to_first_token_ms"] for each in requests),
            "token_ms": median(each["inter_token_latency_ms"] for each in requests),
            "tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        }

    def field_load(self, name: str, turn: int, *where: str) -> dict[str, float]:
        """The figures of `field load`."""
        out = self._folder / f"{name}-{turn}"
        words = [sys.executable, "-m", "pilotfish", "field", "load", *where, "--out", out]
        words += ["--prompts", self._prompts, "--max-tokens", self._tokens, "--think", "0"]
        words += ["--devices", self._devices, "--answers", self._answers, "--for", "5s"]
        words += ["--warm-up", "2s", "--at", "999s", "--protocols", "stream", "--processes", 1]
        subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)
        point = Results.read(out / "load.json").points[0]
        result = figures(point)
        assert result.first_token_ms is not None
        assert result.token_ms is not None
        return {
            "answers": result.n,
            "first_ms": result.first_token_ms.p50,
            "token_ms": result.token_ms.p50,
            "tokens_per_s": result.tokens_per_s,
        }

    def turn(self, guidellm: str, turn: int, steps: Steps) -> Rows:
        """One turn of each generator."""
        steps.next("GuideLLM")
        rows: Rows = [{"generator": "GuideLLM", **self.guidellm(guidellm, turn)}]
        steps.next("field load over HTTP")
        result = self.field_load("http", turn, "--service", self._service)
        rows.append({"generator": "field load over HTTP", **result})
        steps.next("field load on the wire")
        result = self.field_load("wire", turn, "--edge", self._edge)
        rows.append({"generator": "field load on the wire", **result})
        return [{**row, "turn": turn} for row in rows]


def judge(rows: Rows) -> list[Goal]:
    """The difference of the two generators over HTTP, as a share, for each figure."""
    goals = []
    for name in FIGURES:
        ours, theirs = (
            median(row[name] for row in rows if row["generator"] == generator)
            for generator in ("field load over HTTP", "GuideLLM")
        )
        goals.append(at_most(f"{name}: difference", abs(ours / theirs - 1.0), WITHIN))
    return goals


def summarize(rows: Rows) -> Rows:
    """The median of each figure over the turns, by generator."""
    generators: Sequence[str] = list(dict.fromkeys(row["generator"] for row in rows))
    return [
        {
            "generator": generator,
            "turn": "median",
            **{
                name: median(row[name] for row in rows if row["generator"] == generator)
                for name in FIGURES
            },
        }
        for generator in generators
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--guidellm", required=True, metavar="PATH", help="the command guidellm")
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer (32)")
    parser.add_argument("--down", type=float, default=40e3, metavar="BPS", help="bit/s (40000)")
    args = parser.parse_args()
    _, target = pair(args)
    turns, answers = (1, 20) if args.quick else (3, 40)
    steps = Steps(3 * turns)
    rows: Rows = []
    most = 2 * args.devices + 2  # the lanes of the service keep their sessions
    room = {"sessions": most, "sessions_per_client": most}
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        conditions = Conditions(rtt_s=0.02, down_bps=args.down or None)
        with (
            EdgeServer(target, threads=1, **room) as edge,
            Emulator(edge.endpoint, conditions) as link,
        ):
            port = free_port()
            words = ["device", "serve", "--draft", "text", "--edge", link.endpoint]
            words += ["--listen", f"127.0.0.1:{port}", "--lanes", args.devices]
            service = CommandProcess(*words, "--protocol", "stream", "--queue", 64)
            try:
                wait_until_healthy(port, service)
                url = f"http://127.0.0.1:{port}"
                bench = Bench(Path(name), link.endpoint, url, args.devices, args.tokens, answers)
                for turn in range(1, turns + 1):
                    rows += bench.turn(args.guidellm, turn, steps)
            finally:
                service.end()
    table = [*rows, *summarize(rows)]
    return conclude(args, "load generators", COLUMNS, table, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
