"""Render a model's chat template: messages → the text of a prompt.

In: the model's Jinja source, and messages as in OpenAI's API. Out: the text of transformers'
`apply_chat_template(tokenize=False)`, whose functions and settings are repeated here. The text
holds special tokens: encode it with `special=True`.

A template is untrusted code, so it runs in Jinja's sandbox (no attributes that begin with an
underscore, no mutation) and within bounds: every turn of a loop and every call checks the clock,
and every text that is built, and the whole, is measured. Not bounded is what a single filter or
method may do before it returns, such as `center(10**9)`: only memory bounds that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.engines.errors import TemplateError

MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        bos_token, eos_token: the strings of these tokens, which templates may print.
        max_seconds, max_characters: bounds of one rendering.

    Raises:
        TemplateError: if the source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_seconds: float = MAX_SECONDS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = _Sandbox(max_seconds, max_characters)
        try:
            self._template = self._environment.compile_bounded(source)
        except Exception as error:  # the compiler can raise whatever Python's can
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
            messages: each with "role" and "content".
            add_generation_prompt: end with the header of the assistant's answer.
            variables: other variables of this template, such as `enable_thinking`.

        Raises:
            TemplateError: if the template refuses the messages, fails, or exceeds its bounds.
        """
        self._environment.start()
        known = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            pieces = self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **known
            )
            return "".join(self._environment.bounded_output(pieces))
        except TemplateError:
            raise
        except Exception as error:  # a template can raise whatever its expressions can
            raise TemplateError(f"the chat template failed: {error}") from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits of time and size."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, max_seconds: float, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._max_seconds, self._max_characters = max_seconds, max_characters
        self._clock = threading.local()  # the deadline of this thread's rendering
        self.filters |= {"tojson": _to_json, _TURNS: self._turns, _MEASURED: self._measured}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # can make text of any length

    def start(self) -> None:
        """Start the clock for one rendering."""
        self._clock.deadline = time.monotonic() + self._max_seconds

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile with bounds around every loop and every joining of texts."""
        self.start()  # constant expressions are evaluated here
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None)
        for join in list(tree.find_all(nodes.Concat)):
            whole = nodes.Concat(join.nodes)
            join.nodes = [nodes.Filter(whole, _MEASURED, [], [], None, None)]
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def bounded_output(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a rendering while their total length is within bounds."""
        total = 0
        for piece in pieces:
            total += len(piece)
            self._check(total)
            yield piece

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check bounds around every call in a template."""
        self._check()
        return self._measured(context, super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check bounds around every operator of `intercepted_binops`."""
        self._check(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    @jinja2.pass_context
    def _turns(self, context: Context, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop; check the clock each turn."""
        for value in values:
            self._check()
            yield value

    @jinja2.pass_context  # also keeps the compiler from evaluating it
    def _measured(self, context: Context, value: Any) -> Any:
        """Return the value; refuse a text that is too long."""
        if isinstance(value, str):
            self._check(len(value))
        return value

    def _check(self, size: int = 0) -> None:
        if time.monotonic() > self._clock.deadline:
            raise TemplateError(f"the chat template took more than {self._max_seconds:g} s")
        if size > self._max_characters:
            raise TemplateError(
                f"the chat template made more than {self._max_characters} characters"
            )


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Estimate the result's size: characters or items, or the bytes of a large number."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(right, 0) // 8
        return (left.bit_length() + right.bit_length()) // 8
    lengths = [len(operand) for operand in (left, right) if isinstance(operand, Sized)]
    if operator == "*" and len(lengths) == 1:
        factor = right if isinstance(left, Sized) else left
        return lengths[0] * factor if isinstance(factor, int) else 0
    return sum(lengths)


class _Generation(Extension):
    """Accept `{% generation %}`, which marks the assistant's text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration of it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Names that no template can write.
_TURNS, _MEASURED = "turns of a loop", "measured text"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
