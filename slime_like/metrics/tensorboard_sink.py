"""Sink ``tensorboard``: scalars in tensorboard's event format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.types import SinkContext, StepSpans


class TensorboardSink:
    """Sink that writes scalars with tensorboard's own writer, because torch's writer would import torch here.

    A resumed run records its first step, so that tensorboard drops the earlier values of the steps that are repeated.
    """

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        del config
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "metrics.tensorboard=true or metrics.sinks=[tensorboard], but tensorboard is not installed: pip install tensorboard"
            ) from error
        events: Any = event_pb2  # protobuf creates these classes at import, where a type checker cannot see them
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._writer: Any = EventFileWriter(str(context.run_dir / "tensorboard"))
        start = events.SessionLog(status=events.SessionLog.START)
        first_step = context.first_step + (context.first_step > 0)
        self._writer.add_event(self._event(step=first_step, wall_time=time.time(), session_log=start))

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Write one scalar per metric."""
        del spans
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
