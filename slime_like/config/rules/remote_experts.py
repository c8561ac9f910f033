"""Rules for ``rollout.remote_experts``.

The engine checks SGLang's arguments again, with the values that SGLang resolves (``slime_like_plugins.remote_experts``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.expert_load import FIX, read_load
from slime_like.config.schema.remote_experts import MIN_KEY_LENGTH, UNSUPPORTED_FIELDS, field_obstacle
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.counted import counted
from slime_like.util.reading import InputFile

KEY = "rollout.remote_experts"
OFF = f"set {KEY}.count=0"


def check_remote_experts(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.remote_experts`` conflicts with other keys."""
    rollout, remote = cfg.rollout, cfg.rollout.remote_experts
    if not remote.enabled:
        return
    if cfg.run.deterministic:
        raise ConfigError(
            f"{KEY}.count={remote.count} with run.deterministic=true: a worker's results depend on which tokens are sent in one "
            f"request; {OFF}, or set run.deterministic=false"
        )
    for field in UNSUPPORTED_FIELDS:
        value = rollout.sglang.get(field)
        if reason := field_obstacle(field, value):
            raise ConfigError(
                f"rollout.sglang.{field}={value!r} with {KEY}: {reason}; remove rollout.sglang.{field}, or {OFF}"
            )
    if rollout.dp_attention > 1 or rollout.flow_mla.enabled:
        raise ConfigError(
            f"{KEY} with rollout.dp_attention={rollout.dp_attention} has not been tested: set rollout.dp_attention=1 and "
            f"rollout.flow_mla.enabled=false, or {OFF}"
        )
    if remote.workers and (len(remote.workers) != rollout.tp or rollout.num_engines > 1):
        raise ConfigError(
            f"{KEY}.workers has {counted(len(remote.workers), 'address', 'addresses')} for {counted(rollout.num_engines, 'engine')} of {counted(rollout.tp, 'rank')}: a "
            f"worker serves one rank; give one address for each rank of a single engine, or remove {KEY}.workers and {KEY}.key_file"
        )


def check_remote_experts_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.remote_experts`` does not fit ``model``, or names an unsuitable file."""
    remote = cfg.rollout.remote_experts
    if not remote.enabled:
        return
    num_selected = remote.count or max(remote.experts) + 1
    max_selected = model.num_experts - (1 if remote.count else 0)
    if not model.num_experts or num_selected > max_selected or len(remote.experts) == model.num_experts:
        name = f"experts={remote.experts}" if remote.experts else f"count={remote.count}"
        raise ConfigError(
            f"{KEY}.{name}: the model in {model.folder} has {model.num_experts} experts per layer, of which at least one has to "
            "stay in the engine"
        )
    if remote.load_file:
        lengths = {layer: len(counts) for layer, counts in read_load(Path(remote.load_file)).items()}
        layers = sorted({*lengths, *model.sparse_layers})
        if wrong_layers := [layer for layer in layers if lengths.get(layer) != model.num_experts]:
            raise ConfigError(
                f"{KEY}.load_file={remote.load_file} has {lengths.get(wrong_layers[0], 0)} experts of layer {wrong_layers[0]}, but "
                f"the model in {model.folder} has {model.num_experts}; {FIX}"
            )
    if remote.record_load and not Path(remote.record_load).absolute().parent.is_dir():
        raise ConfigError(f"{KEY}.record_load={remote.record_load!r} is in a folder that does not exist: create it")
    if remote.key_file:
        _check_key(Path(remote.key_file))


def _check_key(path: Path) -> None:
    file = InputFile(path, ConfigError, "create it with e.g. `openssl rand -hex 32`", key=f"{KEY}.key_file")
    if (length := len(file.data().strip())) < MIN_KEY_LENGTH:
        raise file.refused(f"has {length} characters, but a key needs at least {MIN_KEY_LENGTH}")
    state = path.stat()
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or state.st_uid != os.getuid():
        raise ConfigError(f"{KEY}.key_file={path} can be read by other users: run `chmod 600 {path}` as its owner")
