"""Jinja's sandbox with bounds on what compiling and rendering a chat template may take.

Compiling is bounded by what is counted, never by a clock, since its verdict is kept: the tokens of
the source, what the compiler goes through for the names of each scope, and the Python code that it
writes. It evaluates nothing: a constant expression costs what the rendering may cost. Rendering is
bounded by this thread's CPU time, and by the characters that are printed and made; what a filter, a
method or an operator would make is estimated beforehand (`template_sizes`).
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
_TOKENS = 16_000
_NAMES_IN_SCOPES = 2_000_000  # scopes, such as a loop or a branch, times names
_STEPS = 250_000  # a node counts once for each scope that it lies in
_CODE_CHARACTERS = 1 << 22
_TEXTS_MADE = 8  # times what may be printed, may texts and lists be that were made on the way
_SCOPES = (
    *(nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Block, nodes.AssignBlock, nodes.Include, nodes.Import, nodes.FromImport),
    *(nodes.Scope, nodes.ScopedEvalContextModifier),
)
# Names that no template can write.
_TURNS, _JOINED, _WEIGHED = "turns of a loop", "joined texts", "weighed value"
_PART = "part of a text"
# Filters that do not look into what lies in a list; what they call is bounded itself.
_SHALLOW = frozenset(
    {"length", "count", "list", "first", "last", "items", "reverse", "default", "d", "map", "join"}
    | {"select", "reject", "selectattr", "rejectattr", "batch", "slice", "tojson", "sum"}
)
_COMPARING = frozenset(
    {"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan"}
    | {">", "ge", ">=", "in"}
)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates and runs them within bounds.

    Args:
        max_seconds: CPU time of a rendering.
        max_characters: of all that a rendering prints; a macro's text counts again where it goes.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_seconds: float, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._printed,
            extensions=[_TokenLimit, _Generation, loopcontrols],
        )
        self.code_generator_class = _BoundedCode
        self._max_seconds, self._max_characters = max_seconds, max_characters
        self._spent = threading.local()  # by this thread's rendering
        self.filters = {name: self._sized(name, done) for name, done in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _JOINED: self._joined, _WEIGHED: self._weighed}
        self.filters[_PART] = self._made
        self.tests |= {name: self._comparing(self.tests[name]) for name in _COMPARING}
        del self.globals["lipsum"]  # can make text of any length

    def add_filter(self, name: str, done: Callable[..., Any]) -> None:
        """Let templates use a filter, within bounds."""
        self.filters[name] = self._sized(name, done)

    def start(self) -> None:
        """Begin one rendering in this thread: nothing is spent."""
        self._spent.deadline = time.thread_time() + self._max_seconds
        self._spent.printed = self._spent.made = 0

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile with bounds around every loop and every joining of texts."""
        tree = self.parse(source)
        _expect_plain(tree)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None)
        for join in list(tree.find_all(nodes.Concat)):
            parts = nodes.Tuple(join.nodes, "load")
            join.nodes = [nodes.Filter(parts, _JOINED, [], [], None, None)]
        for taken in list(tree.find_all(nodes.Getitem)):
            if isinstance(taken.arg, nodes.Slice):
                whole = nodes.Getitem(taken.node, taken.arg, taken.ctx)
                taken.node = nodes.Filter(whole, _PART, [], [], None, None)
                taken.arg = nodes.Slice(None, None, None)  # all of that part
        for part in list(tree.find_all((nodes.Compare, nodes.Operand, nodes.Pair))):
            side = "key" if isinstance(part, nodes.Pair) else "expr"  # is compared, or hashed
            weighed = nodes.Filter(getattr(part, side), _WEIGHED, [], [], None, None)
            setattr(part, side, weighed)
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        return attr not in sizes.BARRED and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check bounds around every call in a template."""
        method = getattr(function, "__wrapped__", function)  # as Jinja does with `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if not isinstance(function, type | Macro | LoopContext):  # these look into nothing
            self._weigh(*args, *kwargs.values())
        if isinstance(text, str):
            if name == "join" and args:
                args = (self._listed(args[0], text),)
            else:
                self._expect(sizes.method_size(text, name, (*args, *kwargs.values())))
        return self._made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up, which may hash what it is looked up by."""
        self._weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check bounds around every operator of `intercepted_binops`."""
        self._expect(sizes.operator_size(operator, left, right))
        return self._made(super().call_binop(context, operator, left, right))

    def _sized(self, name: str, done: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter in bounds; Jinja may hand it its own context first."""
        place = 1 if hasattr(done, "jinja_pass_arg") else 0

        @functools.wraps(done)
        def bounded(*given: Any, **named: Any) -> Any:
            before, value, others = given[:place], given[place], given[place + 1 :]
            if name not in _SHALLOW:
                self._weigh(value, *others, *named.values())
            if name == "join":
                value = self._listed(value, *others[:1], *(v for k, v in named.items() if k == "d"))
            elif name == "sum":
                value = self._turns(value)
                self._expect(sizes.sum_size((*others, *named.values())))
            else:
                self._expect(sizes.filter_size(name, value, (*others, *named.values())))
            return self._made(done(*before, value, *others, **named))

        return bounded

    def _comparing(self, done: Any) -> Callable[..., Any]:
        """Wrap a test that looks into what it compares."""

        @functools.wraps(done)
        def bounded(*given: Any) -> Any:
            self._weigh(*given)
            return done(*given)

        return bounded

    def _weigh(self, *values: Any) -> None:
        """Expect that the values can be printed, compared and hashed.

        What several lists share counts each time, for so it is gone through: a few dozen lists,
        each of which holds another twice, would take for ever.
        """
        for value in values:
            if not isinstance(value, str | int | None):
                self._expect(sizes.printed_size(value))

    def _weighed(self, value: Any) -> Any:
        self._weigh(value)
        return value

    def _turns(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop; check the clock each turn."""
        for value in values:
            self._expect()
            yield value

    def _joined(self, parts: tuple[Any, ...]) -> str:
        """Join what stands between the `~`."""
        self._expect(sum(map(sizes.printed_size, parts)))
        made: str = self._made("".join(map(str, parts)))
        return made

    def _listed(self, values: Iterable[Any], separator: object = "") -> list[Any]:
        """List what is to be joined by the separator."""
        parts = list(self._turns(values))
        self._expect(sizes.joined_size(parts, separator))
        return parts

    def _printed(self, value: Any) -> Any:
        """Count what is printed."""
        self._spent.printed += sizes.printed_size(value)
        self._expect(self._spent.printed)
        return value

    def _made(self, value: Any) -> Any:
        """Count what was made: texts and lists."""
        if isinstance(value, str | bytes | list | tuple):
            size = len(value) if isinstance(value, str | bytes) else sizes.ITEM * len(value)
            self._expect(size)
            self._spent.made += size
            self._expect(self._spent.made // _TEXTS_MADE)
        return value

    def _expect(self, size: int = 0) -> None:
        """Raise `TemplateError` if so much is too much, or the time is over."""
        if time.thread_time() > self._spent.deadline:
            raise TemplateError(f"the chat template took more than {self._max_seconds:g} s")
        if size > self._max_characters:
            raise TemplateError(
                f"the chat template made more than {self._max_characters} characters"
            )


class _BoundedCode(CodeGenerator):
    """Writes the template's Python code: so much of it, and nothing that is evaluated already."""

    _written = 0

    def write(self, x: str) -> None:
        """Write a piece of code."""
        self._written += len(x)
        if self._written > _CODE_CHARACTERS:
            raise _too_intricate()
        super().write(x)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        """Evaluate nothing here, so that all that is printed is counted."""
        raise nodes.Impossible


class _TokenLimit(Extension):
    """Refuses a source of too many tokens before it is parsed."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        """Yield the tokens."""
        for count, token in enumerate(stream):
            if count > _TOKENS:
                raise _too_intricate()
            yield token


class _Generation(Extension):
    """Accept `{% generation %}`, which marks the assistant's text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012  # a ClassVar would contradict Jinja's annotation

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _expect_plain(tree: nodes.Template) -> None:
    """Refuse what takes the compiler long: it knows all names in each scope, and looks ahead."""
    names, scopes, steps = set[str](), 0, 0
    waiting: list[tuple[nodes.Node, int]] = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, nodes.Name | nodes.NSRef):
            names.add(node.name)
        if isinstance(node, nodes.EvalContextModifier) and not all(
            isinstance(option.value, nodes.Const) for option in node.options
        ):
            raise TemplateError("autoescape wants true or false")  # it is evaluated at compiling
        if isinstance(node, _SCOPES):
            scopes, depth = scopes + 1, depth + 1
        steps += depth
        waiting.extend((child, depth) for child in node.iter_child_nodes())
    if scopes * len(names) > _NAMES_IN_SCOPES or steps > _STEPS:
        raise _too_intricate()


def _too_intricate() -> TemplateError:
    return TemplateError(
        "it is longer or more intricate than any language model's: shorten it, or use the "
        "template of the model's makers"
    )
