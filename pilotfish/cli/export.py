"""``pilotfish export``: make artifacts, list them, compare two."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pilotfish.cli import export_auto, export_bridge, export_split
from pilotfish.cli.extras import export_tools
from pilotfish.cli.options import Commands, between, json_option, write_json
from pilotfish.cli.progress import Bars
from pilotfish.engines.artifact import HEADS, Artifact, Precision
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.errors import ArtifactError

_ENGINE = """\
Builds a TensorRT engine of each artifact on the GPU of this machine, which takes minutes, and keeps
it below the cache folder ($PILOTFISH_CACHE/engines); one that is there already and that TensorRT
accepts is left alone. Decoders with --provider tensorrt or auto then run it. An engine has the
artifact's precision. Needs TensorRT's Python package (on JetPack: apt install python3-libnvinfer).
Not run over TensorRT itself yet: tested against doubles of NVIDIA's libraries."""
_ENGINE_EXAMPLE = """\
example:
  pilotfish export model default --out drafter --dialect opset17 --precision fp16
  pilotfish export engine drafter --context 2048
  pilotfish export engine --config /etc/pilotfish/device.toml

exit codes: 0 all engines are there; 65 TensorRT cannot build one; 66 no artifact; 69 no TensorRT or
no GPU; 78 a broken configuration.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export",
        help="make artifacts, list and compare them",
        description="Weights in, artifacts out.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    model = actions.add_parser(
        "model",
        help="export a model",
        description="Writes a graph, its weights, the tokenizer and a manifest into a folder. "
        "Needs the extra 'export' (pip install 'pilotfish[export]').",
    )
    model.add_argument(
        "source", help="'default', a GGUF file, a Hugging Face directory, or a hub id"
    )
    model.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    model.add_argument(
        "--precision",
        choices=("fp32", "fp16", "int8", "int4", export_auto.AUTO),
        default="fp32",
        help="of the weights. A target: fp32, or fp16 on a GPU. A drafter on a CPU: int8, or int4 "
        "where the source has blocks of 4 bits (Q4_0, Q4_1, Q4_K), which are kept; auto: by trial, "
        "see below (default: %(default)s)",
    )
    model.add_argument(
        "--dialect",
        choices=("auto", "opset24", "opset17", "contrib"),
        default="auto",
        help="which operators the graph uses; auto takes what runs best here (default)",
    )
    model.add_argument(
        "--first-layers",
        type=between(1),
        metavar="N",
        help="keep only the first N layers, with the model's own last norm and head: a smaller and "
        "worse model of the same vocabulary (default: all layers)",
    )
    model.add_argument(
        "--ignore-key",
        action="append",
        default=[],
        metavar="NAME",
        help="let a key of the model's configuration pass that is not known here, because it has "
        "no effect on the text; may be given several times, and the manifest says so",
    )
    export_auto.add_options(model)
    model.set_defaults(run=_model, usage=model.error)
    engine = actions.add_parser(
        "engine",
        help="build TensorRT engines of artifacts, for this GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_ENGINE,
        epilog=_ENGINE_EXAMPLE,
    )
    engine.add_argument(
        "artifacts", type=Path, nargs="*", metavar="DIR", help="an artifact, opset17 or opset24"
    )
    engine.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="build for the drafter, lanes and context of this configuration of `device serve`",
    )
    engine.add_argument(
        "--slots",
        type=between(1),
        metavar="N",
        help="sequences at once: a device's lanes, an edge's sessions (default: 1)",
    )
    engine.add_argument(
        "--context",
        type=between(2),
        metavar="C",
        help="positions of each slot (default: all that the model has)",
    )
    json_option(engine)
    engine.set_defaults(run=_engine, usage=engine.error)
    export_split.add_to(actions)
    export_bridge.add_to(actions)
    listing = actions.add_parser("list", help="list the artifacts below a folder")
    listing.add_argument(
        "folder", type=Path, nargs="?", help="default: where `pilotfish demo` keeps its own"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)


def artifacts_directory() -> Path:
    """Where artifacts go that nobody named a folder for."""
    return cache_directory() / "artifacts"


def default_pair() -> tuple[Path, Path]:
    """The default model as int4 drafter and as fp32 target, exported where it is missing.

    Its file has blocks of 4 bits, which int4 keeps: nothing else drafts as fast (docs/engines.md).
    """
    return default_artifact("int4"), default_artifact("fp32")


def default_artifact(precision: Precision, first_layers: int | None = None) -> Path:
    """The default model in this precision, exported if there is none yet; see `export_model`."""
    # Earlier versions kept int4 with another head, and rounded once more, without this in the name.
    head = f"-{HEADS[precision]}-head" if precision in HEADS else ""
    layers = "" if first_layers is None else f"-{first_layers}-layers"
    path = artifacts_directory() / f"smollm2-135m-{precision}{head}{layers}"
    try:
        Artifact.open(path)
    except ArtifactError:
        export_model("default", path, precision, "auto", first_layers)
    return path


def export_model(
    source: str,
    out: Path,
    precision: Precision,
    dialect: str,
    first_layers: int | None = None,
    ignore_keys: Sequence[str] = (),
) -> None:
    """Export with a progress bar; says which extra to install if the export tools are missing."""
    with export_tools():
        from pilotfish.export.model import export_model as write
    with Bars() as bars:
        write(
            source,
            out,
            precision=precision,
            dialect=dialect,
            first_layers=first_layers,
            ignore_keys=ignore_keys,
            progress=bars.show,
        )


def _model(args: argparse.Namespace) -> int:
    pair, precision = export_auto.against(args), args.precision

    def export(precision: Precision, out: Path) -> None:
        export_model(args.source, out, precision, args.dialect, args.first_layers, args.ignore_key)

    if pair is not None:
        export_auto.export_fastest(args.out, args.dialect, pair, export)
    else:
        if precision == export_auto.AUTO:
            precision = export_auto.untried()
        export(precision, args.out)
    print(args.out)
    return 0


def _engine(args: argparse.Namespace) -> int:
    from pilotfish.engines.cudart import Cuda
    from pilotfish.engines.tensorrt.build import Order, ensure_engine
    from pilotfish.engines.tensorrt.gates import tensorrt_version

    paths, slots, context = args.artifacts, args.slots or 1, args.context
    if args.config:
        from pilotfish.cli import parser

        served = parser().parse_args(["device", "serve", "--config", str(args.config)])
        paths = [*paths, served.draft]
        slots, context = args.slots or served.lanes, args.context or served.context
    if not paths:
        args.usage("name an artifact, or a --config that does")
    artifacts = [Artifact.open(path) for path in paths]
    tensorrt_version()
    cuda = Cuda()
    report = []
    for artifact in artifacts:
        order = Order.here(cuda, artifact, slots, context)
        with Bars() as bars:
            built, new = ensure_engine(order, bars.show)
        if args.json != "-":
            print(built.path)
        report.append(
            {"artifact": str(artifact.path), "engine": str(built.path), "built": new}
            | msgspec.to_builtins(order.key)
        )
    if args.json:
        write_json(args.json, report)
    return 0


def _list(args: argparse.Namespace) -> int:
    from pilotfish.export.catalog import list_artifacts

    folder = args.folder or artifacts_directory()
    entries = list_artifacts(folder)
    if args.json:
        print(json.dumps(msgspec.to_builtins(entries), indent=2))
        return 0
    table = Table("path", "model", "precision", "dialect", "MiB", title=f"Artifacts in {folder}")
    for entry in entries:
        size = f"{entry.size / 2**20:.0f}"
        model = entry.model if entry.stage is None else f"{entry.model}, {entry.stage}"
        table.add_row(entry.path, model, entry.precision, entry.dialect, size)
    Console(markup=False).print(table)  # a name may hold brackets
    return 0
