"""What crosses the link: messages, codecs, encrypted transport, and the protocols of a round."""

from pilotfish.base.version import VERSION

SOFTWARE = f"pilotfish {VERSION}"
