"""New weights in a running engine: the engine computes with them, and refuses to generate while they are incomplete."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import re
import threading
from collections.abc import Generator, Iterator

import numpy as np
import psutil
import pytest
import torch

from slime_like.cluster.workers import trainer_worker
from slime_like.config.schema import names
from slime_like.config.schema.residency import CUDA_GRAPH, ENGINE_PARTS, KV_CACHE
from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import Bucket, TensorMeta, WeightSource
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.ports import PortLease
from slime_like.weight_sync.broadcast import BroadcastSender
from slime_like.weight_sync.shared import SharedBucketMemory
from tests.engine.closeness import assert_close
from tests.engine.conftest import ADMIN_KEY, Models, RunningEngine, make_sampling, payload, prompt
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version

pytestmark = pytest.mark.engine
IDS = prompt(40, seed=5)


def check_computes(engine: RunningEngine, models: Models, name: str) -> None:
    """Assert that the engine's scores equal those of transformers with the weights of ``name``."""
    (logprobs,) = engine.run(engine.client.score([IDS], 1.0))
    assert_close(logprobs, models.logprobs(name, IDS, 1.0))


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the weights of A at version 0 on the shared engine and resume decoding, after each test."""
    yield
    engine: RunningEngine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


def test_pushes_of_tensors_replace_the_weights(engine: RunningEngine, models: Models) -> None:
    for version, name in ((1, "B"), (2, "A"), (3, "B")):
        engine.run(engine.push(models.tensors(name), version, remote=version == 1))
        check_computes(engine, models, name)
        assert engine.run(engine.client.version()) == version


def test_an_engine_whose_weights_were_released_generates_after_a_push_only(
    engine: RunningEngine, models: Models
) -> None:
    client = engine.client
    with pytest.raises(EngineError, match="pause generation before memory is released"):
        engine.run(client.release_memory(ENGINE_PARTS))
    client._released.clear()
    engine.run(client.pause())
    engine.run(client.release_memory(ENGINE_PARTS))
    assert client.released == set(ENGINE_PARTS)
    engine.run(client.restore_memory(ENGINE_PARTS))
    with pytest.raises(EngineError, match="generation stays paused: the memory of the weights was released"):
        engine.run(client.resume())
    engine.run(engine.push(models.tensors("B"), 1))
    check_computes(engine, models, "B")


def test_an_engine_without_its_cache_keeps_its_weights(engine: RunningEngine, models: Models) -> None:
    client, parts = engine.client, (KV_CACHE, CUDA_GRAPH)
    for _ in range(2):  # released parts can be released again
        engine.run(client.pause())
        engine.run(client.release_memory(parts))
    for _ in range(2):
        engine.run(client.restore_memory(ENGINE_PARTS))
    assert client.released == set()
    engine.run(client.resume())
    check_computes(engine, models, "A")


class TensorSource:
    """Weight source of one rank, in buckets of 20 tensors."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def manifest(self) -> tuple[TensorMeta, ...]:
        raise NotImplementedError  # no sender calls this

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        items = list(self._tensors.items())
        for first in range(0, len(items), 20):
            yield Bucket(tuple(items[first : first + 20]))


class CountingSender(BroadcastSender):
    """Broadcast transport that counts its pushes."""

    pushes = 0

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        CountingSender.pushes += 1
        return await super().send(source)


def test_a_transport_from_the_table_pushes_weights(
    engine: RunningEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport is added by one line in its table."""
    monkeypatch.setitem(names.SPLIT_TRANSPORTS, "counting", f"{__name__}:CountingSender")
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "127.0.0.1")
    transport = TransportSpec(kind="counting", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    sender = trainer_worker._make_sender([engine.client], transport, "test")

    for version, name in ((1, "B"), (2, "A"), (3, "B")):
        engine.run(engine.update(sender.send(TensorSource(models.tensors(name))), version))
        check_computes(engine, models, name)
    engine.run(sender.close())
    assert CountingSender.pushes == 3


@contextlib.contextmanager
def stop_engine(engine: RunningEngine, seconds: float) -> Generator[None]:
    """Suspend all processes of the engine for this time."""
    main = psutil.Process(engine.server.pid)
    processes = [main, *main.children(recursive=True)] if seconds else []
    for process in processes:
        process.suspend()
    timer = threading.Timer(seconds, lambda: [process.resume() for process in processes])
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("stopped_s", [0.0, 1.0])
def test_an_engine_that_waits_in_a_rendezvous_with_a_lost_engine_is_released(
    engine: RunningEngine, models: Models, stopped_s: float
) -> None:
    """With ``stopped_s`` the living engine reaches the rendezvous after the loss is known."""
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    with PortLease("127.0.0.1") as unused_port:
        lost_engine = EngineClient(
            f"http://127.0.0.1:{unused_port}", admin_key=ADMIN_KEY, name="engine 1", deadline_s=60
        )
        sender = BroadcastSender([engine.client, lost_engine], transport=transport, group_name="gone", host="127.0.0.1")
        with pytest.raises(EngineLost, match="engine 1"), stop_engine(engine, stopped_s):
            engine.run(sender.send(TensorSource(models.tensors("B"))))
        engine.run(sender.close())
    engine.run(engine.push(models.tensors("B"), 1))
    check_computes(engine, models, "B")


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("model.layers.2.self_attn.v_proj.weight", r"model\.layers\.2\.self_attn\.qkv_proj\.weight \(2048 of 8192 "),
        ("model.layers.0.mlp.up_proj.weight", r"model\.layers\.0\.mlp\.gate_up_proj\.weight \(8192 of 16384 "),
        ("model.embed_tokens.weight", r"model\.embed_tokens\.weight"),
        ("model.layers.3.self_attn.q_norm.weight", r"model\.layers\.3\.self_attn\.q_norm\.weight"),
    ],
)
def test_a_commit_names_parameters_that_were_not_written(
    engine: RunningEngine, models: Models, name: str, parameter: str
) -> None:
    tensors = models.tensors("B")
    del tensors[name]
    with pytest.raises(EngineError, match=f"not complete.*1 parameters: {parameter}"):
        engine.run(engine.push(tensors, 1))
    assert engine.run(engine.client.version()) == 0


def test_after_a_failed_commit_the_engine_refuses_until_a_complete_push(engine: RunningEngine, models: Models) -> None:
    tensors = models.tensors("B")
    del tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        engine.run(engine.push(tensors, 1))
    with pytest.raises(EngineError, match=r"HTTP 409: generation stays paused.*model\.norm\.weight"):
        engine.run(engine.client.resume())
    with pytest.raises(EngineError, match=r"HTTP 400: generation is refused: .*model\.norm\.weight"):
        engine.run(engine.client.generate(IDS, [0], make_sampling()))
    engine.run(engine.push(models.tensors("B"), 2))
    check_computes(engine, models, "B")


def test_a_skipped_push_is_a_failed_commit(engine: RunningEngine) -> None:
    with pytest.raises(EngineError, match=r"rank 0: 34 parameters: .* and 31 more"):
        engine.run(engine.push({}, 1))


def test_an_open_update_can_be_repeated(engine: RunningEngine, models: Models) -> None:
    async def give_up() -> None:
        await engine.client.pause()
        await engine.client.begin_update()
        await engine.client.update_from_tensors(payload({"model.norm.weight": torch.ones(64)}))

    engine.run(give_up())
    with pytest.raises(EngineError, match="HTTP 409: generation stays paused: a weight update is open"):
        engine.run(engine.client.resume())
    engine.run(engine.push(models.tensors("B"), 1))
    check_computes(engine, models, "B")


def test_invalid_tensors_are_refused_and_the_engine_survives(engine: RunningEngine) -> None:
    async def send(body: bytes) -> None:
        await engine.client.pause()
        await engine.client.begin_update()
        await engine.client.update_from_tensors(body)

    wrong_shape = {"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)}
    region = SharedBucketMemory()
    for body in (payload(wrong_shape), region.write(Bucket(tuple(wrong_shape.items())))):
        with pytest.raises(EngineError, match="could not be loaded"):
            engine.run(send(body))
    region.close()
    # A process id above Linux's maximum.
    dead_sender = re.sub(rb'"pid": \d+', b'"pid": 4194305', region.write(Bucket(())))
    with pytest.raises(EngineError, match="the engine cannot open the sender's memory"):
        engine.run(send(dead_sender))
    body = io.BytesIO()
    pickle.Pickler(body).dump([("x", asyncio.sleep)])
    with pytest.raises(EngineError, match="could not be loaded"):
        engine.run(send(body.getvalue()))
    assert engine.run(engine.client.health())


def test_an_update_needs_a_paused_engine(engine: RunningEngine) -> None:
    with pytest.raises(EngineError, match="pause generation before a weight update"):
        engine.run(engine.client.begin_update())


def test_requests_in_flight_continue_under_new_weights(engine: RunningEngine, models: Models) -> None:
    """Each token, and the KV cache of its prefix, is computed with the weights that the token's span names."""
    ids = prompt(20, seed=9)
    for completion in generate_over_two_pushes(engine, models, ids, 480):
        assert_close(completion.logprobs, logprobs_by_version(models, ids, completion))


def test_cached_prefixes_of_old_weights_are_not_used(engine: RunningEngine, models: Models) -> None:
    engine.run(engine.client.generate(IDS, [1], make_sampling()))
    engine.run(engine.push(models.tensors("B"), 1))
    (completion,) = engine.run(engine.client.generate(IDS, [1], make_sampling()))
    sequence = np.concatenate([IDS, completion.token_ids])
    assert_close(completion.logprobs, models.logprobs("B", sequence, 1.0)[-12:])


def test_an_engine_refuses_requests_without_its_key(engine: RunningEngine) -> None:
    stranger = EngineClient(engine.server.url, admin_key="another key", name="stranger", deadline_s=30)
    calls = [stranger.begin_update(), stranger.generate(IDS, [0], make_sampling()), stranger.abort_all()]
    for call in calls:
        with pytest.raises(EngineError, match=r"stranger at .*HTTP 401"):
            engine.run(call)
    engine.run(stranger.close())
