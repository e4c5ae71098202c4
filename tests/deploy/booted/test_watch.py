"""The watch as a service of a booted machine: neither edge, disk nor power ends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.run import Answer, Run
from tests.deploy.booted.conftest import EDGE, ETC
from tests.deploy.booted.machine import Machine

WATCH = "pilotfish-watch.service"
FOLDER = Path("var/lib/pilotfish-watch")
RUN = FOLDER / "watch.pilotfish"
EVERY_S = 2

# The first test waits for the machine to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def watched(machine: Machine) -> Iterator[Machine]:
    """The machine with a running watch, whose folder is a file system of 4 MB."""
    settings = machine.root / ETC / "watch.toml"
    text = settings.read_text()
    assert 'edge = "tcp://127.0.0.1:7077"' in text
    settings.write_text(text.replace('every = "5min"', f'every = "{EVERY_S}s"'))
    machine.run("mkdir", "-p", f"/{FOLDER}")
    machine.run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", f"/{FOLDER}")
    machine.run("systemctl", "start", WATCH)
    machine.until_active(WATCH)
    try:
        yield machine
    finally:
        machine.run("systemctl", "stop", WATCH)


def copied(machine: Machine) -> tuple[list[Answer], list[Probe], list[Outage]]:
    """What the run file says now."""
    copy = machine.root / "root" / "copy"
    for suffix in ("", "-wal"):
        machine.run("sh", "-c", f"rm -f /root/copy{suffix}; cp /{RUN}{suffix} /root/copy{suffix}",
                    check=not suffix)  # fmt: skip
    try:
        with Run.open(copy) as run:
            return list(run.answers()), list(run.probes()), list(run.outages())
    except RunFileError:  # file and log were copied one after the other
        return [], [], []


def until_rows(machine: Machine, more: int = 2) -> None:
    """Wait for some further rounds."""
    before = max((probe.id for probe in copied(machine)[1]), default=0)
    machine.until(
        lambda: any(probe.id >= before + more for probe in copied(machine)[1]), "further rounds"
    )


def test_it_measures_and_is_hardened(watched: Machine) -> None:
    until_rows(watched)
    answers, probes, _ = copied(watched)
    assert {answer.protocol for answer in answers} == {"stream", "ahead", "auto"}
    assert all(len(probe.rtts_s) + probe.lost > 0 for probe in probes)
    assert watched.show(WATCH, "NRestarts") == "0"
    reply = watched.run("systemd-analyze", "security", "--no-pager", WATCH)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", reply)
    assert exposure is not None
    assert float(exposure[1]) <= 1.5
    assert watched.run("stat", "-c", "%a %U", f"/{FOLDER}", f"/{RUN}") == (
        "750 pilotfish\n600 pilotfish"
    )


def test_a_kill_loses_the_running_row_at_most(watched: Machine) -> None:
    before = copied(watched)
    watched.run("systemctl", "kill", "--signal=KILL", WATCH)
    watched.until(lambda: watched.show(WATCH, "NRestarts") == "1", "it is started again")
    watched.until_active(WATCH)
    until_rows(watched)
    after = copied(watched)
    assert [probe.clock_s for probe in after[1][: len(before[1])]] == [
        probe.clock_s for probe in before[1]
    ]
    assert {answer.id for answer in before[0]} <= {answer.id for answer in after[0]}


def test_an_edge_that_is_away_is_a_row(watched: Machine) -> None:
    watched.run("systemctl", "stop", EDGE, "pilotfish-edge.socket")
    watched.until(lambda: any(o.ended_clock_s is None for o in copied(watched)[2]), "an outage")
    assert watched.show(WATCH, "ActiveState") == "active"
    watched.run("systemctl", "start", EDGE)
    watched.until(
        lambda: bool(o := copied(watched)[2]) and o[-1].ended_clock_s is not None, "it ended"
    )
    until_rows(watched)


def test_a_full_disk_is_survived(watched: Machine) -> None:
    filler = f"/{FOLDER}/filler"
    watched.run("sh", "-c", f"cat /dev/zero >{filler}", check=False)
    watched.until(lambda: "cannot be written" in watched.journal(WATCH), "the journal says so")
    assert watched.show(WATCH, "ActiveState") == "active"
    before = copied(watched)[1]
    watched.run("sleep", 3 * EVERY_S)
    watched.run("rm", filler)
    until_rows(watched, 5)
    after = copied(watched)[1]
    rounds = [int(probe.clock_s // EVERY_S) for probe in after]
    gaps = [b - a for a, b in pairwise(rounds) if b > rounds[len(before) - 1]]
    assert max(gaps) <= 2, "rounds that were measured while the disk was full are missing"
    assert watched.show(WATCH, "NRestarts") == "1"


def test_the_journal_is_short(watched: Machine) -> None:
    lines = watched.run("journalctl", "-u", WATCH, "-o", "cat", "--no-pager").splitlines()
    assert len(lines) < 60, lines[-20:]


def test_power_that_is_cut_loses_the_running_row_at_most(watched: Machine) -> None:
    """On the disk of the machine, since a tmpfs would be gone."""
    watched.run("systemctl", "stop", WATCH)
    watched.run("umount", f"/{FOLDER}")
    watched.run("systemctl", "enable", "--now", WATCH)
    watched.until_active(WATCH)
    until_rows(watched)
    before = copied(watched)
    watched.cut_power()
    watched.boot()
    watched.until_active(WATCH)
    watched.until_active(EDGE)
    until_rows(watched)
    after = copied(watched)
    times = [probe.clock_s for probe in after[1]]
    assert times[: len(before[1])] == [probe.clock_s for probe in before[1]]
    assert times == sorted(times)
    watched.run("systemctl", "disable", WATCH)
