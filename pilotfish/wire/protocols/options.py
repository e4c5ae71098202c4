"""What a protocol declares beside its two halves: its options, and what a round notes of it.

Flags, TOML keys, the HTTP object ``pilotfish``, the options in `wire.messages.Begin`, metrics of
both ends, run files and reports follow from these declarations; nothing else names an option or a
counter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin

import msgspec

from pilotfish.base.settings import settings

if TYPE_CHECKING:
    from typing_extensions import Self


# What a request says whatever its protocol (`device_runtime.plan`); no protocol has such an option.
SHARED_OPTIONS = frozenset(
    (
        *(
            "protocol",
            "among",
            "lossy",
            "policy",
            "rtt_threshold_s",
            "thrift",
            "window",
            "expansion",
        ),
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "options"),
        *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("logprobs", "prompt_logprobs", "schema", "grammar"),
        *("draft_temperature", "draft_top_k", "draft_top_p", "owner"),
    )
)


class ProtocolOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of a protocol's options: settings as `base.settings` has them, each with a default.

    None as a default stands for the edge's own value. Protocols may share a type; no two types may
    have an option of the same name, nor one of `SHARED_OPTIONS`.
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Self":
        """The options that a caller or a message names; ValueError says what is wrong with them."""
        for setting in settings(cls):
            choices = get_args(setting.type) if get_origin(setting.type) is Literal else ()
            if choices and (value := values.get(setting.name, choices[0])) not in choices:
                raise ValueError(f"{setting.name} is one of {', '.join(choices)}, not {value!r}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error).replace("`$.", "`")) from error

    def with_defaults(self, defaults: "Self | None") -> "Self":
        """The same with ``own`` in place of what is None."""
        if defaults is None:
            return self
        missing = [name for name in self.__struct_fields__ if getattr(self, name) is None]
        return msgspec.structs.replace(self, **{name: getattr(defaults, name) for name in missing})

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, as a message or JSON holds them."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


class CountedRound(Protocol):
    """What of a round a counter needs: `device_runtime.record.Round` has it."""

    notes: dict[str, float]
    accepted: int

    @property
    def verified(self) -> int:
        """Positions that were looked at."""


@dataclass(frozen=True, kw_only=True)
class RoundCounter:
    """A quantity that each round of a protocol notes, beside how many tokens were accepted.

    of: what it is a part of, and so cannot exceed: the accepted tokens, or the positions that were
    looked at (the accepted ones, and the one that was rejected). whole: a number of tokens; else a
    sum of numbers from 0 to 1. gained: it says how many more were accepted than the target's own
    law would have. column_since: the format of run files (`field.run_file`) from which on it has a
    column of its name; None: it stands in the column ``notes``.
    """

    name: str
    help: str
    unit: Literal["accepted", "verified"] = "accepted"
    counts_tokens: bool = True
    is_lossy_gain: bool = False
    column_since: int | None = None

    def upper_bound(self, window: int, accepted: int) -> int:
        """The most that a round can note that had ``window`` levels and accepted so many."""
        return accepted if self.unit == "accepted" else min(window, accepted + 1)

    def is_valid(self, value: float, window: int, accepted: int) -> bool:
        """Whether a round can note this; NaN never fits."""
        kind = isinstance(value, int) if self.counts_tokens else True
        return kind and 0 <= value <= self.upper_bound(window, accepted)

    def total(self, rounds: Iterable[CountedRound]) -> float:
        """The sum over these rounds."""
        return sum(round_.notes.get(self.name, 0) for round_ in rounds)

    def share(self, rounds: Sequence[CountedRound]) -> float | None:
        """The total over all that it is a part of; None where there is nothing of that."""
        units = self.count_units(rounds)
        return self.total(rounds) / units if units else None

    def count_units(self, rounds: Iterable[CountedRound]) -> int:
        """How many accepted tokens, or positions, these rounds have in all."""
        return sum(getattr(round_, self.unit) for round_ in rounds)

    def summarize(self, rounds: Sequence[CountedRound]) -> float | None:
        """What is said of an answer; see `of_total`."""
        return self.summarize_total(self.total(rounds), self.count_units(rounds))

    def summarize_total(self, total: float, units: int) -> float | None:
        """What is said of many rounds: the total of whole numbers, else the share of all parts."""
        if self.counts_tokens:
            return total
        return total / units if units else None

    @property
    def heading(self) -> str:
        """What a table calls `of_total`."""
        if self.counts_tokens:
            return f"{self.name} tokens"
        return f"{self.name} a{' position' if self.unit == 'verified' else 'n accepted token'}"

    @property
    def metric(self) -> str:
        """Its name in Prometheus, behind a prefix."""
        return f"{self.name}_tokens" if self.counts_tokens else self.name
