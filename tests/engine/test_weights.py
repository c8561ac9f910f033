"""New weights in a running engine: proven by what it computes, refused while they are not whole."""

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
from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import Bucket, TensorMeta, WeightSource
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.ports import PortLease
from slime_like.weight_sync.broadcast import BroadcastSender
from slime_like.weight_sync.shared import Region
from tests.engine.closeness import assert_close
from tests.engine.conftest import KEY, Engine, Models, payload, prompt, sampled
from tests.engine.in_flight import by_version, over_two_pushes

pytestmark = pytest.mark.engine
IDS = prompt(40, seed=5)


def expect(engine: Engine, models: Models, name: str) -> None:
    """The engine computes what transformers computes with the weights of ``name``."""
    (logprobs,) = engine.run(engine.client.score([IDS], 1.0))
    assert_close(logprobs, models.logprobs(name, IDS, 1.0))


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared engine with the weights of A, decoding, at version 0."""
    yield
    engine: Engine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


def test_tensors_change_what_the_engine_computes_and_back(engine: Engine, models: Models) -> None:
    for version, name in ((1, "B"), (2, "A"), (3, "B")):
        engine.run(engine.push(models.tensors(name), version, far=version == 1))
        expect(engine, models, name)
        assert engine.run(engine.client.version()) == version


class Source:
    """A weight source of one rank: what a trainer exports, in buckets."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def manifest(self) -> tuple[TensorMeta, ...]:
        raise NotImplementedError  # a sender does not ask

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        items = list(self._tensors.items())
        for first in range(0, len(items), 20):
            yield Bucket(tuple(items[first : first + 20]))


class CountingSender(BroadcastSender):
    """A transport added from outside: a broadcast that counts its pushes."""

    pushes = 0

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        CountingSender.pushes += 1
        return await super().send(source)


def test_broadcast_from_another_process(engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a transport that one line in its table adds."""
    monkeypatch.setitem(names.SPLIT_TRANSPORTS, "counting", f"{__name__}:CountingSender")
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "127.0.0.1")
    transport = TransportSpec(kind="counting", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    sender = trainer_worker._make_sender([engine.client], transport, "test")

    async def push(name: str, version: int) -> None:
        client = engine.client
        await client.pause()
        await client.begin_update()
        await sender.send(Source(models.tensors(name)))
        await client.end_update(version)
        await client.flush()
        await client.resume()

    for version, name in ((1, "B"), (2, "A"), (3, "B")):
        engine.run(push(name, version))
        expect(engine, models, name)
    engine.run(sender.close())
    assert CountingSender.pushes == 3


@contextlib.contextmanager
def stopped(engine: Engine, seconds: float) -> Generator[None]:
    """All processes of the engine, for so long."""
    main = psutil.Process(engine.server.pid)
    processes = [main, *main.children(recursive=True)] if seconds else []
    for process in processes:
        process.suspend()
    goes_on = threading.Timer(seconds, lambda: [process.resume() for process in processes])
    goes_on.start()
    yield
    goes_on.join()


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_who_waits_to_meet_an_engine_that_is_gone_is_let_go(engine: Engine, models: Models, late_s: float) -> None:
    """Also one that comes to the meeting after it is known that another never will."""
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    with PortLease("127.0.0.1") as nobody:
        gone = EngineClient(f"http://127.0.0.1:{nobody}", admin_key=KEY, name="engine 1", deadline_s=60)
        sender = BroadcastSender([engine.client, gone], transport=transport, group_name="gone", host="127.0.0.1")
        with pytest.raises(EngineLost, match="engine 1"), stopped(engine, late_s):
            engine.run(sender.send(Source(models.tensors("B"))))
        engine.run(sender.close())
    engine.run(engine.push(models.tensors("B"), 1))
    expect(engine, models, "B")


@pytest.mark.parametrize(
    ("missing", "parameter"),
    [
        ("model.layers.2.self_attn.v_proj.weight", r"model\.layers\.2\.self_attn\.qkv_proj\.weight \(2048 of 8192 "),
        ("model.layers.0.mlp.up_proj.weight", r"model\.layers\.0\.mlp\.gate_up_proj\.weight \(8192 of 16384 "),
        ("model.embed_tokens.weight", r"model\.embed_tokens\.weight"),
        ("model.layers.3.self_attn.q_norm.weight", r"model\.layers\.3\.self_attn\.q_norm\.weight"),
    ],
)
def test_a_commit_names_what_was_not_written(engine: Engine, models: Models, missing: str, parameter: str) -> None:
    tensors = models.tensors("B")
    del tensors[missing]
    with pytest.raises(EngineError, match=f"not complete.*1 parameters: {parameter}"):
        engine.run(engine.push(tensors, 1))
    assert engine.run(engine.client.version()) == 0


def test_a_failed_commit_keeps_the_engine_refusing_until_a_whole_one(engine: Engine, models: Models) -> None:
    tensors = models.tensors("B")
    del tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        engine.run(engine.push(tensors, 1))
    with pytest.raises(EngineError, match=r"HTTP 409: generation stays paused.*model\.norm\.weight"):
        engine.run(engine.client.resume())
    with pytest.raises(EngineError, match=r"HTTP 400: no generation: .*model\.norm\.weight"):
        engine.run(engine.client.generate(IDS, [0], sampled()))
    engine.run(engine.push(models.tensors("B"), 2))
    expect(engine, models, "B")


def test_a_skipped_push_is_a_failed_commit(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"rank 0: 34 parameters: .* and 31 more"):
        engine.run(engine.push({}, 1))


def test_an_update_given_up_can_be_done_again(engine: Engine, models: Models) -> None:
    async def give_up() -> None:
        await engine.client.pause()
        await engine.client.begin_update()
        await engine.client.update_from_tensors(payload({"model.norm.weight": torch.ones(64)}))
        await engine.client.abort_update()

    engine.run(give_up())
    with pytest.raises(EngineError, match="no generation"):
        engine.run(engine.client.generate(IDS, [0], sampled()))
    engine.run(engine.push(models.tensors("B"), 1))
    expect(engine, models, "B")


def test_what_is_not_a_tensor_of_this_model_is_refused_and_the_engine_lives(engine: Engine) -> None:
    async def send(body: bytes) -> None:
        await engine.client.pause()
        await engine.client.begin_update()
        await engine.client.update_from_tensors(body)

    wrong = {"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)}
    region = Region()
    for body in (payload(wrong), region.write(Bucket(tuple(wrong.items())))):
        with pytest.raises(EngineError, match="could not be loaded"):
            engine.run(send(body))
    region.close()
    # A number above those that Linux gives to processes.
    nobody = re.sub(rb'"pid": \d+', b'"pid": 4194305', region.write(Bucket(())))
    with pytest.raises(EngineError, match="the engine cannot open the sender's memory"):
        engine.run(send(nobody))
    body = io.BytesIO()
    pickle.Pickler(body).dump([("x", asyncio.sleep)])
    with pytest.raises(EngineError, match="could not be loaded"):
        engine.run(send(body.getvalue()))
    assert engine.run(engine.client.health())


def test_an_update_needs_a_paused_engine(engine: Engine) -> None:
    with pytest.raises(EngineError, match="pause generation before a weight update"):
        engine.run(engine.client.begin_update())


def test_requests_in_flight_go_on_under_new_weights(engine: Engine, models: Models) -> None:
    """Each token is of the weights its span names, and so is the KV of the whole prefix it was sampled after."""
    ids = prompt(20, seed=9)
    for completion in over_two_pushes(engine, models, ids, 480):
        assert_close(completion.logprobs, by_version(models, ids, completion))


def test_cached_prefixes_of_old_weights_are_not_used(engine: Engine, models: Models) -> None:
    engine.run(engine.client.generate(IDS, [1], sampled()))
    engine.run(engine.push(models.tensors("B"), 1))
    (completion,) = engine.run(engine.client.generate(IDS, [1], sampled()))
    whole = np.concatenate([IDS, completion.token_ids])
    assert_close(completion.logprobs, models.logprobs("B", whole, 1.0)[-12:])


def test_without_its_key_an_engine_does_nothing(engine: Engine) -> None:
    stranger = EngineClient(engine.server.url, admin_key="another key", name="stranger", deadline_s=30)
    calls = [stranger.begin_update(), stranger.generate(IDS, [0], sampled()), stranger.abort_all()]
    for call in calls:
        with pytest.raises(EngineError, match=r"stranger at .*HTTP 401"):
            engine.run(call)
    engine.run(stranger.close())
