"""``pilotfish export engine``: build TensorRT engines of artifacts."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Cuda, Gpu
from pilotfish.engines.engine_errors import EngineFolderError, FormError
from pilotfish.engines.tensorrt.build import EngineRequest, Progress, build_file
from pilotfish.engines.tensorrt.cache import EngineCache
from pilotfish.engines.tensorrt.edition import RTX, STANDARD, Edition
from pilotfish.engines.tensorrt.engine_file import shipped_path
from pilotfish.engines.tensorrt.loading import ensure_engine
from pilotfish.engines.tensorrt.targets import USUAL, check_targets

_log = logging.getLogger("pilotfish.engines")

_DESCRIPTION = """\
Builds a TensorRT engine of each artifact, which takes minutes. An engine that exists already is not
built again. It has the artifact's precision. A first stage (`pilotfish export split`) gets two
engines: its own, and the head's.

--provider tensorrt (default) builds on this machine's GPU, for this model of GPU, into the cache
($PILOTFISH_CACHE/engines). It needs TensorRT's Python package (on JetPack: apt install
python3-libnvinfer).

--provider tensorrt-rtx builds on any machine, also without a GPU, for GPUs of the compute
capabilities 8.0, 8.6, 8.9 and from 12.0 on (RTX 30, 40 and 50, A100, GB10), or for those of
--compute. The engine goes into the artifact's folder, so it travels with the artifact. It needs the
extra 'tensorrt-rtx'. No Jetson runs such an engine.

Models run an engine with --provider tensorrt, tensorrt-rtx or auto. Quantised models need the
dialect tensorrt. No engine has run on a GPU yet."""
_EXAMPLE = """\
example:
  pilotfish export model default --out drafter --dialect opset17 --precision fp16
  pilotfish export engine drafter --context 2048
  pilotfish export engine --config /etc/pilotfish/device.toml
  pilotfish export engine target --provider tensorrt-rtx --slots 16 --context 2048

exit codes: 0 all engines are built, or no engine can be built of the drafter of --config (a
warning says why); 65 TensorRT cannot build one, or not for this compute capability; 66 no artifact;
69 no TensorRT, or no GPU where one is needed; 73 no engine can be written there; 74 the disk
is full; 78 a broken configuration; 130 interrupted.
"""


class EngineBuildSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export engine``."""

    artifacts: Annotated[
        tuple[Path, ...],
        setting(
            "an artifact of dialect opset17, opset24 or tensorrt, or a stage of one",
            metavar="DIR",
            positional=True,
        ),
    ] = ()
    provider: (
        Annotated[
            Literal["tensorrt", "tensorrt-rtx"],
            setting(
                "the TensorRT that builds and runs the engine (default: tensorrt-rtx if the "
                "configuration of --config names it, else tensorrt)"
            ),
        ]
        | None
    ) = None
    compute: Annotated[
        tuple[str, ...],
        setting(
            "of tensorrt-rtx: the GPUs' compute capabilities (default: 8.0, 8.6, 8.9, and 12.0 and "
            "later)",
            metavar="CC",
        ),
    ] = ()
    into: (
        Annotated[
            Literal["artifact", "cache"],
            setting(
                "where the engine goes: into the artifact's folder (default of tensorrt-rtx), or "
                "into this machine's cache (default of tensorrt, and with --config)"
            ),
        ]
        | None
    ) = None
    config: (
        Annotated[
            Path,
            setting(
                "build for the drafter, the lanes and the context that this configuration file "
                "of `device serve` names",
                metavar="FILE",
            ),
        ]
        | None
    ) = None
    slots: (
        Annotated[
            int,
            setting(
                "number of sequences at once: a device's lanes or an edge's sessions (default: 1)",
                ge=1,
            ),
        ]
        | None
    ) = None
    context: (
        Annotated[
            int,
            setting(
                "positions of each slot (default: the model's whole context)", ge=2, metavar="C"
            ),
        ]
        | None
    ) = None


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "engine",
        help="build TensorRT engines of artifacts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add_flags(parser, EngineBuildSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, EngineBuildSettings)
    paths, slots, context = settings.artifacts, settings.slots or 1, settings.context
    provider = settings.provider
    if settings.config:
        from pilotfish.cli import parser

        served = parser().parse_args(["device", "serve", "--config", str(settings.config)])
        if (reason := _why_no_engine(served)) is not None:
            print(f"no engine is built: {settings.config} names {reason}", file=sys.stderr)
            return 0
        paths = (*paths, drafter_folder(served.draft, served.provider))
        slots, context = settings.slots or served.lanes, settings.context or served.context
        provider = provider or (served.provider if served.provider == RTX.provider else None)
    if not paths:
        args.usage("name an artifact, or a file by --config that names one")
    artifacts = [Artifact.open(path, stage=True) for path in paths]
    edition = RTX if provider == RTX.provider else STANDARD
    if settings.compute and not edition.any_gpu:
        args.usage(
            "--compute is of --provider tensorrt-rtx; tensorrt builds for this machine's GPU"
        )
    gpu = _target(edition, settings.compute)
    # a service may not write into its artifacts
    travels = edition.any_gpu and not settings.config
    into = settings.into or ("artifact" if travels else "cache")
    report = []
    for artifact in artifacts:
        requests = [EngineRequest.for_gpu(gpu, artifact, slots, context, edition)]
        if artifact.manifest.stage is not None and artifact.manifest.stage.first:
            requests.append(EngineRequest.for_head(gpu, artifact, edition))
        for request in requests:
            try:
                with ProgressDisplay() as display:
                    path, built = _build(request, into, display.show)
            except FormError as error:
                if settings.config is None:
                    raise
                # the unit runs this at each boot, which is not broken by an artifact for the CPU
                _log.warning("no engine of %s is built: %s", artifact.path, error)
                report.append({"artifact": str(artifact.path), "engine": None, "why": str(error)})
                break
            if args.json != "-":
                print(path)
            report.append(
                {
                    "artifact": str(artifact.path),
                    "engine": str(path),
                    "built": built,
                    "bytes": path.stat().st_size,
                }
                | msgspec.to_builtins(request.key)
            )
    if args.json:
        write_json(args.json, report)
    return 0


def _why_no_engine(served: argparse.Namespace) -> str | None:
    """Return what a configuration names that needs no engine; None if it may need one."""
    if str(served.draft) == TEXT:
        return f"the drafter {TEXT}, which has no model"
    if served.provider not in {"auto", STANDARD.provider, RTX.provider}:
        return f"the provider {served.provider}, which runs no engine"
    return None


def _target(edition: Edition, compute: Sequence[str]) -> Gpu:
    """Return the GPU to build for: this machine's, or all GPUs of some compute capabilities."""
    trt = edition.load()
    if not edition.any_gpu:
        return Cuda().describe()
    return Gpu("", check_targets(trt, compute) if compute else USUAL)


def _build(request: EngineRequest, into: str, progress: Progress) -> tuple[Path, bool]:
    """Build an engine; return its file, and whether it was built now."""
    if into == "artifact":
        path = shipped_path(request.artifact, request.key)
        _check_writable(path.parent)
        return path, build_file(request, path, progress)
    if request.edition.any_gpu:
        path = EngineCache().path(request.key)
        return path, build_file(request, path, progress)
    engine, built = ensure_engine(request, progress)
    return engine.path, built


def _check_writable(folder: Path) -> None:
    """Raise `EngineFolderError` if a file cannot be written into the folder."""
    try:
        folder.mkdir(exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
        reason = "no right to write"
    except OSError as error:
        writable, reason = False, error.strerror or ""
    if not writable:
        raise EngineFolderError(
            f"an engine cannot be written into {folder} ({reason}): use a copy of the artifact, or "
            "--into cache"
        )
