"""Machines for the doctor: recordings, and root trees with what a kind of machine has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.examination import Examination, examine
from pilotfish.lab.doctor.machine import Machine
from pilotfish.lab.doctor.outlook import Subject
from pilotfish.lab.doctor.system_facts import process_facts

RECORDINGS = Path(__file__).parents[1] / "data" / "machines"
# An Orin Nano with JetPack 6.2 in its fastest mode: nothing is wrong with it.
ORIN_NANO = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0"
    "nvidia,tegra234\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
    "var/lib/nvpmodel/status": "pmode:0002",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
    "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "proc/meminfo": "MemTotal: 7802216 kB\nMemAvailable: 6000000 kB\nSwapTotal: 8000000 kB\n",
}


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write these files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine_of(
    root: Path,
    files: Mapping[str, str],
    outputs: Mapping[str, str | Output] | None = None,
    **process: Any,
) -> Machine:
    """Return a machine that a process could run on, with these files, outputs and facts."""
    kernel = "5.15.148-tegra" if "proc/device-tree/model" in files else "6.8.0"
    known = {"kernel": kernel, "disks": (), "unread": ()}
    return Machine(
        plant(root, files),
        {
            name: Output(output) if isinstance(output, str) else output
            for name, output in (outputs or {}).items()
        },
        process_facts() | known | process,
    )


def examined(machine: Machine, subject: Subject | None = None) -> Examination:
    """Return a machine's examination."""
    return examine(machine, subject or Subject()).examination


def subjects(examination: Examination, *severities: str) -> set[str]:
    """Return the subjects of the findings of these severities, by default faults and warnings."""
    wanted = severities or ("fault", "warning")
    return {each.subject for each in examination.findings if each.severity in wanted}


def mends(examination: Examination, subject: str) -> list[str | None]:
    """Return the commands that mend what is wrong with a part of the machine."""
    return [each.mend for each in examination.findings if each.subject == subject]
