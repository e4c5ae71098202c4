"""What a policy is: it is asked with plans, and answers with one of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice
from pilotfish.wire.link.state import LinkState


class Policy(ABC):
    """Picks one of several plans for an answer, by what is known of link and pair."""

    name: ClassVar[str]
    # it picks no other protocols than those that need what not every edge has
    wants_supplied: ClassVar[bool] = False

    @abstractmethod
    def choose(
        self, auto: Auto, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """One of the plans, and why. `UnsupportedError` if none of them will do.

        auto: by whose wish the plans are these.
        """


def link_in_words(link: LinkState) -> str:
    """RTT and rates, for a log line."""
    rtt = "RTT ?" if link.rtt is None else f"RTT {link.rtt.value * 1e3:.1f} ms"
    rates = [
        f"{way} ?" if reading is None else f"{way} {reading.value * 1e-6:.3g} Mbit/s"
        for way, reading in (("up", link.up), ("down", link.down))
    ]
    return ", ".join([rtt, *rates])
