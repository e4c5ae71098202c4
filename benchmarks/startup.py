"""From the start of a daemon's process to readiness, as systemd would be told.

    python benchmarks/startup.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

Each daemon is started with a notification socket, as systemd gives one, and timed until READY=1
comes over it: `pilotfish edge serve` with the target, and `pilotfish device serve` with the drafter
and that edge. The artifacts are exported and in the page cache; the first start of each is left
out. The goal is 3 s for the default pair on a CPU.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _common import (
    Rows,
    Steps,
    at_most,
    conclude,
    free_port,
    options,
    pair,
    pair_options,
    throwaway_keys,
)

from pilotfish import EdgeServer

COLUMNS = ("daemon", "starts", "min_s", "median_s", "max_s")
PATIENCE_S = 60.0


def started_s(command: list[str], folder: Path) -> float:
    """Seconds until the daemon is ready; it is stopped again."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(path))
        ear.settimeout(PATIENCE_S)
        began_s = time.monotonic()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "pilotfish", *command],
            env=os.environ | {"NOTIFY_SOCKET": str(path)},
            stderr=subprocess.DEVNULL,
        )
        try:
            while b"READY=1" not in ear.recv(4096).splitlines():
                pass
            return time.monotonic() - began_s
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(PATIENCE_S)
            path.unlink()


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    drafter, target = pair(args)
    times = 3 if args.quick else 7
    steps = Steps(2 * (times + 1))
    rows: Rows = []
    with (
        throwaway_keys() as keys,
        EdgeServer(target, keys=keys) as edge,
        tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name,
    ):
        device = ["device", "serve", "--draft", str(drafter), "--edge", edge.endpoint]
        device += ["--keys", str(keys), "--listen"]
        ours = ["edge", "serve", "--target", str(target), "--keys", str(keys), "--listen"]
        for daemon, command, address in (("edge", ours, "tcp://"), ("device", device, "")):
            taken_s = []
            for number in range(times + 1):
                steps.next(daemon)
                listen = f"{address}127.0.0.1:{free_port()}"
                taken_s.append(started_s([*command, listen], Path(name)))
                if not number:
                    taken_s.clear()
            rows.append(
                {
                    "daemon": daemon, "starts": times, "min_s": min(taken_s),
                    "median_s": median(taken_s), "max_s": max(taken_s),
                }
            )  # fmt: skip
    goals = [at_most(f"{row['daemon']}: start to ready, s", row["median_s"], 3.0) for row in rows]
    return conclude(args, "start to ready", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
