"""The state of the link to the edge: a name, a sentence, and a remedy.

All reports about the link use this state: `/health`, `/status`, the status line of systemd, the
page, the journal, metrics, and the errors of requests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pilotfish.base.errors import (
    AccessDeniedError,
    BusyError,
    DrainingError,
    EdgeLostError,
    EdgeUnreachableError,
    PairMismatchError,
    PilotfishError,
    TargetLostError,
    VersionMismatchError,
)
from pilotfish.wire.link.attempts import ConnectAttempts, ConnectFailure
from pilotfish.wire.link.diagnosis import AddressState


class Connectivity(Enum):
    """The states of a link, best first; a device with several links reports the best state."""

    CONNECTED = "connected"
    DRAINING = "draining"
    BUSY = "busy"
    OTHER_VOCABULARY = "other vocabulary"
    OTHER_VERSION = "other version"
    KEY_REFUSED = "refused: key"
    WRONG_EDGE_KEY = "refused: edge.pub"
    KEYS_DIFFER = "refused: keys on one end only"
    NO_HANDSHAKE = "no handshake"
    NO_EDGE = "no edge there"
    CONNECTION_REFUSED = "connection refused"
    NO_NAME = "name not found"
    NO_ROUTE = "no route"
    QUIET = "quiet"
    LOST = "lost"
    CONNECTING = "connecting"


# Every request fails in these states until an operator fixes the cause.
REFUSALS = {
    Connectivity.OTHER_VERSION: VersionMismatchError,
    Connectivity.KEY_REFUSED: AccessDeniedError,
    Connectivity.WRONG_EDGE_KEY: AccessDeniedError,
    Connectivity.KEYS_DIFFER: AccessDeniedError,
}
_STATES_BY_ERROR: dict[type[PilotfishError], Connectivity] = {
    AccessDeniedError: Connectivity.KEY_REFUSED,
    VersionMismatchError: Connectivity.OTHER_VERSION,
    PairMismatchError: Connectivity.OTHER_VOCABULARY,
    DrainingError: Connectivity.DRAINING,
    BusyError: Connectivity.BUSY,
    TargetLostError: Connectivity.BUSY,
}
_STATES_BY_FAILURE = {
    ConnectFailure.KEY: Connectivity.KEY_REFUSED,
    ConnectFailure.MECHANISM: Connectivity.KEYS_DIFFER,
    ConnectFailure.TIMEOUT: Connectivity.NO_HANDSHAKE,
    ConnectFailure.OTHER: Connectivity.NO_EDGE,
}
_STATES_BY_ADDRESS = {
    AddressState.NO_NAME: Connectivity.NO_NAME,
    AddressState.REFUSED: Connectivity.CONNECTION_REFUSED,
    AddressState.NO_ROUTE: Connectivity.NO_ROUTE,
    AddressState.MUTE: Connectivity.NO_HANDSHAKE,
    AddressState.NO_EDGE: Connectivity.NO_EDGE,
    AddressState.HANGS_UP: Connectivity.BUSY,
}
# Each state's sentence and remedy.
_MESSAGES = {
    Connectivity.CONNECTED: ("The edge at {at} is connected.", ""),
    Connectivity.DRAINING: ("The edge at {at} is about to stop, and accepts no new requests.", ""),
    Connectivity.BUSY: (
        "The edge at {at} accepts no work now: it is about to stop, or has no room.",
        "",
    ),
    Connectivity.OTHER_VOCABULARY: (
        "The edge at {at} serves a model of another vocabulary.",
        "repeat the request, or use an edge whose model suits this drafter",
    ),
    Connectivity.OTHER_VERSION: (
        "The edge at {at} uses another version of the wire protocol.",
        "install the same Pilotfish release on both ends",
    ),
    Connectivity.KEY_REFUSED: (
        "The edge at {at} refused this device's key.",
        "on the edge run `pilotfish keys allow device.pub` with this device's device.pub, then "
        "`systemctl reload pilotfish-edge`, or send it SIGHUP",
    ),
    Connectivity.WRONG_EDGE_KEY: (
        "The edge at {at} does not complete the handshake: this device's edge.pub is not the "
        "edge's present public key.",
        "copy the edge's edge.pub into this device's key folder; a running device service reads it "
        "after `systemctl reload pilotfish-device`, or SIGHUP",
    ),
    Connectivity.KEYS_DIFFER: (
        "The edge at {at} does not complete the handshake: {keys}.",
        "{mend}",
    ),
    Connectivity.NO_HANDSHAKE: (
        "The program at {at} accepts connections, but does not answer the handshake: the path is "
        "slow, the edge hangs, or the program is not an edge.",
        "wait longer (--on-link-loss wait; `pilotfish probe --patience`), or check the edge and "
        "the port",
    ),
    Connectivity.NO_EDGE: (
        "The program that answers at {at} is not an edge, or is a proxy with no edge behind it.",
        "check that `pilotfish edge serve` runs there, and that the port is right",
    ),
    Connectivity.CONNECTION_REFUSED: (
        "The machine at {at} refuses the connection: nothing listens there.",
        "start `pilotfish edge serve` there, or correct the port",
    ),
    Connectivity.NO_NAME: (
        "The host name in {at} is not found.",
        "correct the address, or check this machine's DNS",
    ),
    Connectivity.NO_ROUTE: (
        "No machine answers at {at}.",
        "check this machine's network, the address, and the firewalls on the way",
    ),
    Connectivity.QUIET: (
        "The edge at {at} is connected, but no data gets through.",
        "if this lasts, measure the path with `pilotfish probe`; a path that loses large packets "
        "needs `sysctl net.ipv4.tcp_mtu_probing=1` on both ends, or a lower MTU",
    ),
    Connectivity.LOST: (
        "The connection to the edge at {at} is lost; the device is reconnecting.",
        "",
    ),
    Connectivity.CONNECTING: ("The device is connecting to the edge at {at}.", ""),
}


class LinkStatus(NamedTuple):
    """A state with its sentence. remedy: a clause in the imperative; "" if waiting is enough."""

    state: Connectivity
    message: str
    remedy: str

    @classmethod
    def from_state(cls, state: Connectivity, endpoint: str, *, keys: bool) -> LinkStatus:
        """Return the status of a link in this state. keys: whether this device has keys."""
        keys_are, mend = (
            ("the edge has no keys, but this device has keys", "give the edge keys (--keys)")
            if keys
            else (
                "the edge requires keys, but this device has none",
                "name the folder of keys (--keys)",
            )
        )
        message, remedy = _MESSAGES[state]
        return cls(state, message.format(at=endpoint, keys=keys_are), remedy.format(mend=mend))

    def __str__(self) -> str:
        """Return the sentence and, if there is a remedy, a second sentence with it."""
        if not self.remedy:
            return self.message
        return f"{self.message} To mend it: {self.remedy}."

    def error(self, *, was_welcomed: bool, waited_s: float) -> PilotfishError:
        """Return the error for a request that waited for the edge without success.

        was_welcomed: whether the device ever reached the edge.
        """
        if self.state in REFUSALS:
            return REFUSALS[self.state](str(self))
        if was_welcomed:
            absence = f"The edge did not come back within {waited_s:g} s."
            return EdgeLostError(f"{absence} {self}")
        return EdgeUnreachableError(f"No edge answers. {self}")


def state_of_error(error: PilotfishError) -> Connectivity | None:
    """Return the state that an edge's error reports; None if the error is not about the link."""
    return next(
        (state for kind, state in _STATES_BY_ERROR.items() if isinstance(error, kind)), None
    )


def unconnected_state(
    attempts: ConnectAttempts, finding: AddressState | None, *, keys: bool, was_welcomed: bool
) -> Connectivity:
    """Return the state of a link without a connection.

    finding: state of the edge's address. keys: whether this device has keys.
    """
    if attempts.failure in _STATES_BY_FAILURE:
        return _STATES_BY_FAILURE[attempts.failure]
    # If the edge reads our greeting first, it hangs up before we can read its mechanism.
    other_mechanism = AddressState.PLAIN if keys else AddressState.CURVE
    if attempts.failure is ConnectFailure.CLOSED and finding is other_mechanism:
        return Connectivity.KEYS_DIFFER
    if attempts.surely_wrong_key:
        return Connectivity.WRONG_EDGE_KEY
    if attempts.failure is not None and finding in _STATES_BY_ADDRESS:
        return _STATES_BY_ADDRESS[finding]
    return Connectivity.LOST if was_welcomed else Connectivity.CONNECTING
