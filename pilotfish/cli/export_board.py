"""``pilotfish export model … --board``: the form of an artifact that a board's GPU can run."""

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pilotfish.base.settings import setting
from pilotfish.boards.board import ALL_BOARDS, JETPACKS, board_named
from pilotfish.boards.expectation import expect
from pilotfish.boards.recipe import Recipe, Wishes, recipe
from pilotfish.cli.extras import export_tools

if TYPE_CHECKING:
    from pilotfish.boards.shape import ModelShape
    from pilotfish.export.sources import WeightSource

GROUP = setting(
    "Chooses dialect, precision and context for the board on which the model will run, so that it "
    "runs on the board's GPU, and says what to expect there: memory, and a bound of the speed by "
    "the memory's bandwidth. Refuses a model that does not fit before it reads the weights. What "
    "you state by --dialect, --precision and --context counts if the board's GPU can run it. "
    "`pilotfish export list --boards` lists the boards, with the sources of all figures.",
    title="--board",
)


class BoardSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``--board``."""

    board: (
        Annotated[
            str,
            setting(
                "the board that will run the model: " + ", ".join(ALL_BOARDS) + " (default: none)",
                metavar="NAME",
            ),
        ]
        | None
    ) = None
    jetpack: (
        Annotated[
            str,
            setting(
                "the board's JetPack (default: a form that each JetPack of the board takes)",
                choices=tuple(JETPACKS),
            ),
        ]
        | None
    ) = None
    role: Annotated[
        Literal["device", "edge"],
        setting("device: the model will draft; edge: it will be the target"),
    ] = "device"
    slots: Annotated[
        int, setting("number of sequences at a time, each with its keys and values", ge=1)
    ] = 1
    cpu: Annotated[bool, setting("use the CPU, although the board has a GPU")] = False
    dry_run: Annotated[bool, setting("say all this, and write nothing")] = False

    @property
    def problem(self) -> str | None:
        """What is wrong with the flags; None if nothing is."""
        if self.board is None and self != BoardSettings():
            return "--jetpack, --role, --slots, --cpu and --dry-run need --board"
        return None


def choose_by_config(
    source: str,
    ignored: Collection[str],
    first_layers: int | None,
    skipped_layers: Collection[int],
    settings: BoardSettings,
    wishes: Wishes,
) -> None:
    """Refuse a model that does not suit the board, by its config.json alone.

    source: a hub id, or a directory.

    A dry run prints what `choose_for_part` would print. Raises the same errors.
    """
    with export_tools():
        from pilotfish.export.sizes import shape_by_config
    shape = shape_by_config(source, ignored, first_layers, skipped_layers)
    chosen = _choose(shape, settings, wishes)
    if settings.dry_run:
        _print(shape, chosen, settings)


def choose_for_part(
    source: "WeightSource",
    first_layers: int | None,
    skipped_layers: Collection[int],
    kept_tokens: NDArray[np.int64] | None,
    settings: BoardSettings,
    wishes: Wishes,
) -> Recipe:
    """Choose the form of a model, or of the part of it that is kept, and print it.

    Raises:
        MisfitError: if the model does not fit, or would leave the board's GPU idle.
        UnsupportedError: if there is no such board, or if it does not run this JetPack.
        ExportError: if the model cannot be exported in the form that the user states.
    """
    with export_tools():
        from pilotfish.export.model import select_weights
        from pilotfish.export.sizes import shape_of_source
    part = select_weights(source, first_layers, skipped_layers, kept_tokens)
    shape = shape_of_source(part)
    chosen = _choose(shape, settings, wishes)
    _print(shape, chosen, settings)
    return chosen


def _choose(shape: "ModelShape", settings: BoardSettings, wishes: Wishes) -> Recipe:
    with export_tools():
        from pilotfish.export.model import check_form
    chosen = recipe(
        board_named(str(settings.board)),
        jetpack=settings.jetpack,
        role=settings.role,
        model=shape,
        slots=settings.slots,
        wishes=wishes,
    )
    check_form(
        shape.name,
        shape.blocks,
        dialect=chosen.dialect,
        precision=chosen.precision,
        context=chosen.context,
        longest=shape.longest or shape.context,
    )
    return chosen


def _print(shape: "ModelShape", chosen: Recipe, settings: BoardSettings) -> None:
    for line in describe(shape, chosen, settings):
        print(f"pilotfish: {line}", file=sys.stderr)


def describe(shape: "ModelShape", chosen: Recipe, settings: BoardSettings) -> list[str]:
    """Describe a recipe, and what to expect of the model, a line each."""
    board = board_named(str(settings.board))
    jetpack = f", JetPack {settings.jetpack}" if settings.jetpack else ""
    expected = expect(
        board,
        shape.in_form(chosen.dialect, chosen.precision),
        context=chosen.context,
        slots=settings.slots,
    )
    stated = ("memory_bytes", "usable_bytes", "bandwidth_bytes_per_s", "slower_bytes_per_s")
    sources = list(dict.fromkeys(board.sources[name] for name in stated if name in board.sources))
    return [
        f"board: {board.title}{jetpack}, as {settings.role}",
        f"form: --dialect {chosen.dialect} --precision {chosen.precision}; provider: "
        + ", then ".join(chosen.providers),
        *(f"why: {reason}" for reason in chosen.reasons),
        *expected.lines(),
        f"sources: {', '.join(sources) or 'none: the figures are unknown'}",
        *(f"note: {warning}" for warning in chosen.warnings),
    ]
