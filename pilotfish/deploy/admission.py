"""Verify a bundle before any part of it is unpacked or run.

In: a bundle's folder, an `AdmissionPolicy`, the signers that a root file system trusts. Out: an
`AdmittedBundle`, or an error. Every later step uses the admitted bundle's manifest.

Manifest and signature are read once, and the signature is verified before the manifest is parsed.
Every file is compared with this manifest when it is used (`manifest.reading`), since other
processes may write to the folder meanwhile.

A root with a folder of signers trusts these signers only, even if the folder is empty. A root
without a folder of signers has no installation yet, or an installation of a version that knew no
signatures. Then the root takes over the signers that the flashing machine trusts.

Standard library only: this runs on the board before anything is installed.
"""

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.deploy import manifest, signatures
from pilotfish.deploy.errors import BundleError, SignatureError
from pilotfish.deploy.manifest import BundleManifest
from pilotfish.deploy.signatures import Signers


@dataclass(frozen=True, kw_only=True)
class AdmissionPolicy:
    """The conditions for admitting a bundle.

    digest: required digest of the manifest, 64 hex digits; None: any. signers: folder of trusted
    signers, for a root without its own. unsigned: admit a bundle without checking its signature.
    downgrade: admit a version older than the installed one.
    """

    digest: str | None = None
    signers: Path = signatures.FOLDER
    unsigned: bool = False
    downgrade: bool = False

    def __post_init__(self) -> None:
        if self.digest is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.digest):
            raise UnsupportedError(
                "--digest needs all 64 hex digits that `pilotfish bundle` printed."
            )


@dataclass(frozen=True)
class AdmittedBundle:
    """A bundle that may be installed.

    raw, signature: bytes of the manifest and of its signature, if any. signer: name of the bundle's
    signer; None: no signature was required. signers: the trusted signers.
    """

    raw: bytes
    signature: bytes | None
    manifest: BundleManifest
    signer: str | None
    signers: Signers | None


def admit(
    bundle: Path,
    policy: AdmissionPolicy,
    say: Callable[[str], None],
    root_signers: Path | None = None,
) -> AdmittedBundle:
    """Admit a bundle, or raise `SignatureError`, `KeysError` or `BundleError`.

    root_signers: the root's folder of signers, if any. say: called with a sentence for each file
    of a signer that is not a key.
    """
    raw = manifest.read_bytes(bundle)
    signature = _signature(bundle)
    signer = signers = None
    if not policy.unsigned:
        if signature is None:
            raise SignatureError(
                "The bundle is not signed: make it with `pilotfish bundle --sign KEY` "
                "(`pilotfish keys new signer` makes the key), or give --unsigned to install it "
                "without a signature."
            )
        signers = Signers.load(
            root_signers if root_signers is not None and root_signers.exists() else policy.signers
        )
        for fault in signers.faults:
            say(fault)
        signer = signers.verify(raw, signature)
    contents = manifest.decode(raw)
    if policy.digest is not None and contents.digest != policy.digest.lower():
        raise BundleError(
            f"The bundle's digest is {contents.digest}, but --digest requires {policy.digest}."
        )
    return AdmittedBundle(raw, signature, contents, signer, signers)


def _signature(bundle: Path) -> bytes | None:
    path = bundle / signatures.NAME
    if not os.path.lexists(path):
        return None
    with manifest.open_file(path) as file:
        content = file.read(signatures.MAX_BYTES + 1)
    if len(content) > signatures.MAX_BYTES:
        raise SignatureError(f"{path} is too large to be a signature.")
    return content


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that installs bundles."""
    add = parser.add_argument
    add("--digest", metavar="HEX", help="required digest of the bundle, 64 hex digits")
    add(
        "--signers",
        type=Path,
        default=signatures.FOLDER,
        metavar="DIR",
        help="folder of public keys (*.pub) of trusted signers; a root without its own list "
        "takes over these keys (%(default)s)",
    )
    add("--unsigned", action="store_true", help="install a bundle without checking its signature")
    add("--downgrade", action="store_true", help="install a version older than the installed one")


def policy_from_args(args: argparse.Namespace) -> AdmissionPolicy:
    """Read the policy from the flags of `add_arguments`."""
    return AdmissionPolicy(
        digest=args.digest,
        signers=args.signers,
        unsigned=args.unsigned,
        downgrade=args.downgrade,
    )
