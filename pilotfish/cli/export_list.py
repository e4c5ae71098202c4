"""``pilotfish export list``: list artifacts, the supported models, or the boards."""

import argparse
import json
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from pilotfish.base.settings import setting
from pilotfish.boards.board import ALL_BOARDS, JETPACKS
from pilotfish.boards.expectation import UNKNOWN, size
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands


class ListSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish export list``."""

    folder: (
        Annotated[
            Path,
            setting(
                "folder to list (default: this one; `pilotfish models list` lists the cache)",
                positional=True,
            ),
        ]
        | None
    ) = None
    supported: Annotated[
        bool, setting("list, instead, the classes of models that `export model` supports")
    ] = False
    boards: Annotated[
        bool,
        setting("list, instead, the boards of `export model --board`, with the sources of figures"),
    ] = False
    json: Annotated[bool, setting("print JSON")] = False


def add_to(actions: Commands) -> None:
    """Register the action."""
    what = "list artifacts, the supported models, or the boards"
    parser = actions.add_parser("list", help=what, description=f"{what.capitalize()}.")
    add_flags(parser, ListSettings)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    from pilotfish.export.catalog import list_artifacts

    settings = from_args(args, ListSettings)
    if settings.supported:
        if settings.folder:
            args.usage("--supported lists classes of models and takes no folder")
        return _list_supported(settings)
    if settings.boards:
        if settings.folder or settings.supported:
            args.usage("--boards lists boards, and takes no folder and no --supported")
        return _list_boards(settings)
    folder = settings.folder or Path()
    entries = list_artifacts(folder)
    if settings.json:
        print(json.dumps(msgspec.to_builtins(entries), indent=2))
        return 0
    table = _folding("folder", "model", "precision", "dialect", "MiB")
    for entry in entries:
        size = f"{entry.size / 2**20:.0f}"
        model = entry.model if entry.stage is None else f"{entry.model}, {entry.stage}"
        if entry.mask_token is not None:
            model += ", several drafts per pass"
        name = os.path.relpath(entry.path, folder)
        table.add_row(name, model, entry.precision, entry.dialect, size)
    console = Console(markup=False, highlight=False)  # markup off: a name may contain brackets
    console.print(f"{folder}:" if entries else f"{folder} holds no artifacts.", soft_wrap=True)
    if entries:
        console.print(table)
    for entry in entries:
        for engine in entry.engines:
            console.print(f"{os.path.relpath(entry.path, folder)}: engine {engine}", soft_wrap=True)
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


def _list_boards(settings: ListSettings) -> int:
    if settings.json:
        listed = {"boards": [*ALL_BOARDS.values()], "jetpacks": [*JETPACKS.values()]}
        print(json.dumps(msgspec.to_builtins(listed), indent=2))
        return 0
    boards = _folding("board", "its maker's name", "memory", "GB/s", "compute", "JetPack")
    for board in ALL_BOARDS.values():
        rates = (board.bandwidth_bytes_per_s, board.slower_bytes_per_s)
        known = [f"{rate / 1e9:g}" for rate in rates if rate is not None]
        boards.add_row(
            board.name,
            board.title,
            size(board.memory_bytes),
            " or ".join(known) or UNKNOWN,
            ", ".join(board.compute) or ("none" if not board.gpu else UNKNOWN),
            ", ".join(board.jetpacks) or "none",
        )
    jetpacks = _folding("JetPack", "L4T", "Python", "CUDA", "TensorRT")
    for each in JETPACKS.values():
        jetpacks.add_row(each.version, each.l4t, each.python, each.cuda, each.tensorrt)
    console = Console(markup=False, highlight=False)
    console.print(boards)
    console.print(jetpacks)
    sourced = {board.name: (board.sources, board.derived) for board in ALL_BOARDS.values()}
    sourced |= {f"JetPack {each.version}": (each.sources, {}) for each in JETPACKS.values()}
    for name, (sources, derived) in sourced.items():
        for figure, source in sources.items():
            note = f" ({derived[figure]})" if figure in derived else ""
            console.print(f"{name}: {figure}: {source}{note}", soft_wrap=True)
    return 0
