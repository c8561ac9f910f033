"""Routed experts: the experts that an engine chose for each token, stored as an extra column of samples and batches.

Axis suffixes: L tokens, N tokens whose experts an engine computed, B blocks of the decoder, K experts per token. A row of
zeros means that no experts are recorded: a recorded row has K different experts, and K is at least 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_like.errors import DataError, EngineError
from slime_like.metrics.types import Max, Mean, Metric
from slime_like.types import UNTRAINED, RoutedExperts, Sample, SampleGroup, Source

ROUTED_EXPERTS = "routed_experts"  # name in ``extras`` of samples and batches
OWN_EXPERTS = "own_experts"  # suffix of metrics of log-probabilities without replay


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Sizes of a model's routing, which determine shape, dtype and range of the experts of a token."""

    num_blocks: int  # blocks of the decoder; those without experts have zeros
    experts_per_token: int
    num_experts: int
    sparse_blocks: tuple[int, ...]  # indices of the blocks with experts

    @property
    def dtype(self) -> np.dtype[np.uint8 | np.uint16]:
        """Return the smallest integer type that holds every expert index."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def parse(self, data: bytes, num_tokens: int) -> RoutedExperts:
        """Return experts [N, B, K] from the int32 bytes that SGLang sends for ``num_tokens`` tokens.

        Raises ``EngineError`` if the number of experts or an expert index does not fit the model, and ``ValueError`` if
        ``data`` is not a whole number of int32 values.
        """
        flat = np.frombuffer(data, dtype=np.int32)
        expected = (num_tokens, self.num_blocks, self.experts_per_token)
        if flat.size != np.prod(expected):
            raise EngineError(
                f"/generate returned {flat.size} routed experts, not {' * '.join(map(str, expected))} (tokens * layers * "
                "num_experts_per_tok of config.json): engine and trainer have different models"
            )
        if flat.size and not 0 <= flat.min() <= flat.max() < self.num_experts:
            raise EngineError(
                f"/generate returned routed experts {flat.min()} to {flat.max()}, but config.json has {self.num_experts} experts per "
                "layer: engine and trainer have different models"
            )
        return flat.astype(self.dtype).reshape(expected)


@dataclass(frozen=True, slots=True)
class RoutingDifference:
    """Comparison of replayed experts with the trainer's own choice, over all ranks."""

    share: float  # share of tokens whose experts differ, mean over the layers
    max_share: float  # the same, maximum over the layers
    max_gap: float  # largest score difference in favour of a router's own choice; scores: logits, or sigmoids plus bias

    def metrics(self, prefix: str) -> tuple[Metric, ...]:
        """Return the metrics ``<prefix>/routed_experts_*``."""
        return (
            Mean(f"{prefix}/routed_experts_differ", self.share),
            Max(f"{prefix}/routed_experts_differ_max", self.max_share),
            Max(f"{prefix}/routed_experts_gap_max", self.max_gap),
        )


def routing_column(experts_NBK: RoutedExperts | None, num_tokens: int) -> dict[str, RoutedExperts]:
    """Return the ``extras`` entry of a sample of ``num_tokens`` tokens; empty if the engine returned no experts.

    An engine computes no experts for the last token that it samples, which gets zeros.
    """
    if experts_NBK is None:
        return {}
    column = np.zeros((num_tokens, *experts_NBK.shape[1:]), experts_NBK.dtype)
    num_rows = min(num_tokens, len(experts_NBK))
    column[:num_rows] = experts_NBK[:num_rows]
    return {ROUTED_EXPERTS: column}


def with_routing(groups: Sequence[SampleGroup], shape: RoutingShape) -> tuple[SampleGroup, ...]:
    """Return ``groups`` with a column of experts in every sample. A sample with neither experts nor trained tokens gets zeros.

    Raises ``EngineError`` if the experts of a token that precedes a trained one are missing, or if a column of experts
    has another shape or dtype than the sample and ``shape`` require.
    """
    return tuple(
        replace(group, samples=tuple(_with_experts(sample, shape) for sample in group.samples)) for group in groups
    )


def check_dumped(groups: Sequence[SampleGroup], shape: RoutingShape, source: str) -> None:
    """Raise ``DataError`` naming ``source`` if experts that training would replay are missing or do not fit the model."""
    try:
        with_routing(groups, shape)
    except EngineError as error:
        raise DataError(
            f"{source}: {error}; dump it with algo.routing_replay=rollout, or set algo.routing_replay=off"
        ) from error


def _with_experts(sample: Sample, shape: RoutingShape) -> Sample:
    experts = sample.extras.get(ROUTED_EXPERTS)
    trained = () if sample.status in UNTRAINED else sample.spans
    ranges = [np.arange(max(s.start, 1), s.stop) - 1 for s in trained if s.source is Source.MODEL]
    sources = np.concatenate([np.zeros(0, np.int64), *ranges])  # tokens from which a trained token was sampled
    name = f"sample {sample.sample_id} of group {sample.group_id}"
    expected = (len(sample.token_ids), shape.num_blocks, shape.experts_per_token)
    if experts is None:
        if len(sources):
            raise EngineError(
                f"{name} has no routed experts, which algo.routing_replay=rollout replays: a generate function has to return "
                "samples of slime_like.rollout.generate (to_sample, Episode), or keep Completion.routed_experts in "
                f"Sample.extras[{ROUTED_EXPERTS!r}]"
            )
        column: Mapping[str, RoutedExperts] = {ROUTED_EXPERTS: np.zeros(expected, shape.dtype)}
        return replace(sample, extras={**sample.extras, **column})
    if experts.shape != expected or experts.dtype != shape.dtype:
        raise EngineError(
            f"{name} has routed experts of {experts.dtype} {list(experts.shape)}, but its tokens and the model need {shape.dtype} "
            f"{list(expected)} (tokens, layers, num_experts_per_tok): a generate function has to return one row per token"
        )
    chosen_experts = experts[sources][:, list(shape.sparse_blocks)]
    missing = chosen_experts[..., 0] == chosen_experts[..., 1]
    if missing.any():
        token, block = (int(axis[0]) for axis in np.nonzero(missing))
        raise EngineError(
            f"{name}: the engine returned no experts of layer {shape.sparse_blocks[block]} for token {sources[token]}, after which a "
            "trained token was sampled; this engine does not capture the experts of every layer: set algo.routing_replay=off"
        )
    return sample
