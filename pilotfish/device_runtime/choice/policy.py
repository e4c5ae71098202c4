"""The interface of policies; a policy chooses one of several plans."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pilotfish.device_runtime.choice.costs import with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.request import AutoOptions


class Policy(ABC):
    """Chooses a plan for an answer, by the state of the link and the evidence."""

    name: ClassVar[str]
    # True: all protocols of this policy need an optional part of the edge (a decision head)
    wants_resources: ClassVar[bool] = False
    protocols: ClassVar[Sequence[str]] = ()  # the only protocols that it chooses; (): any

    def check(self, auto: AutoOptions, plans: Sequence[Plan]) -> None:
        """Raise `UnsupportedError` if it could choose none of these plans on any link."""
        return

    @abstractmethod
    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose one of the plans; `UnsupportedError` if none is suitable.

        auto: the request that led to these plans.
        """


def describe_link(link: LinkState) -> str:
    """Format RTT and rates for a log line; an unknown value shows what it counts as."""
    assumed = with_defaults(link)
    rtt = f"RTT {'' if link.rtt else 'unknown, counted as '}{assumed.rtt_s * 1e3:.1f} ms"
    rates = [
        f"{way} {'' if reading else 'unknown, counted as '}{bps * 1e-6:.3g} Mbit/s"
        for way, reading, bps in (
            ("up", link.up, assumed.up_bps),
            ("down", link.down, assumed.down_bps),
        )
    ]
    return ", ".join([rtt, *rates])
