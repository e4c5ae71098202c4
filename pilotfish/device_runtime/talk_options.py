"""Options that are about tools and thinking: they make a `Talk` of the prompt.

In:  a prompt with all options of `Device.stream`. Out: the talk, and the options of the plan.
"""

from __future__ import annotations

from typing import cast

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.bridge import Prompt, PromptInput, Talk, are_messages
from pilotfish.device_runtime.plan import Options, TalkOptions
from pilotfish.engines.chat_formats import Tools

_NAMES = ("tools", "tool_choice", "parallel_tool_calls", "thinking")


def read_talk(
    prompt: PromptInput | Prompt, options: TalkOptions
) -> tuple[PromptInput | Prompt, Options]:
    """Split the options: make a `Talk` of the prompt and the options about tools and thinking.

    Returns the talk, or the prompt as it is if there are no such options, and the other options.
    `UnsupportedError` for such options beside a `Talk`, a `Prompt` or token ids.
    """
    rest = {name: value for name, value in options.items() if name not in _NAMES}
    wanted = (options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls"))
    try:
        tools = Tools.read(*wanted)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error
    thinking = options.get("thinking")
    if tools is None and thinking is None:
        return prompt, cast("Options", rest)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(messages, Prompt | Talk) or not are_messages(messages):
        raise UnsupportedError(
            "Tools and thinking go with a text or messages; a Talk has its own, and token ids none."
        )
    return Talk(messages, tools, thinking), cast("Options", rest)
