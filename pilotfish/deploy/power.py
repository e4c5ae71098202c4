"""Set the power mode of a Jetson by name.

    python -m pilotfish.deploy.power --mode MAXN_SUPER --clocks yes

Mode numbers differ from board to board, so names are looked up in ``/etc/nvpmodel.conf``. NVIDIA's
own `nvpmodel` sets the mode, and `jetson_clocks` the clocks. A mode that needs a restart of the
board takes effect at the next restart; this program does not restart the board. Standard library
only.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from pilotfish.deploy.errors import InstallError

MODES = Path("/etc/nvpmodel.conf")
_MODE = re.compile(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", re.MULTILINE)


def modes(text: str) -> dict[str, int]:
    """Return name → number of every mode that the text of an nvpmodel.conf defines."""
    return {name: int(number) for number, name in _MODE.findall(text)}


def set_mode(name: str, definitions: Path = MODES) -> None:
    """Set a mode with ``nvpmodel``; for an unknown mode, `InstallError` names the board's modes."""
    try:
        known = modes(definitions.read_text(errors="replace"))
    except OSError as error:
        raise InstallError(f"{definitions} cannot be read: {error.strerror}.") from error
    mode_number = {mode.casefold(): number for mode, number in known.items()}.get(name.casefold())
    if mode_number is None:
        raise InstallError(
            f"This board has no power mode {name!r}; it has {', '.join(known) or 'none'}."
        )
    _run("nvpmodel", "-m", str(mode_number))


def _run(*command: str) -> None:
    """Run one of NVIDIA's tools without stdin, so that it does not ask to restart the board."""
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    except FileNotFoundError:
        raise InstallError(
            f"The command {command[0]} is missing: this machine is not a Jetson."
        ) from None
    except subprocess.CalledProcessError as error:
        raise InstallError(
            f"The command {command[0]} ended with exit code {error.returncode}."
        ) from None


def main() -> int:
    """Run the command of `pilotfish-power.service`."""
    parser = argparse.ArgumentParser(prog="pilotfish.deploy.power", description=__doc__)
    parser.add_argument(
        "--mode", default="", help="name of a mode in nvpmodel.conf; empty: do not change the mode"
    )
    parser.add_argument(
        "--clocks", default="no", choices=("yes", "no"), help="yes: set all clocks to their maximum"
    )
    args = parser.parse_args()
    try:
        if args.mode:
            set_mode(args.mode)
        if args.clocks == "yes":
            _run("jetson_clocks")
    except InstallError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
