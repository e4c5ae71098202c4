"""The texts of earlier conversations on this device, by owner and vocabulary; optionally on disk.

In:  conversations as token ids, with their owner. Out: a `Corpus` for each owner.

A drafter reads an owner's texts only for this owner's answers. A device that shares texts keeps a
second corpus of all conversations, including conversations without an owner. Only lossless
protocols read it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

from pilotfish.device_runtime.texts.text_folder import TextFolder
from pilotfish.device_runtime.texts.text_store import FileTextStore, TextStore
from pilotfish.drafting.lookup import DEFAULT_OWNER, MAX_OWNERS, Owner
from pilotfish.speculation.corpus import MOST_TOKENS

_log = logging.getLogger("pilotfish.device")

OFF = "off"


class TextMemory:
    """The earlier texts of a device, used by its lanes. Thread-safe.

    location: a folder that keeps the texts; None: keep them in memory until the process ends;
    "off": keep none. max_tokens: limit for the texts of all owners together, and for the shared
    texts; above it, the owner with the most tokens loses the oldest texts. shared: also keep all
    owners' texts together. Only texts in the last used vocabulary are in memory.
    """

    def __init__(
        self,
        location: str | Path | None = None,
        max_tokens: int = MOST_TOKENS,
        *,
        shared: bool = False,
        max_owners: int = MAX_OWNERS,
    ) -> None:
        self._off = location is not None and str(location) == OFF
        self._folder = None if location is None or self._off else TextFolder(Path(location))
        self._max_tokens, self._max_owners = max_tokens, max_owners
        self._shares = shared
        self._lock = threading.Lock()
        self._lanes = 0
        self._vocabulary = ""
        # stores by owner, the most recent last; None: the shared store
        self._stores: OrderedDict[str | None, TextStore] = OrderedDict()

    def texts(self, vocabulary: str, vocab_size: int, owner: Owner = DEFAULT_OWNER) -> TextStore:
        """Return the owner's texts in the vocabulary with this fingerprint and size."""
        return TextStore(0) if owner is None else self._store(vocabulary, vocab_size, owner)

    def shared_texts(self, vocabulary: str, vocab_size: int) -> TextStore | None:
        """Return all owners' texts in this vocabulary; None if texts are not shared."""
        return self._store(vocabulary, vocab_size, None) if self._shares else None

    def _store(self, vocabulary: str, vocab_size: int, owner: str | None) -> TextStore:
        with self._lock:
            known = vocabulary == self._vocabulary
            if not known or owner not in self._stores:
                # open first: this may raise, and then nothing must have changed
                opened = self._open_store(vocabulary, vocab_size, owner)
                if not known:
                    self._forget()
                    self._vocabulary = vocabulary
                self._stores[owner] = opened
            self._stores.move_to_end(owner)
            while len(self._stores) > self._max_owners:
                self._stores.popitem(last=False)[1].close()
            return self._stores[owner]

    def _open_store(self, vocabulary: str, vocab_size: int, owner: str | None) -> TextStore:
        if self._off or not vocabulary:
            return TextStore(0)
        if self._folder is None:
            return TextStore(self._max_tokens)
        path = self._folder.shared_path(vocabulary)
        if vocabulary != self._vocabulary and not self._shares and path.exists():
            _log.warning("%s holds texts without an owner, which only --share-texts uses", path)
        if owner is not None:
            path = self._folder.owner_path(vocabulary, owner)
            self._folder.make_room(path)
        return FileTextStore(path, self._max_tokens, vocab_size)

    def trim(self) -> None:
        """Drop the oldest texts of the largest owner while all owners together exceed the limit."""
        with self._lock:
            held = [texts for owner, texts in self._stores.items() if owner is not None]
            while sum(map(len, held)) > self._max_tokens:
                max(held, key=len).drop_oldest()

    def acquire(self) -> None:
        """Count one more lane that uses these texts."""
        with self._lock:
            self._lanes += 1

    def release(self) -> None:
        """Count one lane less; the last lane closes the files."""
        with self._lock:
            self._lanes -= 1
            last = self._lanes <= 0
        if last:
            self.close()

    def close(self) -> None:
        """Close the files, so that another device may open them."""
        with self._lock:
            if self._folder is not None:
                self._forget()
                self._vocabulary = ""

    def _forget(self) -> None:
        for texts in self._stores.values():
            texts.close()
        self._stores.clear()
