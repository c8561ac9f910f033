"""Low-memory actions that one rank takes and all other ranks of its world repeat before their next op (``guard.symmetric``).

No collective is used, because a vote before every op would slow down every op. The acting rank publishes a request: it writes
a word in shared memory, which the ranks of its node read before every op, and a key in the world's store. On each other node,
one rank copies requests from the store into the node's word. No rank waits for another, so requests cannot deadlock. All ranks
of the world act, not only those of the op's group: a rank outside this group would soon wait, in another group, for a rank that
acts.
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

ACTION_BITS = 3  # bits of the word for the action; the other bits are the number of the request
ACTION_MASK = (1 << ACTION_BITS) - 1
PERIOD_S = 0.1  # polling period of the store, by one thread per node
KEY_PREFIX = "slime_like/memory/"

_wrapper_numbers = itertools.count(1)  # the same on every rank, because all ranks install the wrapper equally often


class SymmetricActions:
    """Requests for actions. The newest request is in one word of memory, which all ranks of a node share.

    Of simultaneous requests on a node, all ranks follow the one for the strongest action, which is the last of them in
    ``ACTIONS``. Of simultaneous requests for different actions on several nodes, a node may receive only one.
    """

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)  # no other user can place a link here
        self._file = open_lock(path)
        self._file.truncate(8)
        self.memory = mmap.mmap(self._file.fileno(), 8)
        self._word = memoryview(self.memory).cast("q")
        self._path = path
        self._key = (
            f"{KEY_PREFIX}{next(_wrapper_numbers)}/"  # separate from requests of an earlier wrapper in this world
        )
        self._last_word = self._word[0]
        self._native_ring: Any = None  # ring of the hot path in C, if that reads the word
        self._store: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    # ---- on this node ------------------------------------------------------------------------------------------------
    def watch_with(self, native_ring: Any) -> None:
        """Make the hot path in C compare the word with ``native_ring.last_request`` before each op that it handles.

        ``Guard.check`` then need not run before each op.
        """
        native_ring.watch(self.memory)
        self._native_ring = native_ring
        self._set_last_word(self._last_word)

    @property
    def is_watched(self) -> bool:
        """Return whether the hot path in C watches the word."""
        return self._native_ring is not None

    def publish(self, action: str) -> None:
        """Request ``action`` from all other ranks."""
        current = self._word[0]  # another rank may have changed it since ``next_action``
        number, strength = max((self._last_word >> ACTION_BITS) + 1, current >> ACTION_BITS), ACTIONS.index(action)
        if number == current >> ACTION_BITS and strength > current & ACTION_MASK:
            number += 1  # other nodes may have copied the weaker request
        self._set_last_word(number << ACTION_BITS | strength)
        word = self._word[0] = max(current, self._last_word)
        if self._store is not None:
            self._store.set(f"{self._key}{number}", ACTIONS[word & ACTION_MASK])

    def next_action(self) -> str:
        """Return the action that another rank has requested since the last call, or "" if there is none."""
        word = self._word[0]
        if word == self._last_word:
            return ""
        self._set_last_word(word)
        action = ACTIONS[word & ACTION_MASK]
        return "" if action == "none" else action

    @property
    def _current_number(self) -> int:
        """Number of the newest request in the word. This rank may not have acted on it yet."""
        return self._word[0] >> ACTION_BITS

    def _set_last_word(self, word: int) -> None:
        self._last_word = word
        if self._native_ring is not None:
            self._native_ring.last_request = word

    # ---- on other nodes ----------------------------------------------------------------------------------------------
    def connect(self, store: Any) -> None:
        """Exchange requests with other nodes through the world's ``store``.

        On each node, the first rank that connects starts a thread that polls the store.
        """
        if self._store is not None:
            return
        self._store = store
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Requests of this world begin at 1; the file may contain the last number of killed ranks.
        if self._last_word == self._word[0]:
            self._word[0] = 0
        threading.Thread(target=self._poll_store, args=(store.clone(),), name="memory requests", daemon=True).start()

    def _poll_store(self, store: Any) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._copy_new(store)
            except RuntimeError:  # the store is closed at the end of the run
                return

    def _copy_new(self, store: Any) -> None:
        """Copy the new requests of other nodes, if any, into the word as one request.

        It has the number of the newest and the strongest of their actions.
        """
        with self._lock:
            if self._closed.is_set():
                return
            first = number = self._current_number + 1
        action = 0
        while store.check([f"{self._key}{number}"]):
            action = max(action, ACTIONS.index(store.get(f"{self._key}{number}").decode()))
            number += 1
        with self._lock:
            if number > first and not self._closed.is_set():
                self._word[0] = max(self._word[0], (number - 1) << ACTION_BITS | action)

    def close(self) -> None:
        """Stop polling and remove the shared file."""
        with self._lock:
            self._closed.set()
            self._word.release()
            self.memory.close()
        self._file.close()
        self._path.unlink(missing_ok=True)
