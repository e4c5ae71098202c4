"""List the cells that a run measures, in the order of measuring.

In: the settings of a run. Out: its configurations, and the cells of its matrix in blocks.

A block is one prompt and one repeat. Every configuration answers the prompt once, in a random order
that differs between blocks. So all configurations suffer equally from drift during a run (the link
fades, the board gets hot) and from the effect of one answer on the next.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from msgspec import structs

from pilotfish.base.errors import PromptTooLongError, TooLargeError, UnsupportedError
from pilotfish.device_runtime.choice import check as check_request
from pilotfish.device_runtime.plan import plan
from pilotfish.emulation.emulator import Conditions
from pilotfish.lab.field import axes
from pilotfish.lab.field.configuration import Cell, Configuration, has_windows
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import LOCAL
from pilotfish.wire.request import AUTO, Request


def configurations(settings: MatrixSettings) -> list[Configuration]:
    """List every protocol with every window and every value of the options that apply to it.

    A protocol without windows (`has_windows`) has none, nor has one whose expansion is given.
    """
    listed = [
        Configuration(protocol, window, point)
        for protocol in settings.protocols
        for point in axes.points(settings.varied, protocol)
        for window in (
            (None,)
            if not has_windows(protocol) or _expands(settings, protocol)
            else settings.windows
        )
    ]
    return list(dict.fromkeys(listed))


def cells(settings: MatrixSettings) -> Iterator[Cell]:
    """Yield the cells of the matrix, block by block. The same settings give the same order.

    With several emulated links, each repeat takes them one after the other, in a random order.
    """
    for repeat in range(settings.repeat):
        links = _by_link(settings)
        random.Random(f"{settings.seed}/{repeat}").shuffle(links)
        for configurations_of_link in links:
            for prompt in range(len(settings.prompts)):
                order = list(configurations_of_link)
                random.Random(f"{settings.seed}/{repeat}/{prompt}").shuffle(order)
                for configuration in order:
                    yield Cell(configuration, prompt, repeat)


def _by_link(settings: MatrixSettings) -> list[list[Configuration]]:
    """Group the configurations by their emulated links."""
    groups: dict[tuple[tuple[str, Any], ...], list[Configuration]] = {}
    for configuration in configurations(settings):
        link = tuple(axes.of_link(configuration.point).items())
        groups.setdefault(link, []).append(configuration)
    return list(groups.values())


def keywords(settings: MatrixSettings, configuration: Configuration) -> dict[str, Any]:
    """Return a configuration's options of generation, as keywords of `Device.generate`."""
    protocol, window, point = configuration
    constant = axes.applied_to(protocol, tuple(settings.options.items()))
    varied = {name: value for name, value in point if name not in axes.of_link(point)}
    return {
        "protocol": protocol,
        "window": window,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        **dict(constant),
        **varied,
    }


def conditions(settings: MatrixSettings, configuration: Configuration) -> Conditions | None:
    """Return the emulated link of a configuration; None: the link itself is measured."""
    link = {**settings.link, **axes.of_link(configuration.point)}
    return Conditions(**link) if emulates(settings) else None


def emulates(settings: MatrixSettings) -> bool:
    """Return whether the run's link is emulated."""
    return bool(settings.link or axes.of_link(settings.varied.items()))


def _expands(settings: MatrixSettings, protocol: str) -> bool:
    """Return whether the run names expansions in place of this protocol's windows."""
    named = settings.varied.keys() | settings.options.keys()
    known = axes.all_axes()
    return any(known[name].kind == "tree" and known[name].applies(protocol) for name in named)


def warm_up(settings: MatrixSettings) -> Iterator[Cell]:
    """Yield the warm-up cells: in each repeat, every configuration answers one prompt."""
    for repeat in range(settings.warm_up):
        prompt = repeat % len(settings.prompts)
        for configurations_of_link in _by_link(settings):
            for configuration in configurations_of_link:
                yield Cell(configuration, prompt, repeat)


def remaining(settings: MatrixSettings, done: Collection[Cell]) -> list[Cell]:
    """List the cells that have not been measured yet. done: cells that have been measured."""
    return [cell for cell in cells(settings) if cell not in done]


def needs_edge(settings: MatrixSettings) -> bool:
    """Return whether the run needs an edge, because it measures a protocol other than `local`."""
    return any(protocol != LOCAL for protocol in settings.protocols)


def check(settings: MatrixSettings) -> None:
    """Raise `UnsupportedError` if the matrix is empty, or if no device can measure it."""
    if not settings.prompts:
        raise UnsupportedError(
            "There are no prompts to measure with: name a file of prompts by --prompts."
        )
    if not settings.protocols or settings.repeat < 1:
        raise UnsupportedError(
            "There is nothing to measure: name protocols, and 1 or more repeats."
        )
    if not settings.windows and any(map(has_windows, settings.protocols)):
        raise UnsupportedError("Protocols that draft need windows: name them by --windows.")
    known = axes.all_axes()
    for name in (*settings.options, *settings.link, *settings.varied):
        if name not in known:
            raise UnsupportedError(f"There is no option {name!r}.")
        if not any(known[name].applies(protocol) for protocol in settings.protocols):
            raise UnsupportedError(
                f"--{known[name].setting.flag} can only be used with "
                f"{', '.join(axes.protocols_of_axis(known[name]))}, but this run measures "
                f"{', '.join(settings.protocols)}."
            )
    for configuration in configurations(settings):
        check_request(Request.from_options(keywords(settings, configuration)))
        conditions(settings, configuration)


def offered(settings: MatrixSettings, edge: Welcome) -> tuple[MatrixSettings, list[str]]:
    """Return the settings with those protocols that the edge offers, and the other protocols."""
    missing = [p for p in settings.protocols if p not in (*edge.protocols, LOCAL, AUTO)]
    protocols = tuple(p for p in settings.protocols if p not in missing)
    return structs.replace(settings, protocols=protocols), missing


def check_edge(settings: MatrixSettings, edge: Welcome, vocab_size: int) -> None:
    """Raise `UnsupportedError` or `TooLargeError` if this edge cannot serve some cell.

    vocab_size: the number of the target's tokens.
    """
    for configuration in configurations(settings):
        protocol, window, _ = configuration
        if protocol not in (*edge.protocols, LOCAL, AUTO):
            raise UnsupportedError(
                f"The edge does not offer protocol {protocol}; it offers "
                f"{', '.join(edge.protocols)}."
            )
        if protocol == AUTO:
            continue
        request = plan(Request.from_options(keywords(settings, configuration)))
        request.expect_sendable(vocab_size)
        nodes = nodes_at_most(request.expansion)
        if window != AUTO and nodes > edge.limits.window:
            shape = "An expansion" if window is None else f"A window {window}"
            raise TooLargeError(
                f"{shape} of protocol {protocol} has {nodes} draft tokens, but this "
                f"edge accepts at most {edge.limits.window}: name smaller --windows."
            )


def check_prompts(prompts: Sequence[str], count: Callable[[str], int], context: int) -> None:
    """Raise `PromptTooLongError` for the first prompt that leaves no room for an answer.

    The error has the prompt's number. count: function that returns a prompt's number of tokens; it
    may raise the same error. context: largest number of tokens.
    """
    for number, prompt in enumerate(prompts, 1):
        try:
            tokens = count(prompt)
        except PromptTooLongError:
            size = f"more than {context - 1}"
        else:
            if tokens < context:
                continue
            size = str(tokens)
        raise PromptTooLongError(
            f"Prompt {number} has {size} tokens, but drafter and target allow at most "
            f"{context - 1}: shorten this prompt."
        )
