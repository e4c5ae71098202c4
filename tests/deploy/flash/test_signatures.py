"""Signed bundles: which are let in, what is said of the others, and that those change nothing."""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pilotfish.base.errors import KeysError
from pilotfish.cli import main
from pilotfish.deploy import manifest, signatures
from pilotfish.deploy.errors import SignatureError
from tests.support.bundles import (
    TOOLS,
    can_install,
    current,
    put,
    release,
    seal,
    sign,
    snapshot,
    tiny_bundle,
)

pytestmark = can_install
SIGNERS = "etc/pilotfish/signers"
SIGNATURE = signatures.NAME


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another signer than that of the bundles."""
    folder = tmp_path_factory.mktemp("other")
    signatures.create(folder)
    return folder


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """A folder that trusts the signer of the bundles, to be changed at will."""
    return Path(shutil.copytree(release() / "signers", tmp_path / "trusted"))


def trust(folder: Path, signer: Path, name: str) -> None:
    shutil.copy(signer / "signers/signer.pub", folder / name)


def flash(root: Path, bundle: Path, signers: Path, *words: str) -> int:
    return main(["flash", "--rootfs", str(root), "--signers", str(signers), *words, str(bundle)])


# --- what is refused ---


def _by_ssh_keygen(bundle: Path, key: Path, namespace: str) -> None:
    """Sign as a person would, without our code."""
    (bundle / SIGNATURE).unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(key)]
    subprocess.run([*command, str(bundle / manifest.NAME)], check=True, capture_output=True)


def _by_ecdsa(bundle: Path, _: Path) -> None:
    key = bundle.with_name("ecdsa")
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(key)]
    subprocess.run(command, check=True)
    _by_ssh_keygen(bundle, key, signatures.NAMESPACE)


def _changed(bundle: Path, _: Path) -> None:
    """Other content, and a manifest that fits it: only the signature does not."""
    (bundle / "systemd/pilotfish-device.service").write_text("[Service]\nExecStart=/bin/evil\n")
    signature = (bundle / SIGNATURE).read_bytes()
    seal(bundle)
    (bundle / SIGNATURE).write_bytes(signature)


def _of_another(bundle: Path, _: Path) -> None:
    another = tiny_bundle(bundle.with_name("another"), version="1.0.1")
    shutil.copy(another / SIGNATURE, bundle)


def _linked(bundle: Path, _: Path) -> None:
    (bundle / SIGNATURE).rename(bundle.with_name("moved"))
    (bundle / SIGNATURE).symlink_to(bundle.with_name("moved"))


def _piped(bundle: Path, _: Path) -> None:
    (bundle / SIGNATURE).unlink()
    os.mkfifo(bundle / SIGNATURE)


REFUSED: dict[str, tuple[Callable[[Path, Path], object], int, str]] = {
    "unsigned": (lambda b, _: (b / SIGNATURE).unlink(), 65, "pilotfish bundle --sign KEY"),
    "unknown signer": (sign, 65, "is not among the 1 trusted signers"),
    "changed": (_changed, 65, "was changed since signer signed it"),
    "signature of another bundle": (_of_another, 65, "was changed since signer signed it"),
    "for another purpose": (
        lambda b, _: _by_ssh_keygen(b, release() / "signer.key", "git"),
        65,
        "signature is for 'git'",
    ),
    "another kind of key": (_by_ecdsa, 65, "not a signature by an Ed25519 key"),
    "rubbish": (lambda b, _: (b / SIGNATURE).write_bytes(b"\xff\n"), 65, "not a signature by an"),
    "truncated": (
        lambda b, _: (b / SIGNATURE).write_bytes((b / SIGNATURE).read_bytes()[:150]),
        65,
        "not a signature by an",
    ),
    "too large": (lambda b, _: (b / SIGNATURE).write_bytes(b"x" * 5000), 65, "too large"),
    "a link": (_linked, 65, "is a link, not a file"),
    "a pipe": (_piped, 65, "is not a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_trusted_signer_signed_is_refused_and_changes_nothing(
    root: Path, version_1: Path, other: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(root)
    spoil, code, words = REFUSED[case]
    spoil(version_1, other)
    assert flash(root, version_1, release() / "signers") == code
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line
    assert snapshot(root) == before


def test_a_signature_with_flipped_bits_is_refused(trusted: Path) -> None:
    content = b"a manifest"
    signers = signatures.Signers.load(trusted)
    good = signatures.sign(content, release() / "signer.key")
    assert signers.verify(content, good) == "signer"
    luck = random.Random(1)
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        try:
            signers.verify(content, bytes(data))
        except SignatureError:
            refused += 1
        else:  # white space, or bits that base64 does not use
            assert _blob(data) == _blob(good)
    assert refused > 280


def _blob(signature: bytes) -> bytes:
    return base64.b64decode(b"".join(signature.split()[3:-3]))


def test_a_public_key_with_flipped_bits_is_another_key_or_none(trusted: Path) -> None:
    good = (trusted / "signer.pub").read_bytes()
    key = signatures.parse_public(good, "good")
    luck = random.Random(1)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(luck.choice((1, 1, 3))):
            data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        with suppress(KeysError):
            read = signatures.parse_public(bytes(data), "damaged")
            assert len(read) == len(key)
            assert read != key or data.split() == good.split()


def test_an_unsigned_bundle_is_installed_if_that_is_said_and_brings_no_signers(
    root: Path, version_1: Path, tmp_path: Path
) -> None:
    (version_1 / "signers").mkdir()
    trust(version_1 / "signers", release(), "mine.pub")
    (seal(version_1) / SIGNATURE).unlink()
    assert flash(root, version_1, tmp_path / "none", "--unsigned") == 0
    assert current(root) == "1.0"
    assert not (root / SIGNERS).exists()


def test_signers_that_cannot_be_relied_upon_are_told(
    root: Path, version_1: Path, trusted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(root)
    assert flash(root, version_1, tmp_path / "none") == 77
    assert "or name their folder with --signers" in capfd.readouterr().err
    trusted.chmod(0o777)
    assert flash(root, version_1, trusted) == 77
    assert "chmod o-w" in capfd.readouterr().err
    trusted.chmod(0o755)
    (trusted / "signer.pub").chmod(0o666)
    assert flash(root, version_1, trusted) == 65
    assert f"Every user may write to {trusted}/signer.pub" in capfd.readouterr().err
    (trusted / "signer.pub").unlink()
    assert flash(root, version_1, trusted) == 65
    assert "not among the 0 trusted signers" in capfd.readouterr().err
    assert snapshot(root) == before


@pytest.mark.parametrize("content", ["", "ssh-ed25519 AAAA\n", "ssh-rsa AAAA x\n", "two\nlines\n"])
def test_a_broken_file_takes_no_trust_from_others_and_is_told(
    root: Path, version_1: Path, trusted: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (trusted / "odd name;.pub").write_text(content)
    (trusted / "a-link.pub").symlink_to(trusted / "signer.pub")
    os.mkfifo(trusted / "a-pipe.pub")
    assert flash(root, version_1, trusted) == 0
    err = capfd.readouterr().err
    for name in ("odd name;.pub", "a-link.pub", "a-pipe.pub"):
        assert str(trusted / name) in err
    assert os.listdir(root / SIGNERS) == ["signer.pub"]
    (trusted / "gone.revoked").write_text(content)  # what does it revoke?
    with pytest.raises(KeysError, match=r"gone\.revoked"):
        signatures.Signers.load(trusted)


def test_without_ssh_keygen_it_says_what_to_install(
    root: Path,
    version_1: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    signers = release() / "signers"
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in (
        ["flash", "--rootfs", str(root), "--signers", str(signers), str(version_1)],
        ["keys", "new", "signer", "--keys", str(tmp_path / "new")],
    ):
        assert main(command) == 65
        (line,) = capfd.readouterr().err.splitlines()
        assert "install the package openssh-client" in line
    assert not (root / "opt").exists()


# --- the signers that a root trusts ---


def test_the_first_installation_brings_the_signers_and_then_they_decide(
    root: Path, version_1: Path, version_2: Path, other: Path, trusted: Path
) -> None:
    assert "signer signer is trusted by" in "\n".join(put(root, version_1))
    ours = root / SIGNERS
    assert (ours.stat().st_mode & 0o777, os.listdir(ours)) == (0o755, ["signer.pub"])
    assert (ours / "signer.pub").stat().st_mode & 0o777 == 0o644
    # one that is trusted here and not there
    trust(trusted, other, "other.pub")
    with pytest.raises(SignatureError, match=f"trusted signers in {ours}"):
        put(root, sign(version_2, other), signers=trusted)
    # one that is trusted there and not here
    trust(ours, other, "other.pub")
    assert "installed, signed by other" in "\n".join(put(root, version_2))
    # one that was taken away there: its bundles, of whatever version, are refused
    (ours / "other.pub").unlink()
    with pytest.raises(SignatureError, match="not among the 1 trusted"):
        put(root, version_2, signers=trusted)
    (ours / "signer.pub").unlink()
    with pytest.raises(SignatureError, match="not among the 0 trusted"):
        put(root, version_1, downgrade=True)
    assert current(root) == "2.0"


def test_a_list_of_the_root_that_cannot_be_read_is_not_an_absent_one(
    root: Path, version_1: Path, trusted: Path
) -> None:
    (root / "etc/pilotfish").mkdir()
    (root / SIGNERS).write_text("")
    with pytest.raises(KeysError, match=r"cannot be read \(Not a directory\)"):
        put(root, version_1, signers=trusted)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from pilotfish.deploy.signatures import Signers\n"
        "os.setgid(65534); os.setuid(65534); Signers.load(Path(sys.argv[1]))"
    )
    trusted.chmod(0o700)
    command = [sys.executable, "-c", code, str(trusted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "KeysError" in done.stderr
    assert "cannot be read (Permission denied)" in done.stderr


def test_a_list_of_the_root_on_a_disk_that_is_not_there_is_not_an_absent_one(
    root: Path, version_1: Path, trusted: Path
) -> None:
    (root / "etc/pilotfish").mkdir()
    (root / SIGNERS).symlink_to("/data/signers")
    with pytest.raises(KeysError, match="broken link"):
        put(root, version_1, signers=trusted)
    assert not (root / "data").exists()
    shutil.copytree(trusted, root / "data/signers")
    assert put(root, version_1)


def test_a_key_is_rotated_by_a_bundle_of_the_old_one(
    root: Path, version_1: Path, version_2: Path, other: Path, tmp_path: Path
) -> None:
    put(root, version_1)
    (version_2 / "signers").mkdir()
    trust(version_2 / "signers", other, "next.pub")
    with pytest.raises(SignatureError, match="not among"):
        put(root, sign(seal(version_2), other))  # it does not vouch for itself
    assert "signer next is trusted by" in "\n".join(put(root, seal(version_2)))
    ours = root / SIGNERS
    assert sorted(os.listdir(ours)) == ["next.pub", "signer.pub"]
    (ours / "signer.pub").unlink()
    three = sign(tiny_bundle(tmp_path / "three", version="3.0"), other)
    put(root, three)
    assert current(root) == "3.0"
    with pytest.raises(SignatureError, match="not among"):
        put(root, version_2, downgrade=True)


@pytest.mark.parametrize("name", ["stolen.revoked", "STOLEN.REVOKED"])
def test_a_revoked_signer_is_brought_back_by_nothing(
    root: Path, version_1: Path, version_2: Path, other: Path, tmp_path: Path, name: str
) -> None:
    put(root, version_1)
    ours = root / SIGNERS
    trust(ours, other, name)
    (version_2 / "signers").mkdir()
    trust(version_2 / "signers", other, "other.pub")
    assert "signers/other.pub is revoked" in "\n".join(put(root, seal(version_2)))
    assert sorted(os.listdir(ours)) == sorted(["signer.pub", name])
    trust(ours, other, "again.pub")
    with pytest.raises(SignatureError, match=rf"revoked key \(.*{re.escape(name)}\)"):
        put(root, sign(tiny_bundle(tmp_path / "three", version="3.0"), other))


def test_a_bundle_whose_signature_nobody_checked_brings_no_signer(
    root: Path, version_1: Path, version_2: Path, other: Path
) -> None:
    put(root, version_1)
    (version_2 / "signers").mkdir()
    trust(version_2 / "signers", other, "other.pub")
    put(root, sign(seal(version_2), other), unsigned=True)
    assert current(root) == "2.0"
    assert os.listdir(root / SIGNERS) == ["signer.pub"]


def test_a_signer_under_a_name_that_is_taken_stays_outside(
    root: Path, version_1: Path, version_2: Path, other: Path
) -> None:
    put(root, version_1)
    (version_2 / "signers").mkdir()
    trust(version_2 / "signers", other, "signer.pub")
    assert "is not the bundle's signer, and stays" in "\n".join(put(root, seal(version_2)))
    with pytest.raises(SignatureError, match="not among"):
        put(root, sign(version_2, other))


# --- the keys ---


def test_a_signers_pair_is_made_once_and_signs(
    root: Path, version_1: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    new = ["keys", "new", "signer", "--keys", str(folder)]
    assert main(new) == 0
    assert capfd.readouterr().out == f"{folder}/signers/signer.pub\n"
    secret = folder / "signer.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    content = secret.read_bytes()
    assert main(new) == 77
    assert "exists already" in capfd.readouterr().err
    assert secret.read_bytes() == content
    assert main(["keys", "new", "device", "--keys", str(folder)]) == 0
    assert main(["keys", "list", "--keys", str(folder)]) == 0  # one folder for all of them
    _by_ssh_keygen(version_1, secret, signatures.NAMESPACE)  # on a machine without pilotfish, say
    assert flash(root, version_1, folder / "signers") == 0


def test_a_key_that_cannot_sign_is_told_before_anything_is_made(
    version_1: Path, other: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def bundle(key: Path) -> str:
        words = ["--artifact", str(version_1 / "artifacts/draft"), "--edge", "tcp://127.0.0.1:7077"]
        out = tmp_path / "out"
        assert main(["bundle", *words, "--sign", str(key), "--out", str(out)]) == 77
        assert not out.exists()
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert "pilotfish keys new signer" in bundle(tmp_path / "none")
    public = shutil.copy(other / "signer.key", tmp_path / "open.key")
    Path(public).chmod(0o640)
    assert "chmod 600" in bundle(Path(public))
    Path(public).write_text("rubbish")
    Path(public).chmod(0o600)
    with pytest.raises(KeysError, match="could not be signed"):
        signatures.sign(b"x", Path(public))
