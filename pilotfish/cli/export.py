"""``pilotfish export``: make, list and compare artifacts."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.boards.recipe import Wishes
from pilotfish.cli import (
    export_auto,
    export_board,
    export_bridge,
    export_engine,
    export_keep,
    export_list,
    export_split,
)
from pilotfish.cli.default_models import (
    DEFAULT,
    drafter_folder,
    requested_folder,
    target_folder,
)
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, choices_of
from pilotfish.engines.manifest import GENAI, LLAMACPP, Precision
from pilotfish.export.model_cache import request_default
from pilotfish.export.source_names import HUB_ID

if TYPE_CHECKING:
    from pilotfish.export.sources import WeightSource


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
    precision: (
        Annotated[
            Precision | Literal["auto"],
            setting(
                "precision of the weights. Target: fp32, or fp16 on a GPU. Drafter on a CPU: "
                "stored, which keeps the blocks of a GGUF file or of a GPTQ or AWQ checkpoint; "
                "else int8, or int4 for two thirds of its size (calibrated on a built-in text; "
                "acceptance 0.87 instead of 0.96); auto: by trial, see below (default: fp32, or "
                "the board's)",
                choices=(*get_args(Precision), export_auto.AUTO),
            ),
        ]
        | None
    ) = None
    dialect: Annotated[
        Literal["auto", "opset24", "opset17", "contrib", "tensorrt", "llamacpp", "genai"],
        setting(
            "the graph's operators; auto takes what runs best here (default). tensorrt: opset24 "
            "with quantised weights as TensorRT takes them; llamacpp: no graph, "
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
                exclusive="layers",
            ),
        ]
        | None
    ) = None
    skip_layers: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        setting(
            "leave out these layers, counted from 0, of a model whose layers are all of one kind",
            metavar="I,I,…",
            exclusive="layers",
        ),
    ] = ()
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
    board: Annotated[export_board.BoardSettings, export_board.GROUP] = export_board.BoardSettings()
    trial: Annotated[export_auto.TrialSettings, export_auto.GROUP] = export_auto.TrialSettings()
    keep: Annotated[export_keep.KeepSettings, export_keep.GROUP] = export_keep.KeepSettings()


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
        "Needs the extra 'export' (docs/guide.md).",
    )
    add_flags(model, ModelSettings)
    model.set_defaults(run=_model, usage=model.error)
    export_engine.add_to(actions)
    export_split.add_to(actions)
    export_bridge.add_to(actions)
    export_list.add_to(actions)


def default_pair() -> tuple[Path, Path]:
    """Return the default model as drafter and as target; export missing artifacts."""
    return drafter_folder(Path(DEFAULT)), target_folder(Path(DEFAULT))


def default_artifact(
    precision: Precision, first_layers: int | None = None, *, skipped_layers: Sequence[int] = ()
) -> Path:
    """Return the default model in this precision; export it if it is missing."""
    return requested_folder(request_default(precision, first_layers, tuple(skipped_layers)))


def export_model(
    source: "str | WeightSource",
    out: Path,
    precision: Precision,
    dialect: str,
    first_layers: int | None = None,
    context: int | None = None,
    ignore_keys: Sequence[str] = (),
    *,
    skipped_layers: Sequence[int] = (),
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
            skipped_layers=skipped_layers,
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
    if wrong := _problem(settings):
        args.usage(wrong)
    on_board = settings.board.board is not None
    layers = settings.first_layers, settings.skip_layers
    if on_board and _has_config_alone(settings):
        export_board.choose_by_config(
            settings.source, settings.ignore_keys, *layers, settings.board, _wishes(settings)
        )
        if settings.board.dry_run:
            return 0
    opened, kept_tokens = None, None
    if settings.keep.keep_tokens is not None or on_board:
        opened = _open_source(settings)
    if opened is not None and settings.keep.keep_tokens is not None:
        kept_tokens = export_keep.choose_kept_tokens(opened, settings.keep)
    precision = settings.precision or "fp32"
    dialect, context = settings.dialect, settings.context
    if opened is not None and on_board:
        chosen = export_board.choose_for_part(
            opened, *layers, kept_tokens, settings.board, _wishes(settings)
        )
        precision, dialect, context = chosen.precision, chosen.dialect, chosen.context
        if settings.board.dry_run:
            return 0

    # a trial also prints what each precision costs
    tried = precision == export_auto.AUTO and settings.trial.requested

    def export(precision: Precision, out: Path) -> None:
        export_model(
            opened or settings.source,
            out,
            precision,
            dialect,
            settings.first_layers,
            context,
            settings.ignore_keys,
            skipped_layers=settings.skip_layers,
            kept_tokens=kept_tokens,
            check=settings.check and not tried,
        )

    if precision != export_auto.AUTO:
        export(precision, settings.out)
    elif settings.trial.requested:
        export_auto.export_fastest(settings.out, dialect, settings.trial, export)
    else:
        export(export_auto.default_choice(), settings.out)
    print(settings.out)
    return 0


def _problem(settings: ModelSettings) -> str | None:
    """Return what is wrong with the flags; None if nothing is."""
    return (
        settings.trial.problem(settings.precision or "fp32")
        or settings.board.problem
        or _copy_problem(settings)
        or settings.keep.problem
    )


def _copy_problem(settings: ModelSettings) -> str | None:
    """Return which flag would change a model that is copied, or needs its weights' sizes."""
    if settings.board.board is not None and settings.precision == export_auto.AUTO:
        return "--precision auto tries the precisions on this machine: leave it out with --board"
    if settings.dialect not in {LLAMACPP, GENAI}:
        return None
    keeps = f"--dialect {settings.dialect} keeps the source's"
    if settings.precision not in {None, "fp32"}:
        return f"{keeps} precision: leave out --precision"
    if settings.keep.keep_tokens is not None:
        return f"{keeps} head: leave out --keep-tokens"
    return f"{keeps} form: leave out --board" if settings.board.board is not None else None


def _has_config_alone(settings: ModelSettings) -> bool:
    """Whether the weights are still to be fetched, from the hub or into the folder."""
    path = Path(settings.source)
    if not path.exists():
        return HUB_ID.fullmatch(settings.source) is not None
    return path.is_dir() and not any(path.glob("*.safetensors"))


def _open_source(settings: ModelSettings) -> "WeightSource":
    """Open the source once, both to count its tokens and to export it."""
    with export_tools():
        from pilotfish.export.sources import open_source
    with ProgressDisplay() as display:
        return open_source(settings.source, display.show, settings.ignore_keys)


def _wishes(settings: ModelSettings) -> Wishes:
    """Return what the flags do not leave to the board."""
    return Wishes(
        dialect=None if settings.dialect == "auto" else settings.dialect,
        precision=None if settings.precision == export_auto.AUTO else settings.precision,
        context=settings.context,
        cpu=settings.board.cpu,
    )
