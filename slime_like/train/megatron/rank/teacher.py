"""One teacher rank: a policy of any shape over the actor's vocabulary, forward only."""

from __future__ import annotations

import time
from collections.abc import Sequence

from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.resolved import RankSpec
from slime_like.distributed.wrapper import install
from slime_like.metrics.types import Last, Metric
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.forward import LogprobSettings, check_tokens, make_micro, score_micros
from slime_like.train.megatron.model.model import PolicyModel, build_segments, load_hf
from slime_like.train.megatron.model.transformer_config import choose_family, transformer_config
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank.rank_model import OpenRollout
from slime_like.train.megatron.rank.residency import scoring_state


class RankTeacher:
    """The teacher on one rank. ``score`` is a collective."""

    def __init__(self, spec: RankSpec, rank_info: RankInfo) -> None:
        folder = HFFolder(spec.model.hf_checkpoint, "teacher.hf_checkpoint")
        family = choose_family(spec, folder.config())
        self.rank_info = rank_info
        self._vocabulary = int(family.hf.vocab_size), folder.path / "config.json"
        self.model = build_segments(PolicyModel, transformer_config(spec, family), family, rank_info, spec.model)
        self.model.requires_grad_(requires_grad=False)
        load_hf(self.model, family.weights(), folder, rank_info)
        self.device_state = scoring_state(self.model, rank_info.device)
        self.logprob_settings = LogprobSettings(spec.temperature, spec.model.logits_chunk)

    def score(self, steps: Sequence[Sequence[PackedBatch]]) -> tuple[Columns | None, tuple[Metric, ...]]:
        """Return log-probabilities of trained tokens at the sampling temperature, and metrics.

        The log-probabilities are None except on the reporter of each shard. Raises ``DataError`` on a token id outside the
        teacher's vocabulary.
        """
        with install.phase("score"):
            columns, metrics = self._score(steps)
        return columns, (*metrics, *install.drain())

    def _score(self, steps: Sequence[Sequence[PackedBatch]]) -> tuple[Columns | None, tuple[Metric, ...]]:
        start = time.perf_counter()
        for batch in (batch for step in steps for batch in step):
            check_tokens(
                batch, *self._vocabulary
            )  # a student's vocabulary may be padded to more rows than its teacher's
        rollout = OpenRollout([[make_micro(batch, self.rank_info) for batch in step] for step in steps])
        micros = rollout.micros
        scores = score_micros(
            self.model, micros, [micro.batch.loss_weight > 0 for micro in micros], self.logprob_settings
        )
        seconds = Last("perf/teacher_log_probs_time", time.perf_counter() - start)
        columns = rollout.group_by_step(scores) if self.rank_info.is_shard_reporter else None
        return columns, ((seconds,) if self.rank_info.is_reporter else ())
