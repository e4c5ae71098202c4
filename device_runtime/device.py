"""`Device`: the drafting end as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from device_runtime.choice import Evidence
from device_runtime.conversation import Choosable, Conversation
from device_runtime.drafter import Drafter
from device_runtime.learned import Learned
from device_runtime.link.edge_link import PROBE_BYTES, EdgeLink
from device_runtime.link.family import Family, load_keys
from device_runtime.link.loss import Interrupt, OnLinkLoss, Patience
from device_runtime.plan import AUTO, Auto, plan
from device_runtime.record import Generation, Piece, Round
from engines.artifact import Artifact
from engines.chat import ChatTemplate
from wire.errors import TokenOutOfRangeError, UnsupportedError
from wire.link.state import LinkState
from wire.messages import Welcome

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from device_runtime.plan import Options


class Device:
    """A drafter and its edge. One generation at a time; `beside` makes devices for more.

    draft: the drafter's artifact. edge: ``tcp://host:port``, or None when only ``local`` is used.
    keys: the folder with ``device.key`` and ``edge.pub``; None is allowed on loopback only.
    on_round: is told of every round when it is over, before the next one begins.

    lanes: how many devices, this one included, may share the drafter's weights.

    on_link_loss: what to do while the edge is away (it cannot be reached, drains, or is full).
    "fail": raise `EdgeLostError` 2.2 s after the loss was noticed; and the edge must be there at
    the start. "wait": for so long as ``patience_s``, then raise it. "local": after a second go on
    with the drafter alone, and come back to the edge when it is there. Whatever was verified is the
    text that it would have been without the loss; pieces of origin "local" are the drafter's.

    `interrupt`, `looked_s`, `redirect`, `link_up` and `link_state` are for any thread.
    """

    def __init__(
        self,
        draft: str | Path,
        edge: str | None = None,
        keys: str | Path | None = None,
        *,
        provider: str = "auto",
        threads: int | None = None,
        context: int | None = None,
        on_round: Callable[[Round], None] | None = None,
        lanes: int = 1,
        on_link_loss: OnLinkLoss = "fail",
        patience_s: float = 120.0,
    ) -> None:
        if lanes < 1:
            raise UnsupportedError(f"A device has at least one lane, not {lanes}.")
        self._patience = Patience.under(on_link_loss, patience_s)
        self._on_round = on_round
        self._interrupt = Interrupt()
        self._link: EdgeLink | None = None
        artifact = Artifact.open(draft)
        # the edge first: its absence shows at once, loading a model takes a while
        if edge is not None:
            self._family = Family(edge, load_keys(edge, keys))
            self._link = self._dial(artifact, self._interrupt)
        try:
            drafter = Drafter(
                artifact, provider=provider, threads=threads, context=context, lanes=lanes
            )
            self.tokenizer = drafter.tokenizer
            self.template = _chat_template(drafter)
            self._learned = Learned(drafter.pace, artifact.manifest.vocab_size)
            if self._link is not None and self._patience.starts_alone:
                self._link.presence.look_out()
            self._move_in(drafter)
        except BaseException:
            if self._link is not None:
                self._link.close()
            raise

    def _dial(self, artifact: Artifact, interrupt: Interrupt) -> EdgeLink:
        """A link to the edge; unless that may come later, it is there."""
        link = self._family.open(self._patience, interrupt)
        try:
            link.presence.introduce(artifact.manifest)
            if not self._patience.starts_alone:
                link.reach()
                link.greet()
        except BaseException:
            self._family.remove(link)
            link.close()
            raise
        return link

    def _move_in(self, drafter: Drafter) -> None:
        """Begin a conversation on this lane."""
        self._drafter = drafter
        self._conversation = Conversation(
            drafter, self._link, self._learned, self._patience, self._interrupt, self._on_round
        )

    def beside(self) -> Device:
        """A device for another conversation, and another thread, on the same weights and edge.

        It has a lane, a connection and a session of its own, and is closed by itself. Raises
        `UnsupportedError` if all lanes are taken.
        """
        other = copy(self)
        other._interrupt = Interrupt()
        drafter = self._drafter.beside()
        try:
            if self._link is not None:
                other._link = self._dial(drafter.artifact, other._interrupt)
                if other._link.welcome is None:  # until it is greeted itself, as far as is known
                    other._link.presence.welcome = self._link.welcome
            other._move_in(drafter)
        except BaseException:
            drafter.release()
            raise
        return other

    # Answers

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation:
        """One answer, whole. The options are those of `stream`."""
        for _ in self.stream(prompt, **options):
            pass
        assert self.last is not None
        return self.last

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Piece]:
        """One answer, piece by piece; the whole is in ``last`` when the iterator ends.

        A text prompt is one user message in the model's chat template, where it has one; a list of
        token ids is taken as it is. The options are those of `device_runtime.plan.plan`.
        """
        self._interrupt.arm()
        ids = self.prompt_ids(prompt)
        auto = options.get("protocol")
        if auto == AUTO:
            auto = Auto()
        if not isinstance(auto, Auto):
            return self._conversation.answer(ids, plan(**options))
        self._learned.check(auto.policy)
        wish = Choosable(auto, options)
        self._conversation.plans(wish)  # complains, if there is reason to, before anything is done
        return self._conversation.answer(ids, wish)

    @property
    def last(self) -> Generation | None:
        """The last answer that came to its end."""
        return self._conversation.last

    def interrupt(self) -> None:
        """End the running answer soon, whatever it waits for: `InterruptedGenerationError` there.

        For any thread. It is about the answer that `stream` was last asked for.
        """
        self._interrupt.strike()

    @property
    def looked_s(self) -> float:
        """When the answer's thread last looked for an interruption (monotonic). For any thread.

        It does so while it waits for the edge or reads a prompt, too: one that has not for long
        hangs, and is beyond interruption.
        """
        return self._interrupt.looked_s

    def prompt_ids(self, prompt: str | Sequence[int]) -> NDArray[np.uint32]:
        """The token ids u32 [n] that a prompt stands for."""
        vocab = self._drafter.manifest.vocab_size
        if not isinstance(prompt, str):
            ids = list(prompt)
            wrong = [i for i in ids if not isinstance(i, int | np.integer) or not 0 <= i < vocab]
            if wrong:
                raise TokenOutOfRangeError(
                    f"{wrong[0]!r} is no token id: the vocabulary has {vocab} tokens."
                )
            return np.array(ids, dtype=np.uint32)
        if self.template is not None:
            text = self.template.render([{"role": "user", "content": prompt}])
            return np.array(self.tokenizer.encode(text, special=True), dtype=np.uint32)
        ids = [*self.tokenizer.beginning, *self.tokenizer.encode(prompt)]
        return np.array(ids, dtype=np.uint32)

    def shared(self, prompt_ids: Sequence[int] | NDArray[np.uint32]) -> int:
        """How many tokens of a prompt, from the first on, this conversation holds already."""
        return self._conversation.session.shared(np.asarray(prompt_ids, dtype=np.uint32))

    # The edge

    @property
    def welcome(self) -> Welcome | None:
        """What the edge said of itself when it was last greeted; None before that."""
        return self._link.welcome if self._link is not None else None

    @property
    def evidence(self) -> Evidence:
        """What protocol "auto" goes by; all lanes share it."""
        return self._learned.evidence

    def probe(self, *, rates: bool = False) -> LinkState:
        """Measure the link to the edge with a ping, and a larger one for its rates."""
        if self._link is None:
            raise UnsupportedError("This device has no edge, so there is no link to measure.")
        self._interrupt.arm()
        self._link.ping()
        if rates:
            self._link.ping(PROBE_BYTES)
        return self._link.state()

    @property
    def link_up(self) -> bool:
        """Is there a connection to the edge? For any thread."""
        link = self._link
        return link is not None and link.up()

    def link_state(self) -> LinkState | None:
        """What is known of the link; None without an edge. For any thread; asks nobody."""
        link = self._link
        return link.state() if link is not None else None

    def redirect(self, edge: str, keys: str | Path | None = None) -> None:
        """From now on the edge is there, for this device and all `beside` it. For any thread.

        keys: the folder of others than so far. Running answers go on there. Raises what the
        constructor raises for a wrong address or wrong keys, and then changes nothing.
        """
        if self._link is None:
            raise UnsupportedError("This device has no edge that it could look for elsewhere.")
        self._family.redirect(edge, keys)

    def close(self) -> None:
        """Tell the edge to forget the session, hang up, and give the lane back."""
        link, self._link = self._link, None
        try:
            if link is not None:
                self._family.remove(link)
                self._conversation.session.close()
        finally:
            if link is not None:
                link.close()
            self._drafter.release()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(edge: str, keys: str | Path | None) -> EdgeLink:
    """A connection to an edge, with the keys in this folder; beyond loopback there must be some."""
    link = EdgeLink(edge, load_keys(edge, keys))
    try:
        link.reach()
    except BaseException:
        link.close()
        raise
    return link


def _chat_template(drafter: Drafter) -> ChatTemplate | None:
    manifest, tokenizer = drafter.manifest, drafter.tokenizer
    if manifest.chat_template is None:
        return None
    return ChatTemplate(
        manifest.chat_template,
        bos_token="" if manifest.bos_id is None else tokenizer.piece(manifest.bos_id),
        eos_token=tokenizer.piece(manifest.eos_ids[0]) if manifest.eos_ids else "",
    )
