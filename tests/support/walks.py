"""Measure the depth of the code: files that one request crosses, owners of one fact, code by room.

    python -m tests.support.walks [--checkout DIR] [--json FILE] [--options NAME,NAME] [--static]

`--checkout` measures another checkout, so figures before and after a change come from one script.
The walks run an edge, a device and a device service as processes, with tiny models. Calls are
recorded there by `tests.support.walk_tracer`; `tests.support.source_measures` reads the source.

A walk is repeated. "each" counts what every repeat crosses, "any" what at least one crosses, and
the median is that of single repeats. Work on a clock (ticks) is in "any" and not in "each".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import source_measures
from tests.support.walk_tracer import REPEATS, Walk

ROOT = Path(__file__).parents[2]
TRACER = Path(__file__).with_name("walk_tracer.py")
OPTIONS = ("prompt_logprobs", "min_p")
START_S = 120.0
END_S = 20.0
# Replaces the folder that -c puts first in the path, so `pilotfish` is that of the checkout.
_RUN = "import runpy, sys; sys.path[0] = sys.argv[2]; runpy.run_path({tracer!r}, None, '__main__')"


class Traced:
    """A process of a checkout that records its calls."""

    def __init__(self, checkout: Path, log: Path, role: str, *arguments: object) -> None:
        self._log = log
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        self._lines = ours.makefile("rw")
        ours.close()
        words = [sys.executable, "-c", _RUN.format(tracer=str(TRACER)), str(theirs.fileno())]
        with theirs, log.open("w") as errors:
            self._process = subprocess.Popen(
                [*words, str(checkout), role, *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(checkout)},
                cwd=checkout,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def address(self) -> str:
        """Wait for the line that names the process's address."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if match := re.search(r"serves on (\S+)\s", self._log.read_text()):
                return match[1]
            time.sleep(0.05)
        raise SystemExit(f"a traced process does not serve:\n{self._log.read_text()}")

    def request(self, action: str) -> Any:
        """Send a request to the tracer; returns its reply."""
        self._lines.write(f"{action}\n")
        self._lines.flush()
        if line := self._lines.readline():
            return json.loads(line)
        raise SystemExit(f"a traced process has ended:\n{self._log.read_text()}")

    def end(self) -> None:
        """Stop the process."""
        self._lines.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def traced(checkout: Path, log: Path, role: str, *arguments: object) -> Iterator[Traced]:
    """Run a traced process, and end it."""
    process = Traced(checkout, log, role, *arguments)
    try:
        yield process
    finally:
        process.end()


def summary(walks: Sequence[Walk]) -> dict[str, Any]:
    """Summarize the repeats of a walk."""
    result: dict[str, Any] = {"repeats": len(walks)}
    for kind in ("files", "functions"):
        sets = [set(walk[kind]) for walk in walks]
        common, union = set.intersection(*sets), set.union(*sets)
        result[kind] = {
            "each": len(common),
            "median": statistics.median_low(len(names) for names in sets),
            "any": len(union),
            "in_each": sorted(common),
            "in_some": sorted(union - common),
        }
    for kind in ("calls", "changes"):
        result[kind] = statistics.median_low(walk[kind] for walk in walks)
    return result


def both(ends: Sequence[Sequence[Walk]]) -> list[Walk]:
    """Join the walks of two processes, repeat by repeat: a window's draft and its verdict, say."""
    return [
        {
            "files": sorted({name for walk in walks for name in walk["files"]}),
            "functions": sorted({name for walk in walks for name in walk["functions"]}),
            "calls": sum(walk["calls"] for walk in walks),
            "changes": sum(walk["changes"] for walk in walks),
        }
        for walks in zip(*ends, strict=False)
    ]


def post(url: str, content: str) -> None:
    """Send an OpenAI request and read its whole reply."""
    body = {
        "model": "pilotfish",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=START_S) as reply:
        assert json.load(reply)["choices"]


def measure_walks(checkout: Path, folder: Path) -> dict[str, Any]:
    """Run the processes and walk through them."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    make_pair = [sys.executable, "-m", "tests.support.tiny", str(folder / "pair")]
    subprocess.run(make_pair, cwd=checkout, env=environment, check=True, capture_output=True)
    draft, target = folder / "pair/draft", folder / "pair/target"
    serve = ("edge", "serve", "--target", target, "--listen", "tcp://127.0.0.1:0", "--threads", 1)
    result = {}
    with traced(checkout, folder / "edge.log", "command", *serve) as edge:
        endpoint = edge.address()
        with traced(checkout, folder / "device.log", "device", draft, endpoint) as device:
            at_device, at_edge = device.request("report"), edge.request("report")
        result["prompt to first draft, device"] = summary(at_device["first draft"])
        name, rounds = "a later greedy round", (at_device["round"], at_edge["round"])
        result[f"{name}, device"] = summary(rounds[0])
        result[f"{name}, edge to verdict"] = summary(rounds[1])
        result[f"{name}, both ends"] = summary(both(rounds))
        result[f"{name}, edge to next window"] = summary(at_edge["cycle"])
        serve = ("device", "serve", "--draft", draft, "--edge", endpoint, "--protocol", "greedy")
        more = ("--listen", "127.0.0.1:0", "--threads", 1, "--window", 4)
        with traced(checkout, folder / "service.log", "command", *serve, *more) as service:
            ends = measure_requests(service, edge)
        result["an OpenAI request, device"] = summary(ends[0])
        result["an OpenAI request, both ends"] = summary(both(ends))
    return result


def measure_requests(service: Traced, edge: Traced) -> list[list[Walk]]:
    """Send requests to the service; returns the walks of the service and of the edge."""
    url = service.address()
    for content in ("warm", "up"):
        post(url, content)
    for repeat in range(REPEATS):
        for process in (service, edge):
            process.request("start http")
        post(url, f"abc {repeat}")
        for process in (service, edge):
            process.request("stop http")
    return [process.request("report")["http"] for process in (service, edge)]


def table(result: dict[str, Any]) -> str:
    """Write the figures as a table for a terminal."""
    title = f"{'':42}{'files':^20}{'functions':^20}{'changes':>9}"
    lines = [title, f"{'':42}" + f"{'each':>6}{'median':>8}{'any':>6}" * 2 + f"{'of file':>9}"]
    for name, walk in result.get("walks", {}).items():
        counts = [walk[kind] for kind in ("files", "functions")]
        cells = "".join(f"{each['each']:6}{each['median']:8}{each['any']:6}" for each in counts)
        lines.append(f"{name:42}{cells}{walk['changes']:9}")
    lines = lines if "walks" in result else []
    return "\n".join([*lines, *source_lines(result["source"])])


def source_lines(source: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table that are about the source."""
    yield from ("", f"{'files that mention an option':40}{'files':>6}")
    for name, files in source["options"].items():
        yield f"  {name:38}{len(files):6}"
    yield from ("", f"{'keep_path and rollback':40}{'definitions':>6}")
    for place, methods in source["slot_methods"].items():
        yield f"  {place:38}{len(methods):6}"
    inside = sum(path.startswith("engines/") for path in source["owners"])
    yield from ("", "owners of a slot's content")
    yield f"  {'classes in engines':38}{inside:6}"
    yield f"  {'classes outside engines':38}{len(source['owners']) - inside:6}"
    for owner, attributes in source["owners"].items():
        yield f"    {owner}: {', '.join(attributes)}"
    yield f"  no longer there: {', '.join(source['missing_owners']) or 'none'}"
    yield "  other attributes with one entry a slot: " + (", ".join(source["per_slot"]) or "none")
    for name, types in source["types"].items():
        yield from ("", f"{f'types {name}':40}{len(types):6}", f"  {', '.join(types)}")
    yield from ("", f"{'code lines by room':32}{'files':>8}{'code':>8}")
    for room, count in source["rooms"].items():
        yield f"  {room:30}{count['files']:8}{count['code']:8}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--json", type=Path, help="write all figures and lists here")
    parser.add_argument("--options", default=",".join(OPTIONS), help="options of a request")
    parser.add_argument("--static", action="store_true", help="read the source, run nothing")
    chosen = parser.parse_args(arguments)
    checkout = chosen.checkout.resolve()
    package = checkout / "pilotfish"
    result: dict[str, Any] = {"source": source_measures.measure(package, chosen.options.split(","))}
    if not chosen.static:
        with tempfile.TemporaryDirectory() as folder:
            result["walks"] = measure_walks(checkout, Path(folder))
    print(table(result))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
