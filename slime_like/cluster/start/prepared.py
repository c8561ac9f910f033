"""Load the config of a run, call ``run.prepare`` (it may create data and model), and check the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_like.cluster.plan.device import resolve_device
from slime_like.cluster.plan.machine import probe_machine
from slime_like.cluster.plan.shapes import PREPARED, model_config
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.cluster.start.folder import check_folder
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_files, check_model
from slime_like.config.rules.user_functions import check_function
from slime_like.config.schema.root import TrainConfig
from slime_like.quickstart.prepare import check_folders
from slime_like.registry import resolve
from slime_like.util.user_code import name_user_errors


def load_prepared(argv: Sequence[str]) -> TrainConfig:
    """Load a config, check ``run.dir``, call ``run.prepare``, check the files, and return the config.

    Raises ``ConfigError``, ``CheckpointError`` or ``DataError`` if a check fails, and ``UserCodeError`` if ``run.prepare``
    raises anything but a ``SlimeLikeError``.
    """
    cfg = load_config(argv, files=False)
    check_folder(cfg)
    if cfg.run.prepare is not None:
        if cfg.placement.ray_address is not None:  # checked here because ``run.prepare`` may train for minutes
            from slime_like.cluster.start.local_ray import reach  # imports Ray, which takes seconds

            reach(cfg.placement.ray_address)
        check_function("run.prepare", cfg.run.prepare, {})
        _check_unwritten(cfg)
        prepare = resolve("run.prepare", cfg.run.prepare, {})
        with name_user_errors("run.prepare", cfg.run.prepare, f"run.dir={cfg.run.dir}"):
            prepare(cfg)
    check_files(cfg)
    return load_config(argv) if cfg.loop.num_epoch is not None else cfg  # the rows can be counted only now


def _check_unwritten(cfg: TrainConfig) -> None:
    """Check the run's device, and the folders and model that ``run.prepare`` will write, before it is called.

    Raises ``ConfigError`` or ``CheckpointError`` if they cannot be used. Folders and model are checked only if
    ``run.prepare`` is one of ``PREPARED``. The model is checked only if its folder is missing; if the folder exists,
    ``run.prepare`` writes the model again or returns quickly.
    """
    machine = probe_machine()
    if cfg.run.prepare in PREPARED:
        check_folders(cfg)
    model = None if Path(cfg.model.hf_checkpoint).exists() else model_config(cfg, machine)
    if model is not None:
        check_model(cfg, model)
    resolve_device(cfg, model, machine, PlanDecisions([]))
