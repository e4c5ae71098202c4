"""List the quantities of the link that a run measured, with units, and those it did not measure.

In: answers, each with the state of the link when it began. Out: numbers in a panel's unit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.lab.field.run import Answer
from pilotfish.wire.link.state import LinkState, Reading


@dataclass(frozen=True)
class Quantity:
    """A quantity in `LinkState`.

    panel: label of the quantity's panel: a heading, and in brackets the unit. si: size of this unit
    in SI units.
    """

    name: str
    panel: str
    si: float
    reading: Callable[[LinkState], Reading | None]

    def points(self, answers: Sequence[Answer]) -> list[tuple[int, float]]:
        """Return index and reading (in the panel's unit) of each answer that has a reading."""
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
    """List the quantities of which at least one answer has a reading."""
    return [quantity for quantity in QUANTITIES if quantity.points(answers)]


def unmeasured_names(answers: Sequence[Answer]) -> list[str]:
    """List the names of the quantities of which no answer has a reading."""
    known = measured_quantities(answers)
    return [quantity.name for quantity in QUANTITIES if quantity not in known]
