"""The version of this software, and the name under which it introduces itself."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pilotfish")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+source"

SOFTWARE = f"pilotfish {VERSION}"
