"""Tell whether drafter and target run on one machine, and what that falsifies in a comparison.

In: the address of the target's edge. Out: whether it is this machine's; a warning.
"""

import socket
from urllib.parse import urlsplit

from pilotfish.wire.transport import is_loopback


def is_this_machine(address: str) -> bool:
    """Return whether an edge's address is one of this machine's; False if it cannot be resolved.

    An address belongs to this machine if a socket can be bound to it.
    """
    if is_loopback(address):
        return True
    try:
        addresses = socket.getaddrinfo(urlsplit(address).hostname, None, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return False
    return any(_is_own(family, where) for family, _, _, _, where in addresses)


def _is_own(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


def shared_machine_warning(*, served_here: bool, pass_ms: float | None) -> str:
    """Say what the comparison cannot know if drafter and target ran on one machine.

    served_here: whether the command itself served the target, and ended it before it timed the
    drafters. pass_ms: the target's pass time, ms, if the caller stated it.
    """
    where = "This command served the target on" if served_here else "The target's edge is on"
    parts = [f"{where} the drafters' machine."]
    if pass_ms is None:
        parts.append("So its pass times are this machine's, not those of a server.")
    elif not served_here:
        parts.append("So other work of the edge slows down the drafts that are timed here.")
    parts.append(
        "Passes and drafts were timed while the other model was idle; if both stay on one machine, "
        "they slow each other down, and real answers are slower than these."
    )
    advice = "name the edge of the machine that will serve by --target tcp://HOST:PORT"
    if pass_ms is None:
        advice += ", or state its pass time by --target-ms"
    parts.append(f"For two machines, {advice}.")
    if not served_here:
        parts.append("If the address is a tunnel to another machine, ignore this.")
    return " ".join(parts)
