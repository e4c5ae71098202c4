"""``pilotfish export split``: cut an artifact into the stages of a pipeline."""

import argparse
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.engine_errors import ArtifactError

_DESCRIPTION = """\
Cuts an artifact between layers into stages, one folder each. Stage 1 has the embedding, the
tokenizer and the head; the last stage has the final norm. Each stage holds the keys and values of
its layers, and sends hidden states to the next. `edge serve --pipeline` runs them on several
machines: stage 1 on the edge, each other stage on a node. Takes dialects opset24, opset17
and tensorrt. Needs the extra 'export' (docs/guide.md)."""
_EXAMPLE = """\
example:
  pilotfish export model default --out target --precision fp32
  pilotfish export split target --stages 4
  pilotfish export split target --layers 9,7,7,7 --out stages

exit codes: 0 all stages are made; 2 wrong usage; 65 a model that cannot be cut this way, or a
folder with other content; 66 no artifact, or a damaged one; 74 a file that cannot be written.
"""


def _layers(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0 with commas between them (an argparse type)."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text} is not a list of whole numbers above 0, such as 8,8,7,7")
    return tuple(map(int, parts))


class SplitSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export split``."""

    artifact: Annotated[
        Path, setting("the artifact to cut; it stays as it is", metavar="DIR", positional=True)
    ]
    stages: (
        Annotated[
            int,
            setting(
                "number of stages, of about equal size; the first stages may have one more layer",
                ge=1,
            ),
        ]
        | None
    ) = None
    layers: Annotated[
        tuple[int, ...],
        setting(
            "number of layers of each stage: give a slower machine fewer layers",
            form=_layers,
            metavar="N,N,…",
        ),
    ] = ()
    out: (
        Annotated[
            Path,
            setting(
                "folder for stage-1, stage-2, …; stages already in this folder are replaced "
                "(default: DIR-N-stages next "
                "to the artifact)",
                metavar="DIR",
            ),
        ]
        | None
    ) = None


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "split",
        help="cut an artifact into the stages of a pipeline",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add_flags(parser, SplitSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def stages_of(artifact: Artifact, count: int) -> Path:
    """Return the folder of an artifact's stages in the cache; make missing stages."""
    folder = cache_directory() / "stages" / f"{artifact.manifest.digest}-{count}"
    try:
        open_stages(folder)
    except ArtifactError:
        with export_tools():
            from pilotfish.export.split import split_artifact
        with ProgressDisplay() as display:
            split_artifact(artifact.path, folder, stages=count, progress=display.show)
    return folder


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, SplitSettings)
    if settings.stages is None and not settings.layers:
        args.usage("give --stages or --layers")
    with export_tools():
        from pilotfish.export.split import split_artifact
    whole = settings.artifact.resolve()
    count = settings.stages or len(settings.layers)
    out = settings.out or whole.with_name(f"{whole.name}-{count}-stages")
    with ProgressDisplay() as display:
        stages = split_artifact(
            settings.artifact,
            out,
            stages=settings.stages,
            layers=settings.layers or None,
            progress=display.show,
        )
    if args.json:
        write_json(args.json, [_figures(stage) for stage in stages])
    if args.json != "-":
        for stage in stages:
            print(stage.path)
    return 0


def _figures(stage: Artifact) -> dict[str, Any]:
    cut = stage.manifest.stage
    assert cut is not None
    return {
        "folder": str(stage.path),
        "stage": cut.index,
        "stages": cut.count,
        "first_layer": cut.first_layer,
        "layers": cut.layers,
        "bytes": sum((stage.path / name).stat().st_size for name in stage.manifest.files),
        "digest": stage.manifest.digest,
    }
