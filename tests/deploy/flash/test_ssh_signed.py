"""What a board is spared over ssh: bundles that are refused here, and those that it refuses."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotfish.cli import main
from pilotfish.deploy import manifest, signatures
from pilotfish.deploy.errors import BundleError
from pilotfish.deploy.ssh import Board
from tests.deploy.flash.sshd import Server, has_sshd, real_bundle
from tests.support.bundles import (
    can_install,
    current,
    demands,
    plant,
    release,
    seal,
    sign,
    tiny_rootfs,
)

pytestmark = [pytest.mark.slow, can_install, has_sshd]
SIGNERS = "etc/pilotfish/signers"


@pytest.fixture(scope="module")
def kept_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signed bundles of two versions, not to be changed."""
    folder = tmp_path_factory.mktemp("bundles")
    for version in ("1.0", "2.0"):
        real_bundle(folder / version, version)
    return folder


@pytest.fixture
def bundles(kept_rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept_rows, tmp_path / "bundles"))


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder that trusts the signer of the bundles, and another."""
    other = tmp_path / "other"
    signatures.create(other)
    trusted = Path(shutil.copytree(release() / "signers", tmp_path / "both"))
    shutil.copy(other / "signers/signer.pub", trusted / "other.pub")
    return trusted


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Server]:
    """A machine that has nothing in /opt."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    try:
        running = Server(folder, own_opt=True)
    except AssertionError:
        pytest.skip(f"no file system can be mounted here: {(folder / 'log').read_text()[-80:]}")
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def root(board: Server, tmp_path: Path) -> Path:
    """Where things are installed there; its /opt/pilotfish is the board's."""
    root = tiny_rootfs(tmp_path / "mounted")
    (board.opt / "pilotfish").symlink_to(root / "opt/pilotfish")
    return root


def flash(server: Server, root: Path, bundle: Path, *words: object, signers: Path) -> int:
    flags = [*server.options(), "--signers", str(signers), "--root", str(root)]
    return main(["flash", *flags, *map(str, words), str(bundle)])


# --- before anything is sent ---


def _unsigned(bundle: Path) -> None:
    (bundle / signatures.NAME).unlink()


def _changed(bundle: Path) -> None:
    signature = (bundle / signatures.NAME).read_bytes()
    plant(bundle, bundle.with_name("ran"))
    (bundle / signatures.NAME).write_bytes(signature)


NOT_SENT: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {
    "unsigned": (_unsigned, [], 65, "pilotfish bundle --sign"),
    "changed": (_changed, [], 65, "changed since signer signed it"),
    "another digest": (_changed, ["--unsigned", "--digest={}"], 65, "The bundle's digest is"),
    "no digest": (lambda _: 0, ["--digest="], 64, "all 64 hex digits"),
    "part of a digest": (lambda _: 0, ["--digest=2"], 64, "all 64 hex digits"),
}


@pytest.mark.parametrize("case", NOT_SENT)
def test_what_is_refused_here_never_meets_the_board(
    bundles: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, words, code, info = NOT_SENT[case]
    bundle = bundles / "1.0"
    noted = manifest.read(bundle).digest
    spoil(bundle)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        port = str(listening.getsockname()[1])
        flags = ["--ssh", "root@127.0.0.1", "--port", port, "--signers", f"{release()}/signers"]
        assert main(["flash", *flags, *(word.format(noted) for word in words), str(bundle)]) == code
        with pytest.raises(BlockingIOError):
            listening.accept()
    (line,) = capfd.readouterr().err.splitlines()
    assert info in line


@pytest.mark.parametrize("path", ["wheels/pilotfish-*.whl", "systemd/*.service"])
def test_a_file_that_changes_while_it_is_sent_ends_it(
    board: Server, root: Path, bundles: Path, path: str
) -> None:
    bundle = bundles / "1.0"
    (changing,) = bundle.glob(path)

    def swap(what: str, done: int, _: int) -> None:
        if (what, done > 0) == ("copying to the board", True):
            changing.write_bytes(changing.read_bytes()[::-1])

    options = [word.partition("=")[2] for word in board.options() if "-option" in word]
    here = Board("root@127.0.0.1", board.port, options)
    with pytest.raises(BundleError, match="changed while it was read"):
        here.install(bundle, demands(), ["--root", str(root)], lambda _: None, swap)
    assert not (root / "opt/pilotfish").exists()
    assert os.listdir(board.scratch) == []


# --- on the board ---


def test_packages_in_the_login_folder_are_not_imported(
    board: Server, root: Path, bundles: Path, tmp_path: Path
) -> None:
    login, mark = tmp_path / "login", tmp_path / "ran"
    for package in ("pilotfish", "wire", "argparse", "usercustomize"):
        (login / package).mkdir(parents=True)
        (login / package / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\n")
    key = board.allowed.read_text()
    forced = f'export PYTHONPATH={login} && cd {login} && eval \\"$SSH_ORIGINAL_COMMAND\\"'
    board.allowed.write_text(f'command="{forced}" {key}')
    for version in ("1.0", "2.0"):  # by the bundle alone, and by what is installed
        assert flash(board, root, bundles / version, signers=release() / "signers") == 0
    assert main(["flash", *board.options(), "--root", str(root), "--check"]) == 0
    assert current(root) == "2.0"
    assert not mark.exists()


def test_the_board_refuses_what_its_own_signers_did_not_sign_before_any_of_it_runs(
    board: Server,
    root: Path,
    bundles: Path,
    both: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert flash(board, root, bundles / "1.0", signers=release() / "signers") == 0
    assert os.listdir(root / SIGNERS) == ["signer.pub"]
    mark = tmp_path / "ran"
    evil = sign(plant(bundles / "2.0", mark), tmp_path / "other")
    capfd.readouterr()
    assert flash(board, root, evil, signers=both) == 65
    assert f"trusted signers in {root / SIGNERS}" in capfd.readouterr().err
    assert not mark.exists()
    assert current(root) == "1.0"
    assert os.listdir(board.scratch) == []
    # its code does run, if the board trusts the signer: so the mark would have been left
    shutil.copy(both / "other.pub", root / SIGNERS)
    assert flash(board, root, evil, signers=both) == 0
    assert mark.exists()


def test_an_older_version_is_refused_before_any_of_it_runs(
    board: Server, root: Path, bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    signers, mark = release() / "signers", tmp_path / "ran"
    assert flash(board, root, bundles / "2.0", signers=signers) == 0
    older = plant(bundles / "1.0", mark)
    for words in ((), ("--unsigned",)):
        assert flash(board, root, older, *words, signers=signers) == 73
        assert "give --downgrade" in capfd.readouterr().err
    assert not mark.exists()
    assert flash(board, root, older, "--downgrade", signers=signers) == 0
    assert mark.exists()
    assert current(root) == "1.0"


def test_a_board_of_before_signatures_is_upgraded_like_a_new_one(
    board: Server, root: Path, bundles: Path, both: Path, tmp_path: Path
) -> None:
    """Its version cannot verify: this machine's does, and its signers become the board's."""
    signers = release() / "signers"
    assert flash(board, root, bundles / "1.0", "--unsigned", signers=signers) == 0
    assert not (root / SIGNERS).exists()
    _forget(root)
    assert flash(board, root, bundles / "2.0", signers=signers) == 0
    assert os.listdir(root / SIGNERS) == ["signer.pub"]
    # one that went back to such a version is spared the same bundles as any other
    _forget(root)
    mark = tmp_path / "ran"
    assert flash(board, root, plant(bundles / "1.0", mark), signers=signers) == 73
    evil = sign(plant(bundles / "2.0", mark), tmp_path / "other")
    assert flash(board, root, evil, signers=both) == 65
    assert not mark.exists()


def _forget(root: Path) -> None:
    """Take what verifies bundles out of the installed version, as if it were an older one."""
    for name in ("admission.py", "signatures.py"):
        (root / "opt/pilotfish/current/site/pilotfish/deploy" / name).unlink()


def test_an_unsigned_bundle_is_installed_if_that_is_said(
    board: Server, root: Path, bundles: Path, tmp_path: Path
) -> None:
    bundle = seal(bundles / "1.0")
    _unsigned(bundle)
    assert flash(board, root, bundle, "--unsigned", signers=tmp_path / "none") == 0
    assert flash(board, root, bundle, "--unsigned", signers=tmp_path / "none") == 0
    assert current(root) == "1.0"
    assert not (root / SIGNERS).exists()
