"""Calls of all ranks: shared arguments are stored once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.workers import trainer_group
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.resolved import Layout, RankSpec, TransportSpec
from slime_like.interfaces import EngineAddress

NUM_RANKS = 16
SPEC = RankSpec(
    model=ModelConfig(hf_checkpoint="none"),
    optim=OptimConfig(),
    algo=GrpoConfig(),
    layout=Layout(dp=NUM_RANKS),
    device="cpu",
    dtype="float32",
    temperature=1.0,
    num_steps=1,
    steps_per_rollout=1,
    max_tokens_per_rank=8,
    seed=0,
    deadline_s=60.0,
)


def test_a_push_stores_the_addresses_of_the_engines_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickling them for each rank takes time by ranks x engines: 55 s for 8,192 ranks and 1,024 engines."""
    stored: list[object] = []
    arguments: list[tuple[Any, ...]] = []

    def put(value: object) -> object:
        stored.append(value)
        return SimpleNamespace(value=value)

    def send_weights(*args: Any) -> str:
        arguments.append(args)
        return f"ref {len(arguments)}"

    monkeypatch.setattr(trainer_group, "put", put)
    monkeypatch.setattr(trainer_group, "wait_all", lambda refs, deadline: dict.fromkeys(refs, ()))
    worker: Any = SimpleNamespace(send_weights=SimpleNamespace(remote=send_weights))
    engines = [EngineAddress(f"engine {i}", "http://127.0.0.1:1", "", 8) for i in range(4)]

    trainer_group.TrainerGroup([worker] * NUM_RANKS, SPEC).send_weights(
        engines, TransportSpec("tensor", "gloo", 2**30, 60.0)
    )

    assert stored == [tuple(engines)]
    assert len(arguments) == NUM_RANKS
    assert len({id(args[0]) for args in arguments}) == 1
    assert arguments[0][0].value == tuple(engines)
