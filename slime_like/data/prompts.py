"""Default data source: a file in slime's format, checked and tokenised once, shuffled per epoch, resumable."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from slime_like.config.schema.rollout import DataConfig
from slime_like.data.chat import tokenize
from slime_like.data.files import DataFile
from slime_like.data.rows import BadRow, PromptRow, RowReader, any_row, length_problem, vocabulary_problem
from slime_like.errors import DataError
from slime_like.interfaces import Tokenizer
from slime_like.metrics.types import Last, Metric
from slime_like.types import Prompt
from slime_like.util.reading import Count, abbreviate, typed

MAX_REASONS = 5  # number of reasons kept for bad rows
MIN_ROLLOUTS_APART = 4  # minimum number of rollouts between two uses of a prompt, if the file has enough rows


@dataclass(frozen=True, slots=True)
class SourceContext:
    """Arguments of a data source in addition to its config group: values of the run, the model and the data file."""

    path: str  # data.train, or a file of evaluation.datasets
    tokenizer: Tokenizer
    max_context_len: int  # prompt and response together
    needs_label: Callable[[str | None], bool]  # takes a row's rm_type; raises ConfigError on an unknown one
    row_problem: Callable[[str | None, str | None, Mapping[str, Any]], str] = (
        any_row  # takes rm_type, label and metadata; returns the problem, or empty
    )
    rm_type: str | None = None  # reward of every row; overrides the rows' own
    seed: int = 0
    shuffle: bool = True
    dataset: str = "train"
    key: str = "data.train"  # the config key that named the path, for messages
    vocab_size: int | None = None  # size of the model's vocabulary; None: not checked
    supervised: bool = False  # rows are demonstrations: a label, or chat messages that end with the assistant's turn
    batch_size: int = 1  # prompts at the start of a rollout
    max_prompts: int = 1  # prompts of a rollout, including refills


def num_distinct(num_rows: int, batch_size: int, max_prompts: int) -> int:
    """Return the number of consecutive prompts that must be distinct, even across the border of two epochs; at least 1.

    It is the larger of two numbers: ``batch_size``, but at most ``num_rows``; and the number of prompts in
    ``MIN_ROLLOUTS_APART`` rollouts of ``max_prompts`` each, but at most half of ``num_rows``, so that epochs stay shuffled.
    """
    return max(min(batch_size, num_rows), min(MIN_ROLLOUTS_APART * max_prompts, num_rows // 2), 1)


def delay_repeats(order: Sequence[int], previous: Sequence[int]) -> list[int]:
    """Return ``order``, changed so that no row repeats too soon after ``previous``, the last rows of the previous epoch.

    At least ``len(previous)`` other rows then lie between two occurrences of a row. Rows move as few positions as possible.
    ``previous`` must be shorter than ``order``.
    """
    earliest_positions = {row: position for position, row in enumerate(previous, 1)}
    rows, delayed_rows, free_rows, moved_rows = iter(order), set[int](), deque[int](), list[int]()
    for position in range(len(order)):
        if 0 < position <= len(previous) and previous[position - 1] in delayed_rows:
            free_rows.append(previous[position - 1])
        while not free_rows:
            row = next(rows)
            (free_rows.append if earliest_positions.get(row, 0) <= position else delayed_rows.add)(row)
        moved_rows.append(free_rows.popleft())
    return moved_rows


class _Cursor(TypedDict):
    """State of a ``FileSource``."""

    epoch: Count
    offset: Count
    before: NotRequired[list[Count]]  # absent in states of older versions
    seed: int
    shuffle: bool
    rows: Count
    fingerprint: str


class FileSource:
    """Resumable stream of prompts from one file. It has no tokenizer, so it can be pickled to other processes.

    The constructor raises ``DataError`` for an unusable file and for a bad row (naming file, line, key, reason and fix),
    and ``ConfigError`` if a row needs a chat template but the tokenizer has none, or if the tokenizer cannot encode the
    prompts. With ``data.on_bad_row=skip``, bad rows are left out and counted in ``num_bad_rows``, and ``bad_rows`` has the
    reasons for the first of them. They then raise ``DataError`` only if no good row is left.
    """

    def __init__(self, config: DataConfig, context: SourceContext) -> None:
        self._skip = config.on_bad_row == "skip"
        self._key, self._seed, self._shuffle = context.key, context.seed, context.shuffle
        self._file = DataFile.open(context.key, context.path)
        self.num_bad_rows = 0
        self.bad_rows: tuple[str, ...] = ()
        self._locations: dict[int, str] = {}
        self.prompts = self._load(config, context)
        if not self.prompts:
            raise DataError(
                f"{context.key}={context.path!r} has no usable row: all {self.num_bad_rows} are bad; "
                f"{'; '.join(self.bad_rows[:1])}"
            )
        self._fingerprint = _fingerprint(self.prompts)
        self._distinct = num_distinct(len(self.prompts), context.batch_size, context.max_prompts)
        self._epoch = 0
        self._offset = 0
        self._before: list[int] = []  # last rows of the previous epoch, oldest first
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self.prompts)

    def location(self, prompt_id: int) -> str:
        """Return the file and the line (or row, of a parquet file) of prompt ``prompt_id``, for messages."""
        return f"{self._file.path}, {self._locations[prompt_id]}"

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts. When an epoch ends, the next one starts, in a new order if shuffled.

        If the file has enough prompts for a batch, the prompts of a batch are distinct, even across epochs: prompts at the
        end of one epoch are delayed in the next.
        """
        prompts: list[Prompt] = []
        while len(prompts) < num_prompts:
            if self._offset == len(self.prompts):
                self._before = self._order[len(self.prompts) - self._distinct + 1 :].tolist()
                self._epoch += 1
                self._offset = 0
                self._order = self._order_of(self._epoch)
            indices: list[int] = self._order[self._offset : self._offset + num_prompts - len(prompts)].tolist()
            prompts.extend(self.prompts[i] for i in indices)
            self._offset += len(indices)
        return prompts

    def metrics(self) -> tuple[Metric, ...]:
        """Return ``data/bad_rows``: rows skipped under ``data.on_bad_row=skip``."""
        return (Last("data/bad_rows", float(self.num_bad_rows)),)

    def state(self) -> dict[str, Any]:
        """Return the cursor and a fingerprint of the dataset, as JSON values."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "before": self._before,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self.prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the cursor ``state``.

        Raises ``DataError`` if it is malformed, or if the prompts or their order have changed.
        """
        try:
            typed(state, _Cursor)
        except ValueError as error:
            raise DataError(
                f"the cursor of the checkpoint cannot be used ({error}): resume from another checkpoint"
            ) from error
        current = self.state()
        prompts = f"{self._key}, and the tokenizer and keys with which it is read"
        owners = {"rows": prompts, "fingerprint": prompts, "seed": "run.seed", "shuffle": "data.shuffle"}
        for name, key in owners.items():
            if state[name] != current[name]:
                raise DataError(
                    f"{self._file.path}: {name} was {state[name]} when the checkpoint was written and is {current[name]} "
                    f"now, so the run cannot continue with its next prompts; restore {key}"
                )
        if state["offset"] > len(self.prompts):
            raise DataError(
                f"the cursor of the checkpoint is at row {state['offset']} of {len(self.prompts)}: resume from another "
                f"checkpoint"
            )
        before: list[int] = state.get("before", [])
        if len({*before}) < len(before) or not len(before) < len(self.prompts) > max(before, default=0):
            raise DataError(
                f"the cursor of the checkpoint has before={abbreviate(before)}, which must contain rows below {len(self.prompts)}, each "
                "only once: resume from another checkpoint"
            )
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._before = list(before)
        self._order = self._order_of(self._epoch)

    def _reject(self, location: str, reason: str) -> None:
        """Raise ``DataError`` for an unusable row, or count it if ``data.on_bad_row=skip``."""
        message = f"{self._file.path}, {location}: {reason}"
        if not self._skip:
            raise DataError(f"{message} (data.on_bad_row=skip skips and counts bad rows)")
        self.num_bad_rows += 1
        self.bad_rows = (*self.bad_rows, message)[:MAX_REASONS]

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self.prompts))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.prompts))
        return np.array(delay_repeats(order.tolist(), self._before))

    def _load(self, config: DataConfig, context: SourceContext) -> tuple[Prompt, ...]:
        reader = RowReader(
            config, context.tokenizer, context.needs_label, context.row_problem, context.rm_type, context.supervised
        )
        rows: list[PromptRow] = []
        for raw in self._file.rows():
            try:
                rows.append(reader.read(raw))
            except BadRow as bad:
                self._reject(raw.location, str(bad))
        prompts: list[Prompt] = []
        for row, token_ids in zip(rows, tokenize(context.tokenizer, [row.text for row in rows]), strict=True):
            longest = context.max_context_len, config.max_prompt_len
            problem = length_problem(config.input_key, token_ids, *longest)
            problem = problem or vocabulary_problem(config.input_key, token_ids, context.vocab_size)
            if problem:
                self._reject(row.location, problem)
                continue
            self._locations[row.index] = row.location
            prompts.append(row.prompt(token_ids, context.dataset))
        return tuple(prompts)


def _fingerprint(prompts: tuple[Prompt, ...]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{len(prompt.token_ids)}\0{prompt.label}\0".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
