"""Whether `field load` and an outside load generator, GuideLLM, measure the same.

    python benchmarks/load_agreement.py --guidellm PATH [--protocol P] [--rtt S] [--json PATH]

A device service with N lanes answers by one protocol of an edge. Three load generators take turns,
each with N questions under way, without time to think, over the same prompts and lengths: GuideLLM
over HTTP, `field load --service` over HTTP, and `field load --edge` on the wire. What the HTTP path
costs is the difference of the last two.

Rounds over a long link (--rtt) wait for the link most of the time: so the times hardly depend on
what else this machine does, and differences are the generators'. `--protocol stream --rtt 0.02` is
limited by the target: there the generators' own work on the same cores shows.

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
from pilotfish.lab.field.load.methods import read_method
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
        self,
        folder: Path,
        where: tuple[str, str],
        protocol: str,
        draft: Path,
        counts: tuple[int, int, int],
    ) -> None:
        """where: the addresses of edge and service. counts: of devices, an answer's tokens, and the
        answers of a turn."""
        self._folder, (self._edge, self._service) = folder, where
        self._protocol, self._draft = protocol, draft
        self._devices, self._tokens, self._answers = counts
        self._prompts = folder / "prompts.jsonl"
        self._prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))

    def guidellm(self, command: str, turn: int) -> dict[str, float]:
        """GuideLLM's figures.

        Its own tokens/s includes the end of the run, when some streams have no question left. So
        this one is computed from its requests: tokens per second of a busy stream, times streams.
        """
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
        requests = benchmark["requests"]["successful"]
        busy_s = sum(each["request_latency"] for each in requests)
        tokens = sum(each["output_tokens"] for each in requests)
        return {
            "answers": len(requests),
            "first_ms": median(each["time_to_first_token_ms"] for each in requests),
            "token_ms": median(each["inter_token_latency_ms"] for each in requests),
            "tokens_per_s": self._devices * tokens / busy_s,
        }

    def field_load(self, name: str, turn: int, *extra: object) -> dict[str, float]:
        """The figures of `field load`."""
        out = self._folder / f"{name}-{turn}"
        words = [sys.executable, "-m", "pilotfish", "field", "load", "--out", out]
        words += ["--prompts", self._prompts, "--max-tokens", self._tokens, "--think", "0"]
        words += ["--devices", self._devices, "--answers", self._answers, "--for", "5s"]
        words += ["--warm-up", "2s", "--at", "999s", "--protocols", self._protocol]
        words += ["--processes", 1, *extra]
        subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)
        results = Results.read(out / "load.json")
        result = figures(results.points[0], results.load.for_s)
        assert result.first_token_ms is not None
        assert result.token_ms is not None
        assert result.tokens_per_s is not None
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
        result = self.field_load("wire", turn, "--edge", self._edge, "--draft", self._draft)
        rows.append({"generator": "field load on the wire", **result})
        return [{**row, "turn": turn} for row in rows]


def service_flags(method: str) -> list[str]:
    """The flags of `device serve` for a method as `field load` names it, such as ``ahead:edge``.

    Raises `UnsupportedError` for one that a load cannot replay.
    """
    chosen = read_method(method).options
    flags = [(f"--{name}", chosen.get(name)) for name in ("protocol", "window", "hints")]
    return [str(word) for flag, value in flags if value is not None for word in (flag, value)]


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
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer (32)")
    parser.add_argument(
        "--protocol", default="greedy:4", metavar="P", help="as --protocols (greedy:4)"
    )
    parser.add_argument("--rtt", type=float, default=0.2, metavar="S", help="of the link (0.2)")
    args = parser.parse_args()
    draft, target = pair(args)
    flags = service_flags(args.protocol)
    turns, answers = (1, 20) if args.quick else (3, 40)
    steps = Steps(3 * turns)
    rows: Rows = []
    most = 2 * args.devices + 2  # the lanes of the service keep their sessions
    room = {"sessions": most, "sessions_per_client": most}
    with (
        tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name,
        EdgeServer(target, threads=1, **room) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=args.rtt)) as link,
    ):
        port = free_port()
        words = ["device", "serve", "--draft", draft, "--edge", link.endpoint]
        words += ["--listen", f"127.0.0.1:{port}", "--lanes", args.devices, "--queue", 64]
        service = CommandProcess(*words, *flags, "--threads", 1)
        try:
            wait_until_healthy(port, service)
            where = link.endpoint, f"http://127.0.0.1:{port}"
            counts = args.devices, args.tokens, answers
            bench = Bench(Path(name), where, args.protocol, draft, counts)
            for turn in range(1, turns + 1):
                rows += bench.turn(args.guidellm, turn, steps)
        finally:
            service.end()
    table = [*rows, *summarize(rows)]
    return conclude(args, "load generators", COLUMNS, table, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
