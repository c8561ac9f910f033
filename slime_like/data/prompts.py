"""The default data source: a file in slime's format, checked and tokenised once, shuffled per epoch, resumable.

A row: ``{"prompt": "2+2=" | [chat messages], "label": "4", "metadata": {...}, "rm_type": "math"}``; column names by
``data.*_key``, ``rm_type`` also inside the metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from slime_like.config.rollout import DataConfig
from slime_like.data.chat import Tokenizer, check_messages, has_template, render, require_template, tokenize
from slime_like.data.files import DataFile, RawRow
from slime_like.errors import ConfigError, DataError
from slime_like.types import I32, Prompt

REASONS_KEPT = 5


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a data source gets besides its config group: one dataset of the run."""

    path: str  # data.train, or a file of evaluation.datasets
    tokenizer: Tokenizer
    max_context_len: int  # prompt and response together
    needs_label: Callable[[str | None], bool]  # of a row's rm_type; raises ConfigError on an unknown one
    seed: int = 0
    shuffle: bool = True
    dataset: str = "train"
    key: str = "data.train"  # the config key that named the path, for messages


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that was understood, before tokenisation."""

    index: int
    location: str
    text: str
    label: str | None
    rm_type: str | None
    metadata: Mapping[str, Any]

    def prompt(self, token_ids: I32, dataset: str) -> Prompt:
        return Prompt(self.index, token_ids, self.text, self.label, self.rm_type, self.metadata, dataset)


class FileSource:
    """A resumable stream of prompts from one file.

    Raises at construction: ``DataError`` for a missing or empty file or a bad row (file, line, key, reason, fix);
    ``ConfigError`` for chat messages without a chat template. With ``data.on_bad_row=skip`` bad rows are left out and
    counted in ``num_bad_rows``; ``bad_rows`` holds the first reasons.
    """

    def __init__(self, config: DataConfig, context: SourceContext) -> None:
        self._config = config
        self._context = context
        self._file = DataFile.open(context.key, context.path)
        self._has_template = has_template(context.tokenizer)
        self.num_bad_rows = 0
        self.bad_rows: tuple[str, ...] = ()
        self._locations: dict[int, str] = {}
        self.prompts = self._load()
        if not self.prompts:
            raise DataError(
                f"{context.key}={context.path!r} has no usable row: all {self.num_bad_rows} are bad; "
                f"{'; '.join(self.bad_rows[:1])}"
            )
        self._fingerprint = _fingerprint(self.prompts)
        self._epoch = 0
        self._offset = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self.prompts)

    def location(self, prompt_id: int) -> str:
        """File and line of a prompt, for messages."""
        return f"{self._file.path}, {self._locations[prompt_id]}"

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; a new epoch, in a new order, starts where one ends."""
        chosen: list[Prompt] = []
        while len(chosen) < n:
            if self._offset == len(self.prompts):
                self._epoch += 1
                self._offset = 0
                self._order = self._order_of(self._epoch)
            taken: list[int] = self._order[self._offset : self._offset + n - len(chosen)].tolist()
            chosen.extend(self.prompts[i] for i in taken)
            self._offset += len(taken)
        return chosen

    def state(self) -> dict[str, Any]:
        """The cursor, and what the dataset was: JSON-able."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "seed": self._context.seed,
            "shuffle": self._context.shuffle,
            "rows": len(self.prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken. Raises ``DataError`` when the prompts or their order differ."""
        here = self.state()
        dataset = self._context.key
        owners = {"rows": dataset, "fingerprint": dataset, "seed": "run.seed", "shuffle": "data.shuffle"}
        for name, key in owners.items():
            if state[name] != here[name]:
                raise DataError(
                    f"{self._file.path}: {name} was {state[name]} when the checkpoint was written and is {here[name]} "
                    f"now, so the run cannot go on with its next prompts; restore {key} or choose a new run.dir"
                )
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._order = self._order_of(self._epoch)

    def reject(self, location: str, reason: str) -> None:
        """A row that cannot be used: raise, or count it, as ``data.on_bad_row`` says."""
        message = f"{self._file.path}, {location}: {reason}"
        if self._config.on_bad_row == "stop":
            raise DataError(f"{message} (data.on_bad_row=skip leaves bad rows out and counts them)")
        self.num_bad_rows += 1
        self.bad_rows = (*self.bad_rows, message)[:REASONS_KEPT]

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._context.shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self._context.seed, epoch]).permutation(len(self.prompts))

    def _load(self) -> tuple[Prompt, ...]:
        rows: list[_Row] = []
        for raw in self._file.rows():
            try:
                rows.append(self._understand(raw))
            except _BadRow as bad:
                self.reject(raw.location, str(bad))
        prompts: list[Prompt] = []
        texts = [row.text for row in rows]
        for row, token_ids in zip(rows, tokenize(self._context.tokenizer, texts), strict=True):
            problem = self._length_problem(token_ids)
            if problem:
                self.reject(row.location, problem)
                continue
            self._locations[row.index] = row.location
            prompts.append(row.prompt(token_ids, self._context.dataset))
        return tuple(prompts)

    def _length_problem(self, token_ids: I32) -> str:
        cfg, longest = self._config, self._context.max_context_len
        if not len(token_ids):
            return f"{cfg.input_key!r} has no token; a prompt needs at least one"
        if len(token_ids) + 1 > longest:
            return (
                f"{cfg.input_key!r} has {len(token_ids)} tokens, and with a response of at least 1 does not fit "
                f"rollout.max_context_len={longest}; shorten the prompt, raise rollout.max_context_len, or take "
                f"a model with a longer context"
            )
        return ""

    def _understand(self, raw: RawRow) -> _Row:
        if raw.fields is None:
            raise _BadRow(raw.problem)
        cfg, fields = self._config, raw.fields
        if fields.get(cfg.input_key) is None:
            known = ", ".join(map(repr, fields)) or "no column"
            raise _BadRow(f"has no {cfg.input_key!r} but {known}; set data.input_key to the column of the prompt")
        metadata = _metadata(cfg.metadata_key, fields.get(cfg.metadata_key))
        rm_type = fields.get("rm_type") or metadata.get("rm_type")
        if rm_type is not None and not isinstance(rm_type, str):
            raise _BadRow(f"'rm_type' is {rm_type!r}; it must be the name of a reward")
        label = _label(cfg.label_key, fields.get(cfg.label_key))
        try:
            needed = self._context.needs_label(rm_type)
        except ConfigError as error:
            raise _BadRow(str(error)) from error
        if needed and label is None:
            raise _BadRow(
                f"label missing: no {cfg.label_key!r}, and its reward compares with one; "
                f"add it, or set data.label_key to its column"
            )
        return _Row(raw.index, raw.location, self._text(fields[cfg.input_key]), label, rm_type, metadata)

    def _text(self, prompt: object) -> str:
        cfg, tokenizer = self._config, self._context.tokenizer
        if isinstance(prompt, str) and not cfg.apply_chat_template:
            return prompt
        try:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        except ValueError as error:
            raise _BadRow(f"{cfg.input_key!r} {error}") from error
        if not self._has_template:
            chat = f"a prompt of chat messages in {self._file.path}"
            by = "data.apply_chat_template=true" if isinstance(prompt, str) else chat
            require_template(tokenizer, by)
        from jinja2 import TemplateError

        try:
            return render(tokenizer, messages, cfg.chat_template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise _BadRow(f"the chat template refused {cfg.input_key!r}: {error}") from error


class _BadRow(Exception):
    """Why a row cannot be used; never leaves this file."""


def _label(key: str, value: object) -> str | None:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, (bool, dict, list)):
        raise _BadRow(f"{key!r} is {value!r}; a label is a string or a number")
    return str(value) or None


def _metadata(key: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):  # tables that cannot nest keep it as text
        try:
            value = json.loads(value) if value else None
        except ValueError as error:
            raise _BadRow(f"{key!r} is text that is not JSON ({error})") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _BadRow(f"{key!r} is {value!r}; metadata is a JSON object")
    return cast(dict[str, Any], value)


def _fingerprint(prompts: tuple[Prompt, ...]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{len(prompt.token_ids)}\0{prompt.label}\0".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
