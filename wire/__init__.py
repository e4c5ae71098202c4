"""What crosses the link: messages, codecs, encrypted transport, and the protocols of a round."""

from importlib.metadata import PackageNotFoundError, version

try:
    SOFTWARE = f"pilotfish {version('pilotfish')}"
except PackageNotFoundError:  # run from a source tree that was never installed
    SOFTWARE = "pilotfish (source)"
