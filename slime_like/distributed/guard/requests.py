"""Memory actions of all ranks: when one rank acts on low memory, all ranks of its world do so before their next op.

No collective is used: a vote before every op would slow down every op. Instead the acting rank publishes a request, and
all others poll a word of memory shared by the ranks of a node; one rank per node copies requests of other nodes into it
from the world's store. No rank waits for another, so this cannot deadlock. All ranks of the world follow, not just the
op's group: ranks outside it would soon wait for its members in another group.
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

ACTION_BITS = 3  # of the word, for the action; the other bits are the request's number
PERIOD_S = 0.1  # polling period of the store, by one thread per node
KEY = "slime_like/memory/"

_joined = itertools.count(1)  # equal on every rank: all install the wrapper equally often


class Requests:
    """The shared word on one rank. Two simultaneous requests write the same value, which is one request, on all nodes."""

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)  # no other user can place a link here
        self._file = open_lock(path)
        self._file.truncate(8)
        self.memory = mmap.mmap(self._file.fileno(), 8)
        self._word = memoryview(self.memory).cast("q")
        self._path = path
        self._key = f"{KEY}{next(_joined)}/"  # separate from requests of an earlier wrapper in this world
        self._seen = self._word[0]
        self._native: Any = None  # the hot path in C, where that looks at the word
        self._store: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    # ---- on this node ------------------------------------------------------------------------------------------------
    def watched_by(self, native: Any) -> None:
        """Let ``native`` compare the word with its ``seen`` before each op, so that ops need not be due to see a request."""
        native.watch(self.memory)
        self._native = native
        self._see(self._seen)

    @property
    def watched(self) -> bool:
        """True if the C hot path watches the word."""
        return self._native is not None

    def ask(self, action: str) -> None:
        """Request ``action`` from all other ranks."""
        number = (self._seen >> ACTION_BITS) + 1
        self._see(number << ACTION_BITS | ACTIONS.index(action))
        self._word[0] = self._seen
        if self._store is not None:
            self._store.set(f"{self._key}{number}", action)

    def news(self) -> str:
        """Return the action requested since the last call, or "" if there is none."""
        word = self._word[0]
        if word == self._seen:
            return ""
        self._see(word)
        action = ACTIONS[word & ((1 << ACTION_BITS) - 1)]
        return "" if action == "none" else action

    @property
    def _number(self) -> int:
        """Number of the last request, whether this rank has seen it or not."""
        return self._word[0] >> ACTION_BITS

    def _see(self, word: int) -> None:
        self._seen = word
        if self._native is not None:
            self._native.seen = word

    # ---- on other nodes ----------------------------------------------------------------------------------------------
    def join(self, store: Any) -> None:
        """Exchange requests with other nodes through the world's ``store``. The first rank to join listens for its node."""
        if self._store is not None:
            return
        self._store = store
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Killed ranks may have left a number: requests of this world begin at 1.
        if self._seen == self._word[0]:
            self._word[0] = 0
        threading.Thread(target=self._listen, args=(store.clone(),), name="memory requests", daemon=True).start()

    def _listen(self, store: Any) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._look(store)
            except RuntimeError:  # the store is closed at the end of the run
                return

    def _look(self, store: Any) -> None:
        """Copy the next request of another node, if any, into the word."""
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
        """Stop listening and remove the shared file."""
        with self._lock:
            self._closed.set()
            self._word.release()
            self.memory.close()
        self._file.close()
        self._path.unlink(missing_ok=True)
