"""A bundle that names its board: what flash says of it, and what it refuses.

The running board is a chroot with a Jetson's device tree and memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from pilotfish.boards.board import board_named
from pilotfish.boards.gpu_forms import idle_reasons
from pilotfish.deploy import board_record
from pilotfish.deploy.board_record import BoardRecord
from pilotfish.deploy.errors import BundleError
from pilotfish.engines.manifest import LLAMACPP, Dialect
from tests.support.bundles import (
    can_install,
    current,
    install_over_this_machine,
    put,
    seal,
    tiny_bundle,
)

pytestmark = can_install
NANO = ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234")
AGX = ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234")
SAID = "tiny: memory: weights 1 MiB"


def record(name: str = "orin-nano", **changes: object) -> BoardRecord:
    board = board_named(name)
    fields = {
        "board": board.name,
        "title": board.title,
        "jetpack": "6.2",
        "l4t": "36.4",
        "tree": board.tree,
        "prefixes": board.prefixes,
        "need_bytes": 3 << 30,
        "lines": (SAID,),
        **changes,
    }
    return BoardRecord(**fields)


def bundle_for(folder: Path, made_for: BoardRecord | bytes) -> Path:
    bundle = tiny_bundle(folder)
    raw = made_for if isinstance(made_for, bytes) else made_for.encode()
    (bundle / "config" / board_record.NAME).write_bytes(raw)
    return seal(bundle)


def with_release(root: Path, line: str) -> Path:
    (root / "etc/nv_tegra_release").write_text(line)
    return root


def test_flash_says_what_bundle_said_and_keeps_the_record(root: Path, tmp_path: Path) -> None:
    lines = put(root, bundle_for(tmp_path / "bundle", record()))
    installed = next(line for line in lines if "installed" in line)
    assert lines.index(SAID) < lines.index(installed)
    settled = json.loads((root / "etc/pilotfish/board.json").read_text())
    assert settled["board"] == "orin-nano"
    assert current(root) == "1.0"


@pytest.mark.parametrize(
    ("release_line", "differs"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic", False),
        ("# R36 (release), REVISION: 5.0, GCID: 1, BOARD: generic", False),
        ("# R36 (release), REVISION: 3.0, GCID: 36923193, BOARD: generic", True),
        ("# R39 (release), REVISION: 2.0, GCID: 1, BOARD: generic", True),
        ("# of another form", False),
    ],
)
def test_another_release_of_the_system_is_named(
    root: Path, tmp_path: Path, release_line: str, differs: bool
) -> None:
    lines = put(with_release(root, release_line), bundle_for(tmp_path / "bundle", record()))
    sentences = [line for line in lines if "this system has L4T" in line]
    assert len(sentences) == differs
    if differs:
        assert "JetPack 6.2 (L4T 36.4)" in sentences[0]
        assert "--jetpack" in sentences[0]


def test_a_bundle_without_a_board_says_nothing_of_one(root: Path, tmp_path: Path) -> None:
    lines = put(root, tiny_bundle(tmp_path / "bundle"))
    assert not [line for line in lines if "memory" in line or "made for" in line]


@pytest.mark.parametrize(
    ("model", "warned"),
    [
        ('{"dialect": "contrib"}', True),
        ('{"dialect": "opset17"}', False),
        ("[" * 10_000, False),
        ("[]", False),
    ],
)
def test_an_older_bundle_that_leaves_a_jetsons_gpu_idle(
    root: Path, tmp_path: Path, model: str, warned: bool
) -> None:
    bundle = tiny_bundle(tmp_path / "bundle")
    (bundle / "artifacts/draft/manifest.json").write_text(model)
    seal(bundle)
    lines = put(root, bundle)  # another machine: nothing is known of its GPU
    assert not [line for line in lines if "WARNING" in line]
    lines = put(with_release(root, "# R36 (release), REVISION: 4.3"), bundle)
    warnings = [line for line in lines if "GPU will idle" in line]
    assert len(warnings) == warned


def test_dialects_for_cpus_are_those_of_the_boards_rules() -> None:
    """The installer has a list of its own, since it runs with the standard library alone."""
    jetson = board_named("orin-nano")
    for dialect in {*get_args(Dialect)} - {LLAMACPP}:  # no bundle has llama.cpp
        idle = all(
            idle_reasons(jetson, dialect, precision, states=False, jetpack=None, further=("cuda",))
            for precision in ("fp16", "int4")
        )
        assert idle == (dialect in board_record.CPU_DIALECTS), dialect


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        record().encode().replace(b'"need_bytes"', b'"x"'),
        record(need_bytes="much").encode(),
        record(need_bytes=-1).encode(),
        record(need_bytes=10**400).encode(),
        record(lines=(1,)).encode(),
        record(l4t=36.4).encode(),
        record(jetpack=["6.2"]).encode(),
        b" " * (1 << 17),
    ],
)
def test_a_damaged_record_is_refused(root: Path, tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(BundleError, match=r"board\.json of the bundle is damaged"):
        put(root, bundle_for(tmp_path / "bundle", raw))
    assert not (root / "opt/pilotfish/current").exists()


def test_a_record_writes_no_escapes_to_the_terminal(root: Path, tmp_path: Path) -> None:
    hostile = record(l4t="99.1", jetpack="\x1b[2J\n7", title="\x1b]0;", lines=("\x07",))
    lines = put(
        with_release(root, "# R36 (release), REVISION: 4.3"), bundle_for(tmp_path / "b", hostile)
    )
    assert any("made for JetPack" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def flash_board(bundle: Path, folder: Path, tree: tuple[str, ...], memory_kib: int) -> str:
    """Flash a board with this device tree and memory; returns exit code and output."""
    base = folder / "sys/firmware/devicetree/base"
    base.mkdir(parents=True)
    (base / "compatible").write_text("\0".join(tree) + "\0")
    (base / "model").write_text("The maker's own name\0")
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:        {memory_kib} kB\n")
    files = (
        f"mount --bind {meminfo} {folder}/all/proc/meminfo || exit 99; "
        f"cp -r {folder}/sys {folder}/all/;"
    )
    done = install_over_this_machine(folder, bundle, files)
    return f"{done.returncode}\n{done.stderr}"


def test_the_board_that_the_bundle_is_for(root: Path, tmp_path: Path) -> None:
    bundle = bundle_for(tmp_path / "bundle", record())
    output = flash_board(bundle, root.parent, NANO, 7_500_000)
    assert output.startswith("0\n"), output
    assert SAID in output
    assert "but this" not in output


def test_another_board_is_named(root: Path, tmp_path: Path) -> None:
    bundle = bundle_for(tmp_path / "bundle", record())
    output = flash_board(bundle, root.parent, AGX, 60_000_000)
    assert output.startswith("0\n"), output
    assert "made for Jetson Orin Nano 8 GB, but this machine is The maker's own name" in output


def test_a_board_with_too_little_memory_is_refused(root: Path, tmp_path: Path) -> None:
    bundle = bundle_for(tmp_path / "bundle", record())
    output = flash_board(bundle, root.parent, ("nvidia,p3767-0004",), 2_900_000)
    assert output.startswith("73\n"), output
    assert "needs 3072 MiB of memory, but this machine has 2832 MiB" in output
    assert "is current" not in output
