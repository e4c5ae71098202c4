"""Quantities of the link during a run, their units, and the quantities not measured.

In: answers, each with the link's state at its begin. Out: numbers in the units of a panel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.field.run import Answer
from pilotfish.wire.link.state import LinkState, Reading


@dataclass(frozen=True)
class Quantity:
    """One quantity of `LinkState`.

    panel: label of its panel: a heading, and below it the unit in brackets. si: that unit in SI.
    """

    name: str
    panel: str
    si: float
    reading: Callable[[LinkState], Reading | None]

    def points(self, answers: Sequence[Answer]) -> list[tuple[int, float]]:
        """Return indices of answers that have a reading, and readings in the panel's unit."""
        readings = [(at, self.reading(a.link)) for at, a in enumerate(answers) if a.link]
        return [(at, reading.value / self.si) for at, reading in readings if reading is not None]


QUANTITIES = (
    Quantity("RTT", "RTT, jitter\n(ms)", 1e-3, lambda link: link.rtt),
    Quantity("jitter", "RTT, jitter\n(ms)", 1e-3, lambda link: link.jitter),
    Quantity("goodput up", "goodput\n(Mbit/s)", 1e6, lambda link: link.up),
    Quantity("goodput down", "goodput\n(Mbit/s)", 1e6, lambda link: link.down),
    Quantity(
        "retransmissions", "retransmitted\n(% of segments)", 1e-2, lambda link: link.retransmitted
    ),
    Quantity("signal", "signal\n(dBm)", 1.0, lambda link: link.signal),
)


def measured_quantities(answers: Sequence[Answer]) -> list[Quantity]:
    """List the quantities with a reading in some answer of the run."""
    return [quantity for quantity in QUANTITIES if quantity.points(answers)]


def unmeasured_names(answers: Sequence[Answer]) -> list[str]:
    """List the names of the quantities without a reading."""
    known = measured_quantities(answers)
    return [quantity.name for quantity in QUANTITIES if quantity not in known]
