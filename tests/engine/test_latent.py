"""Engines of models with latent attention (DeepSeek-V2, DeepSeek-V3, Kimi K2) agree with transformers.

SGLang absorbs the up projections into queries and outputs, whereas transformers expands keys and values. Prompts longer
than ``CHUNK`` are prefilled in chunks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import ConsistencyError, EngineError
from slime_like.interfaces import Bucket, Completion
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool import probe
from slime_like.types import I32
from slime_like.weight_sync.broadcast import BroadcastSender
from slime_like.weight_sync.shared import SharedBucketMemory
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, payload, prompt
from tests.engine.forked_engines import ForkedEngineServer, start_fork_server
from tests.engine.in_flight import MAX_TRIES, generate_over_two_pushes, logprobs_by_version
from tests.engine.latent_models import FAMILIES, build
from tests.engine.test_weights import TensorSource

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5
CHUNK = 48
NUM_BUCKETS = 7
ENGINES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"cpu_kernels": "torch"},
    "deepseek_v2 greedy": {},
    "deepseek_v3": {},
    "deepseek_v3 tp2": {"tp": 2},
    "deepseek_v3 dp2": {"tp": 2, "dp_attention": 2},
    "deepseek_v2 dcp2": {"tp": 2, "dcp": 2, "cpu_kernels": "torch"},
    "deepseek_v3 dcp2": {"tp": 2, "dcp": 2, "dcp_comm": "a2a", "max_total_tokens": 256},
    "kimi_k2": {},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, tuple[Models, RunningEngine]]]:
    """Return the models and engine of each name; the engines start at the same time."""
    start_fork_server()
    models = {name: build(tmp_path_factory.mktemp("model"), name) for name in FAMILIES}
    with contextlib.ExitStack() as stack:
        launching: dict[str, tuple[Models, Any]] = {}
        for name, options in ENGINES.items():
            settings: dict[str, Any] = {
                "tp": 1,
                "chunked_prefill_size": CHUNK,
                "server_type": ForkedEngineServer,
                **options,
            }
            model = models[name if name in FAMILIES else name.split()[0]]
            run = stack.enter_context(contextlib.closing(launch(model, tmp_path_factory.mktemp("run"), **settings)))
            assert next(run) is None
            launching[name] = model, run
        yield {name: (models, next(run)) for name, (models, run) in launching.items()}


def assert_agrees(models: Models, name: str, ids: I32, completion: Completion, temperature: float) -> None:
    """Assert that logprobs agree with transformers, and that greedy tokens are its most probable tokens."""
    sequence = torch.from_numpy(np.concatenate([ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = models.hf[name](sequence[None]).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, sequence[len(ids) :, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), rtol=0, atol=TOLERANCE)
    if temperature == 0:
        np.testing.assert_array_equal(completion.token_ids, logits.argmax(-1).numpy())


class InterleavedTensors(TensorSource):
    """Weight source with a bucket of a single tensor, then buckets that each have at most one part of a fused parameter."""

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        first, *entries = self._tensors.items()
        yield Bucket((first,))
        for start in range(NUM_BUCKETS):
            bucket = Bucket(tuple(entries[start::NUM_BUCKETS]))
            fused = [key for name, _ in bucket.tensors if (key := fused_parameter(name))]
            assert len(set(fused)) == len(fused), "two parts of a parameter are in one bucket"
            yield bucket


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def fused_parameter(name: str) -> str:
    """Return a name that the parts of a fused parameter have in common; empty if ``name`` is no such part."""
    for parts in FUSED:
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, parts[0])
    return ""


async def push(engine: RunningEngine, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Push version 1 over the tensor transport, and later versions over a process group."""
    source = InterleavedTensors(tensors)

    async def send() -> None:
        region = SharedBucketMemory()
        for bucket in source.buckets(0):
            await engine.client.update_from_tensors(region.write(bucket))
        region.close()

    if version == 1:
        await engine.update(send(), version)
        return
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    sender = BroadcastSender([engine.client], transport=transport, group_name="latent", host="127.0.0.1")
    await engine.update(sender.send(source), version)
    await sender.close()


@pytest.mark.parametrize("name_of_engine", ENGINES)
def test_a_batch_of_many_lengths_agrees_before_and_after_pushes(
    name_of_engine: str, engines: Mapping[str, tuple[Models, RunningEngine]]
) -> None:
    """Prompts have 1 to 100 tokens, and some are prefixes of others; repeated prompts hit the prefix cache."""
    models, engine = engines[name_of_engine]
    long_prompt = prompt(100, seed=5)
    prompts = [long_prompt, long_prompt[:60], prompt(1, seed=6), prompt(17, seed=7), long_prompt[:31]]
    temperatures = [0.0, 0.8, 0.0, 0.8, 0.0]

    async def answers() -> list[list[Completion]]:
        requests = [
            engine.client.generate(ids, [index], make_sampling(temperature, 4 + 2 * index))
            for index, (ids, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        ]
        return await asyncio.gather(*requests)

    log = Path(engine.server._spec.log_path)  # pyright: ignore[reportPrivateUsage]
    log_before_last_version = ""
    for version, name in enumerate("ABAA"):
        if version == 3:
            log_before_last_version = log.read_text()
        if version in (1, 2):
            engine.run(push(engine, models.tensors(name), version))
        for ids, temperature, (completion,) in zip(prompts, temperatures, engine.run(answers()), strict=True):
            assert_agrees(models, name, ids, completion, temperature)
        (scores,) = engine.run(engine.client.score([long_prompt], 0.7))
        np.testing.assert_allclose(scores, models.logprobs(name, long_prompt, 0.7), rtol=0, atol=TOLERANCE)
    options = ENGINES[name_of_engine]
    capacity = options.get("max_total_tokens", 4096) * options.get("dcp", 1)
    assert f"max_total_num_tokens={capacity}," in log_before_last_version
    log_of_last_version = log.read_text().removeprefix(log_before_last_version)
    cached_tokens = sum(map(int, re.findall(r"#cached-token: (\d+)", log_of_last_version)))
    assert cached_tokens >= len(long_prompt) - 2, "the second generation from the same prompts missed the prefix cache"


def test_the_controller_of_data_parallel_attention_waits_for_requests(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    """The controller sleeps at least once before each request; a busy loop would occupy a core and never sleep."""
    _, engine = engines["deepseek_v3 dp2"]
    (pid,) = processes.pids_of_part(engine.server.pid, "data_parallel_controller")

    def num_sleeps() -> int:
        (line,) = re.findall(
            r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
        return int(line)

    before = num_sleeps()
    for _ in range(10):
        engine.run(engine.client.score([prompt(5)], 1.0))
    assert num_sleeps() - before >= 10


def test_the_samples_of_a_prompt_share_the_prefix_cache_of_a_data_parallel_rank(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    """By default SGLang alternates between the two ranks, so second samples of three prompts miss the cache."""
    _, engine = engines["deepseek_v3 dp2"]
    prompts, sampling = [prompt(60, seed=70 + number) for number in range(3)], make_sampling(1.0, 4)

    async def num_cached_tokens(dp_ranks: Sequence[int | None]) -> list[int]:
        await engine.drop_prefixes()
        cached: list[int] = []
        for _ in range(2):
            for ids, rank in zip(prompts, dp_ranks, strict=True):
                answers = await engine.client.extend([ids], [0], [4], sampling, dp_rank=rank)
                cached.append(answers[0].cached_tokens)
        return cached

    assert min(engine.run(num_cached_tokens([0, 1, 0]))[3:]) >= 59
    assert min(engine.run(num_cached_tokens([None] * 3))[3:]) < 59


def test_retracted_requests_of_sharded_latents_have_the_tokens_without_dcp(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    """Run so many sequences that requests are retracted, and prefilled again later. They arrive together, in one message."""
    (_, sharded), (_, unsharded) = engines["deepseek_v3 dcp2"], engines["deepseek_v3"]

    async def answers(engine: RunningEngine) -> tuple[list[Completion], int]:
        await engine.client.kv_usage()
        prompts, sampling = [prompt(20, seed=seed) for seed in range(16)], make_sampling(0.0, 30)
        completions = await engine.client.extend(prompts, [0] * len(prompts), [30] * len(prompts), sampling)
        return completions, (await engine.client.kv_usage()).retractions

    completions, retractions = sharded.run(answers(sharded))
    expected, without_dcp = unsharded.run(answers(unsharded))
    assert retractions > 0 and without_dcp == 0
    for completion, reference in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(completion.token_ids, reference.token_ids)
        np.testing.assert_allclose(completion.logprobs, reference.logprobs, rtol=0, atol=TOLERANCE)


def test_aborted_requests_of_sharded_latents_are_continued(engines: Mapping[str, tuple[Models, RunningEngine]]) -> None:
    """As in a partial rollout, the prompt of a continuation ends with the tokens that the aborted request sampled."""
    models, engine = engines["deepseek_v3 dcp2"]
    ids = prompt(30, seed=77)

    async def abort() -> list[Completion]:
        request = asyncio.create_task(engine.client.generate(ids, [1, 2], make_sampling(tokens=150)))
        await engine.client.generate(prompt(5), [9], make_sampling(tokens=8))  # by then both usually have tokens
        await engine.client.abort_all()
        return await request

    for _ in range(MAX_TRIES):
        partials = engine.run(abort())
        if all(0 < len(partial.token_ids) < 150 for partial in partials):
            break
    else:
        raise AssertionError(f"in {MAX_TRIES} tries no two requests were aborted between their first and last token")
    for partial in partials:
        assert_agrees(models, "A", ids, partial, 1.0)
        longer = np.concatenate([ids, partial.token_ids]).astype(np.int32)
        (continuation,) = engine.run(engine.client.generate(longer, [0], make_sampling(0.0)))
        assert continuation.cached_tokens >= len(longer) - 3, (
            "the prefix cache has complete pages of all but the last token"
        )
        assert_agrees(models, "A", longer, continuation, 0.0)


def test_requests_of_sharded_latents_continue_under_new_weights(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    models, engine = engines["deepseek_v3 dcp2"]
    ids = prompt(21, seed=3)
    for completion in generate_over_two_pushes(engine, models, ids, 120, tokens_after_pushes=8):
        np.testing.assert_allclose(
            completion.logprobs, logprobs_by_version(models, ids, completion), rtol=0, atol=TOLERANCE
        )


async def send_stale(client: EngineClient, tensors: dict[str, torch.Tensor]) -> None:
    """Send weights in such a way that SGLang does not update ``w_kc`` and ``w_vc`` of layer 1.

    With ``load_format=direct`` it only copies ``kv_b_proj`` and does not derive the two from it.
    """
    direct = {name: tensors.pop(name) for name in list(tensors) if "layers.1.self_attn.kv_b_proj" in name}
    await client.update_from_tensors(payload(tensors))
    request = {"serialized_named_tensors": [base64.b64encode(payload(direct)).decode()], "load_format": "direct"}
    connection = client._connection  # pyright: ignore[reportPrivateUsage]
    await connection.post("update", "/update_weights_from_tensor", {**request, "flush_cache": False})


def test_a_commit_names_weights_that_sglang_did_not_compute(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    models, engine = engines["kimi_k2"]
    w_kc, w_vc = (rf"model\.layers\.1\.self_attn\.{name} \(\d+ of \d+ elements\)" for name in ("w_kc", "w_vc"))
    with pytest.raises(EngineError, match=rf"not complete.*rank 0: 2 parameters: {w_kc}, {w_vc}"):
        engine.run(engine.update(send_stale(engine.client, models.tensors("B")), 1))
    engine.run(engine.push(models.tensors("A"), 0))
    (completion,) = engine.run(engine.client.generate(prompt(9), [0], make_sampling(0.0)))
    assert_agrees(models, "A", prompt(9), completion, 0.0)


def test_the_probe_finds_stale_derived_weights_that_a_commit_accepts(
    engines: Mapping[str, tuple[Models, RunningEngine]],
) -> None:
    """The update derives ``w_kc`` and ``w_vc`` of layer 1 from the weights of A, and sets all other weights to B."""
    models, engine = engines["kimi_k2"]

    async def send_twice() -> None:
        await engine.client.update_from_tensors(payload(models.tensors("A")))
        await send_stale(engine.client, models.tensors("B"))

    def check(name: str) -> None:
        scores = engine.run(probe.probe_engine(engine.client, 1, [prompt(30, seed=9)], 1.0, 60))
        trainer = probe.TrainerScores([scores], max_tokens=1000)
        (rows,) = trainer.rows
        sequences = np.split(rows.token_ids, rows.cu_seqlens[1:-1])
        columns = [np.concatenate([[0.0], models.logprobs(name, ids, 1.0)]) for ids in sequences]
        trainer.set_columns([np.concatenate(columns).astype(np.float32)])
        probe.check(scores, trainer, 1, 1e-4)

    engine.run(engine.push(models.tensors("B"), 1))
    check("B")
    engine.run(engine.update(send_twice(), 1))
    with pytest.raises(
        ConsistencyError, match=r"engine and trainer disagree.*engine's weights differ from the trainer's"
    ):
        check("B")
    engine.run(engine.push(models.tensors("A"), 0))
    check("A")
