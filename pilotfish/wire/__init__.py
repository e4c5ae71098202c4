"""What crosses the link: messages, codecs, encrypted transport, and the protocols of a round."""

from pilotfish.version import VERSION

SOFTWARE = f"pilotfish {VERSION}"
