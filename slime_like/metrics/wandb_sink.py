"""Sink ``wandb``: curves and settings of a run."""

from __future__ import annotations

import netrc
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.types import RunWarning, SinkContext, StepSpans
from slime_like.util.reading import InputFile, abbreviate, one_line, reason

# Ids that wandb's ``Settings.validate_run_id`` accepts, without control characters and of bounded length.
WANDB_ID = re.compile(r"(?!\s)[^:;,#?/'\x00-\x1f]{1,128}(?<!\s)")


class WandbSink:
    """Sink that sends curves, settings and warnings to wandb, but no prompts or responses.

    It stores them offline if ``WANDB_MODE`` is not set and there is no API key (``_has_api_key``). The run folder stores the id
    of the wandb run, which a resumed run continues (``WANDB_RUN_ID`` takes precedence). The step is logged as a metric and used
    as the x axis, because a resumed run repeats the steps after its checkpoint, and wandb drops rows with an internal step that
    it already has.
    """

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb=true or metrics.sinks=[wandb], but wandb is not installed: pip install wandb"
            ) from error
        run_dir = context.run_dir
        offline = "WANDB_MODE" not in os.environ and not _has_api_key()
        wandb_id = _wandb_id(run_dir / "wandb" / "run_id", resumed=context.first_step > 0)
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                group=config.wandb_group,
                name=run_dir.name,
                id=wandb_id,
                resume="allow",
                dir=str(run_dir),
                config=dict(context.settings),
                mode="offline" if offline else None,
                settings=wandb.Settings(save_code=False, disable_git=True, console="off"),
            )
        except Exception as error:  # fault boundary: wandb raises its own errors for the network, the key and settings
            raise ConfigError(
                f"metrics.wandb=true or metrics.sinks=[wandb]: wandb did not start ({one_line(str(error))}): correct the key of "
                "`wandb login` or WANDB_API_KEY, set WANDB_MODE=offline, or remove wandb"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one row of metrics."""
        del spans
        self._run.log({**values, "step": step})

    def warn(self, step: int, warning: RunWarning) -> None:
        """Send a warning as an alert, without its example, which quotes a sample."""
        self._run.alert(title="slime_like", text=f"step {step}: {warning.text}", level="WARN")

    def close(self) -> None:
        """Finish the wandb run."""
        self._run.finish()


def _has_api_key() -> bool:
    """Return whether wandb finds an API key in ``WANDB_API_KEY`` or in the .netrc file that ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        entry = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts.get(host)
    except (OSError, RuntimeError, ValueError, netrc.NetrcParseError):  # no file, no home folder, or unreadable text
        return False
    return entry is not None and bool(entry[2])


def _wandb_id(path: Path, *, resumed: bool) -> str:
    """Return the wandb id of this run and store it: ``WANDB_RUN_ID``, the stored id of a resumed run, or a new id.

    Raises ``ConfigError`` if ``WANDB_RUN_ID`` is not valid, the stored id is unreadable or not valid, or the id cannot be stored.
    """
    stored_id = InputFile(path, ConfigError, "remove it").text().strip() if resumed and path.is_file() else ""
    if stored_id and not WANDB_ID.fullmatch(stored_id):
        raise ConfigError(
            f"{path} contains {abbreviate(stored_id)}, which is not the id of a wandb run: correct or remove it"
        )
    given_id = os.environ.get("WANDB_RUN_ID")
    if given_id and not WANDB_ID.fullmatch(given_id):
        raise ConfigError(
            f"WANDB_RUN_ID={abbreviate(given_id)} cannot be the id of a wandb run: use up to 128 letters, digits, - and _, or unset it"
        )
    wandb_id = given_id or stored_id or secrets.token_hex(4)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wandb_id + "\n")
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"{path}: the id of the wandb run cannot be stored ({reason(error)}): make run.dir writable, "
            "or set metrics.wandb=false"
        ) from error
    return wandb_id
