"""Render a model's chat template: turn messages into the text of a prompt.

In: the model's Jinja source, and messages as in OpenAI's API. Out: the text that transformers'
`apply_chat_template(tokenize=False)` returns. Templates get the same functions and settings as in
transformers. The text contains special tokens, so encode it with `special=True`.

A template is untrusted code. It runs in Jinja's sandbox (no attributes that begin with an
underscore, no mutation), and compilation, time and size are bounded (`sandbox`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from pilotfish.engines.engine_errors import TemplateError
from pilotfish.engines.sandbox import Sandbox

MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24
# Names of the field with a message's thought; the first name that the message has is used.
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MOST_DATE_CHARACTERS = 1000  # maximum characters of a strftime format that a template may use


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        tokens: special tokens by the variable names that the template uses, e.g. {"bos_token":
        "<s>"}.
        max_seconds: limit of CPU time for one rendering.
        max_characters: limit of characters that one rendering may print.

    Raises:
        TemplateError: if the source does not compile.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] = {},
        *,
        max_seconds: float = MAX_SECONDS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._tokens = dict(tokens)
        self._environment = Sandbox(max_seconds, max_characters)
        self._environment.add_filter("tojson", _to_json)
        self._environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        try:
            self._template = self._environment.compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from None
        except Exception as error:  # Python's compiler, which Jinja calls, raises many types
            raise TemplateError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the prompt for `messages`.

        Args:
            messages: dicts with "role" and "content". Fields that are None are removed, as in
            transformers, because templates would print "None". A thought is passed under both of
            its names, "thinking" and "reasoning_content".
            add_generation_prompt: whether the text ends with the header of the assistant's answer.
            variables: further variables of this template, such as `enable_thinking`.

        Raises:
            TemplateError: if the template refuses the messages, fails, or exceeds its bounds.
        """
        self._environment.start()
        cleaned = [_clean_message(message) for message in messages]
        template_variables = {**self._tokens, "tools": None, "documents": None, **variables}
        template_variables |= {"messages": cleaned, "add_generation_prompt": add_generation_prompt}
        try:
            return "".join(self._template.generate(template_variables))
        except TemplateError:
            raise
        except Exception as error:  # a template's expressions can raise any type
            raise TemplateError(f"the chat template failed: {error}") from None


def _clean_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields that are None; copy a thought to `thinking`, the name some templates read."""
    plain = {name: value for name, value in message.items() if value is not None}
    thought = next((plain[name] for name in _THOUGHT_FIELDS if name in plain), None)
    return plain if thought is None else {"thinking": thought, **plain, _THOUGHT_FIELDS[0]: thought}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MOST_DATE_CHARACTERS:
        raise TemplateError(
            f"the chat template formats a date by a format of {len(form)} "
            "characters, which is too long"
        )
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON, without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
