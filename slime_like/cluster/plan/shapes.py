"""Shapes of a run's models, from their folders, from the default job that will write them, or from the planner's table.

The default jobs (``slime_like.quickstart``) train small models that their ``run.prepare`` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import RoleShapes
from slime_like.config.rules.files import refuse_family
from slime_like.config.rules.hf import HfConfig, hf_config, read_hf_config, read_json
from slime_like.config.schema.model import ModelConfig
from slime_like.config.schema.resolved import CriticSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError
from slime_like.planner.config_json import read_shape, shape_of
from slime_like.planner.models import MODELS, refused_type, table_config
from slime_like.planner.shapes import ModelShape
from slime_like.quickstart.model import DENSE, GDN, LATENT, MOE, NEXT, TOOL, config_fields

KEY = "model.hf_checkpoint"
PREPARED = {
    "slime_like.quickstart.prepare:prepare": DENSE,
    "slime_like.quickstart.prepare:prepare_gdn": GDN,
    "slime_like.quickstart.prepare:prepare_latent": LATENT,
    "slime_like.quickstart.prepare:prepare_moe": MOE,
    "slime_like.quickstart.prepare:prepare_next": NEXT,
    "slime_like.quickstart.prepare:prepare_tool": TOOL,
}
"""Map from run.prepare of a default job to the model that it writes."""


def model_config(cfg: TrainConfig, machine: Machine) -> HfConfig | None:
    """Return config.json of ``model.hf_checkpoint`` or, if the folder is missing, the config expected there.

    With ``run.prepare`` of a default job, this is the config that it will write; with another ``run.prepare``, return None.
    Without ``run.prepare``, it is the config in the planner's table of public models, unless ``machine`` is this machine.
    Raises ``CheckpointError`` if there is no config or it cannot be used, and ``ConfigError`` if a public model of this name is
    not supported.
    """
    folder = cfg.model.hf_checkpoint
    if Path(folder).exists():
        return read_hf_config(KEY, folder)
    if cfg.run.prepare is not None:
        spec = PREPARED.get(cfg.run.prepare)
        return None if spec is None else hf_config(KEY, folder, {"model_type": spec.model_type, **config_fields(spec)})
    if machine.is_local:
        return read_hf_config(KEY, folder)
    refuse_family(KEY, folder, refused_type(folder) or "")
    values = table_config(folder)
    if values is None:
        raise CheckpointError(
            f"{KEY}={folder!r} is neither a folder nor a model of the planner's table: give a folder with a config.json, or "
            f"the path of one of {', '.join(MODELS)}"
        )
    return hf_config(KEY, folder, values)


def config_values(cfg: TrainConfig) -> dict[str, Any] | None:
    """Return the values of config.json of ``model.hf_checkpoint``.

    If the folder is missing, return the values that ``run.prepare`` of a default job will write. For any other run, return those
    in the planner's table of public models, or None if the table lacks the model. Raises ``CheckpointError`` if the folder
    exists but has no valid config.json.
    """
    folder = Path(cfg.model.hf_checkpoint)
    if folder.exists():
        return read_json(KEY, folder / "config.json")
    spec = PREPARED.get(cfg.run.prepare or "")
    return table_config(str(folder)) if spec is None else {"model_type": spec.model_type, **config_fields(spec)}


def role_shapes(cfg: TrainConfig, critic: CriticSpec | None, teacher: TeacherSpec | None) -> RoleShapes:
    """Return the shapes of the models of actor, critic and teacher, as far as they are known.

    If a config.json cannot be used, the result has no shapes, and its field ``unknown`` contains the reason.
    """
    try:
        return RoleShapes(
            actor=_shape(KEY, cfg.model, cfg.run.prepare),
            critic=None if critic is None else _shape(critic.rank.model_key, critic.rank.model, cfg.run.prepare),
            teacher=None if teacher is None else _shape(teacher.rank.model_key, teacher.rank.model, None),
        )
    except CheckpointError as error:  # a valid config.json may lack sizes for which transformers has defaults
        return RoleShapes(actor=None, unknown=str(error))


def _shape(key: str, config: ModelConfig, prepare: str | None) -> ModelShape | None:
    folder = config.hf_checkpoint
    if Path(folder).exists():
        return read_shape(key, folder, config.family)
    spec = PREPARED.get(prepare or "")
    values: dict[str, Any] | None = table_config(folder)
    if spec is not None:
        values = {"model_type": spec.model_type, **config_fields(spec)}
    return None if values is None else shape_of(values, folder, family=config.family)
