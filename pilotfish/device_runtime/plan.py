"""Check the options of an answer: `Options` in, a `Plan` out."""

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from pilotfish.base.errors import UnsupportedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import Grammar, LogitsOptions
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.wire.messages import MAX_LOGPROBS, MAX_WINDOW
from pilotfish.wire.protocols import (
    LOCAL,
    PROTOCOL_REGISTRY,
    STREAM,
    Greedy,
    ProtocolOptions,
    SamplingParams,
    SpeculationProtocol,
    names,
    option_types,
    streams,
)
from pilotfish.wire.protocols.ahead import AheadOptions

AUTO = "auto"
THRESHOLD = "threshold"  # the policy that decides by the RTT alone
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # draft tokens; protocol "auto" chooses among these
AUTO_LEVELS = 16  # maximum levels of window "auto"; low confidence ends most windows earlier


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Protocol "auto": choose protocol and window of each answer by the link's state and the pair.

    among: the protocols to choose from; None: all lossless protocols, and with ``lossy`` all
    protocols. policy: a policy of `device_runtime.choice`. rtt_threshold_s: threshold (s) of policy
    ``threshold``; None: the paper's 10 ms. thrift: policy ``predictive`` minimises the edge's time
    per token among the plans that are not slower than ``stream``. Raises `UnsupportedError` for an
    unknown protocol, a negative threshold, a threshold with another policy, and thrift with policy
    ``threshold``.
    """

    among: Sequence[str] | None = None
    lossy: bool = False
    policy: str = "predictive"
    rtt_threshold_s: float | None = None
    thrift: bool = False

    def __post_init__(self) -> None:
        if self.thrift and self.policy == THRESHOLD:
            raise UnsupportedError(
                f"Policy {THRESHOLD} does not support thrift: use policy {Auto.policy}."
            )
        if self.rtt_threshold_s is not None:
            if self.policy != THRESHOLD:
                raise UnsupportedError(
                    f"An RTT threshold can only be used with policy {THRESHOLD}."
                )
            if not 0.0 <= self.rtt_threshold_s < math.inf:
                raise UnsupportedError(
                    f"The RTT threshold is {self.rtt_threshold_s} s; it must be 0 or more."
                )
        if self.among is None:
            return
        if isinstance(self.among, str):
            object.__setattr__(self, "among", [self.among])
        wrong = [repr(name) for name in self.among if name not in names()]
        if wrong or not self.among:
            fault = f"There is no protocol {wrong[0]}" if wrong else "No protocol is named"
            raise UnsupportedError(f"{fault}; the protocols are {', '.join(names())}.")


class Options(TypedDict, total=False):
    """Options of an answer; see `plan` for meanings and defaults.

    ``protocol`` "auto" stands for ``Auto()``. The protocols' own options
    (`wire.protocols.option_types`) are further keywords or, for type checkers, a struct:
    ``options=RelaxationOptions(tau=0.3)``.
    """

    protocol: "str | Auto"
    window: "int | Literal['auto'] | None"
    expansion: Sequence[int] | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    schema: Mapping[str, Any] | str | None
    grammar: Grammar | None
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    seed: int | None
    stop: Sequence[str]
    options: ProtocolOptions | None


class TalkOptions(Options, total=False):
    """`Options`, and the options that turn a text or messages into a `Talk`.

    tools: functions that the model may call, as in OpenAI's API, with tool_choice ("auto", "none",
    "required", or a name) and parallel_tool_calls. thinking: whether the model thinks first
    (``enable_thinking`` of its template).
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    thinking: bool | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked options of one answer.

    sampling: the target's parameters. drafting: the drafter's parameters, with the same seed.
    exchange: the drafting protocol with its options; None under ``stream`` and ``local``.
    expansion: the shape of each window. auto: True: low confidence may end a window early.
    """

    protocol: str
    exchange: SpeculationProtocol[Any] | None
    sampling: SamplingParams
    drafting: SamplingParams
    expansion: Expansion
    auto: bool
    max_tokens: int
    stop: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None

    @property
    def streams(self) -> bool:
        """Whether the target generates without waiting for drafts: `stream` and `ahead`."""
        return streams(self.protocol)

    def with_grammar(self, grammar: Grammar | None) -> "Plan":
        """Return the plan with this grammar."""
        if grammar == self.sampling.logits_options.grammar:
            return self
        sampling, drafting = (
            replace(params, logits_options=replace(params.logits_options, grammar=grammar))
            for params in (self.sampling, self.drafting)
        )
        return replace(self, sampling=sampling, drafting=drafting)

    @property
    def depends_on_link(self) -> bool:
        """Whether the edge's decisions depend on the link, as measured for this request."""
        return self.exchange is not None and self.exchange.decides_by_link

    @property
    def requires(self) -> str:
        """The optional part of an edge that this plan needs; "" if none."""
        return self.exchange.requires if self.exchange is not None else ""


def plan(
    *,
    protocol: "str | Auto",
    window: "int | Literal['auto'] | None" = None,
    expansion: Sequence[int] | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    schema: Mapping[str, Any] | str | None = None,
    grammar: Grammar | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    options: ProtocolOptions | None = None,
    **protocol_values: Any,
) -> Plan:
    """Check the options and return the plan; `UnsupportedError` names the fault and the choices.

    window: draft tokens per round (default: 4), or "auto": draft until the drafter's confidence is
    low. An edge may set a lower limit. expansion: the candidates per node at each level of a tree,
    ⟨k₁…k_L⟩, instead of a window. temperature, top_k, top_p, min_p: the target's sampling. draft_…:
    the drafter's sampling, by default the target's. logit_bias, penalties, grammar: applied to both
    ends' logits (`LogitsOptions`). schema: a JSON schema that serves as grammar. logprobs: return
    the log-probabilities of each token and of this number of likeliest tokens. prompt_logprobs: the
    same for the prompt's tokens, from unprocessed logits. If no top_k and top_p are set, ``tslt``
    and ``tree`` draft with top_k 64; 2,048 is their maximum. seed: 0 ≤ seed < 2⁶³; None: random.
    options, protocol_values: the protocols' own options; options of other protocols have no effect.
    """
    if not isinstance(protocol, str) or protocol not in names():
        raise UnsupportedError(
            f"There is no protocol {protocol!r}; the protocols are {', '.join(names())}."
        )
    if max_tokens < 1:
        raise UnsupportedError(f"max_tokens must be at least 1, not {max_tokens}.")
    for name, most in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if most is not None and not 0 <= most <= MAX_LOGPROBS:
            raise UnsupportedError(f"{name} must be between 0 and {MAX_LOGPROBS}, not {most}.")
    if seed is not None and not 0 <= seed < 2**63:
        raise UnsupportedError(f"seed must be at least 0 and below 2^63, not {seed}.")
    exchange = PROTOCOL_REGISTRY.get(protocol)
    target = _sampling("", temperature, top_k, top_p, min_p)
    if schema is not None and grammar is not None:
        raise UnsupportedError("Give a schema or a grammar for the answer, not both.")
    try:
        logits_options = LogitsOptions(
            logit_bias=logit_bias or {},
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            grammar=grammar if schema is None else Grammar.from_schema(schema),
        )
    except (TypeError, ValueError) as error:  # TypeError: the schema has a value that JSON lacks
        raise UnsupportedError(f"{error}.") from error
    draft_sampling = (draft_temperature, draft_top_k, draft_top_p)
    if exchange is None and draft_sampling != (None, None, None):
        raise UnsupportedError(
            f"Under protocol {protocol} nothing is drafted: draft_temperature, draft_top_k and "
            f"draft_top_p can only be used with {', '.join(PROTOCOL_REGISTRY)}."
        )
    drafter = _drafter_sampling(target, exchange, *draft_sampling)
    if exchange is not None:
        exchange.check(target, drafter)
    chosen = protocol_options((options.to_dict() if options is not None else {}) | protocol_values)
    if exchange is not None and exchange.Options in chosen:
        exchange = exchange.with_options(chosen[exchange.Options])
    if seed is None:
        seed = secrets.randbits(63)
    return Plan(
        protocol=protocol,
        exchange=exchange,
        sampling=SamplingParams(sampling=target, seed=seed, logits_options=logits_options),
        drafting=SamplingParams(sampling=drafter, seed=seed, logits_options=logits_options),
        expansion=_expansion(protocol, exchange, window, expansion),
        auto=window == AUTO,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
    )


def protocol_options(values: Mapping[str, Any]) -> dict[type[ProtocolOptions], ProtocolOptions]:
    """Parse the protocols' own options, by type; `UnsupportedError` for an unknown or bad one."""
    options: dict[type[ProtocolOptions], ProtocolOptions] = {}
    left = {name: value for name, value in values.items() if value is not None}
    for kind in option_types():
        fields = {name: left.pop(name) for name in kind.__struct_fields__ if name in left}
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


def alternatives(
    auto: Auto, options: Options, *, offered: Collection[str], most: int = MAX_WINDOW
) -> list[Plan]:
    """List the plans that protocol "auto" may choose from: one for each protocol and window.

    At temperature 0 the lossless protocols are `greedy`, `ahead` and `stream`: all drafting
    protocols have the same acceptance there, and `greedy` sends the fewest bytes. At a higher
    temperature with a seed they are `coupled`, `ahead` and `stream`: these generate the same text,
    so the seed reproduces it. If the options have a window, no other window is tried. `ahead` has
    two plans unless the options name a source of hints: one with hints of all sources, and one with
    the edge's hints alone, where the device drafts nothing. offered: the available protocols. most:
    the edge's limit for a window, in tokens of a chain or nodes of a tree.
    """
    window = options.get("window")
    if isinstance(window, str) or options.get("expansion") is not None:
        raise UnsupportedError(
            'Protocol "auto" chooses the window itself: give a number of draft '
            "tokens as window, or no window."
        )
    if window is not None:
        _check_window(window)
    seed = options.get("seed")
    options = {**options, "seed": secrets.randbits(63) if seed is None else seed}
    windows = ([w for w in WINDOWS if w <= most] or [0]) if window is None else [min(window, most)]
    plans: list[Plan] = []
    refused: UnsupportedError | None = None
    eligible = _eligible(auto, greedy=not options.get("temperature"), seeded=seed is not None)
    for name in eligible:
        if name not in offered:
            continue
        try:
            plans += _plans_of(name, options, windows)
        except UnsupportedError as error:  # `greedy` and decision heads require temperature 0
            refused = refused or error
    if refused is not None and not any(candidate.exchange for candidate in plans):
        raise refused
    if not plans:
        lacking = {
            name: PROTOCOL_REGISTRY[name].requires for name in eligible if name in PROTOCOL_REGISTRY
        }
        needs = "".join(
            f" For {' and '.join(name for name, part in lacking.items() if part == need)} the edge "
            f"needs a {need} for this drafter."
            for need in dict.fromkeys(filter(None, lacking.values()))
        )
        if not needs and tuple(offered) == ("local",):
            raise UnsupportedError(
                "Without an edge only protocol local is available: name an edge, tcp://HOST:PORT, "
                "or use protocol local."
            )
        raise UnsupportedError(
            "None of the protocols to choose from is available; available are "
            f"{', '.join(offered)}: name an edge, name other protocols, or allow lossy "
            f"protocols.{needs}"
        )
    fitting = [candidate for candidate in plans if nodes_at_most(candidate.expansion) <= most]
    return fitting or plans


def _plans_of(name: str, options: Options, windows: Sequence[int]) -> list[Plan]:
    wanted: Options = {**options, "protocol": name}
    if name in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[name].streams:
        wanted = {**wanted, "window": None}
        hinted = plan(**wanted)
        edge = AheadOptions(hints="edge")
        if hinted.exchange is None or hinted.exchange.options != AheadOptions():
            return [hinted]
        return [hinted, replace(hinted, exchange=hinted.exchange.with_options(edge))]
    if name not in PROTOCOL_REGISTRY:
        nothing: Options = {"draft_temperature": None, "draft_top_k": None, "draft_top_p": None}
        wanted = {**wanted, **nothing}
        return [plan(**wanted)]
    plans = []
    for window in windows:
        wanted = {**wanted, "window": window}
        plans.append(plan(**wanted))
    return plans


def _eligible(auto: Auto, *, greedy: bool, seeded: bool) -> Sequence[str]:
    if auto.among is not None:
        return auto.among
    eligible = [STREAM]
    for name, exchange in PROTOCOL_REGISTRY.items():
        if not exchange.lossless:
            eligible += [name] if auto.lossy else []
        elif greedy:
            eligible += [name] if exchange.streams or name == Greedy.name else []
        elif exchange.deterministic or not seeded:
            eligible.append(name)
    return [*eligible, LOCAL] if auto.lossy else eligible


def _sampling(
    prefix: str, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Sampling:
    try:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    except ValueError as error:
        raise UnsupportedError(f"{prefix}{error}.") from error


def _drafter_sampling(
    target: Sampling,
    exchange: SpeculationProtocol[Any] | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> Sampling:
    """Return the drafter's sampling parameters."""
    shaped = _sampling(
        "draft_",
        target.temperature if temperature is None else temperature,
        target.top_k if top_k is None else top_k,
        target.top_p if top_p is None else top_p,
        target.min_p,
    )
    untruncated = shaped.top_k == 0 and shaped.top_p == 1.0
    if exchange is not None and untruncated and top_k is None and top_p is None:
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
    _check_window(window)
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


def _check_window(window: object) -> None:
    if window != AUTO and not (isinstance(window, int) and 0 <= window <= MAX_WINDOW):
        raise UnsupportedError(
            f"window must be between 0 and {MAX_WINDOW}, or {AUTO!r}, not {window!r}."
        )


def _cut_to_window(expansion: Expansion) -> Expansion:
    """Remove the last levels until the expansion's largest tree fits into a window."""
    while nodes_at_most(expansion) > MAX_WINDOW:
        expansion = expansion[:-1]
    return expansion
