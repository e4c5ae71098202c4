"""A protocol's options, and the counters of its rounds.

Flags, TOML keys, the HTTP object ``pilotfish``, the options in `wire.messages.Begin`, metrics of
device and edge, run files and reports follow from these declarations. No other code names an option
or a counter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args, get_origin

import msgspec

from pilotfish.base.settings import converted, settings

if TYPE_CHECKING:
    from typing_extensions import Self


class ProtocolOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of a protocol's options: settings (`base.settings`), each with a default.

    The default None means the edge's own value. Protocols may share a type. No two types may have
    an option of the same name, or one with the name of a request's option
    (`wire.request.OPTION_NAMES`).
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Self":
        """Read the options of a caller or a message; raises `ValueError`."""
        for setting in settings(cls):
            choices = get_args(setting.type) if get_origin(setting.type) is Literal else ()
            if choices and (value := values.get(setting.name, choices[0])) not in choices:
                raise ValueError(
                    f"{setting.name} must be one of {', '.join(choices)}, not {value!r}"
                )
        return converted(values, cls)

    def with_defaults(self, defaults: "Self | None") -> "Self":
        """Return these options, with the values of ``defaults`` in place of None."""
        if defaults is None:
            return self
        missing = [name for name in self.__struct_fields__ if getattr(self, name) is None]
        return msgspec.structs.replace(self, **{name: getattr(defaults, name) for name in missing})

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, for a message or JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


class CountedRound(Protocol):
    """The fields of a round that counters read (`device_runtime.record.Round`)."""

    notes: dict[str, float]
    accepted: int

    @property
    def verified(self) -> int:
        """The number of verified positions."""

    @property
    def averaged(self) -> int:
        """The number of positions in the sum `OMITTED_MASS`."""


@dataclass(frozen=True, kw_only=True)
class RoundCounter:
    """A quantity that every round of a protocol reports, besides the accepted tokens.

    unit: its upper bound: the number of accepted tokens, or of verified positions (the accepted
    tokens and the first rejected token), or of averaged positions (`Round.averaged`).
    counts_tokens: the quantity is a number of tokens; else it is a sum of numbers from 0 to 1.
    is_lossy_gain: it counts acceptances that a lossless rule would have rejected. column_since: the
    first format of run files (`field.run_file`) with a column for the quantity; None: it is in the
    column ``notes``.
    """

    name: str
    help: str
    unit: Literal["accepted", "verified", "averaged"] = "accepted"
    counts_tokens: bool = True
    is_lossy_gain: bool = False
    column_since: int | None = None

    def upper_bound(self, window: int, accepted: int) -> int:
        """Return the largest value in a verdict on ``window`` levels, ``accepted`` of them."""
        return accepted if self.unit == "accepted" else min(window, accepted + 1)

    def is_valid(self, value: float, window: int, accepted: int) -> bool:
        """Return whether a round can have this value; False for NaN."""
        kind = isinstance(value, int) if self.counts_tokens else True
        return kind and 0 <= value <= self.upper_bound(window, accepted)

    def total(self, rounds: Iterable[CountedRound]) -> float:
        """Return the sum of the counter's values in these rounds."""
        return sum(round_.notes.get(self.name, 0) for round_ in rounds)

    def share(self, rounds: Sequence[CountedRound]) -> float | None:
        """Return the total divided by the number of units; None without units."""
        units = self.count_units(rounds)
        return self.total(rounds) / units if units else None

    def count_units(self, rounds: Iterable[CountedRound]) -> int:
        """Count the accepted tokens, or the positions, of these rounds."""
        return sum(getattr(round_, self.unit) for round_ in rounds)

    def summarize(self, rounds: Sequence[CountedRound]) -> float | None:
        """Summarize the rounds of an answer; see `summarize_total`."""
        return self.summarize_total(self.total(rounds), self.count_units(rounds))

    def summarize_total(self, total: float, units: int) -> float | None:
        """Return the total if it is a number of tokens, else the total divided by ``units``."""
        if self.counts_tokens:
            return total
        return total / units if units else None

    @property
    def heading(self) -> str:
        """The table heading for values of `summarize_total`."""
        if self.counts_tokens:
            return f"{self.name} tokens"
        return f"{self.name} a{'n accepted token' if self.unit == 'accepted' else ' position'}"

    @property
    def metric(self) -> str:
        """The counter's Prometheus name, without the prefix."""
        return f"{self.name}_tokens" if self.counts_tokens else self.name


# reported by a federation under every protocol, after the protocol's own counters
OMITTED_MASS: Final = RoundCounter(
    name="omitted_mass",
    help="Upper bound of the change of acceptance by a federation's truncation (specfed (19)), "
    "summed over the verified positions; under protocols that stream, over the tokens.",
    unit="averaged",
    counts_tokens=False,
)
