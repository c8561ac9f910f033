"""One real SGLang engine per tensor-parallel size, shared by all tests of the session."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import EngineSpec
from slime_like.data.routing import RoutingShape
from slime_like.interfaces import Bucket, Sampling
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.server import EngineServer
from slime_like.types import F32, I32
from slime_like.weight_sync.shared import SharedBucketMemory

VOCAB = 500  # not a multiple of 64: the engine pads its embedding
ADMIN_KEY = "a key of this test run"


@dataclass(frozen=True)
class Models:
    """Two random Qwen3 models of one shape: 4 layers, GQA, tied embeddings, float32."""

    paths: Mapping[str, Path]
    hf: Mapping[str, Any]

    def logprobs(self, name: str, token_ids: I32, temperature: float) -> F32:
        """Return the [L - 1] log-probabilities of tokens 1 .. L - 1 at ``temperature``, by transformers."""
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = self.hf[name](ids).logits[0, :-1] / temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the HF tensors as a trainer exports them, with tied embeddings once."""
        return {k: v.detach() for k, v in self.hf[name].named_parameters()}


def payload(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the body of an ``update_from_tensors`` request."""
    body = io.BytesIO()
    pickle.Pickler(body, protocol=pickle.HIGHEST_PROTOCOL).dump([(k, v.clone()) for k, v in tensors.items()])
    return body.getvalue()


class RunningEngine:
    """A running engine, its client, and the client's event loop."""

    def __init__(self, server: EngineServer, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.client, self._loop = server, client, loop

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the client and return its result."""
        return self._loop.run_until_complete(work)

    async def push(self, tensors: Mapping[str, torch.Tensor], version: int, remote: bool = False) -> None:
        """Push over the tensor transport. ``remote``: as if from another machine."""

        async def send() -> None:
            region = SharedBucketMemory()
            message = payload(tensors) if remote else region.write(Bucket(tuple(tensors.items())))
            await self.client.update_from_tensors(message)
            region.write(Bucket(tuple((name, torch.full_like(t, 7.0)) for name, t in tensors.items())))
            region.close()  # an engine that still read the region would now serve wrong weights

        await self.update(send(), version)

    async def drop_prefixes(self) -> None:
        """Drop all cached prefixes. Pause first, because a rank that completes a reply refuses to flush."""
        await self.client.pause()
        await self.client.flush()
        await self.client.resume()

    async def update(self, sending: Awaitable[object], version: int) -> None:
        """Update the weights by ``sending``: pause, update, flush, resume."""
        await self.client.pause()
        await self.client.begin_update()
        await sending
        await self.client.end_update(version)
        await self.client.flush()
        await self.client.resume()


def make_sampling(temperature: float = 1.0, tokens: int = 12) -> Sampling:
    """Return sampling parameters without stop tokens, because random models seldom sample an EOS."""
    return Sampling(temperature=temperature, max_new_tokens=tokens)


def prompt(length: int, seed: int = 0) -> I32:
    """Return a random prompt of ``length`` tokens."""
    return np.random.default_rng(seed).integers(2, VOCAB, length).astype(np.int32)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        rms_norm_eps=2e-5,  # like rope_theta not a default of any library, so that a hard-coded constant is detected
        rope_parameters={"rope_type": "default", "rope_theta": 2e5},
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models")
    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        hf[name] = Qwen3ForCausalLM(config).eval()
        hf[name].save_pretrained(folder / name)
    return Models({name: folder / name for name in hf}, hf)


def launch(
    models: Models,
    folder: Path,
    tp: int,
    *,
    deterministic: bool = False,
    cpu_kernels: str = "auto",
    dp_attention: int = 1,
    dcp: int = 1,
    dcp_comm: str = "ag_rs",
    dcp_replicate_q: bool = False,
    flow_mla: str = "",
    remote_experts: str = "",
    max_running_requests: int | None = 64,
    routing: RoutingShape | None = None,
    server_type: type[EngineServer] = EngineServer,
    **sglang: Any,
) -> Generator[RunningEngine | None]:
    """Yield ``None`` once the engine's process has started, so that several start at once; then the ready engine."""
    spec = EngineSpec(
        model_path=str(models.paths["A"]),
        device="cpu",
        dtype="float32",
        tp=tp,
        context_length=512,
        seed=0,
        log_path=str(folder / f"engine_tp{tp}.log"),
        start_deadline_s=180,
        max_running_requests=max_running_requests,
        admits_by_kv=max_running_requests is None,
        deterministic=deterministic,
        cpu_kernels=cpu_kernels,
        dp_attention=dp_attention,
        dcp=dcp,
        dcp_comm=dcp_comm,
        dcp_replicate_q=dcp_replicate_q,
        flow_mla=flow_mla,
        remote_experts=remote_experts,
        returns_experts=routing is not None,
        sglang={"max_total_tokens": 4096, **sglang},
    )
    yield from serve(spec, server_type, routing)


def serve(
    spec: EngineSpec, server_type: type[EngineServer] = EngineServer, routing: RoutingShape | None = None
) -> Generator[RunningEngine | None]:
    """Yield ``None`` and the ready engine, like ``launch``."""
    loop = asyncio.new_event_loop()
    server = server_type(spec, admin_key=ADMIN_KEY)
    client: EngineClient | None = None
    try:
        server.start()
        yield None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("http_proxy", "http://127.0.0.1:9")  # requests to an engine do not go through a proxy
            patch.delenv("no_proxy", raising=False)
            patch.delenv("NO_PROXY", raising=False)
            server.wait_ready()
        name = f"engine tp{spec.tp}"
        client = EngineClient(server.url, admin_key=ADMIN_KEY, name=name, tp=spec.tp, deadline_s=60, routing=routing)
        yield RunningEngine(server, client, loop)
    finally:
        server.stop()
        if client is not None:
            loop.run_until_complete(client.close())
        loop.close()


def start(models: Models, folder: Path, tp: int, **options: Any) -> Iterator[RunningEngine]:
    for engine in launch(models, folder, tp, **options):
        if engine is not None:
            yield engine


@pytest.fixture(scope="session")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    yield from start(models, tmp_path_factory.mktemp("tp1"), 1, enable_custom_logit_processor=True)


@pytest.fixture(scope="session")
def engine_tp2(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    engines = launch(models, tmp_path_factory.mktemp("tp2"), 2)
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # of a user's shell, for test_tensor_parallel.py
    try:
        next(engines)
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    yield from (engine for engine in engines if engine is not None)
