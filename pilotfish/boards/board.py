"""Boards and JetPacks, read from `boards.toml`; every figure there has a public source.

A board is a name for `--board`. Some boards are made with several memories: the plain name
(orin-nano) stands for the developer kit's, and each other memory has a name of its own
(orin-nano-4gb). An unpublished figure is None, and is shown as "unknown".
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pilotfish.base.errors import UnsupportedError

GIB = 1 << 30
_Url = Annotated[str, Meta(pattern="^https://")]


class Figure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published figure.

    Attributes:
        value: a number, or a version.
        source: the address of the page that states the value, or that it is derived from.
        derived: how the value follows from the page; None if the page states it.
    """

    value: float | str
    source: _Url
    derived: str | None = None


class JetPack(Struct, frozen=True, kw_only=True):
    """A version of NVIDIA's software for Jetsons.

    Attributes:
        l4t, python, cuda, tensorrt: versions of its parts, such as "36.4", "3.10", "12.6", "10.3".
        sources: name of the attribute → address of the page that states it.
    """

    version: str
    l4t: str
    python: str
    cuda: str
    tensorrt: str
    sources: dict[str, str]


class Board(Struct, frozen=True, kw_only=True):
    """A kind of machine.

    Attributes:
        name: the value of `--board`.
        title: its maker's name for it.
        aliases: further values of `--board`.
        family: the name in `BOARDS` that it belongs to.
        memory_bytes: size of its memory; None: unknown, or differs between cards.
        usable_bytes: what Linux shows of this memory to programs (MemTotal); None: unknown.
        bandwidth_bytes_per_s: the fastest that its memory can be read, in the fastest power mode.
        slower_bytes_per_s: the same in the other power modes, if it is lower; else None.
        compute: compute capabilities of its GPU, such as ("8.7",); a class of cards has several.
        jetpacks: versions of JetPack that run on it and that we support, oldest first.
        gpu: whether it has a GPU.
        integrated: whether the GPU uses the system's memory.
        tree: entries of `compatible` in its device tree that name the module.
        prefixes: beginnings of entries that name its family; the memory tells the boards apart.
        sources: name of the attribute → address of the page that states it.
        derived: name of the attribute → how it follows from that page, if the page does not state
            it.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    family: str
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    slower_bytes_per_s: float | None = None
    compute: tuple[str, ...] = ()
    jetpacks: tuple[str, ...] = ()
    gpu: bool
    integrated: bool
    tree: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    sources: dict[str, str] = {}
    derived: dict[str, str] = {}

    @property
    def program_bytes(self) -> int | None:
        """The memory that programs can have: what Linux shows of it, else all of it."""
        return self.usable_bytes or self.memory_bytes


class _Module(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board in one size of memory, in the file."""

    name: str
    title: str
    memory_gib: Figure | None = None
    usable_gib: Figure | None = None
    bandwidth: Figure | None = None  # bytes/s
    slower: Figure | None = None  # bytes/s
    tree: tuple[str, ...] = ()
    tree_source: _Url | None = None


class _Family(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board in the file; its first module has the plain name."""

    gpu: bool
    integrated: bool
    aliases: tuple[str, ...] = ()
    compute: tuple[Figure, ...] = ()
    jetpacks: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    prefixes_source: _Url | None = None
    modules: Annotated[tuple[_Module, ...], Meta(min_length=1)]

    def boards(self, name: str) -> list[Board]:
        return [self._board(name, module) for module in self.modules]

    def _board(self, family: str, module: _Module) -> Board:
        figures = {
            "memory_bytes": module.memory_gib,
            "usable_bytes": module.usable_gib,
            "bandwidth_bytes_per_s": module.bandwidth,
            "slower_bytes_per_s": module.slower,
        }
        stated = {name: figure for name, figure in figures.items() if figure is not None}
        sources = {name: figure.source for name, figure in stated.items()}
        if self.compute:
            sources["compute"] = self.compute[0].source
        if module.tree_source is not None:
            sources["tree"] = module.tree_source
        if self.prefixes_source is not None:
            sources["prefixes"] = self.prefixes_source
        first = module is self.modules[0]
        return Board(
            name=family if first else module.name,
            title=module.title,
            aliases=(*self.aliases, *((module.name,) if module.name != family else ()))
            if first
            else (),
            family=family,
            memory_bytes=_bytes(module.memory_gib),
            usable_bytes=_bytes(module.usable_gib),
            bandwidth_bytes_per_s=_number(module.bandwidth),
            slower_bytes_per_s=_number(module.slower),
            compute=tuple(str(each.value) for each in self.compute),
            jetpacks=self.jetpacks,
            gpu=self.gpu,
            integrated=self.integrated,
            tree=module.tree,
            prefixes=self.prefixes,
            sources=sources,
            derived={name: each.derived for name, each in stated.items() if each.derived},
        )


class _JetPackParts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JetPack, in the file."""

    l4t: Figure
    python: Figure
    cuda: Figure
    tensorrt: Figure


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    jetpacks: dict[str, _JetPackParts]
    boards: dict[str, _Family]


def _read_file() -> _File:
    data = (resources.files("pilotfish.boards") / "boards.toml").read_bytes()
    return msgspec.toml.decode(data, type=_File)


def _bytes(gib: Figure | None) -> int | None:
    return None if gib is None else round(float(gib.value) * GIB)


def _number(figure: Figure | None) -> float | None:
    return None if figure is None else float(figure.value)


def _jetpack(version: str, parts: _JetPackParts) -> JetPack:
    figures: dict[str, Figure] = {
        name: getattr(parts, name) for name in ("l4t", "python", "cuda", "tensorrt")
    }
    return JetPack(
        version=version,
        **{name: str(each.value) for name, each in figures.items()},
        sources={name: each.source for name, each in figures.items()},
    )


_FILE = _read_file()
JETPACKS: dict[str, JetPack] = {
    version: _jetpack(version, parts) for version, parts in _FILE.jetpacks.items()
}
# every board, also those of another memory than the developer kit's
ALL_BOARDS: dict[str, Board] = {
    board.name: board for name, family in _FILE.boards.items() for board in family.boards(name)
}
# the boards by their plain names
BOARDS: dict[str, Board] = {
    name: board for name, board in ALL_BOARDS.items() if name == board.family
}


def board_named(name: str) -> Board:
    """Return the board of a name or an alias.

    Raises:
        UnsupportedError: if no board has the name; the message lists all names.
    """
    for board in ALL_BOARDS.values():
        if name == board.name or name in board.aliases:
            return board
    raise UnsupportedError(
        f"{name!r} is no board that this version knows: choose {', '.join(ALL_BOARDS)}"
    )


def siblings(board: Board) -> list[Board]:
    """Return the boards of the same family with other memories."""
    return [
        each
        for each in ALL_BOARDS.values()
        if each.family == board.family and each.name != board.name
    ]
