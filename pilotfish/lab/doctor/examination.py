"""The examination of a machine: its facts, what to expect, and what is wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from pilotfish.drafting.text_drafter import TEXT
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import EngineError, ProviderError
from pilotfish.engines.tensorrt.edition import edition_of
from pilotfish.engines.tensorrt.loading import check_engine_exists
from pilotfish.lab.doctor.board_facts import board_facts
from pilotfish.lab.doctor.board_rules import board_findings
from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.finding import SEVERITIES, Finding, fault, note, warning
from pilotfish.lab.doctor.gpu_facts import gpu_facts, slowed_by
from pilotfish.lab.doctor.gpu_rules import gpu_findings
from pilotfish.lab.doctor.machine import Machine
from pilotfish.lab.doctor.outlook import Expects, Outlook, Subject, look_ahead
from pilotfish.lab.doctor.system_facts import system_facts
from pilotfish.lab.doctor.system_rules import system_findings

VERSION = 1
# exit codes of `pilotfish doctor` by the worst finding; 2 is argparse's
EXIT_CODES = {"fault": 3, "warning": 1, "note": 0}


class Examination(Struct, frozen=True, kw_only=True):
    """The results of the doctor; `--json` writes this structure.

    Attributes:
        format, version: name and version of this structure. A new version may change or remove
            fields; within a version fields are only added.
        machine: the facts that are known.
        expects: what will run, and how fast it should be.
        findings: what is wrong, the worst first.
    """

    format: Literal["pilotfish-doctor"] = "pilotfish-doctor"
    version: int = VERSION
    machine: MachineFacts
    expects: Expects
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code: 0, or that of the worst finding."""
        return max((EXIT_CODES[each.severity] for each in self.findings), default=0)


class Diagnosis(Struct, frozen=True, kw_only=True):
    """An examination, and the lines about memory and speed that the page shows."""

    examination: Examination
    lines: tuple[str, ...]


def read_facts(machine: Machine) -> MachineFacts:
    """Collect a machine's facts from its readings."""
    board = board_facts(machine)
    board["throttled"] += slowed_by(machine)
    gpu = gpu_facts(machine)
    tegra = board["tegra"] or board["soc"] or board["l4t"]
    if tegra and "not found" in (gpu["gpu_problem"] or ""):
        gpu["gpu_problem"] = None  # before JetPack 6 a Jetson has no nvidia-smi
    cards = gpu["gpus"] and not tegra
    if cards and board["board_name"] in (None, "cpu"):
        board["board_name"] = "rtx"
    known = board | gpu | system_facts(machine) | {"unfinished": tuple(machine.unfinished)}
    # msgspec leaves out only the same object as a default, and Python 3.10 has many empty tuples
    return MachineFacts(**{name: value for name, value in known.items() if value != ()})


def examine(machine: Machine, subject: Subject, *, known: tuple[Finding, ...] = ()) -> Diagnosis:
    """Examine a machine. known: findings that the caller has already, such as a broken file."""
    facts = read_facts(machine)
    findings = list(known)
    artifact = None
    if subject.model is not None:
        try:
            artifact = Artifact.open(subject.model, stage=True)
        except EngineError as error:
            findings.append(fault("model", f"{subject.source}: {error}"))
    outlook = look_ahead(facts, subject, artifact)
    for part in (board_findings, gpu_findings, system_findings):
        findings += part(facts)
    findings += _outlook_findings(facts, subject, artifact, outlook)
    findings.sort(key=lambda each: SEVERITIES.index(each.severity))
    examination = Examination(machine=facts, expects=outlook.expects, findings=tuple(findings))
    return Diagnosis(examination=examination, lines=outlook.lines)


def _outlook_findings(
    facts: MachineFacts, subject: Subject, artifact: Artifact | None, outlook: Outlook
) -> Iterator[Finding]:
    """Yield what is wrong with the model on this machine."""
    expects = outlook.expects
    if subject.unexported not in (None, TEXT):
        end = "target" if subject.role == "edge" else "drafter"
        yield note(
            "model",
            f"{subject.unexported} has no artifact in this user's cache: the first start exports "
            "it, so its memory and speed are not known before.",
            f"pilotfish models fetch {shlex.quote(str(subject.unexported))} --role {end}",
        )
    for misfit in outlook.misfits:
        yield (fault if misfit.kind == "too-large" else warning)(
            "model", misfit.message, expects.advice if misfit.kind == "idle-gpu" else None
        )
    works = {each.name: each for each in expects.providers}
    wanted = works.get(subject.provider)
    if wanted is None and subject.provider != "auto":
        yield fault(
            "provider",
            f"{subject.source} names the provider {subject.provider}, which there is not: choose "
            f"auto, {', '.join(works)}.",
        )
    if wanted is not None and wanted.works is False:
        yield fault(
            "provider",
            f"{subject.source} names the provider {wanted.name}, which cannot run here: "
            f"{wanted.reason}",
        )
    idle = facts.has_gpu and expects.provider == "cpu" and subject.provider == "auto"
    if artifact is not None and idle and not outlook.misfits:
        reasons = "; ".join(
            f"{each.name}: {each.reason}" for each in expects.providers if each.works is False
        )
        yield warning(
            "model",
            f"The model ({expects.dialect} {expects.precision}) would run on the CPU, although "
            f"there is a GPU{': ' if reasons else '.'}{reasons}",
            expects.advice,
        )
    elif artifact is not None and expects.provider is not None:
        yield from _engine(artifact, expects.provider)


def _engine(artifact: Artifact, provider: str) -> Iterator[Finding]:
    """Yield whether an engine of the model is missing, if the provider runs engines."""
    edition = edition_of(provider)
    if edition is None:
        return
    try:
        check_engine_exists(edition, artifact)
    except ProviderError:
        yield warning(
            "engine",
            f"{provider} needs an engine of the model, and none is in the artifact or in the "
            "cache: until it is built, the model runs on the CPU.",
            edition.command(artifact.path),
        )
