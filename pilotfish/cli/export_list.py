"""``pilotfish export list``: list artifacts, or the supported models."""

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
    json: Annotated[bool, setting("print JSON")] = False


def add_to(actions: Commands) -> None:
    """Register the action."""
    what = "list artifacts, or the supported models"
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
