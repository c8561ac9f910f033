"""Sinks by name or import path (``metrics.sinks``). Errors in user code name the config key and the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_like.config.rules.user_functions import check_methods
from slime_like.config.schema.names import SINKS
from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.types import KeepsWarnings, RunWarning, ShowsNotes, Sink, SinkContext, StepSpans
from slime_like.registry import is_shipped, resolve
from slime_like.util.user_code import describe, name_user_errors

KEY = "metrics.sinks"


def open_sink(name: str, config: MetricsConfig, context: SinkContext) -> Sink:
    """Construct the sink ``name``, a table entry or an import path.

    Raises ``ConfigError`` as ``resolve`` does, or if a user sink's constructor raises an error, or if the sink lacks a method
    or has one with other parameters. Errors of a shipped sink's constructor are raised unchanged.
    """
    factory = resolve(KEY, name, SINKS)
    if is_shipped(name, SINKS):
        return factory(config, context)
    try:
        sink: Sink = factory(config, context)
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{KEY}={name!r}: sink(config, context) raised {describe(error)}: correct that line"
        ) from error
    check_methods(KEY, name, sink)
    return UserSink(name, sink)


@dataclass(frozen=True, slots=True)
class UserSink:
    """Sink of a user: an import path, or a table entry that leads to one.

    If a method of the user's sink raises an error other than ``SlimeLikeError``, it is raised as ``UserCodeError``.
    """

    name: str
    sink: Sink

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one step."""
        with name_user_errors(KEY, self.name, f"step {step}"):
            self.sink.log(step, values, spans)

    def note(self, text: str) -> None:
        """Show a note, if the sink has ``note``."""
        if isinstance(self.sink, ShowsNotes):
            with name_user_errors(KEY, self.name, f"the note {text!r}"):
                self.sink.note(text)

    def warn(self, step: int, warning: RunWarning) -> None:
        """Record a warning, if the sink has ``warn``."""
        if isinstance(self.sink, KeepsWarnings):
            with name_user_errors(KEY, self.name, f"a warning of step {step}"):
                self.sink.warn(step, warning)

    def close(self) -> None:
        """Close the sink."""
        with name_user_errors(KEY, self.name, "the end of the run"):
            self.sink.close()
