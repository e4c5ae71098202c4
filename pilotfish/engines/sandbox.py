"""Jinja's sandbox, with bounds on the compilation and the rendering of a chat template.

Compilation is bounded by counts, not by time, because its verdict is stored: tokens of the source,
the compiler's work on names in scopes, and characters of the generated Python code. The compiler
does not evaluate constant expressions; rendering does, and counts them. Rendering is bounded by
this thread's CPU time, by the characters printed, and by the characters of intermediate values. The
size of a filter's, a method's or an operator's result is estimated before it runs
(`template_sizes`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.engines import template_sizes as sizes
from pilotfish.engines.engine_errors import TemplateError

# The longest published templates have some 4,000 tokens, 300 scopes and 100 names.
_MOST_TOKENS = 16_000
_MOST_NAMES_IN_SCOPES = 2_000_000  # number of scopes (loops, branches, …) × number of names
_MOST_STEPS = 250_000  # sum over all nodes of the syntax tree of 1 + the number of enclosing scopes
_MOST_CODE_CHARACTERS = 1 << 22
_MADE_FACTOR = 8  # maximum size of all intermediate values, as a multiple of max_characters
_SCOPES = (
    *(nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Block, nodes.AssignBlock, nodes.Include, nodes.Import, nodes.FromImport),
    *(nodes.Scope, nodes.ScopedEvalContextModifier),
)
# Names of internal filters; they contain spaces, so no template can use them.
_TURNS, _JOINED, _CHECKED = "turns of a loop", "joined texts", "weighed value"
_PART = "part of a text"
# Filters that do not look inside a list's items; functions that they call are bounded, too.
_SHALLOW = frozenset(
    {"length", "count", "list", "first", "last", "items", "reverse", "default", "d", "map", "join"}
    | {"select", "reject", "selectattr", "rejectattr", "batch", "slice", "tojson", "sum"}
)
_COMPARING = frozenset(
    {"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan"}
    | {">", "ge", ">=", "in"}
)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment that compiles templates and renders them within bounds.

    Args:
        max_seconds: limit of CPU time for one rendering.
        max_characters: limit of printed characters; a macro's text counts each time it is used.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_seconds: float, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._count_printed,
            extensions=[_TokenLimit, _Generation, loopcontrols],
        )
        self.code_generator_class = _BoundedCode
        self._max_seconds, self._max_characters = max_seconds, max_characters
        self._counts = threading.local()  # a rendering runs in one thread
        self.filters = {
            name: self._bounded_filter(name, function) for name, function in self.filters.items()
        }
        self.filters |= {
            _TURNS: self._bounded_turns,
            _JOINED: self._join_parts,
            _CHECKED: self._checked_value,
        }
        self.filters[_PART] = self._count_made
        self.tests |= {name: self._bounded_test(self.tests[name]) for name in _COMPARING}
        del self.globals["lipsum"]  # lipsum can make text of any length

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter that templates may use, with bounds around it."""
        self.filters[name] = self._bounded_filter(name, function)

    def start(self) -> None:
        """Begin a rendering in this thread: reset the thread's counts."""
        self._counts.deadline = time.thread_time() + self._max_seconds
        self._counts.printed = self._counts.made = 0

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template, with checks around every loop, join, slice and comparison."""
        tree = self.parse(source)
        _check_complexity(tree)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None)
        for join in list(tree.find_all(nodes.Concat)):
            parts = nodes.Tuple(join.nodes, "load")
            join.nodes = [nodes.Filter(parts, _JOINED, [], [], None, None)]
        for subscript in list(tree.find_all(nodes.Getitem)):
            if isinstance(subscript.arg, nodes.Slice):
                whole = nodes.Getitem(subscript.node, subscript.arg, subscript.ctx)
                subscript.node = nodes.Filter(whole, _PART, [], [], None, None)
                subscript.arg = nodes.Slice(None, None, None)  # all of the slice's result
        for part in list(tree.find_all((nodes.Compare, nodes.Operand, nodes.Pair))):
            # the operand that is compared or hashed
            side = "key" if isinstance(part, nodes.Pair) else "expr"
            checked = nodes.Filter(getattr(part, side), _CHECKED, [], [], None, None)
            setattr(part, side, checked)
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use this attribute."""
        return attr not in sizes.BARRED and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the template: check its operands before it and its result after it."""
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        # these functions do not look inside their arguments
        if not isinstance(function, type | Macro | LoopContext):
            self._check_printable(*args, *kwargs.values())
        if isinstance(text, str):
            if name == "join" and args:
                args = (self._list_parts(args[0], text),)
            else:
                self._check_bounds(sizes.method_size(text, name, (*args, *kwargs.values())))
        return self._count_made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; check the key before that, because hashing a nested key takes time."""
        self._check_printable(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator of `intercepted_binops`, with checks before and after it."""
        self._check_bounds(sizes.operator_size(operator, left, right))
        return self._count_made(super().call_binop(context, operator, left, right))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter in checks; its first argument may be a context that Jinja passes."""
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*arguments: Any, **keywords: Any) -> Any:
            before, value, others = arguments[:place], arguments[place], arguments[place + 1 :]
            if name not in _SHALLOW:
                self._check_printable(value, *others, *keywords.values())
            if name == "join":
                value = self._list_parts(
                    value, *others[:1], *(v for k, v in keywords.items() if k == "d")
                )
            elif name == "sum":
                value = self._bounded_turns(value)
                self._check_bounds(sizes.sum_size((*others, *keywords.values())))
            else:
                self._check_bounds(sizes.filter_size(name, value, (*others, *keywords.values())))
            return self._count_made(function(*before, value, *others, **keywords))

        return bounded

    def _bounded_test(self, function: Any) -> Callable[..., Any]:
        """Wrap in checks a test that compares nested values."""

        @functools.wraps(function)
        def bounded(*arguments: Any) -> Any:
            self._check_printable(*arguments)
            return function(*arguments)

        return bounded

    def _check_printable(self, *values: Any) -> None:
        """Check that the values are small enough to be printed, compared and hashed.

        A list counts each time it occurs, because it is traversed each time: a chain of a few dozen
        lists, each of which contains the next list twice, would never finish.
        """
        for value in values:
            if not isinstance(value, str | int | None):
                self._check_bounds(sizes.printed_size(value))

    def _checked_value(self, value: Any) -> Any:
        self._check_printable(value)
        return value

    def _bounded_turns(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop; check the time limit before each."""
        for value in values:
            self._check_bounds()
            yield value

    def _join_parts(self, parts: tuple[Any, ...]) -> str:
        """Join the operands of Jinja's operator `~`."""
        self._check_bounds(sum(map(sizes.printed_size, parts)))
        text: str = self._count_made("".join(map(str, parts)))
        return text

    def _list_parts(self, values: Iterable[Any], separator: object = "") -> list[Any]:
        """List the parts of a join; check the size of the joined text."""
        parts = list(self._bounded_turns(values))
        self._check_bounds(sizes.joined_size(parts, separator))
        return parts

    def _count_printed(self, value: Any) -> Any:
        """Add a printed value to the count of printed characters; return the value."""
        self._counts.printed += sizes.printed_size(value)
        self._check_bounds(self._counts.printed)
        return value

    def _count_made(self, value: Any) -> Any:
        """Add an intermediate text or list to the count of its kind; return the value."""
        if isinstance(value, str | bytes | list | tuple):
            size = len(value) if isinstance(value, str | bytes) else sizes.ITEM * len(value)
            self._check_bounds(size)
            self._counts.made += size
            self._check_bounds(self._counts.made // _MADE_FACTOR)
        return value

    def _check_bounds(self, size: int = 0) -> None:
        """Raise `TemplateError` if `size` (characters) or the time spent exceeds its bound."""
        if time.thread_time() > self._counts.deadline:
            raise TemplateError(f"the chat template took more than {self._max_seconds:g} s")
        if size > self._max_characters:
            raise TemplateError(
                f"the chat template made more than {self._max_characters} characters"
            )


class _BoundedCode(CodeGenerator):
    """A code generator that writes a bounded amount of Python code and evaluates no constants."""

    _characters = 0

    def write(self, x: str) -> None:
        """Write a piece of code; count its characters."""
        self._characters += len(x)
        if self._characters > _MOST_CODE_CHARACTERS:
            raise _complexity_error()
        super().write(x)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        """Refuse to evaluate a constant now, so that rendering counts all printed text."""
        raise nodes.Impossible


class _TokenLimit(Extension):
    """An extension that refuses a source of too many tokens before it is parsed."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        """Yield the source's tokens; raise if there are too many."""
        for count, token in enumerate(stream):
            if count > _MOST_TOKENS:
                raise _complexity_error()
            yield token


class _Generation(Extension):
    """A `{% generation %}` block, which marks the assistant's text for training; no effect here."""

    tags = {"generation"}  # noqa: RUF012  # a ClassVar would contradict Jinja's annotation

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_complexity(tree: nodes.Template) -> None:
    """Refuse a template that would compile slowly: the compiler tracks all names in each scope."""
    names, scopes, steps = set[str](), 0, 0
    waiting: list[tuple[nodes.Node, int]] = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, nodes.Name | nodes.NSRef):
            names.add(node.name)
        if isinstance(node, nodes.EvalContextModifier) and not all(
            isinstance(option.value, nodes.Const) for option in node.options
        ):
            # other expressions are refused, since the compiler would evaluate them
            raise TemplateError("the option autoescape must be true or false")
        if isinstance(node, _SCOPES):
            scopes, depth = scopes + 1, depth + 1
        steps += depth
        waiting.extend((child, depth) for child in node.iter_child_nodes())
    if scopes * len(names) > _MOST_NAMES_IN_SCOPES or steps > _MOST_STEPS:
        raise _complexity_error()


def _complexity_error() -> TemplateError:
    return TemplateError(
        "it is longer or more complex than the template of any known language model: shorten "
        "it, or use the model's original template"
    )
