"""``pilotfish export``: make, list and compare artifacts."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli import export_auto, export_bridge, export_keep, export_split
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, choices_of, json_option, write_json
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import GENAI, HEADS, LLAMACPP, Precision
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version

if TYPE_CHECKING:
    from pilotfish.export.sources import WeightSource

_ENGINE = """\
Builds a TensorRT engine of each artifact on this machine's GPU, which takes minutes, and keeps the
engine in the cache ($PILOTFISH_CACHE/engines). A cached engine that TensorRT accepts is not built
again. Models run the engine with --provider tensorrt or auto. It has the artifact's precision.

Needs TensorRT's Python package (on JetPack: apt install python3-libnvinfer). Not tested with
TensorRT itself yet, only with test doubles of NVIDIA's libraries."""
_ENGINE_EXAMPLE = """\
example:
  pilotfish export model default --out drafter --dialect opset17 --precision fp16
  pilotfish export engine drafter --context 2048
  pilotfish export engine --config /etc/pilotfish/device.toml

exit codes: 0 all engines are built; 65 TensorRT cannot build one; 66 no artifact; 69 no TensorRT or
no GPU; 78 a broken configuration.
"""


class ModelSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export model``."""

    source: Annotated[
        str,
        setting(
            "'default', a GGUF file, a Hugging Face directory, a hub id, or, with --dialect genai, "
            "a folder of ONNX Runtime GenAI",
            positional=True,
        ),
    ]
    out: Annotated[Path, setting("folder to write", metavar="DIR")]
    precision: Annotated[
        Precision | Literal["auto"],
        setting(
            "precision of the weights. Target: fp32, or fp16 on a GPU. Drafter on a CPU: stored, "
            "which keeps the blocks of a GGUF file or of a GPTQ or AWQ checkpoint; else int8, or "
            "int4 to save memory; auto: by trial, see below (default: fp32)",
            choices=(*get_args(Precision), export_auto.AUTO),
        ),
    ] = "fp32"
    dialect: Annotated[
        Literal["auto", "opset24", "opset17", "contrib", "llamacpp", "genai"],
        setting(
            "the graph's operators; auto takes what runs best here (default). llamacpp: no graph, "
            "but the GGUF file itself, of any architecture, for llama.cpp; genai: the unchanged "
            "graph of a folder that ONNX Runtime GenAI's model builder wrote"
        ),
    ] = "auto"
    first_layers: (
        Annotated[
            int,
            setting(
                "keep only the first N layers, with the final norm and head: a smaller and worse "
                "model of the same vocabulary (default: all layers)",
                ge=1,
            ),
        ]
        | None
    ) = None
    context: (
        Annotated[
            int,
            setting(
                "the artifact's context in positions; its rotary tables grow with it (default: the "
                "model's; for Phi's longrope, the context of the short factors; with a larger "
                "number, all positions use the long factors)",
                ge=2,
                metavar="C",
            ),
        ]
        | None
    ) = None
    ignore_keys: Annotated[
        tuple[str, ...],
        setting(
            "ignore an unknown key of the model's configuration that has no effect on the text; "
            "the key chat_template leaves out the chat templates; may be repeated; the "
            "manifest records each key",
            flag="ignore-key",
            metavar="NAME",
            repeat=True,
        ),
    ] = ()
    check: Annotated[
        bool,
        setting(
            "do not measure what the precision costs: by default, the manifest gets KL and α "
            "against the same weights in float32, on a built-in text",
            flag="no-check",
        ),
    ] = True
    trial: Annotated[export_auto.TrialSettings, export_auto.GROUP] = export_auto.TrialSettings()
    keep: Annotated[export_keep.KeepSettings, export_keep.GROUP] = export_keep.KeepSettings()


class EngineBuildSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export engine``."""

    artifacts: Annotated[
        tuple[Path, ...],
        setting("an artifact of dialect opset17 or opset24", metavar="DIR", positional=True),
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


class ListSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export list``."""

    folder: (
        Annotated[Path, setting("folder to list (default: the cache's)", positional=True)] | None
    ) = None
    supported: Annotated[
        bool, setting("list, instead, the classes of models that `export model` supports")
    ] = False
    json: Annotated[bool, setting("print JSON")] = False


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export",
        help="make, list and compare artifacts",
        description="Makes artifacts from weights, and lists and compares them.",
    )
    actions = choices_of(parser)
    model = actions.add_parser(
        "model",
        help="export a model",
        description="Writes a graph, its weights, the tokenizer and a manifest into a folder. "
        "Needs the extra 'export' (README.md).",
    )
    add_flags(model, ModelSettings)
    model.set_defaults(run=_model, usage=model.error)
    engine = actions.add_parser(
        "engine",
        help="build TensorRT engines of artifacts, for this GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_ENGINE,
        epilog=_ENGINE_EXAMPLE,
    )
    add_flags(engine, EngineBuildSettings)
    json_option(engine)
    engine.set_defaults(run=_engine, usage=engine.error)
    export_split.add_to(actions)
    export_bridge.add_to(actions)
    what = "list artifacts, or the supported models"
    listing = actions.add_parser("list", help=what, description=f"{what.capitalize()}.")
    add_flags(listing, ListSettings)
    listing.set_defaults(run=_list, usage=listing.error)


def artifacts_directory() -> Path:
    """Return the cache's folder of artifacts."""
    return cache_directory() / "artifacts"


def default_pair() -> tuple[Path, Path]:
    """Return the default model as int4 drafter and as fp32 target; export missing artifacts.

    The model's file has 4-bit blocks, which int4 keeps, so int4 is the fastest drafter
    (docs/engines.md).
    """
    return default_artifact("int4"), default_artifact("fp32")


def default_artifact(precision: Precision, first_layers: int | None = None) -> Path:
    """Return the default model in this precision; export it if it is missing."""
    # The name includes the head's precision: earlier versions, which rounded the head's weights a
    # second time, wrote names without it.
    head = f"-{HEADS[precision]}-head" if precision in HEADS else ""
    layers = "" if first_layers is None else f"-{first_layers}-layers"
    # The name includes the dialect: environments with older runtimes may share the cache.
    whole = precision in ("fp32", "fp16")
    dialect = "-opset17" if whole and runtime_version() < OPSET24_SINCE else ""
    path = artifacts_directory() / f"smollm2-135m-{precision}{head}{layers}{dialect}"
    try:
        Artifact.open(path)
    except ArtifactError:
        export_model("default", path, precision, "auto", first_layers)
    return path


def export_model(
    source: "str | WeightSource",
    out: Path,
    precision: Precision,
    dialect: str,
    first_layers: int | None = None,
    context: int | None = None,
    ignore_keys: Sequence[str] = (),
    *,
    kept_tokens: NDArray[np.int64] | None = None,
    check: bool = False,
) -> None:
    """Export a model with a progress bar; if the export tools are missing, name the extra."""
    with export_tools():
        from pilotfish.export.model import export_model as write
    with ProgressDisplay() as display:
        artifact = write(
            source,
            out,
            precision=precision,
            dialect=dialect,
            first_layers=first_layers,
            context=context,
            ignore_keys=ignore_keys,
            head_tokens=kept_tokens,
            check=check,
            progress=display.show,
        )
    if cost := artifact.manifest.cost:
        print(
            f"pilotfish: {precision} against float32, on {cost.tokens} tokens: KL "
            f"{cost.kl:.4f} nats per token, α {cost.acceptance:.3f}",
            file=sys.stderr,
        )


def _model(args: argparse.Namespace) -> int:
    settings = from_args(args, ModelSettings)
    if wrong := settings.trial.problem(settings.precision):
        args.usage(wrong)
    if settings.dialect in {LLAMACPP, GENAI} and settings.precision != "fp32":
        args.usage(
            f"--dialect {settings.dialect} keeps the source's precision: leave out --precision"
        )

    if wrong := settings.keep.problem:
        args.usage(wrong)
    source: str | WeightSource = settings.source
    kept_tokens = None
    if settings.keep.keep_tokens is not None:
        if settings.dialect in {LLAMACPP, GENAI}:
            args.usage(
                f"--dialect {settings.dialect} keeps the source's head: leave out --keep-tokens"
            )
        source = _open_source(settings)
        kept_tokens = export_keep.choose_kept_tokens(source, settings.keep)

    # a trial also prints what each precision costs
    tried = settings.precision == export_auto.AUTO and settings.trial.requested

    def export(precision: Precision, out: Path) -> None:
        export_model(
            source,
            out,
            precision,
            settings.dialect,
            settings.first_layers,
            settings.context,
            settings.ignore_keys,
            kept_tokens=kept_tokens,
            check=settings.check and not tried,
        )

    if settings.precision != export_auto.AUTO:
        export(settings.precision, settings.out)
    elif settings.trial.requested:
        export_auto.export_fastest(settings.out, settings.dialect, settings.trial, export)
    else:
        export(export_auto.default_choice(), settings.out)
    print(settings.out)
    return 0


def _open_source(settings: ModelSettings) -> "WeightSource":
    """Open the source once, both to count its tokens and to export it."""
    with export_tools():
        from pilotfish.export.sources import open_source
    with ProgressDisplay() as display:
        return open_source(settings.source, display.show, settings.ignore_keys)


def _engine(args: argparse.Namespace) -> int:
    from pilotfish.engines.cudart import Cuda
    from pilotfish.engines.tensorrt.build import EngineRequest, ensure_engine
    from pilotfish.engines.tensorrt.gates import tensorrt_version

    settings = from_args(args, EngineBuildSettings)
    paths, slots, context = settings.artifacts, settings.slots or 1, settings.context
    if settings.config:
        from pilotfish.cli import parser

        served = parser().parse_args(["device", "serve", "--config", str(settings.config)])
        paths = (*paths, served.draft)
        slots, context = settings.slots or served.lanes, settings.context or served.context
    if not paths:
        args.usage("name an artifact, or a file by --config that names one")
    artifacts = [Artifact.open(path) for path in paths]
    tensorrt_version()
    cuda = Cuda()
    report = []
    for artifact in artifacts:
        order = EngineRequest.for_this_machine(cuda, artifact, slots, context)
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


def _list(args: argparse.Namespace) -> int:
    from pilotfish.export.catalog import list_artifacts

    settings = from_args(args, ListSettings)
    if settings.supported:
        if settings.folder:
            args.usage("--supported lists classes of models and takes no folder")
        return _list_supported(settings)
    folder = settings.folder or artifacts_directory()
    entries = list_artifacts(folder)
    if settings.json:
        print(json.dumps(msgspec.to_builtins(entries), indent=2))
        return 0
    table = _folding("folder", "model", "precision", "dialect", "MiB")
    for entry in entries:
        size = f"{entry.size / 2**20:.0f}"
        model = entry.model if entry.stage is None else f"{entry.model}, {entry.stage}"
        name = os.path.relpath(entry.path, folder)
        table.add_row(name, model, entry.precision, entry.dialect, size)
    console = Console(markup=False, highlight=False)  # markup off: a name may contain brackets
    console.print(f"{folder}:" if entries else f"{folder} holds no artifacts.", soft_wrap=True)
    if entries:
        console.print(table)
    return 0


def _folding(*columns: str) -> Table:
    """Return a table that truncates no cell; on a narrow terminal, it folds the first column."""
    table = Table()
    for at, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=at == 0)
    return table


def _list_supported(settings: ListSettings) -> int:
    with export_tools():
        from pilotfish.export.supported import supported
    models = supported()
    if settings.json:
        print(json.dumps(msgspec.to_builtins(models), indent=2))
        return 0
    table = _folding("model_type", "models", "dialects", "drafts", "stages", "GGUF")
    for model in models:
        marks = ("yes" if mark else "no" for mark in (model.stages, model.gguf))
        table.add_row(
            model.model_type, model.models, ", ".join(model.dialects), model.drafts, *marks
        )
    console = Console(markup=False)
    console.print(table)
    console.print(
        f"Tested against {models[0].tested}. Each dialect has its own precisions (--json shows "
        f"them). For any other GGUF file, use --dialect llamacpp. For a folder of ONNX Runtime "
        f"GenAI's model builder, use --dialect genai; such a model reads only chains, not "
        f"trees."
    )
    return 0
