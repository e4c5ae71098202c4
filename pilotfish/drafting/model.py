"""The model of all drafters of a process, on either end, and the lock for taking turns.

In:  texts in the model's tokens, one per slot. Out: what a slot lacks of its text, and outputs.

On a device, each lane's drafter acquires a slot and runs its own work, in its own thread. On an
edge, one thread drafts for all sessions: it runs the work of many slots together, and a session has
the same slot as in the target.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Engine, Work, open_engine
from pilotfish.engines.language_model import Output
from pilotfish.engines.pass_times import pass_times

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDTHS = (1, 2, 4)  # sizes (tokens) of the timed passes
# Drafts of a pass of a model with a mask token: PARD's models were trained with 8.
_MASKED_DRAFTS = 8

Result = TypeVar("Result")


class SharedModel:
    """A model with a slot for each text. Thread-safe; each slot has one user.

    Passes run in order of request, one at a time, so a long prompt of one thread does not delay the
    others.

    engine: the engine, which only this class runs. drafts_per_pass: maximum number of tokens that
    one pass predicts; above 1 only for a model with a mask token (`Manifest.mask_token`).
    pass_times: seconds of a pass by its number of tokens, measured when the model is loaded.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        mask = engine.model.artifact.manifest.mask_token
        self.drafts_per_pass = 1 if mask is None else min(_MASKED_DRAFTS, engine.model.context)
        self._masks = np.full(self.drafts_per_pass - 1, mask or 0, np.uint32)
        # a pass of several drafts also reads those of the pass before
        widths = {*_WIDTHS, self.drafts_per_pass, 2 * self.drafts_per_pass - 1}
        self.pass_times = pass_times(engine, sorted(widths))
        self._passes = FairLock()  # held during a pass, and while its output is in use
        self._free = list(range(engine.model.slots))
        self._lock = threading.Lock()  # protects `_free`

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        *,
        slots: int,
        provider: str,
        threads: int | None,
        context: int | None,
    ) -> Self:
        """Load an artifact, and time its passes; see `open_model` for arguments and errors."""
        return cls(
            open_engine(
                artifact,
                slots=slots,
                context=context,
                threads=threads,
                provider=provider,
                drafts=True,
            )
        )

    @property
    def draft_times(self) -> Mapping[int, float]:
        """Seconds by number of drafts, for the edge's welcome.

        With a mask token, the drafts of a pass share its time: the only entry is the time of one.
        """
        if self.drafts_per_pass == 1:
            return self.pass_times
        return {1: self.pass_times[self.drafts_per_pass] / self.drafts_per_pass}

    def acquire_slot(self) -> int:
        """Empty and return a lane's slot, the lowest free one; `UnsupportedError` if none is."""
        with self._lock:
            if not self._free:
                raise UnsupportedError(
                    f"All {self.engine.model.slots} lanes of this device are in use: close a "
                    "device, or open the device with more lanes."
                )
            slot = min(self._free)
            self._free.remove(slot)
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        with self._passes:
            self.engine.clear(slot)

    def next_work(
        self,
        slot: int,
        text: NDArray[np.integer[Any]],
        chunk: int | None = None,
        *,
        predicts: int = 1,
    ) -> tuple[int, Work]:
        """Return how many tokens of a text [n] a slot lacks, and the work that reads the next.

        text: must not change before the work is run. chunk: maximum number of tokens of the text
        that the work reads; None: all. predicts: number of tokens after the text to predict, see
        `masked`: the work that reads the text to its end then has this number of rows of output,
        and the slot always lacks at least the last token. 0: the last token need not be read, and
        the work has no output; if the slot lacks no token, the work must not be run.
        """
        wanted = len(text) if predicts else len(text) - 1
        whole = self.masked(text, predicts)
        cached = self.engine.cached(slot, whole, max(predicts, 1))
        end = wanted if chunk is None else min(wanted, cached + chunk)
        if end < len(text):
            return wanted - cached, Work(slot, text[:end], rows=0)
        # the same array: the engine does not compare it with the slot again
        return wanted - cached, Work(slot, whole, rows=predicts)

    def masked(self, text: NDArray[np.integer[Any]], predicts: int) -> NDArray[np.integer[Any]]:
        """Return a text [n] with mask tokens after it, to predict ``predicts`` tokens in one pass.

        The last ``predicts`` rows of output predict the tokens after the text, in order. Row i does
        not depend on the i tokens before its token, since none of them is known. predicts: at most
        `drafts_per_pass`; text and masks must fit the context.
        """
        if predicts <= 1:
            return text
        return np.concatenate([text, self._masks[: predicts - 1].astype(text.dtype)])

    def run(
        self,
        works: Sequence[Work],
        take: Callable[[list[Output]], Result],
        before_pass: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run works, at most one per slot; return what ``take`` copies from their outputs.

        before_pass: see `Engine.run`. Raises the errors of `Engine.run`.
        """
        passes = 0

        def let_others_run() -> None:
            nonlocal passes
            before_pass()
            if passes:
                self._passes.give_way()
            passes += 1

        with self._passes:
            return take(self.engine.run(works, let_others_run))

    def release_slot(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            self._free.append(slot)


class FairLock:
    """A lock that is granted in the order of request, used with ``with``. Not re-entrant.

    A thread that releases an ordinary lock often gets it again at once. While it reads a long
    prompt, pass after pass, all other threads would wait.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C: other threads must not wait for this one
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:
                    self._pass_on()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._pass_on()

    def give_way(self) -> None:
        """Let the waiting threads have the lock first; the caller holds it before and after."""
        interrupt: BaseException | None = None
        self.__exit__()
        while True:  # the caller's ``with`` block is going to release the lock, so it must hold it
            try:
                self.__enter__()
                break
            except BaseException as error:  # Ctrl-C, perhaps several times
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
