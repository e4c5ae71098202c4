"""What traces cost an answer: ms per token with traces off, on, and with the collector away.

    python benchmarks/traces.py [--json PATH] [--quick] [--port N]

Both ends on loopback with tiny models, whose passes are so short that the cost shows. Four pairs of
a device and an edge answer the same prompt in turn, in another order each time: off, off once more
(what two equal pairs differ by), on, and on with nothing at the collector's address. The figures
are medians, and medians of the differences from the first pair within a turn. On a busy machine
processor times say more: of the thread that answers, and of the edge's process with its exporter.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from _common import Rows, Steps, at_most, conclude, options

from pilotfish import Device, EdgeServer

TOKENS = 64
PROTOCOLS = ("stream", "ahead", "greedy")
MOST_MS = 0.05  # goal: more ms per token with traces


class _Sink(BaseHTTPRequestHandler):
    """Takes whatever comes, as a collector does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _sink(port: int) -> None:
    HTTPServer(("127.0.0.1", port), _Sink).serve_forever()


@contextmanager
def collector(port: int) -> Iterator[str]:
    """Run a collector in a process of its own."""
    process = get_context("spawn").Process(target=_sink, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / 100


def main() -> int:
    from tests.support.tiny import tiny_pair

    parser = options(__doc__ or "")
    parser.add_argument("--port", type=int, default=24318, help="port of the collector")
    args = parser.parse_args()
    turns = 40 if args.quick else 400
    rows: Rows = []
    goals = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        draft, target = tiny_pair(folder)
        url = stack.enter_context(collector(args.port))
        urls = {"off": None, "off again": None, "on": url, "collector away": "http://127.0.0.1:9"}
        edges, devices = {}, {}
        for name, traces in urls.items():
            edge = EdgeServer(target, threads=1, traces=traces or False)
            edges[name] = stack.enter_context(edge)
            devices[name] = stack.enter_context(
                Device(draft, edge.endpoint, threads=1, traces=traces)
            )
        steps = Steps(len(PROTOCOLS))
        for protocol in PROTOCOLS:
            steps.next(protocol)
            times: dict[str, list[float]] = {name: [] for name in urls}
            device_ms: dict[str, list[float]] = {name: [] for name in urls}
            used = {name: -cpu_s(edges[name].pid) for name in urls}
            names = [*urls]
            for turn in range(turns):
                names = [*names[1:], names[0]] if turn % 2 else names[::-1]
                for name in names:
                    begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
                    answer = devices[name].generate(
                        [1, 2, 3, turn % 60], protocol=protocol, max_tokens=TOKENS, ignore_eos=True
                    )
                    took_s = time.perf_counter() - begun_s
                    times[name].append(took_s * 1e3 / len(answer.tokens))
                    cpu_ms = (time.thread_time() - begun_cpu_s) * 1e3
                    device_ms[name].append(cpu_ms / len(answer.tokens))
            time.sleep(6)  # until the last spans are sent
            for name, traces in urls.items():
                used[name] += cpu_s(edges[name].pid)
                more = median(x - y for x, y in zip(times[name], times["off"], strict=True))
                rows.append({
                    "protocol": protocol, "traces": name,
                    "ms/token": round(median(times[name]), 4), "more ms/token": round(more, 4),
                    "device CPU ms/token": round(median(device_ms[name]), 4),
                    "edge CPU ms/token": round(used[name] * 1e3 / turns / TOKENS, 4),
                })  # fmt: skip
                if traces is not None:
                    goals.append(at_most(f"more ms/token, {protocol}, {name}", more, MOST_MS))
    return conclude(args, "Cost of traces", [*rows[0]], rows, goals)


if __name__ == "__main__":
    sys.exit(main())
