"""An invitation: the line that enrols one device at an edge, and the messages of that exchange.

In:  the edge's address and public key. Out: a line with a one-time secret key, by which a new
device connects once, sends its own public key, and gets its name on the edge's allow-list.

The line is one word of letters, digits, ``-`` and ``_``, so that no shell changes it::

    pf1_ BASE64( edge's public key [32] · one-time secret key [32] · address · checksum [4] )

The edge admits the one-time key's public half by ZAP, as it admits devices, so a peer without the
line never passes a handshake. The device knows the edge's public key from the line, so nobody else
can answer. See docs/keys.md for the threats.
"""

import binascii
import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import zmq
from zmq.utils import z85

from pilotfish.base.errors import InvitationError, UnsupportedError
from pilotfish.wire.address import require_address
from pilotfish.wire.messages import VERSION, Buffer, Failure, Header, Name, decode_checked

PREFIX: Final = "pf1_"
ENROL_BYTES: Final = 512  # maximum bytes of a request; it has no frames
_KEY_BYTES, _CHECKSUM_BYTES = 32, 4
_MAX_ADDRESS_BYTES = 300
MOST_TEXT: Final = 4096  # maximum characters of a text that is searched for a line

PublicKey = Annotated[bytes, msgspec.Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]


class EnrolRequest(Header, tag="enrol", frozen=True):
    """A device's request to be put on the allow-list under a name of its choice."""

    key: PublicKey  # the device's public key
    name: Name  # the edge makes it valid and, if another device has it, adds a number
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = VERSION


class EnrolReply(Header, tag="enrolled", frozen=True):
    """The edge's answer: the device is on the allow-list, under this name."""

    name: Name


_requests: "msgspec.msgpack.Decoder[EnrolRequest]" = msgspec.msgpack.Decoder(EnrolRequest)
_replies: "msgspec.msgpack.Decoder[EnrolReply | Failure]" = msgspec.msgpack.Decoder(
    EnrolReply | Failure
)


def decode_enrol_request(header: Buffer) -> EnrolRequest:
    """Decode a device's request; raises `MalformedError`."""
    return decode_checked(_requests, header, ENROL_BYTES)


def decode_enrol_reply(header: Buffer) -> EnrolReply | Failure:
    """Decode the edge's answer; raises `MalformedError`."""
    return decode_checked(_replies, header)


@dataclass(frozen=True)
class Invitation:
    """What a line says. All keys are in Z85.

    address: the edge's, ``tcp://HOST:PORT``. edge: the edge's public key. secret: the one-time
    secret key, which no ``repr`` shows.
    """

    address: str
    edge: bytes
    secret: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The public half of the one-time key."""
        return zmq.curve_public(self.secret)

    @property
    def line(self) -> str:
        """The line, which `parse_line` reads."""
        body = z85.decode(self.edge) + z85.decode(self.secret) + self.address.encode()
        return PREFIX + urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse_line(text: str) -> Invitation:
    """Read a line, also with the command before it, or wrapped by a terminal.

    Raises `InvitationError` if it was cut or garbled.
    """
    words = text[:MOST_TEXT].split()
    starts = [at for at, word in enumerate(words) if word.startswith(PREFIX)]
    if not starts:
        raise InvitationError(
            f"This is not an invitation: it has no word that begins with {PREFIX}. Copy the whole "
            "line that `pilotfish edge up` or `pilotfish keys invite` prints."
        )
    code = "".join(words[starts[-1] :]).removeprefix(PREFIX)
    try:
        raw = urlsafe_b64decode(code + "=" * (-len(code) % 4))
    except (binascii.Error, ValueError):
        raw = b""
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    address = body[2 * _KEY_BYTES :]
    # the code is compared, too, since base64 decoding ignores characters that it does not know
    same_code = urlsafe_b64encode(raw).decode().rstrip("=") == code
    whole = same_code and checksum == _checksum(body)
    if not whole or not 0 < len(address) <= _MAX_ADDRESS_BYTES:
        raise InvitationError(
            f"The invitation is cut or garbled ({len(code)} characters after {PREFIX}): copy the "
            "whole line again, from the first character to the last."
        )
    edge, secret = (z85.encode(body[at : at + _KEY_BYTES]) for at in (0, _KEY_BYTES))
    try:
        endpoint = address.decode()
        require_address(endpoint)
    except (UnicodeDecodeError, UnsupportedError) as error:
        raise InvitationError(
            "The invitation names no address of an edge: make another line on the edge, with "
            "--address."
        ) from error
    return Invitation(endpoint, edge, secret)


def _checksum(body: bytes) -> bytes:
    """Return a checksum against faults of copying; the secret key needs none against forgery."""
    return hashlib.sha256(b"pilotfish invitation" + body).digest()[:_CHECKSUM_BYTES]
