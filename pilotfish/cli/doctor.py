"""``pilotfish doctor``: what this machine is, what will run on it, and what is wrong with it."""

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Meta, structs
from rich.console import Console

from pilotfish.base.errors import ConfigError
from pilotfish.cli.configuration import read_settings
from pilotfish.cli.flags import bounded
from pilotfish.cli.options import Commands, write_json
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.export.cached_models import find_model
from pilotfish.export.model_cache import request_of
from pilotfish.export.source_names import DEFAULT, DEFAULTS
from pilotfish.lab.doctor.doctor_page import show
from pilotfish.lab.doctor.examination import Diagnosis, examine
from pilotfish.lab.doctor.finding import Finding, fault
from pilotfish.lab.doctor.machine import LIMIT_S, Machine, recorded_machine, this_machine
from pilotfish.lab.doctor.outlook import Role, Subject

_CONFIGURATION = Path("/etc/pilotfish")
_MOST = (1 << 31) - 1  # the largest number in a configuration
_LONGEST_WAIT_S = 600
_EDGE = EdgeLimits()  # its defaults
_LANES: int = next(f.default for f in structs.fields(ServiceConfig) if f.name == "lanes")
_DESCRIPTION = """\
Says what this machine is, what will therefore run on it and how fast that should be, and what is
wrong, with the command that mends it. It looks at the board, JetPack, L4T, CUDA, TensorRT and ONNX
Runtime, the GPU and its driver, power mode, clocks and heat, memory, swap and disks, systemd and
our units, the clock, the locale, limits, and Python.

It takes at most about three seconds unless the machine is overloaded. It changes nothing, sends
nothing, and needs no root. It reports tools that hang, and lists the facts that only root may read.
"""
_EPILOG = """\
examples:
  pilotfish doctor                            this machine, and the model of /etc/pilotfish/*.toml
  pilotfish doctor --role edge                as an edge
  pilotfish doctor --config device.toml       the model that a configuration file names
  pilotfish doctor --json | jq '.findings[] | select(.severity != "note")'
  pilotfish doctor --recorded machine.toml    the recording of another machine (docs/doctor.md)

exit codes: 0 nothing is wrong (there may be notes); 1 warnings; 3 a fault: something will not run;
2 wrong usage; 78 a file of --config or --recorded that cannot be read.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine is, what will run on it, and what is wrong with it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON (docs/doctor.md)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a configuration file of `device serve` or `edge serve`, whose model is examined "
        f"(default: {_CONFIGURATION}/device.toml or edge.toml, if there is one)",
    )
    parser.add_argument(
        "--role",
        choices=get_args(Role),
        help="the end of the link (default: by the configuration file; else device)",
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="FILE",
        help="examine a recorded machine instead of this one (docs/doctor.md)",
    )
    parser.add_argument(
        "--wait",
        type=bounded(float, Meta(gt=0, le=_LONGEST_WAIT_S)),
        default=LIMIT_S,
        metavar="S",
        help="seconds after which a tool hangs (%(default)g)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    if args.recorded is not None:
        machine = recorded_machine(args.recorded)
    else:
        machine = this_machine(args.wait)
    diagnosis = _diagnose(machine, args.config, args.role)
    if args.json:
        write_json("-", msgspec.to_builtins(diagnosis.examination))
    else:
        seconds = None if args.recorded else time.monotonic() - began
        show(diagnosis, Console(highlight=False), seconds)
    return diagnosis.examination.exit_code


def diagnose_this_machine() -> Diagnosis:
    """Examine this machine and the model that is configured on it, as the command does."""
    return _diagnose(this_machine(), None, None)


def _diagnose(machine: Machine, config: Path | None, role: Role | None) -> Diagnosis:
    """Examine a machine. config: None: the configuration of this machine's service, if any.

    Raises `ConfigError` if ``config`` cannot be read; a broken configuration of the service is a
    finding.
    """
    if config is not None:
        return _examine_configured(machine, config, role)
    known: tuple[Finding, ...] = ()
    roles: tuple[Role, ...] = (role,) if role is not None else get_args(Role)
    for end in roles if machine.process is not None else ():
        path = _CONFIGURATION / f"{end}.toml"
        if os.access(path, os.R_OK):  # else it is listed as unread, if it is there
            try:
                return _examine_configured(machine, path, end)
            except ConfigError as error:
                known = (fault("configuration", str(error), f"sudoedit {path}"),)
                break
    return examine(machine, Subject(role=role or "device"), known=known)


def _examine_configured(machine: Machine, path: Path, role: Role | None) -> Diagnosis:
    """Examine a machine with the model of a configuration file, and the file itself."""
    from pilotfish.cli import parser

    subject = _subject(read_settings(path), path, role)
    known: tuple[Finding, ...] = ()
    try:  # as the daemon reads it
        parser().parse_args([subject.role, "serve", "--config", str(path)])
    except ConfigError as error:
        known = (fault("configuration", str(error), f"sudoedit {path}"),)
    return examine(machine, subject, known=known)


def _subject(settings: Mapping[str, Any], path: Path, role: Role | None) -> Subject:
    """Return the model that a configuration names: an artifact, or what will be exported."""
    values = {key.replace("_", "-"): value for key, value in settings.items()}
    end: Role = role or ("edge" if "target" in values else "device")
    model = str(values.get("target" if end == "edge" else "draft", DEFAULT))
    provider = str(values.get("provider", "auto"))
    context = _count(values.get("context"))
    slots = _count(values.get("sessions" if end == "edge" else "lanes"))
    artifact = _artifact(model, end, provider)
    return Subject(
        role=end,
        model=artifact,
        unexported=None if artifact is not None or model in DEFAULTS else model,
        source=str(path),
        provider=provider,
        context=context or (_EDGE.context if end == "edge" else None),
        slots=slots or (_EDGE.sessions if end == "edge" else _LANES),
    )


def _artifact(name: str, role: Role, provider: str) -> Path | None:
    """Return the folder of the artifact that a name means; None: it is not exported yet."""
    if name == TEXT:
        return None
    try:
        request = request_of(name, "target" if role == "edge" else "drafter", provider)
    except ArtifactError:
        return Path(name)  # a finding tells what is wrong with it
    return Path(name) if request is None else find_model(request)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MOST else None
