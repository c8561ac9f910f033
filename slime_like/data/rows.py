"""Validation of dataset rows: check columns, render chat messages, resolve label and reward. No tokenization.

A row is ``{"prompt": "2+2=" | [chat messages], "label": "4", "metadata": {...}, "rm_type": "math"}``.
``data.*_key`` set other column names; ``rm_type`` may also be inside the metadata. A column ``tools`` goes to the chat
template and into the metadata, as in slime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import numpy as np

from slime_like.config.schema.rollout import DataConfig
from slime_like.data.chat import Message, abbreviate, check_messages, has_template, render, require_template
from slime_like.data.files import RawRow
from slime_like.errors import ConfigError
from slime_like.interfaces import Tokenizer
from slime_like.types import I32, Prompt
from slime_like.util.reading import parse_json, reason

TOOLS = "tools"  # slime's default of --tool-key
MAX_NAME = 200  # characters of a reward's name


class BadRow(Exception):
    """Error of an unusable row; caught within this package."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Row before tokenization."""

    index: int
    location: str
    text: str
    label: str | None
    rm_type: str | None
    metadata: Mapping[str, Any]
    messages: tuple[Message, ...] = ()

    def prompt(self, token_ids: I32, dataset: str) -> Prompt:
        """Return the row as a ``Prompt`` with the tokens ``token_ids``."""
        return Prompt(
            prompt_id=self.index,
            token_ids=token_ids,
            text=self.text,
            label=self.label,
            rm_type=self.rm_type,
            metadata=self.metadata,
            dataset=dataset,
            messages=self.messages,
        )


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converter of raw rows to ``PromptRow``, configured by the keys of ``data``.

    ``read`` raises ``BadRow`` if a row cannot be used, and ``ConfigError`` if the chat template that a row needs is
    missing, since other rows will need it too.
    """

    config: DataConfig
    tokenizer: Tokenizer
    needs_label: Callable[[str | None], bool]
    row_problem: Callable[[str | None, str | None, Mapping[str, Any]], str]
    rm_type: str | None = None
    supervised: bool = False  # chat messages may end with an assistant turn, which replaces the label

    def read(self, raw: RawRow) -> PromptRow:
        """Return the validated row with its prompt rendered as text.

        Raises ``BadRow`` if the row cannot be used, ``ConfigError`` if it needs a chat template and there is none.
        """
        if raw.fields is None:
            raise BadRow(raw.problem)
        cfg, fields = self.config, raw.fields
        prompt = _column(fields, cfg.input_key)
        if prompt is None:
            column_names = ", ".join(map(repr, fields)) or "no column"
            raise BadRow(f"has no {cfg.input_key!r} but {column_names}; set data.input_key to the column of the prompt")
        metadata = _metadata(cfg.metadata_key, _column(fields, cfg.metadata_key))
        tools = _tools(fields.get(TOOLS))
        metadata |= {} if tools is None else {TOOLS: tools}
        rm_type = self.rm_type or _rm_type(fields.get("rm_type") or metadata.get("rm_type"))
        label = _label(cfg.label_key, _column(fields, cfg.label_key))
        needs_label = self._needs_label(rm_type)  # raises on an unknown rm_type, so it is called for every row
        if needs_label and label is None and not self._has_answer(prompt):
            raise BadRow(
                f"label missing: no {cfg.label_key!r}, but the reward compares with one; "
                f"add it, or set data.label_key to its column"
            )
        if problem := self.row_problem(rm_type, label, metadata):
            raise BadRow(problem)
        text, messages = self._text(prompt, tools)
        for key, value in ((cfg.input_key, text), (cfg.label_key, label or "")):
            _check_text(repr(key), value)
        return PromptRow(raw.index, raw.location, text, label, rm_type, metadata, messages)

    def _has_answer(self, prompt: object) -> bool:
        last: object = cast("list[object]", prompt)[-1] if isinstance(prompt, list) and prompt else None
        return self.supervised and isinstance(last, dict) and cast("dict[str, object]", last).get("role") == "assistant"

    def _needs_label(self, rm_type: str | None) -> bool:
        try:
            return self.needs_label(rm_type)
        except ConfigError as error:
            raise BadRow(str(error)) from error

    def _text(self, prompt: object, tools: list[object] | None) -> tuple[str, tuple[Message, ...]]:
        """Return the prompt's text and the row's messages, which are empty if the prompt is a string used without a template.

        If the messages are a demonstration, the text ends before the first assistant turn. Raises ``BadRow`` if the
        messages are invalid or the template rejects them, ``ConfigError`` if there is no template.
        """
        cfg = self.config
        if isinstance(prompt, str) and not cfg.apply_chat_template:
            return prompt, ()
        try:
            messages: list[Message] = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
            )
        except ValueError as error:
            raise BadRow(f"{cfg.input_key!r} {error}") from error
        _check_json(cfg.input_key, messages)
        if not has_template(self.tokenizer):
            needed_by = "data.apply_chat_template=true" if isinstance(prompt, str) else "a prompt of chat messages"
            require_template(self.tokenizer, needed_by)
        prompt_messages = messages
        if self._has_answer(prompt):
            prompt_messages = messages[
                : next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            ]
            if not prompt_messages:
                raise BadRow(f"{cfg.input_key!r} begins with an assistant turn; it must begin with another role")
            for i, message in enumerate(messages):  # those that are not rendered here are tokenized later
                _check_text(f"{cfg.input_key!r} message {i} (as JSON)", json.dumps(message, ensure_ascii=False))
        # Fault boundary: a chat template is third-party code.
        try:
            return render(self.tokenizer, prompt_messages, cfg.chat_template_kwargs, tools), tuple(messages)
        except Exception as error:
            raise BadRow(f"{self._template()} refused {cfg.input_key!r}: {reason(error)}") from error

    def _template(self) -> str:
        folder = getattr(self.tokenizer, "name_or_path", "")
        return f"the chat template of {folder}" if folder else "the chat template"


def length_problem(key: str, token_ids: I32, max_context_len: int, max_prompt_len: int | None = None) -> str:
    """Return the problem with the length of a prompt; empty if there is none."""
    if not len(token_ids):
        return f"{key!r} has no token; a prompt needs at least one"
    if max_prompt_len is not None and len(token_ids) > max_prompt_len:
        return f"{key!r} has {len(token_ids)} tokens, more than data.max_prompt_len={max_prompt_len}; shorten the prompt or raise data.max_prompt_len"
    if len(token_ids) + 1 > max_context_len:
        return (
            f"{key!r} has {len(token_ids)} tokens, and with a response of at least 1 does not fit a context of "
            f"{max_context_len} (rollout.max_context_len or, if that is null, the model's "
            f"max_position_embeddings); shorten the prompt or raise rollout.max_context_len"
        )
    return ""


def vocabulary_problem(key: str, token_ids: I32, vocab_size: int | None) -> str:
    """Return the problem with token ids outside the vocabulary; empty if there is none."""
    if vocab_size is None or int(token_ids.max()) < vocab_size:
        return ""
    return (
        f"{key!r} has token {int(token_ids.max())}, and the model's vocabulary ends at {vocab_size - 1} (vocab_size of its "
        "config.json): do the tokenizer files and config.json of model.hf_checkpoint belong to one model?"
    )


def _column(fields: Mapping[str, Any], key: str) -> Any:
    """Return a column, or the nested field of a dotted key such as ``reward_model.ground_truth``; None if it is absent."""
    if key in fields or "." not in key:
        return fields.get(key)
    outer, _, inner = key.partition(".")
    value = fields.get(outer)
    return _column(cast("Mapping[str, Any]", value), inner) if isinstance(value, Mapping) else None


def _check_text(place: str, text: str) -> None:
    """Raise ``BadRow`` naming ``place`` if ``text`` contains a lone surrogate, which JSON and Python accept but tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{place} has {text[error.start]!r} at character {error.start}, which is a lone surrogate and not text; correct the row"
        ) from error


def any_row(rm_type: str | None, label: str | None, metadata: Mapping[str, Any]) -> str:
    """Return an empty string, which stands for no problem, for any row. Used for rewards without requirements."""
    del rm_type, label, metadata
    return ""


def _rm_type(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_NAME):
        raise BadRow(f"'rm_type' is {abbreviate(value)}; it must be the name of a reward")
    return (value or "").strip() or None


def _label(key: str, value: object) -> str | None:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise BadRow(f"{key!r} is {abbreviate(value)}; a label is a string or a number")
    return str(value) or None


def _tools(value: object) -> list[object] | None:
    """Return a row's column ``tools``, a list or its JSON text, as a list; None if it is absent, null or empty text.

    Raises ``BadRow`` if it is something else, or if the list contains a value that JSON cannot represent.
    """
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value) if value else None
        except (ValueError, RecursionError):
            tools = value
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRow(
            f"{TOOLS!r} is {abbreviate(value)}; tools must be a list of JSON schemas, or such a list as JSON text"
        )
    tools = cast("list[object]", tools)
    _check_json(TOOLS, tools)
    return tools


def _metadata(key: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):  # tables that cannot nest store it as JSON text
        try:
            value = parse_json(value) if value else None
        except ValueError as error:
            raise BadRow(f"{key!r} is text that is not JSON ({error}); metadata is a JSON object") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"{key!r} is {abbreviate(value)}; metadata is a JSON object")
    metadata = cast(dict[str, Any], value)
    _check_json(key, metadata)
    return metadata


def _check_json(key: str, value: object) -> None:
    """Raise ``BadRow`` if JSON, the format of dumps and checkpoints, cannot represent ``value``.

    Parquet files may contain such values.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(
            f"{key!r} contains a value that JSON cannot represent ({reason(error)}); write it as text or a number"
        ) from error
