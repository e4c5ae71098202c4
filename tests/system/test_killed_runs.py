"""A run of the tests that is killed leaves no process, in whatever session, and no mount."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish import EdgeServer
from tests.conftest import Pair
from tests.support.daemons import Daemon
from tests.support.reaper import MARK, Reaper
from tests.support.serving import Serving
from tests.support.thinned import thinned

SOON_S = 10.0
NAMES = "TESTS_KILLED_RUN"  # the file to which the run to be killed writes whom it has started
SLEEPS = "import time; time.sleep(300)"
# a child in a session of its own that outlives its parent, as a daemon does
FORKS = f"""
import subprocess, sys
command = [sys.executable, "-c", {SLEEPS!r}]
child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
"""


def killed_while_it_serves(pair: Pair, tmp_path: Path) -> None:
    """What is collected by the run that is to be killed, and by no other."""
    edge = EdgeServer(pair.target, threads=1).start()
    daemon = Daemon("--target", pair.target, "--listen", "tcp://127.0.0.1:0", serves=False)
    service = Serving(pair.draft, edge.endpoint).wait_until_it_serves()
    wait_to_be_killed(edge.pid, daemon.pid, service.process.pid)


def killed_with_what_detaches_itself() -> None:
    plain = subprocess.Popen([sys.executable, "-c", SLEEPS])
    forked = subprocess.run([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, check=True)
    wait_to_be_killed(plain.pid, int(forked.stdout))


def wait_to_be_killed(*pids: int) -> None:
    names = Path(os.environ[NAMES])
    names.with_suffix(".part").write_text(" ".join(map(str, (os.getpid(), *pids))))
    names.with_suffix(".part").rename(names)
    time.sleep(300)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


CASES = {
    "killed": ("killed_with_what_detaches_itself", signal.SIGKILL, "pytest"),
    "interrupted": ("killed_with_what_detaches_itself", signal.SIGINT, "pytest"),
    "killed above its processes": ("killed_with_what_detaches_itself", signal.SIGKILL, "tests"),
    "interrupted above them": ("killed_with_what_detaches_itself", signal.SIGINT, "tests"),
    "killed while it serves": ("killed_while_it_serves", signal.SIGKILL, "pytest"),
}


@pytest.mark.parametrize("case", thinned(CASES, [*CASES][2:]))
def test_a_run_that_is_cut_short_leaves_no_process(case: str, tmp_path: Path) -> None:
    test, blow, program = CASES[case]
    names = tmp_path / "pids"
    command = [sys.executable, "-m", program, __file__, "-o", f"python_functions={test}"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    with (tmp_path / "said").open("wb") as reply:
        # a session of its own, as where CI or a terminal ends pytest alone
        run = subprocess.Popen(
            command, env={**os.environ, NAMES: str(names), "TMPDIR": str(tmp_path)},
            stdout=reply, stderr=reply, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not names.exists():
        assert run.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = [*map(int, names.read_text().split())]
    assert all(map(is_alive, pids))
    run.send_signal(blow)
    run.wait(SOON_S)
    deadline = time.monotonic() + SOON_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, [
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left
        ]
        time.sleep(0.02)


def test_what_a_run_leaves_is_named_and_what_is_not_its_own_stays(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = os.environ.get(MARK)
    sleeps = [sys.executable, "-c", SLEEPS]
    with subprocess.Popen(sleeps) as stays:
        reaper = Reaper()
        with subprocess.Popen(sleeps) as left:
            reaper.close()
            assert left.wait(SOON_S) == -signal.SIGKILL
        assert stays.poll() is None
        stays.kill()
    assert f"left by the tests, and killed: {left.pid} " in capfd.readouterr().err
    assert os.environ.get(MARK) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="to mount takes root")
def test_what_the_tests_mount_is_seen_by_themselves_alone(tmp_path: Path) -> None:
    mounted = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    assert str(tmp_path) in Path("/proc/self/mounts").read_text()
    assert str(tmp_path) not in Path("/proc/1/mounts").read_text()
    subprocess.run(["umount", str(tmp_path)], check=True)
