"""List the cells that a run measures, in their order.

In: the settings of a run. Out: its configurations, and the cells of its matrix in blocks. A block
is one prompt and one repeat: every configuration answers it once, in the block's own random order.
So drift during a run (a link that fades, a board that gets hot) and effects of one answer on the
next fall on all configurations alike.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence

from pilotfish.base.errors import PromptTooLongError, TooLargeError, UnsupportedError
from pilotfish.device_runtime.plan import AUTO, plan
from pilotfish.field.run import Cell, Configuration, MatrixSettings
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import LOCAL, STREAM

_WINDOWLESS = (STREAM, LOCAL, AUTO)  # `auto` chooses its window itself


def configurations(settings: MatrixSettings) -> list[Configuration]:
    """List protocols × windows; a protocol without a window, or that chooses it, stands once."""
    listed = [
        Configuration(protocol, window)
        for protocol in settings.protocols
        for window in ((None,) if protocol in _WINDOWLESS else settings.windows)
    ]
    return list(dict.fromkeys(listed))


def cells(settings: MatrixSettings) -> Iterator[Cell]:
    """List the matrix, block by block. The same settings give the same order."""
    for repeat in range(settings.repeat):
        for prompt in range(len(settings.prompts)):
            order = configurations(settings)
            random.Random(f"{settings.seed}/{repeat}/{prompt}").shuffle(order)
            for configuration in order:
                yield Cell(configuration, prompt, repeat)


def warm_up(settings: MatrixSettings) -> Iterator[Cell]:
    """List the warm-up cells: every configuration answers one prompt a repeat."""
    for repeat in range(settings.warm_up):
        prompt = repeat % len(settings.prompts)
        for configuration in configurations(settings):
            yield Cell(configuration, prompt, repeat)


def remaining(settings: MatrixSettings, done: Collection[Cell]) -> list[Cell]:
    """List the cells that are not measured yet."""
    return [cell for cell in cells(settings) if cell not in done]


def needs_edge(settings: MatrixSettings) -> bool:
    """Whether any protocol but `local` is measured."""
    return any(protocol != LOCAL for protocol in settings.protocols)


def check(settings: MatrixSettings) -> None:
    """Raise `UnsupportedError` for a matrix that is empty, or that no device can measure."""
    if not settings.prompts:
        raise UnsupportedError("There are no prompts to measure with.")
    if not settings.protocols or settings.repeat < 1:
        raise UnsupportedError("Nothing is to be measured: name protocols, and repeats from 1 on.")
    if not settings.windows and any(p not in _WINDOWLESS for p in settings.protocols):
        raise UnsupportedError("Protocols that draft need windows: name them by --windows.")
    for protocol, window in configurations(settings):
        plan(
            protocol=STREAM if protocol == AUTO else protocol,
            window=window,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            **settings.options,
        )


def check_edge(settings: MatrixSettings, edge: Welcome) -> None:
    """Raise `UnsupportedError` or `TooLargeError` for a cell that this edge does not serve."""
    for protocol, window in configurations(settings):
        if protocol not in (*edge.protocols, LOCAL, AUTO):
            raise UnsupportedError(
                f"The edge does not offer protocol {protocol}; it has {', '.join(edge.protocols)}."
            )
        if window is None or window == AUTO:
            continue
        request = plan(protocol=protocol, window=window, temperature=settings.temperature)
        nodes = nodes_at_most(request.expansion)
        if nodes > edge.limits.window:
            raise TooLargeError(
                f"A window {window} of {protocol} has {nodes} draft tokens, and this edge takes "
                f"{edge.limits.window}: name smaller --windows."
            )


def check_prompts(prompts: Sequence[str], count: Callable[[str], int], context: int) -> None:
    """Raise `PromptTooLongError`, with its number, for the first prompt that leaves no room.

    count: function that counts a prompt's tokens; it may raise the same error.
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
            f"Prompt {number} has {size} tokens, and drafter and target together take at "
            f"most {context - 1}: shorten it."
        )
