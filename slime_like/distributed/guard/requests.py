"""A group decision about memory: what one rank does for want of it, every rank of its world does before its next op.

No collective decides: which op a rank is short before is its own affair, and ranks that were to vote before every op would
pay for it with every op. Instead the rank that acts says so first, and everybody else looks: at a word of memory that the
ranks of a node share, into which one rank of each node puts what other nodes said in the world's store. Nobody waits
for anybody, so that it cannot deadlock. The whole world follows, not the op's group alone: ranks outside it wait for
its members a moment later, in a group of their own.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import threading
from pathlib import Path
from typing import Any

from slime_like.config.schema.guard_policy import ACTIONS
from slime_like.util.private import open_lock, private_folder

ACTION_BITS = 3  # of the word, for the action; the rest is the request's number
PERIOD_S = 0.1  # between two looks into the store, by one thread of each node
KEY = "slime_like/memory/"

_joined = itertools.count(1)  # of this process; the same on every rank, as each installs the wrapper as often


class Requests:
    """The word, on one rank. Two ranks that ask at once write the same one, which is one request, on all nodes."""

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)  # so that nobody else can have put a link here
        self._file = open_lock(path)
        self._file.truncate(8)
        self.memory = mmap.mmap(self._file.fileno(), 8)
        self._word = memoryview(self.memory).cast("q")
        self._path = path
        self._key = f"{KEY}{next(_joined)}/"  # requests of an earlier wrapper in this world are another's
        self._seen = self._word[0]
        self._native: Any = None  # the hot path in C, where that looks at the word
        self._store: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    # ---- on this node ------------------------------------------------------------------------------------------------
    def watched_by(self, native: Any) -> None:
        """Ops need not be due to find a request: ``native`` compares the word with its ``seen`` before each."""
        native.watch(self.memory)
        self._native = native
        self._see(self._seen)

    @property
    def watched(self) -> bool:
        """Whether that is so."""
        return self._native is not None

    def ask(self, action: str) -> None:
        """Everybody else is to do ``action``."""
        number = (self._seen >> ACTION_BITS) + 1
        self._see(number << ACTION_BITS | ACTIONS.index(action))
        self._word[0] = self._seen
        if self._store is not None:
            self._store.set(f"{self._key}{number}", action)

    def news(self) -> str:
        """The action that somebody asked for since the last call, or nothing."""
        word = self._word[0]
        if word == self._seen:
            return ""
        self._see(word)
        action = ACTIONS[word & ((1 << ACTION_BITS) - 1)]
        return "" if action == "none" else action

    @property
    def _number(self) -> int:
        """Of the last request, seen by this rank or not."""
        return self._word[0] >> ACTION_BITS

    def _see(self, word: int) -> None:
        self._seen = word
        if self._native is not None:
            self._native.seen = word

    # ---- on other nodes ----------------------------------------------------------------------------------------------
    def join(self, store: Any) -> None:
        """Tell and hear other nodes by ``store``, the world's. The first rank of a node to come listens for all of it."""
        if self._store is not None:
            return
        self._store = store
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if (
            self._seen == self._word[0]
        ):  # ranks that were killed may have left a number: requests of this world begin at 1
            self._word[0] = 0
        threading.Thread(target=self._listen, args=(store.clone(),), name="memory requests", daemon=True).start()

    def _listen(self, store: Any) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._look(store)
            except RuntimeError:  # the store is gone, and the run with it
                return

    def _look(self, store: Any) -> None:
        """Put the next request of all into the word, if there is one that did not come from this node."""
        with self._lock:
            if self._closed.is_set():
                return
            number = self._number + 1
        if not store.check([f"{self._key}{number}"]):
            return
        action = ACTIONS.index(store.get(f"{self._key}{number}").decode())
        with self._lock:
            if not self._closed.is_set() and self._number < number:
                self._word[0] = number << ACTION_BITS | action

    def close(self) -> None:
        """Remove it."""
        with self._lock:
            self._closed.set()
            self._word.release()
            self.memory.close()
        self._file.close()
        self._path.unlink(missing_ok=True)
