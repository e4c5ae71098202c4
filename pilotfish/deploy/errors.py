"""Errors of bundles and installations, and how a command of `deploy` reports them."""

import sys
from collections.abc import Callable

from pilotfish.base.errors import SIGINT_CODE, PilotfishError


class BundleError(PilotfishError):
    """A bundle that cannot be made, or is damaged, incomplete or not for this machine."""

    code = "bundle"
    exit_code = 65


class SignatureError(BundleError):
    """A bundle that is unsigned, signed by an untrusted signer, or changed after it was signed."""

    code = "signature"


class InstallError(PilotfishError):
    """An installation that is impossible in this root file system, or damaged."""

    code = "install"
    exit_code = 73


class PrivilegeError(InstallError):
    """The installation belongs to root, and this process is not root."""

    code = "privilege"
    exit_code = 77


class ServiceError(InstallError):
    """The new version was installed, but its service does not start."""

    code = "service"
    exit_code = 75


class FetchError(BundleError):
    """Wheels that cannot be resolved or fetched."""

    code = "fetch"
    exit_code = 69


class RemoteError(InstallError):
    """The board cannot be reached by ssh, or lacks what an installation needs."""

    code = "remote"
    exit_code = 69


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command, and write its error to stderr; return the exit code."""
    try:
        return command()
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 74
    except KeyboardInterrupt:
        print("pilotfish: interrupted", file=sys.stderr)
        return SIGINT_CODE
