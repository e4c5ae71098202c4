"""List the cells that a run measures, in the order of measuring.

In: the settings of a run. Out: its configurations, and the cells of its matrix in blocks.

A block is one prompt and one repeat. Every configuration answers the prompt once, in a random order
that differs between blocks. So all configurations suffer equally from drift during a run (the link
fades, the board gets hot) and from the effect of one answer on the next.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence

from pilotfish.base.errors import PromptTooLongError, TooLargeError, UnsupportedError
from pilotfish.device_runtime.plan import plan
from pilotfish.lab.field.run import Cell, Configuration, MatrixSettings
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import LOCAL, STREAM
from pilotfish.wire.request import AUTO, Request

_WINDOWLESS = (STREAM, LOCAL, AUTO)  # protocols without a window option; `auto` chooses its window


def configurations(settings: MatrixSettings) -> list[Configuration]:
    """List every protocol with every window; list a protocol in `_WINDOWLESS` once."""
    listed = [
        Configuration(protocol, window)
        for protocol in settings.protocols
        for window in ((None,) if protocol in _WINDOWLESS else settings.windows)
    ]
    return list(dict.fromkeys(listed))


def cells(settings: MatrixSettings) -> Iterator[Cell]:
    """Yield the cells of the matrix, block by block. The same settings give the same order."""
    for repeat in range(settings.repeat):
        for prompt in range(len(settings.prompts)):
            order = configurations(settings)
            random.Random(f"{settings.seed}/{repeat}/{prompt}").shuffle(order)
            for configuration in order:
                yield Cell(configuration, prompt, repeat)


def warm_up(settings: MatrixSettings) -> Iterator[Cell]:
    """Yield the warm-up cells: in each repeat, every configuration answers one prompt."""
    for repeat in range(settings.warm_up):
        prompt = repeat % len(settings.prompts)
        for configuration in configurations(settings):
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
    if not settings.windows and any(p not in _WINDOWLESS for p in settings.protocols):
        raise UnsupportedError("Protocols that draft need windows: name them by --windows.")
    for protocol, window in configurations(settings):
        plan(
            Request(
                protocol=STREAM if protocol == AUTO else protocol,
                window=window,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                options=settings.options,
            )
        )


def check_edge(settings: MatrixSettings, edge: Welcome) -> None:
    """Raise `UnsupportedError` or `TooLargeError` if this edge cannot serve some cell."""
    for protocol, window in configurations(settings):
        if protocol not in (*edge.protocols, LOCAL, AUTO):
            raise UnsupportedError(
                f"The edge does not offer protocol {protocol}; it offers "
                f"{', '.join(edge.protocols)}."
            )
        if window is None or window == AUTO:
            continue
        request = plan(Request(protocol=protocol, window=window, temperature=settings.temperature))
        nodes = nodes_at_most(request.expansion)
        if nodes > edge.limits.window:
            raise TooLargeError(
                f"A window {window} of protocol {protocol} has {nodes} draft tokens, but this "
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
