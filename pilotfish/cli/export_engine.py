"""``pilotfish export engine``: build TensorRT engines of artifacts."""

import argparse
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.engines.artifact import Artifact

_DESCRIPTION = """\
Builds a TensorRT engine of each artifact on this machine's GPU, which takes minutes, and keeps the
engine in the cache ($PILOTFISH_CACHE/engines). A cached engine that TensorRT accepts is not built
again. Models run the engine with --provider tensorrt or auto. It has the artifact's precision.
A first stage (`pilotfish export split`) gets two engines: its own, and the head's.

Needs TensorRT's Python package (on JetPack: apt install python3-libnvinfer). Quantised models need
the dialect tensorrt. No engine has run on a GPU yet."""
_EXAMPLE = """\
example:
  pilotfish export model default --out drafter --dialect opset17 --precision fp16
  pilotfish export engine drafter --context 2048
  pilotfish export engine --config /etc/pilotfish/device.toml

exit codes: 0 all engines are built; 65 TensorRT cannot build one; 66 no artifact; 69 no TensorRT or
no GPU; 78 a broken configuration.
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
        help="build TensorRT engines of artifacts, for this GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add_flags(parser, EngineBuildSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    from pilotfish.engines.cudart import Cuda
    from pilotfish.engines.tensorrt.build import EngineRequest, ensure_engine
    from pilotfish.engines.tensorrt.gates import tensorrt_version

    settings = from_args(args, EngineBuildSettings)
    paths, slots, context = settings.artifacts, settings.slots or 1, settings.context
    if settings.config:
        from pilotfish.cli import parser

        served = parser().parse_args(["device", "serve", "--config", str(settings.config)])
        paths = (*paths, drafter_folder(served.draft, served.provider))
        slots, context = settings.slots or served.lanes, settings.context or served.context
    if not paths:
        args.usage("name an artifact, or a file by --config that names one")
    artifacts = [Artifact.open(path, stage=True) for path in paths]
    tensorrt_version()
    cuda = Cuda()
    report = []
    for artifact in artifacts:
        orders = [EngineRequest.for_this_machine(cuda, artifact, slots, context)]
        if artifact.manifest.stage is not None and artifact.manifest.stage.first:
            orders.append(EngineRequest.for_head(cuda, artifact))
        for order in orders:
            with ProgressDisplay() as display:
                built, new = ensure_engine(order, display.show)
            if args.json != "-":
                print(built.path)
            report.append(
                {"artifact": str(artifact.path), "engine": str(built.path), "built": new}
                | msgspec.to_builtins(order.key)
            )
    if args.json:
        write_json(args.json, report)
    return 0
