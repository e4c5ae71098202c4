"""``pilotfish models``: list, show, fetch and remove the models in the cache."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from pilotfish.base.settings import setting
from pilotfish.cli.default_models import model_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, choices_of
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.export.cache_contents import (
    CacheEntry,
    entries_named,
    list_contents,
    related_to,
    remove,
    remove_leftovers,
)
from pilotfish.export.cached_models import CachedModel, read_cached
from pilotfish.export.export_errors import ModelInUseError
from pilotfish.export.model_cache import Role

_DESCRIPTION = """\
Commands take a model for --target and --draft by its name: `default`, a hub id (Org/Name or
Org/Name@REVISION), a GGUF file or a checkpoint's folder. What is no artifact is exported into the
cache once ($PILOTFISH_CACHE, by default ~/.cache/pilotfish), in a precision that depends on the
role: a target in fp32, or in fp16 for a GPU; a drafter in fp16 for a GPU, else with the blocks of a
quantised source, or in int8 (the default model: int4). For another precision, dialect or context,
use `pilotfish export model`, and name the folder that it writes."""
_EXAMPLE = """\
examples:
  pilotfish models fetch Qwen/Qwen2.5-0.5B-Instruct --role drafter     before a service starts
  pilotfish models list
  pilotfish models show default
  pilotfish models remove Qwen/Qwen2.5-0.5B-Instruct --downloads
"""


class JsonSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish models list``."""

    json: Annotated[bool, setting("print JSON")] = False


class ShowSettings(JsonSettings, frozen=True, kw_only=True):
    """Settings of ``pilotfish models show``."""

    name: Annotated[
        str,
        setting("a name that `models list` shows, or an artifact's folder", positional=True),
    ]


class FetchSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish models fetch``."""

    name: Annotated[
        str,
        setting("default, a hub id, a GGUF file or a checkpoint's folder", positional=True),
    ]
    role: Annotated[Role, setting("what the model is for, which determines its precision")] = (
        "target"
    )
    provider: Annotated[str, setting("the provider that will run the model")] = "auto"


class RemoveSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish models remove``."""

    names: Annotated[
        tuple[str, ...],
        setting(
            "names that `models list` shows, or sources, such as a hub id",
            metavar="NAME",
            positional=True,
        ),
    ] = ()
    all: Annotated[bool, setting("remove all artifacts, stages and engines in the cache")] = False
    downloads: Annotated[
        bool,
        setting(
            "remove also the downloads that the artifacts were made of; those of hub ids are in "
            "the hub's cache, which other programs use, too"
        ),
    ] = False


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "models",
        help="list, show, fetch and remove the models in the cache",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = choices_of(parser)
    for name, what, struct, run in (
        ("list", "list what the cache has, with sizes", JsonSettings, _list),
        ("show", "show the facts about a model in the cache", ShowSettings, _show),
        (
            "fetch",
            "export a model into the cache, or update a hub id, before a command needs it",
            FetchSettings,
            _fetch,
        ),
        ("remove", "remove models from the cache", RemoveSettings, _remove),
    ):
        action = actions.add_parser(name, help=what, description=f"{what.capitalize()}.")
        add_flags(action, struct)
        action.set_defaults(run=run, usage=action.error)


def _list(args: argparse.Namespace) -> int:
    contents = list_contents()
    total = sum(entry.size for entry in contents)
    if from_args(args, JsonSettings).json:
        entries = msgspec.to_builtins(contents)
        print(json.dumps({"cache": str(cache_directory()), "bytes": total, "entries": entries}))
        return 0
    console = Console(markup=False, highlight=False)  # markup off: a name may contain brackets
    if not contents:
        console.print(f"{cache_directory()} has no models.", soft_wrap=True)
        return 0
    table = Table()
    table.add_column("name", overflow="fold", no_wrap=True)
    for heading in ("made of", "what", "MB", "last used"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "MB" else "left")
    for entry in contents:
        size = f"{entry.size / 1e6:,.0f}"
        table.add_row(entry.name, entry.made_of or "–", _what(entry), size, _used(entry))
    console.print(table)
    console.print(f"{total / 1e6:,.0f} MB in {cache_directory()}", soft_wrap=True)
    return 0


def _what(entry: CacheEntry) -> str:
    if entry.kind != "artifact":
        return entry.kind
    return "damaged" if entry.precision is None else f"{entry.precision}, {entry.dialect}"


def _used(entry: CacheEntry) -> str:
    return "in use" if entry.in_use else _date(entry.used_s)


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _show(args: argparse.Namespace) -> int:
    settings = from_args(args, ShowSettings)
    folders = [
        Path(entry.path)
        for entry in entries_named(settings.name, list_contents())
        if entry.kind == "artifact"
    ]
    if not folders:
        if not Path(settings.name).is_dir():
            raise _absent(settings.name)
        folders = [Path(settings.name)]
    models = [read_cached(folder) for folder in folders]
    if settings.json:
        print(json.dumps([_facts(model) for model in models], indent=2))
        return 0
    console = Console(markup=False, highlight=False)
    for model in models:
        table = Table(title=str(model.artifact.path), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _rows(model):
            table.add_row(name, value)
        console.print(table)
    return 0


def _facts(model: CachedModel) -> dict[str, Any]:
    """Return the manifest, without the texts of chat templates, and the record."""
    manifest: dict[str, Any] = msgspec.to_builtins(model.artifact.manifest)
    for name in ("chat_template", "chat_templates"):
        manifest[name] = bool(manifest[name])
    return {
        "folder": str(model.artifact.path),
        "bytes": _bytes(model),
        "digest": model.artifact.manifest.digest,
        "made_of": msgspec.to_builtins(model.record),
        "manifest": manifest,
    }


def _bytes(model: CachedModel) -> int:
    return sum(path.stat().st_size for path in model.artifact.paths.values())


def _rows(model: CachedModel) -> list[tuple[str, str]]:
    """Return the facts about an artifact as rows of a table."""
    manifest, record = model.artifact.manifest, model.record
    sizes, source, cost = manifest.dimensions, manifest.source, manifest.cost
    made_of = source.location if record is None else record.request.name
    rows = [
        ("model", manifest.model),
        ("made of", made_of if source.revision is None else f"{made_of}, {source.revision}"),
        ("made", "–" if record is None else _date(record.made_s)),
        ("architecture", manifest.architecture),
        (
            "size",
            f"{_bytes(model) / 1e6:,.0f} MB; {sizes.layers} layers of width {sizes.hidden}, "
            f"{manifest.vocab_size:,} tokens",
        ),
        ("context", f"{sizes.context:,} positions"),
        ("precision", manifest.precision),
        ("dialect", manifest.dialect),
        ("token trees", "no" if manifest.why_chains_only else "yes"),
        ("chat template", "no" if manifest.chat_template is None else "yes"),
        ("digest", manifest.digest),
    ]
    if cost is not None:
        rows.append(
            (
                "cost of precision",
                f"KL {cost.kl:.4f} nats a token, α {cost.acceptance:.3f}, on {cost.tokens} tokens",
            )
        )
    if manifest.stage is not None:
        rows.append(("stage", str(manifest.stage)))
    return rows + [("warning", warning) for warning in manifest.warnings]


def _fetch(args: argparse.Namespace) -> int:
    settings = from_args(args, FetchSettings)
    print(model_folder(settings.name, settings.role, settings.provider, refresh=True))
    return 0


def _remove(args: argparse.Namespace) -> int:
    settings = from_args(args, RemoveSettings)
    if bool(settings.names) == settings.all:
        args.usage("name models, or give --all")
    contents = list_contents()
    chosen = contents if settings.all else _named(settings.names, contents)
    downloads = [entry for entry in chosen if entry.kind == "download"]
    if not settings.downloads:
        chosen = [entry for entry in chosen if entry.kind != "download"]
    remove_leftovers()
    freed, used = 0, []
    for entry in chosen:  # artifacts first: what was made of one that stays also stays
        if entry.made_of not in used and remove(entry):
            freed += entry.size
            print(f"removed {entry.path} ({entry.size / 1e6:,.0f} MB)")
        else:
            used.append(entry.name)
    print(f"{freed / 1e6:,.0f} MB are free again")
    if downloads and not settings.downloads:
        size = sum(entry.size for entry in downloads)
        print(
            f"downloads of {size / 1e6:,.0f} MB were kept, since --downloads was not given: "
            f"{', '.join(entry.path for entry in downloads)}",
            file=sys.stderr,
        )
    if used:
        raise ModelInUseError(
            f"a running process uses {', '.join(used)}, which was therefore kept: stop it first"
        )
    return 0


def _named(names: Sequence[str], contents: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries of these names, and those that are related to them, in contents' order."""
    paths: set[str] = set()
    for name in names:
        named = entries_named(name, contents)
        if not named:
            raise _absent(name)
        artifacts = [entry for entry in named if entry.kind == "artifact"]
        paths |= {entry.path for entry in (*named, *related_to(artifacts, contents))}
    return [entry for entry in contents if entry.path in paths]


def _absent(name: str) -> ArtifactError:
    return ArtifactError(f"the cache has no model {name!r}: `pilotfish models list` lists all")
