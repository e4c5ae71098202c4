"""The version of this software, and its name on the wire and in reports."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pilotfish")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+source"

SOFTWARE = f"pilotfish {VERSION}"
