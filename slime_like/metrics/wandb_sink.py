"""``metrics.wandb``: curves and settings of a run on wandb."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.types import RunWarning, SinkContext, StepSpans
from slime_like.util.reading import InputFile, shown


class WandbSink:
    """Curves and settings to wandb; offline without an API key. Never sends prompts or responses.

    The run id is stored in the run folder (``WANDB_RUN_ID`` has precedence), so a resumed run continues the same wandb
    run. Steps are logged as a metric and used as x axis: wandb drops rows whose internal step it has already seen, and a
    resumed run repeats the steps after its checkpoint.
    """

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb=true or metrics.sinks=[wandb], but wandb is not installed: pip install wandb"
            ) from error
        run_dir = context.run_dir
        offline = not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            name=run_dir.name,
            id=_wandb_id(run_dir / "wandb" / "run_id", resumed=context.first_step > 0),
            resume="allow",
            dir=str(run_dir),
            config=dict(context.settings),
            mode="offline" if offline else None,
            settings=wandb.Settings(save_code=False, disable_git=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one row of metrics."""
        del spans
        self._run.log({**values, "step": step})

    def warn(self, step: int, warning: RunWarning) -> None:
        """Raise an alert, without the quoted sample."""
        self._run.alert(title="slime_like", text=f"step {step}: {warning.text}", level="WARN")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb_id(path: Path, *, resumed: bool) -> str:
    """Return the wandb id of this run: the user's, the stored one, or a new one; store it in the run folder."""
    stored = InputFile(path, ConfigError, "remove it").text().strip() if resumed and path.is_file() else ""
    if stored and not re.fullmatch(r"[\w-]{1,64}", stored):
        raise ConfigError(f"{path} holds {shown(stored)}, which is no id of a wandb run: correct it, or remove it")
    chosen = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chosen + "\n")
    return chosen
