"""`pilotfish-watch.service` on a booted machine: it survives kills, outages, a full disk and the
loss of power, and its run file has all rows but the running one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pilotfish.lab.field.run import Run
from tests.deploy.booted.conftest import EDGE, ETC
from tests.deploy.booted.machine import Machine

WATCH = "pilotfish-watch.service"
EVERY_S = 4
FOLDER = "/var/lib/pilotfish-watch"
OUT = f"{FOLDER}/watch.pilotfish"
SETTINGS = f"""\
edge = "tcp://127.0.0.1:7077"
keys = "/etc/pilotfish/keys"
out = "{OUT}"
every = "{EVERY_S}s"
goodput-bytes = 0
protocols = ["stream", "ahead"]
prompts = "/etc/pilotfish/prompts.txt"
max-tokens = 4
threads = 1
"""

_COPIED = "root/copy.pilotfish"
_COPY = """\
import pathlib, sqlite3, sys
pathlib.Path(sys.argv[2]).unlink(missing_ok=True)
run = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
with sqlite3.connect(sys.argv[2]) as copy:
    run.backup(copy)
    copy.execute("PRAGMA journal_mode = DELETE")
"""

# The first test waits for the machine to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Watched:
    """The machine whose watch runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def rounds(self) -> list[int]:
        """The numbers of the rounds in the file."""
        with self._run() as run:
            return [int(probe.clock_s // EVERY_S) for probe in run.probes()]

    def away(self) -> list[bool]:
        """For each outage in the file, whether it has not ended."""
        with self._run() as run:
            return [outage.ended_clock_s is None for outage in run.outages()]

    def protocols(self) -> set[str]:
        """The protocols that have given answers."""
        with self._run() as run:
            return {answer.protocol for answer in run.answers()}

    def starts(self) -> int:
        """How often the watch has started."""
        with self._run() as run:
            return len(run.facts.starts)

    def _run(self) -> Run:
        """A copy of the file that the machine itself makes, since only it sees all mounts."""
        self.machine.run("python3", "-c", _COPY, OUT, f"/{_COPIED}")
        return Run.open(self.machine.root / _COPIED)

    def until_rounds(self, more: int) -> list[int]:
        """Wait until the file has so many more rounds; all of them."""
        before = len(self.rounds())
        self.machine.until(
            lambda: len(self.rounds()) >= before + more, f"{more} more rounds", 30.0 + 8 * more
        )
        return self.rounds()

    def show(self, what: str) -> str:
        return self.machine.show(WATCH, what)

    def lines(self) -> list[str]:
        """All that the unit has written to the journal, without systemd's own lines."""
        options = ("--no-pager", "-o", "cat", "_SYSTEMD_UNIT=pilotfish-watch.service")
        return self.machine.run("journalctl", *options).splitlines()


@pytest.fixture(scope="module")
def watched(machine: Machine) -> Iterator[Watched]:
    """The watch of the machine's own edge, enabled; every few seconds a round."""
    state = machine.show(WATCH, "UnitFileState"), machine.show(WATCH, "ActiveState")
    assert state == ("disabled", "inactive")  # until somebody wants it
    etc = machine.root / ETC
    shipped = (etc / "watch.toml").read_text()
    (etc / "prompts.txt").write_text("abc\nbcd ef\nfed\n")
    (etc / "watch.toml").write_text(SETTINGS)
    machine.run("systemctl", "enable", "--now", WATCH)
    watched = Watched(machine)
    machine.until_active(WATCH)
    try:
        yield watched
    finally:
        machine.run("systemctl", "disable", "--now", WATCH)
        (etc / "watch.toml").write_text(shipped)


def test_it_measures_and_is_private(watched: Watched) -> None:
    rounds = watched.until_rounds(3)
    assert consecutive(rounds)
    assert (watched.show("ActiveState"), watched.show("NRestarts")) == ("active", "0")
    assert "127.0.0.1:7077" in watched.show("StatusText")
    assert watched.machine.run("systemd-analyze", "verify", WATCH) == ""
    reply = watched.machine.run("systemd-analyze", "security", "--no-pager", WATCH)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", reply)
    assert exposure is not None, reply
    assert float(exposure[1]) <= 1.5
    owned = watched.machine.run("stat", "-c", "%a %U", FOLDER, OUT)
    assert owned.splitlines() == ["750 pilotfish", "600 pilotfish"]
    assert watched.protocols() == {"stream", "ahead"}, watched.lines()


def test_the_journal_has_no_line_a_round(watched: Watched) -> None:
    before = watched.lines()
    watched.until_rounds(3)
    assert watched.lines() == before


def test_a_kill_loses_only_the_running_row(watched: Watched) -> None:
    before, starts = watched.until_rounds(1), watched.starts()
    restarts = int(watched.show("NRestarts"))
    watched.machine.run("systemctl", "kill", "-s", "KILL", WATCH)
    watched.machine.until(
        lambda: int(watched.show("NRestarts")) > restarts, "systemd has restarted the watch"
    )
    after = watched.until_rounds(2)
    assert after[: len(before)] == before
    assert after[len(before)] - before[-1] <= 3  # the running round, and the restart
    assert watched.starts() == starts + 1
    assert any("continuing the watch" in line for line in watched.lines())


def test_an_edge_that_is_away_is_one_outage(watched: Watched) -> None:
    outages, lines = len(watched.away()), len(watched.lines())
    restarts = watched.show("NRestarts")
    watched.machine.run("systemctl", "stop", EDGE)
    try:
        watched.machine.until(
            lambda: watched.away()[outages:] == [True], "the outage is in the file"
        )
        watched.machine.until(lambda: "Away" in watched.show("StatusText"), "the status tells it")
        assert watched.show("ActiveState") == "active"
    finally:
        watched.machine.run("systemctl", "start", EDGE)
    watched.machine.until(lambda: watched.away()[outages:] == [False], "the outage has ended")
    watched.until_rounds(1)
    assert watched.show("NRestarts") == restarts
    new_lines = watched.lines()[lines:]
    assert ["away" in line or "back after" in line for line in new_lines] == [True, True], new_lines


def test_a_full_disk_costs_no_row(watched: Watched) -> None:
    """A small file system, which only this test fills."""
    machine = watched.machine
    machine.run("systemctl", "stop", WATCH)
    machine.run("mount", "-t", "tmpfs", "-o", "size=4M", "none", FOLDER)
    try:
        machine.run("systemctl", "start", WATCH)
        machine.until_active(WATCH)
        before = watched.until_rounds(2)
        lines = len(watched.lines())
        machine.run("sh", "-c", f"cat /dev/zero >{FOLDER}/filler", check=False)
        machine.until(lambda: len(watched.lines()) > lines, "the journal tells of the disk")
        machine.run("sleep", 3 * EVERY_S)
        assert (watched.show("ActiveState"), watched.show("NRestarts")) == ("active", "0")
        machine.run("rm", f"{FOLDER}/filler")
        machine.until(lambda: len(watched.lines()) > lines + 1, "the rows are on the disk")
        after = watched.until_rounds(1)
        assert after[0] == before[0]
        assert consecutive(after)
        assert len(after) >= len(before) + 4
        full_line, free_line = watched.lines()[lines:]
        assert "full" in full_line
        assert "stay in memory" in full_line
        assert "all rows are in the file again" in free_line
    finally:
        machine.run("systemctl", "stop", WATCH)
        machine.run("umount", FOLDER)
        machine.run("systemctl", "start", WATCH)


def test_a_loss_of_power_loses_only_the_running_row(watched: Watched) -> None:
    """The machine ends at once; what its kernel had in memory stays, unlike in a real loss."""
    before, starts = watched.until_rounds(2), watched.starts()
    watched.machine.cut_power()
    watched.machine.boot()
    watched.machine.until_active(WATCH)
    after = watched.until_rounds(2)
    assert after[: len(before)] == before
    assert watched.starts() == starts + 1


def test_stop_ends_it_in_order(watched: Watched) -> None:
    watched.until_rounds(1)
    watched.machine.run("systemctl", "stop", WATCH)
    assert (watched.show("Result"), watched.show("ExecMainStatus")) == ("success", "0")
    files = watched.machine.run("ls", FOLDER).split()
    assert not any(name.endswith(("-wal", "-shm", "-journal")) for name in files), files
    watched.machine.run("systemctl", "start", WATCH)


def consecutive(rounds: list[int]) -> bool:
    """Whether no round is missing between the first one and the last one."""
    return rounds == list(range(rounds[0], rounds[0] + len(rounds)))
