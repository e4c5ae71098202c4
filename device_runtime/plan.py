"""What a caller asks for, checked before anything is done: `Options` in, a `Plan` out."""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pilotfish.speculation.adaptive import Relaxation
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.messages import MAX_WINDOW, Relaxing
from pilotfish.wire.protocols import EXCHANGES, LOCAL, NAMES, STREAM, Exchange, Greedy, Judged, Law

AUTO = "auto"
THRESHOLD = "threshold"  # the policy that goes by the RTT alone
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # what protocol "auto" has to choose from
AUTO_LEVELS = 16  # with window "auto", confidence ends nearly every window before that


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Protocol "auto": link and pair decide on protocol and window, anew for each answer.

    among: the protocols to choose from; by default all whose output has the target's law, and with
    ``lossy`` all. policy: how to choose (`device_runtime.choice`). rtt_threshold_s: of policy
    ``threshold``; None: the paper's 10 ms. Raises `UnsupportedError` for protocols that there are
    not, and for a threshold that no RTT can be compared with or that nobody asks for.
    """

    among: Sequence[str] | None = None
    lossy: bool = False
    policy: str = "predictive"
    rtt_threshold_s: float | None = None

    def __post_init__(self) -> None:
        if self.rtt_threshold_s is not None:
            if self.policy != THRESHOLD:
                raise UnsupportedError(f"An RTT threshold goes with policy {THRESHOLD} only.")
            if not 0.0 <= self.rtt_threshold_s < math.inf:
                raise UnsupportedError(
                    f"The RTT threshold is {self.rtt_threshold_s} s; it must be 0 or more."
                )
        if self.among is None:
            return
        if isinstance(self.among, str):
            object.__setattr__(self, "among", [self.among])
        wrong = [repr(name) for name in self.among if name not in NAMES]
        if wrong or not self.among:
            what = f"There is no protocol {wrong[0]}" if wrong else "No protocol is named"
            raise UnsupportedError(f"{what}: there are {', '.join(NAMES)}.")


class Options(TypedDict, total=False):
    """How to generate; `plan` says what each means and what it is by default.

    ``protocol`` may be "auto", which stands for ``Auto()``.
    """

    protocol: "str | Auto"
    window: "int | Literal['auto'] | None"
    expansion: Sequence[int] | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    seed: int | None
    stop: Sequence[str]
    threshold: float | None
    hidden: str
    tau: float | None
    lambdas: Sequence[float] | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one answer is generated.

    law: the target's. drafting: the drafter's; the same seed names both ends' draws. exchange and
    expansion: of a drafting protocol; ``stream`` and ``local`` have neither. auto: a window may end
    before its expansion does. relaxing: what the edge is told under a protocol that relaxes.
    """

    protocol: str
    exchange: Exchange[Any] | None
    law: Law
    drafting: Law
    expansion: Expansion
    auto: bool
    max_tokens: int
    stop: Sequence[str]
    threshold: float | None = None
    relaxing: Relaxing | None = None

    @property
    def judged(self) -> bool:
        """Whether a decision head at the edge is to judge it."""
        return self.exchange is not None and self.exchange.judged


def plan(
    *,
    protocol: "str | Auto" = "greedy",
    window: "int | Literal['auto'] | None" = None,
    expansion: Sequence[int] | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    threshold: float | None = None,
    hidden: str = HIDDEN_FORMATS[0],
    tau: float | None = None,
    lambdas: Sequence[float] | None = None,
) -> Plan:
    """Check the options; `UnsupportedError` says what is wrong and what is possible.

    window: draft tokens a round (4), or "auto": the drafter stops where it loses confidence. An
    edge may take fewer. expansion: ⟨k₁…k_L⟩ of protocol ``tree``, instead of a window. temperature,
    top_k, top_p: how the target's distribution is shaped; draft_…: the drafter's, by default as the
    target's. Where neither end is truncated, ``tslt`` and ``tree`` truncate the drafter to 64
    tokens (never to more than 2,048). seed: 0 ≤ seed < 2⁶³; None takes a random one. threshold: 0
    to 1, for ``wisv-full`` and ``wisv-selective``, which need an edge with a decision head: how
    probable it must find it that a mismatch does harm to reject it (0: always, as ``greedy``; 1:
    never; None: as the edge has it). hidden: how these two send states: int8, fp16, int4, fp32.
    tau: 0 to 1, for ``adaptive``: how far tokens that are not key may stray (0: not at all, as
    ``tslt``; None: as the edge has it). lambdas: λ₁, λ₂ and λ₃, beyond which a token is key
    (`speculation.adaptive.Relaxation`; None: as the edge has them).
    """
    if not isinstance(protocol, str) or protocol not in NAMES:
        raise UnsupportedError(f"There is no protocol {protocol!r}: {', '.join(NAMES)}.")
    if max_tokens < 1:
        raise UnsupportedError(f"max_tokens must be at least 1, not {max_tokens}.")
    if seed is not None and not 0 <= seed < 2**63:
        raise UnsupportedError(f"seed must be at least 0 and below 2^63, not {seed}.")
    exchange = EXCHANGES.get(protocol)
    target = _sampling("", temperature, top_k, top_p)
    wanted = (draft_temperature, draft_top_k, draft_top_p)
    if exchange is None and wanted != (None, None, None):
        raise UnsupportedError(
            f"Under protocol {protocol} nothing is drafted: draft_temperature, draft_top_k and "
            f"draft_top_p go with {', '.join(EXCHANGES)}."
        )
    drafter = _drafting(target, exchange, *wanted)
    if exchange is not None:
        exchange.check(target, drafter)
    if hidden not in HIDDEN_FORMATS:
        known = ", ".join(HIDDEN_FORMATS)
        raise UnsupportedError(f"There is no format {hidden!r} for hidden states: {known}.")
    if isinstance(exchange, Judged):
        exchange = exchange.sending(hidden)
    if threshold is not None and not 0.0 <= threshold <= 1.0:
        raise UnsupportedError(f"threshold must be within 0 and 1, not {threshold}.")
    relaxing = _relaxing(tau, lambdas)
    if seed is None:
        seed = secrets.randbits(63)
    return Plan(
        protocol=protocol,
        exchange=exchange,
        law=Law(sampling=target, seed=seed),
        drafting=Law(sampling=drafter, seed=seed),
        expansion=_expansion(protocol, exchange, window, expansion),
        auto=window == AUTO,
        max_tokens=max_tokens,
        stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
        threshold=threshold,
        relaxing=relaxing if exchange is not None and exchange.relaxes else None,
    )


def alternatives(
    auto: Auto, options: Options, *, offered: Collection[str], most: int = MAX_WINDOW
) -> list[Plan]:
    """What protocol "auto" may choose from: a plan for each protocol and window.

    At temperature 0 the lossless ones are `greedy` and `stream`: there every drafting protocol
    accepts alike, and `greedy` sends least. Above it, whoever gives a seed wants a text that can be
    had again, so the lossless ones are `coupled` and `stream`, under which it is the same. A window
    in the options is the only one to choose from. offered: what the edge has; it takes windows of
    ``most`` tokens, all nodes of a tree counted. All plans have the same seed.
    """
    window = options.get("window")
    if isinstance(window, str) or options.get("expansion") is not None:
        raise UnsupportedError(
            'Protocol "auto" chooses the window itself: give a number of draft tokens, or nothing.'
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
            plans += _plans(name, options, windows)
        except UnsupportedError as error:  # `greedy` does not sample, nor does a decision head
            refused = refused or error
    if refused is not None and not any(one.exchange for one in plans):
        raise refused
    if not plans:
        headless = [name for name in eligible if name in EXCHANGES and EXCHANGES[name].judged]
        head = f" For {' and '.join(headless)} the edge needs a decision head for this drafter."
        raise UnsupportedError(
            f"None of the protocols to choose from is there, but {', '.join(offered)}: name an "
            f"edge, name others, or allow lossy ones.{head if headless else ''}"
        )
    fitting = [one for one in plans if nodes_at_most(one.expansion) <= most]
    return fitting or plans


def _plans(name: str, options: Options, windows: Sequence[int]) -> list[Plan]:
    wanted: Options = {**options, "protocol": name}
    if name not in EXCHANGES:
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
    kept = [STREAM]
    for name, exchange in EXCHANGES.items():
        if not exchange.lossless:
            kept += [name] if auto.lossy else []
        elif greedy:
            kept += [name] if name == Greedy.name else []
        elif exchange.determined or not seeded:
            kept.append(name)
    return [*kept, LOCAL] if auto.lossy else kept


def _sampling(prefix: str, temperature: float, top_k: int, top_p: float) -> Sampling:
    try:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValueError as error:
        raise UnsupportedError(f"{prefix}{error}.") from error


def _relaxing(tau: float | None, lambdas: Sequence[float] | None) -> Relaxing:
    """What an edge is told; `UnsupportedError` for what is no relaxation."""
    if lambdas is not None and len(lambdas) != 3:
        raise UnsupportedError(f"lambdas must be three numbers, λ₁, λ₂ and λ₃, not {lambdas}.")
    first, second, third = lambdas or (0.0, 0.0, 0.0)
    try:
        Relaxation(tau=tau or 0.0, lambda1=first, lambda2=second, lambda3=third)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error
    return Relaxing(tau=tau, lambdas=None if lambdas is None else (first, second, third))


def _drafting(
    target: Sampling,
    exchange: Exchange[Any] | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> Sampling:
    """How the drafter's distribution is shaped."""
    shaped = _sampling(
        "draft_",
        target.temperature if temperature is None else temperature,
        target.top_k if top_k is None else top_k,
        target.top_p if top_p is None else top_p,
    )
    untruncated = shaped.top_k == 0 and shaped.top_p == 1.0
    if exchange is not None and untruncated and top_k is None and top_p is None:
        return Sampling(temperature=shaped.temperature, top_k=exchange.truncates)
    return shaped


def _expansion(
    protocol: str,
    exchange: Exchange[Any] | None,
    window: "int | Literal['auto'] | None",
    expansion: Sequence[int] | None,
) -> Expansion:
    """⟨k₁…k_L⟩ of the windows; empty for the baselines."""
    if window is None:
        window = 4 if expansion is None else len(expansion)
    elif expansion is not None:
        raise UnsupportedError("An expansion says how deep windows are: give it without a window.")
    _check_window(window)
    if expansion is None:
        if exchange is None:
            return ()
        levels = AUTO_LEVELS if window == AUTO else int(window)
        return _fitting(exchange.expansion(levels))
    if exchange is None or not exchange.branches:
        trees = ", ".join(name for name, other in EXCHANGES.items() if other.branches)
        raise UnsupportedError(f"Protocol {protocol} drafts a chain; expansion goes with {trees}.")
    ks = tuple(expansion)
    if not ks or any(not isinstance(k, int) or k < 1 for k in ks):
        raise UnsupportedError(f"expansion must hold numbers from 1 on, not {list(ks)}.")
    if nodes_at_most(ks) > MAX_WINDOW:
        raise UnsupportedError(
            f"The tree {list(ks)} may have {nodes_at_most(ks)} nodes; {MAX_WINDOW} is the most."
        )
    return ks


def _check_window(window: object) -> None:
    if window != AUTO and not (isinstance(window, int) and 0 <= window <= MAX_WINDOW):
        raise UnsupportedError(f"window must be 0 to {MAX_WINDOW}, or {AUTO!r}, not {window!r}.")


def _fitting(expansion: Expansion) -> Expansion:
    """As many of the levels as keep the tree within a window."""
    while nodes_at_most(expansion) > MAX_WINDOW:
        expansion = expansion[:-1]
    return expansion
