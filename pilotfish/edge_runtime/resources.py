"""Configure protocols with the edge's default options and its resources.

In:  a protocol and the options of a request. Out: the protocol configured for that generation.

The attribute ``requires`` of a protocol names a kind of resource, by which `EdgeResources` finds
the resource. The only kind is the decision heads of `wisv`. Options that a request omits get the
edge's defaults.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.edge_runtime.head import DecisionHead, HeadJudge
from pilotfish.edge_runtime.relaxation_file import read_relaxation
from pilotfish.engines.manifest import Manifest
from pilotfish.wire.messages import DecisionConditions
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, ProtocolOptions, SpeculationProtocol
from pilotfish.wire.protocols.adaptive import RelaxationOptions
from pilotfish.wire.protocols.decision_head import JudgedProtocol, JudgingOptions


class ResourceProvider(Protocol):
    """Provider of one kind of resource that protocols require."""

    def supports(self, drafter: str, hidden_size: int) -> bool:
        """Return whether there is a resource for a drafter of this origin and hidden size."""

    def find(self, conditions: DecisionConditions, options: Any) -> Any:
        """Return the resource for a generation; raise `UnsupportedError` if there is none."""


class DecisionHeads:
    """Decision heads for this edge's target; each head was trained for one drafter."""

    def __init__(self, heads: Sequence[DecisionHead] = ()) -> None:
        self.heads = list(heads)

    @classmethod
    def load(cls, target: Manifest, names: Sequence[str]) -> "DecisionHeads":
        """Load the heads at these paths.

        Raises `HeadError` for unreadable heads, `PairMismatchError` for heads of another target.
        """
        heads = [DecisionHead.load(name) for name in names]
        for head in heads:
            head.check_target(target)
        return cls(heads)

    def supports(self, drafter: str, hidden_size: int) -> bool:
        """Return whether a head was trained for this drafter."""
        return any(head.supports(drafter, hidden_size) for head in self.heads)

    def find(self, conditions: DecisionConditions, options: JudgingOptions) -> HeadJudge:
        """Return the drafter's head, bound to the request's link and threshold."""
        for head in self.heads:
            if head.supports(conditions.drafter, conditions.hidden_size):
                return head.judge(conditions.channel, options.threshold)
        raise UnsupportedError(
            "This edge has no decision head for this drafter, so it does not offer wisv-full and "
            "wisv-selective: start it with --head, or use greedy."
        )


class EdgeResources:
    """Decision heads of an edge, and its defaults for options that requests omit.

    options: the defaults. chained: reason why the target reads only chains of tokens (the rest of a
    sentence about the target); None: it reads trees, too.
    """

    def __init__(
        self,
        heads: DecisionHeads | None = None,
        options: Sequence[ProtocolOptions] = (),
        *,
        chained: str | None = None,
    ) -> None:
        self._chained = chained
        self._heads = heads or DecisionHeads()
        self._providers: dict[str, ResourceProvider] = {JudgedProtocol.requires: self._heads}
        self._options = {type(each): each for each in options}

    @classmethod
    def load(
        cls,
        target: Manifest,
        heads: Sequence[str],
        threshold: float | None,
        relaxation: Path | None = None,
    ) -> "EdgeResources":
        """Load the configured heads (paths) and relaxation (file).

        Raises `RelaxationError` for an unreadable file, `PairMismatchError` for a relaxation of
        another target, and the errors of `DecisionHeads.load`.
        """
        defaults: list[ProtocolOptions] = [JudgingOptions(threshold=threshold)]
        if relaxation is not None:
            card = read_relaxation(relaxation)
            card.check_target(target, relaxation)
            defaults.append(RelaxationOptions.from_relaxation(card.relaxation))
        resources = cls(DecisionHeads.load(target, heads), defaults, chained=target.why_chains_only)
        return resources if target.hidden_states else resources.without_heads()

    @property
    def heads(self) -> list[str]:
        """Names of the decision heads."""
        return [head.card.name for head in self._heads.heads]

    def without_heads(self) -> "EdgeResources":
        """Return these resources for a target without hidden states.

        Raises `UnsupportedError` if there are heads, which need hidden states.
        """
        if self._heads.heads:
            raise UnsupportedError(
                "This kind of target gives no hidden states, which a decision head needs: remove "
                "--head."
            )
        return self

    def protocols(self, drafter: str, hidden_size: int) -> list[str]:
        """List the protocols that a drafter of this origin and hidden size can use."""
        available = {
            name
            for name, provider in self._providers.items()
            if provider.supports(drafter, hidden_size)
        }
        return [
            name
            for name, protocol in PROTOCOL_REGISTRY.items()
            if (not protocol.requires or protocol.requires in available)
            and not (self._chained and protocol.allows_trees)
        ]

    def configure(
        self,
        protocol: SpeculationProtocol[Any],
        values: Mapping[str, Any],
        conditions: DecisionConditions | None,
    ) -> SpeculationProtocol[Any]:
        """Return the protocol with the options and resources of one generation.

        values: the protocol's options in the request. conditions: the drafter and the link. Raises
        `MalformedError` for bad options, `UnsupportedError` if the edge lacks a resource that the
        protocol needs.
        """
        if protocol.allows_trees and self._chained:
            raise UnsupportedError(
                f"This edge's target {self._chained}, so it cannot serve protocol "
                f"{protocol.name}: use greedy or tslt."
            )
        options = protocol.read_options(values).with_defaults(self._options.get(protocol.Options))
        protocol = protocol.with_options(options)
        if not protocol.requires:
            return protocol
        if conditions is None:
            raise MalformedError(
                f"A request for protocol {protocol.name} must describe the drafter and the link."
            )
        if protocol.requires not in self._providers:
            raise UnsupportedError(f"This edge has no {protocol.requires}.")
        return protocol.with_resource(self._providers[protocol.requires].find(conditions, options))
