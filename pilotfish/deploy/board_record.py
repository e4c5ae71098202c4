"""`board.json` of a bundle: the board that it was made for, and what it says of the board.

In: a bundle, and the machine to install on. Out: sentences for the user, or an `InstallError` if
the models cannot fit into the machine's memory. Bundles without a named board have no record; of
these, one that leaves the GPU of a Jetson idle is still recognised by its model's dialect.

The record is a file of the bundle's configuration, not a field of its manifest: earlier versions
install such a bundle, too.

Standard library only: this runs on the board before anything is installed.
"""

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pilotfish.base.memory import reported_bytes
from pilotfish.base.prose import one_line
from pilotfish.deploy import manifest
from pilotfish.deploy.errors import BundleError, InstallError
from pilotfish.deploy.manifest import BundleManifest, Entry
from pilotfish.deploy.rootfs import Rootfs

NAME = "board.json"
_PATH = f"config/{NAME}"
_MAX_BYTES = 1 << 16
_MAX_MANIFEST_BYTES = 16 << 20
_MOST_NEED = 1 << 50  # more than any machine has; a float holds its parts exactly
# dialects of bundles that no provider of a GPU takes, by `boards.gpu_forms`, which the installer
# cannot import
CPU_DIALECTS = ("contrib", "genai")
_TREE = "sys/firmware/devicetree/base"  # /proc/device-tree leads there
_TEGRA = "nvidia,tegra"  # begins an entry of every Jetson's device tree


@dataclass(frozen=True)
class BoardRecord:
    """The board that a bundle was made for.

    board: its name for --board; None: the bundle names only a JetPack. title: its maker's name.
    jetpack, l4t: versions of NVIDIA's software; None: any, or none. tree: entries of the device
    tree's `compatible` that such a board has; prefixes: beginnings of such entries. need_bytes: the
    memory that the served model is known to need. lines: what `pilotfish bundle` said of the model
    on this board.
    """

    board: str | None
    title: str
    jetpack: str | None
    l4t: str | None
    tree: tuple[str, ...]
    prefixes: tuple[str, ...]
    need_bytes: int
    lines: tuple[str, ...]

    def encode(self) -> bytes:
        """Encode as the bytes of `board.json`."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def require(self, machine: "RootFacts") -> None:
        """Raise `InstallError` if the model needs more memory than the machine has."""
        if machine.memory_bytes is not None and self.need_bytes > machine.memory_bytes:
            raise InstallError(
                f"The model of the bundle needs {_mebibytes(self.need_bytes)} of memory, but this "
                f"machine has {_mebibytes(machine.memory_bytes)}: make the bundle with a smaller "
                "model, or with --board for this machine."
            )

    def sentences(self, machine: "RootFacts") -> Iterator[str]:
        """Yield what the bundle says of its board, and how this machine differs from it."""
        yield from self.lines
        if self.board is not None and machine.tree and not self._is_board(machine.tree):
            yield (
                f"the bundle was made for {self.title}, but this machine is "
                f"{machine.model or ' '.join(machine.tree)}: make a bundle with its own --board"
            )
        if self.l4t is not None and machine.l4t and not _is_same(self.l4t, machine.l4t):
            yield (
                f"the bundle was made for JetPack {self.jetpack} (L4T {self.l4t}), but this system "
                f"has L4T {machine.l4t}: make a bundle with its own --jetpack"
            )

    def _is_board(self, tree: tuple[str, ...]) -> bool:
        """Return whether a device tree is this board's; a machine without Jetson is no Jetson."""
        if not self.tree and not self.prefixes:
            return not any(entry.startswith(_TEGRA) for entry in tree)
        begins = bool(self.prefixes) and any(each.startswith(self.prefixes) for each in tree)
        return begins or not set(tree).isdisjoint(self.tree)


@dataclass(frozen=True)
class RootFacts:
    """What is known of the machine to install on; empty or None: unknown.

    tree, model: from its device tree. memory_bytes: what its kernel reports. l4t: such as "36.4.3".
    """

    tree: tuple[str, ...] = ()
    model: str = ""
    memory_bytes: int | None = None
    l4t: str = ""

    @classmethod
    def read(cls, root: Rootfs) -> "RootFacts":
        """Read the facts; a root file system that does not run shows only its L4T."""
        l4t = _l4t(root.release)
        if root.root != Path("/"):
            return cls(l4t=l4t)
        return cls(
            tree=tuple(filter(None, _tree_text(root.root, "compatible").split("\0"))),
            model=_tree_text(root.root, "model"),
            memory_bytes=reported_bytes(root.root),
            l4t=l4t,
        )


def read(bundle: Path, contents: BundleManifest) -> BoardRecord | None:
    """Read a bundle's record; None if it has none.

    Raises `BundleError` if it has another form.
    """
    entry = contents.files.get(_PATH)
    if entry is None:
        return None
    try:
        if entry.size > _MAX_BYTES:
            raise ValueError("too long")
        fields = json.loads(_content(bundle, _PATH, entry))
        for name in ("tree", "prefixes", "lines"):
            fields[name] = tuple(map(one_line, fields[name]))
        for name in ("board", "title", "jetpack", "l4t"):
            if fields[name] is not None or name == "title":
                fields[name] = one_line(fields[name])
        record = BoardRecord(**fields)
        if type(record.need_bytes) is not int or not 0 <= record.need_bytes < _MOST_NEED:
            raise TypeError("need_bytes is a size of memory")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(f"{_PATH} of the bundle is damaged: make the bundle again.") from error
    return record


def sentence_without_record(
    bundle: Path, contents: BundleManifest, model: str, root: Rootfs
) -> str | None:
    """Return a warning for a bundle without a record, whose model leaves a Jetson's GPU idle.

    model: folder of the served artifact in the bundle.
    """
    path = f"artifacts/{model}/manifest.json"
    entry = contents.files.get(path)
    if root.release is None or entry is None or entry.size > _MAX_MANIFEST_BYTES:
        return None
    try:
        fields = json.loads(_content(bundle, path, entry))
        dialect = fields.get("dialect")
    except (ValueError, AttributeError, RecursionError):
        return None  # the service says what is wrong with the artifact
    if dialect not in CPU_DIALECTS:
        return None
    return (
        f"WARNING: the model has the dialect {dialect}, which no GPU runs, so this Jetson's GPU "
        "will idle: export the model and make the bundle with --board"
    )


def _content(bundle: Path, path: str, entry: Entry) -> bytes:
    content = io.BytesIO()
    with manifest.reading(bundle, path, entry) as source:
        shutil.copyfileobj(source, content)
    return content.getvalue()


def _tree_text(root: Path, name: str) -> str:
    with suppress(OSError):
        raw = (root / _TREE / name).read_bytes()
        return raw.decode("ascii", "replace").strip("\0\n")
    return ""


def _l4t(release: str | None) -> str:
    """Return the version in "R36 (release), REVISION: 4.3, …" as "36.4.3", or ""."""
    major, _, rest = (release or "").partition(" (release), REVISION: ")
    return f"{major.lstrip('R')}.{rest.partition(',')[0]}" if rest else ""


def _is_same(wanted: str, version: str) -> bool:
    """Return whether an L4T is the wanted one ("36.4"), or a later minor version of it."""
    (major, minor), (its_major, its_minor) = (
        (*each.split("."), "0")[:2] for each in (wanted, version)
    )
    later = minor.isdecimal() and its_minor.isdecimal() and int(its_minor) >= int(minor)
    return major == its_major and later


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
