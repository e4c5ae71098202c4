"""Check a request: `Request` in, a `Plan` out."""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import Grammar
from pilotfish.speculation.tree import Expansion, branch, nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import (
    PROTOCOL_REGISTRY,
    ProtocolOptions,
    SamplingParams,
    SpeculationProtocol,
    names,
    option_types,
    streams,
)
from pilotfish.wire.request import AUTO, AutoOptions, Request

THRESHOLD = "threshold"  # the policy that decides by the RTT alone
_UNLIMITED = 2**31 - 1  # tokens of an answer that only the context limits
AUTO_LEVELS = 16  # maximum levels of window "auto"; low confidence ends most windows earlier


class Auto(AutoOptions, frozen=True, kw_only=True):
    """Protocol "auto": choose protocol, window and K of an answer by the link's state and the pair.

    among: the protocols to choose from; None: all lossless protocols, and with ``lossy`` all
    protocols (`local` only while no edge can be reached). policy: a policy of
    `device_runtime.choice`. rtt_threshold_s: threshold (s) of policy ``threshold``; None: the
    paper's 10 ms. thrift: policy ``predictive`` minimises the edge's time per token among the plans
    that are not slower than ``stream``. Raises `UnsupportedError` for an unknown protocol, a value
    of a wrong type or outside its bounds, a threshold with another policy, and thrift with policy
    ``threshold``.
    """

    def __post_init__(self) -> None:
        if isinstance(self.among, str):
            structs.force_setattr(self, "among", [self.among])
        for name, value in self.plain_values().items():
            structs.force_setattr(self, name, value)
        self.check_bounds()
        if self.thrift and self.policy == THRESHOLD:
            raise UnsupportedError(
                f"Policy {THRESHOLD} does not support thrift: use policy {AutoOptions().policy}."
            )
        if self.rtt_threshold_s is not None and self.policy != THRESHOLD:
            raise UnsupportedError(f"An RTT threshold can only be used with policy {THRESHOLD}.")
        if self.among is None:
            return
        wrong = [repr(name) for name in self.among if name not in names()]
        if wrong or not self.among:
            fault = f"There is no protocol {wrong[0]}" if wrong else "No protocol is named"
            raise UnsupportedError(f"{fault}; the protocols are {', '.join(names())}.")


class Free(NamedTuple):
    """What protocol "auto" may change in a plan, and the limits of it.

    top_ks: values for K. branchings: first levels of the tree (`speculation.tree.branch`). most:
    maximum number of nodes of a window. vocab_size: the target's; 0 if unknown.
    """

    top_ks: tuple[int, ...] = ()
    branchings: tuple[Expansion, ...] = ()
    most: int = MAX_WINDOW
    vocab_size: int = 0


NOTHING_FREE: Final = Free()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked options of one answer.

    request: the request, with the protocol, the protocol's options and the seed of the plan.
    exchange: the drafting protocol with its options; None under ``stream`` and ``local``.
    sampling: the target's parameters. drafting: the drafter's parameters, with the same seed.
    expansion: the shape of each window. free: what "auto" may still change; else nothing.
    """

    request: Request
    exchange: SpeculationProtocol[Any] | None
    sampling: SamplingParams
    drafting: SamplingParams
    expansion: Expansion
    free: Free = NOTHING_FREE

    @property
    def protocol(self) -> str:
        """Name of the protocol; `plan` has checked it."""
        assert self.request.protocol is not None
        return self.request.protocol

    @property
    def auto(self) -> bool:
        """Whether low confidence of the drafter may end a window early."""
        return self.request.window == AUTO

    @property
    def max_tokens(self) -> int:
        """Upper limit of the answer's tokens."""
        return _UNLIMITED if self.request.max_tokens is None else self.request.max_tokens

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end the answer; none is empty."""
        return [text for text in self.request.stop if text]

    @property
    def streams(self) -> bool:
        """Whether the target generates without waiting for drafts: `stream` and `ahead`."""
        return streams(self.protocol)

    def with_grammar(self, grammar: Grammar | None) -> "Plan":
        """Return the plan with this grammar."""
        if grammar == self.sampling.logits_options.grammar:
            return self
        with _unsupported():
            sampling, drafting = (
                replace(params, logits_options=replace(params.logits_options, grammar=grammar))
                for params in (self.sampling, self.drafting)
            )
        request = structs.replace(self.request, grammar=grammar)
        return replace(self, request=request, sampling=sampling, drafting=drafting)

    def with_options(self, options: ProtocolOptions) -> "Plan":
        """Return the plan with these options of its drafting protocol."""
        assert self.exchange is not None
        request = structs.replace(self.request, options=options.to_dict())
        return replace(self, request=request, exchange=self.exchange.with_options(options))

    @property
    def top_k(self) -> int:
        """K of the drafter's distributions, if the protocol sends their top K; else 0."""
        exchange = self.exchange
        return self.drafting.sampling.top_k if exchange and exchange.default_top_k else 0

    @property
    def names_truncation(self) -> bool:
        """Whether the request names a truncation at either end, so that K is given."""
        request, target = self.request, self.sampling.sampling
        named = (request.draft_top_k, request.draft_top_p) != (None, None)
        return named or target.top_k > 0 or target.top_p < 1.0

    def with_window(self, window: int) -> "Plan":
        """Return the plan with this number of draft tokens, and the protocol's own expansion."""
        request = structs.replace(self.request, window=window)
        assert self.exchange is not None
        expansion = _cut_to_window(self.exchange.expansion(window))
        return replace(self, request=request, expansion=expansion)

    def with_branching(self, branching: Expansion) -> "Plan":
        """Return the plan with a tree of as many levels that begins with this branching."""
        return replace(self, expansion=branch(branching, len(self.expansion)))

    def with_top_k(self, top_k: int) -> "Plan":
        """Return the plan with this K of the drafter's distributions."""
        sampling = replace(self.drafting.sampling, top_k=top_k)
        return replace(self, drafting=replace(self.drafting, sampling=sampling))

    @property
    def depends_on_link(self) -> bool:
        """Whether the edge's decisions depend on the link, as measured for this request."""
        return self.exchange is not None and self.exchange.decides_by_link

    def expect_sendable(self, vocab_size: int) -> None:
        """Raise `UnsupportedError` if no message holds the distributions of a whole window.

        Window "auto" passes: it ends where the message is full.
        """
        most, rows = self._most_rows(vocab_size), self._rows
        if most is not None and rows > most:
            top_k = self.drafting.sampling.top_k or vocab_size
            raise UnsupportedError(
                f"A window of protocol {self.protocol} with {rows} distributions of "
                f"{min(top_k, vocab_size):,} tokens does not fit into a message; {most} of them "
                "fit: use a smaller window or draft_top_k."
            )

    @property
    def fits(self) -> bool:
        """Whether the largest window keeps the limits of `Free`: its nodes, and its message."""
        most_rows = self._most_rows(self.free.vocab_size) if self.free.vocab_size else None
        rows_fit = most_rows is None or self._rows <= most_rows
        return rows_fit and nodes_at_most(self.expansion) <= self.free.most

    @property
    def _rows(self) -> int:
        """Number of distributions of the largest window."""
        return 1 + nodes_at_most(self.expansion[:-1])

    def _most_rows(self, vocab_size: int) -> int | None:
        """Return how many distributions a message holds; None: a window ends where it is full."""
        if self.exchange is None or not self.expansion or self.auto:
            return None
        return self.exchange.max_rows(self.drafting.sampling, vocab_size)

    @property
    def requires(self) -> str:
        """The optional part of an edge that this plan needs; "" if none."""
        return self.exchange.requires if self.exchange is not None else ""


def plan(request: Request) -> Plan:
    """Check a request and return its plan; `UnsupportedError` names the fault and the choices."""
    protocol = request.protocol
    if not isinstance(protocol, str) or protocol not in names():
        raise UnsupportedError(
            f"There is no protocol {protocol!r}; the protocols are {', '.join(names())}."
        )
    if request.seed is not None and not 0 <= request.seed < 2**63:
        raise UnsupportedError(f"seed must be at least 0 and below 2^63, not {request.seed}.")
    exchange = PROTOCOL_REGISTRY.get(protocol)
    with _unsupported():
        target = request.sampling
    with _unsupported():
        logits_options = request.logits_options
    drafter = _drafter_sampling(request, target, exchange)
    request.check_bounds()
    if exchange is not None:
        exchange.check(target, drafter)
    chosen = protocol_options(request.options)
    if exchange is not None and exchange.Options in chosen:
        exchange = exchange.with_options(chosen[exchange.Options])
    seed = secrets.randbits(63) if request.seed is None else request.seed
    request = structs.replace(
        request, seed=seed, options={} if exchange is None else exchange.options.to_dict()
    )
    return Plan(
        request=request,
        exchange=exchange,
        sampling=SamplingParams(sampling=target, seed=seed, logits_options=logits_options),
        drafting=SamplingParams(sampling=drafter, seed=seed, logits_options=logits_options),
        expansion=_expansion(protocol, exchange, request.window, request.expansion),
    )


@contextmanager
def _unsupported(prefix: str = "") -> Iterator[None]:
    """Convert a `ValueError` of sampling parameters to `UnsupportedError`."""
    try:
        yield
    except ValueError as error:
        raise UnsupportedError(f"{prefix}{error}.") from error


def protocol_options(values: Mapping[str, Any]) -> dict[type[ProtocolOptions], ProtocolOptions]:
    """Parse the protocols' own options, by type; `UnsupportedError` for an unknown or bad one."""
    options: dict[type[ProtocolOptions], ProtocolOptions] = {}
    left = dict(values)
    for kind in option_types():
        named = {name: left.pop(name) for name in kind.__struct_fields__ if name in left}
        fields = {name: value for name, value in named.items() if value is not None}
        try:
            options[kind] = kind.from_mapping(fields)
        except ValueError as error:
            raise UnsupportedError(f"{error}.") from error
    if left:
        raise UnsupportedError(f"There is no option {min(left)!r}.")
    return options


def expect_effective(
    protocol: str, option_names: Collection[str], format_name: Callable[[str], str] = str
) -> None:
    """Raise `UnsupportedError` for options that have no effect under this protocol.

    format_name: formats an option's name as the caller writes it.
    """
    taken = (
        PROTOCOL_REGISTRY[protocol].Options.__struct_fields__
        if protocol in PROTOCOL_REGISTRY
        else ()
    )
    for name in option_names:
        if name not in taken:
            protocols = [
                other
                for other, registered in PROTOCOL_REGISTRY.items()
                if name in registered.Options.__struct_fields__
            ]
            raise UnsupportedError(
                f"{format_name(name)} can only be used with {format_name('protocol')} "
                f"{' or '.join(protocols)}, or with {AUTO} if it may choose such a protocol, not "
                f"with {protocol}."
            )


def _drafter_sampling(
    request: Request, target: Sampling, exchange: SpeculationProtocol[Any] | None
) -> Sampling:
    """Return the drafter's sampling parameters."""
    changes = {
        name: value
        for name in ("temperature", "top_k", "top_p")
        if (value := getattr(request, f"draft_{name}")) is not None
    }
    if exchange is None and changes:
        raise UnsupportedError(
            f"Under protocol {request.protocol} nothing is drafted: draft_temperature, draft_top_k "
            f"and draft_top_p can only be used with {', '.join(PROTOCOL_REGISTRY)}."
        )
    with _unsupported("draft_"):
        shaped = replace(target, **changes)
    untruncated = shaped.top_k == 0 and shaped.top_p == 1.0
    if exchange is not None and untruncated and not {"top_k", "top_p"} & {*changes}:
        return replace(shaped, top_k=exchange.default_top_k)
    return shaped


def _expansion(
    protocol: str,
    exchange: SpeculationProtocol[Any] | None,
    window: "int | Literal['auto'] | None",
    expansion: Sequence[int] | None,
) -> Expansion:
    """Return the expansion ⟨k₁…k_L⟩ of each window; empty for protocols without windows."""
    if window is None:
        window = 4 if expansion is None else len(expansion)
    elif expansion is not None:
        raise UnsupportedError(
            "An expansion already sets the depth of windows: give no window with it."
        )
    check_window(window)
    if expansion is None:
        if exchange is None or exchange.streams:
            return ()
        levels = AUTO_LEVELS if window == AUTO else int(window)
        return _cut_to_window(exchange.expansion(levels))
    if exchange is None or not exchange.allows_trees:
        trees = ", ".join(name for name, other in PROTOCOL_REGISTRY.items() if other.allows_trees)
        raise UnsupportedError(
            f"Protocol {protocol} drafts a chain; an expansion can only be used with {trees}."
        )
    ks = tuple(expansion)
    if not ks or any(not isinstance(k, int) or k < 1 for k in ks):
        raise UnsupportedError(f"expansion must be a list of numbers of 1 or more, not {list(ks)}.")
    if nodes_at_most(ks) > MAX_WINDOW:
        raise UnsupportedError(
            f"The tree {list(ks)} may have {nodes_at_most(ks)} nodes; at most {MAX_WINDOW} are "
            "allowed."
        )
    return ks


def check_window(window: object) -> None:
    """Raise `UnsupportedError` unless this is "auto" or a number of draft tokens in bounds."""
    if window != AUTO and not (isinstance(window, int) and 0 <= window <= MAX_WINDOW):
        raise UnsupportedError(
            f"window must be between 0 and {MAX_WINDOW}, or {AUTO!r}, not {window!r}."
        )


def _cut_to_window(expansion: Expansion) -> Expansion:
    """Remove the last levels until the expansion's largest tree fits into a window."""
    while nodes_at_most(expansion) > MAX_WINDOW:
        expansion = expansion[:-1]
    return expansion
