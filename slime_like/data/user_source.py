"""Data source of a user (``data.source``). Errors in it name the config key and the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from slime_like.config.rules.user_functions import check_methods
from slime_like.config.schema.names import DATA_SOURCES
from slime_like.config.schema.rollout import DataConfig
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.errors import ConfigError, SlimeLikeError, UserCodeError
from slime_like.interfaces import DataSource
from slime_like.metrics.types import Metric
from slime_like.registry import is_user_code, resolve
from slime_like.types import Prompt
from slime_like.util.user_code import describe, name_user_errors

KEY = "data.source"


def open_source(config: DataConfig, context: SourceContext) -> DataSource:
    """Construct the source that ``data.source`` names.

    Raises ``ConfigError`` as ``resolve`` does, or if the constructor of a user's source raises an error other than
    ``SlimeLikeError``, or if the source lacks a method or has one with other parameters.
    """
    factory = resolve(KEY, config.source, DATA_SOURCES)
    if not is_user_code(config.source, DATA_SOURCES):
        return factory(config, context)
    try:
        source: DataSource = factory(config, context)
    except SlimeLikeError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{KEY}={config.source!r}: source(config, context) raised {describe(error)}: correct that line"
        ) from error
    check_methods(KEY, config.source, source)
    return UserSource(config.source, source)


def open_rows(config: DataConfig, context: SourceContext) -> FileSource | UserFileSource:
    """Construct the source that ``data.source`` names, for supervised fine-tuning, which reads all rows at once.

    Raises ``ConfigError`` as ``open_source`` does, or if the source is not a ``FileSource``.
    """
    source = open_source(config, context)
    if isinstance(source, FileSource):
        return source
    if isinstance(source, UserSource) and isinstance(source.source, FileSource):
        return UserFileSource(source.name, source.source)
    raise ConfigError(
        f"{KEY}={config.source!r} with algo=sft, which reads all rows of a data file: set {KEY}=file, or derive your source from "
        "slime_like.data.prompts.FileSource"
    )


@dataclass(frozen=True, slots=True)
class UserSource:
    """Data source of a user, named in ``data.source`` by an import path or a registered name.

    If a method of the user's source raises an error other than ``SlimeLikeError``, it is raised as ``UserCodeError``.
    """

    name: str
    source: DataSource

    def __len__(self) -> int:
        with name_user_errors(KEY, self.name, "the number of prompts"):
            return len(self.source)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts. Raises ``UserCodeError`` if the user's source returns anything else."""
        with name_user_errors(KEY, self.name, f"the next {num_prompts} prompts"):
            prompts = cast(object, self.source.next(num_prompts))  # user code may return anything
            items: list[object] = list(prompts) if isinstance(prompts, (list, tuple)) else []
        if len(items) != num_prompts or not all(isinstance(item, Prompt) for item in items):
            kinds = ", ".join(sorted({type(item).__name__ for item in items}))
            actual = f"{len(items)} items ({kinds})" if items else f"a {type(prompts).__name__}"
            raise UserCodeError(
                f"{KEY}={self.name} returned {actual} from next({num_prompts}): return a list of {num_prompts} Prompt objects, and "
                "begin a new epoch when one ends"
            )
        return cast(list[Prompt], items)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of the data."""
        with name_user_errors(KEY, self.name, "the metrics of the data"):
            return tuple(self.source.metrics())

    def state(self) -> Mapping[str, object]:
        """Return the cursor. Raises ``UserCodeError`` if it has a value that JSON cannot represent."""
        with name_user_errors(KEY, self.name, "the cursor of a checkpoint"):
            state = self.source.state()
            json.dumps(state)
            return state

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue from the cursor ``state``."""
        with name_user_errors(KEY, self.name, f"the cursor {state}"):
            self.source.load_state(state)


@dataclass(frozen=True, slots=True)
class UserFileSource(UserSource):
    """User's data source that is derived from ``FileSource``, for supervised fine-tuning."""

    source: FileSource

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts of the file."""
        with name_user_errors(KEY, self.name, "all prompts"):
            return self.source.prompts

    def location(self, prompt_id: int) -> str:
        """Return the file and the line (or row, of a parquet file) of prompt ``prompt_id``, for messages."""
        with name_user_errors(KEY, self.name, f"the location of prompt {prompt_id}"):
            return self.source.location(prompt_id)
