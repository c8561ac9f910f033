"""Number of rollouts for loop.num_epoch passes over data.train, computed as in slime (--num-epoch) and verl.

Both count the complete rollouts of one epoch (``get_num_rollout_per_epoch`` of ``slime/ray/rollout.py``; verl's data loader with
``drop_last``) and multiply by the number of epochs. slime counts rows after removing overlong ones; here, overlong rows
count too.
"""

from __future__ import annotations

from slime_like.config.rules.files import check_data_file
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.row_count import selected_rows


def resolve_epochs(cfg: TrainConfig) -> None:
    """Set loop.num_rollout of an unsealed config if loop.num_epoch is set.

    Raises ``ConfigError`` if the run does not read data.train, or if data.train has fewer rows than one rollout needs. Raises
    ``DataError`` unless data.train names a readable data file.
    """
    epochs, prompts = cfg.loop.num_epoch, cfg.rollout.batch_size
    if epochs is None:
        return
    if cfg.data.source != "file" or cfg.run.replay_from is not None:
        data_key = f"data.source={cfg.data.source}" if cfg.data.source != "file" else "run.replay_from"
        raise ConfigError(
            f"loop.num_epoch={epochs} counts the rows of data.train, which {data_key} does not read: set loop.num_rollout, and "
            "loop.num_epoch=null"
        )
    check_data_file("data.train", cfg.data.train)
    rows = len(selected_rows(cfg.data.train))
    if not (rollouts := rows // prompts * epochs):
        raise ConfigError(
            f"loop.num_epoch={epochs}: the {rows} rows of data.train={cfg.data.train!r} are fewer than "
            f"rollout.batch_size={prompts}: an epoch has no complete rollout; lower rollout.batch_size, or set "
            "loop.num_rollout and loop.num_epoch=null"
        )
    cfg.loop.num_rollout = rollouts
