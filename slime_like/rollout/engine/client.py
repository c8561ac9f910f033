"""Client of one engine: an SGLang HTTP server that exchanges token ids with the framework."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from slime_like.data.routing import RoutingShape
from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.interfaces import Completion, EngineAddress, Sampling, TensorMeta
from slime_like.rollout.engine.connection import (
    EngineConnection,
    KvUsage,
    any_aborted,
    completions,
    kv_usage,
    scored_experts,
    scores,
    weight_version,
)
from slime_like.types import F32, I32, RoutedExperts

# Models of an engine that a weight update writes. SGLang's default includes the draft model of speculative decoding; here it
# keeps its checkpoint's weights, which affect how many drafts are accepted but not the distribution of the tokens.
UPDATE_SELECTOR = {"selector": "target"}

# Fields that ask for base64 columns instead of lists. Without the plugin ``rollout_sampling`` they have no effect, as SGLang reads
# them for top log-probabilities only.
COLUMNS = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
PEER_TIMEOUT_S = 30.0  # the default of health.timeout_s


class EngineClient:
    """Async client of one engine; implements ``interfaces.Engine`` and ``interfaces.WeightReceiver``.

    Every call has a deadline. A failed call raises ``DeadlineExceeded`` or ``EngineError`` (``EngineLost`` if the engine cannot
    be reached). If the engine refuses a request, the error names engine, address, endpoint and reply.
    """

    def __init__(
        self,
        url: str,
        *,
        admin_key: str,
        name: str = "engine",
        tp: int = 1,
        num_dp_ranks: int = 1,
        deadline_s: float = 600.0,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        routing: RoutingShape | None = None,
    ) -> None:
        """``num_dp_ranks``: data-parallel ranks of the engine's attention. ``peer_timeout_s``: see ``EngineConnection``.
        ``routing`` is the shape of the routed experts that the engine returns; None if it returns none.
        """
        self.name = name
        self.num_dp_ranks = num_dp_ranks
        self.address = EngineAddress(name, url, admin_key, tp)
        self.num_aborts = 0  # calls of ``abort_all``
        self._aborting = 0  # calls of ``abort_all`` in progress
        self.is_updating = False  # True from ``begin_update`` until ``end_update`` has set the version number
        self._routing = routing
        self._released: set[str] = set()
        self._restoring: asyncio.Task[None] | None = None
        self._connection = EngineConnection(self.address, deadline_s, peer_timeout_s)

    @classmethod
    def at(
        cls,
        address: EngineAddress,
        *,
        num_dp_ranks: int = 1,
        deadline_s: float = 600.0,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        routing: RoutingShape | None = None,
    ) -> EngineClient:
        """Return a client of the engine at ``address``; the other arguments are passed to the constructor."""
        client = cls(
            address.url,
            admin_key=address.admin_key,
            name=address.name,
            tp=address.tp,
            num_dp_ranks=num_dp_ranks,
            deadline_s=deadline_s,
            peer_timeout_s=peer_timeout_s,
            routing=routing,
        )
        client.address = address
        return client

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        return self.address.tp

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU of each rank of the engine; see ``EngineAddress.gpus``."""
        return self.address.gpus

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.address.url

    @property
    def host(self) -> str:
        """Address of the engine's node; empty for an engine on several nodes, which share no memory."""
        return str(urlsplit(self.url).hostname) if self.address.num_nodes == 1 else ""

    @property
    def num_ended_aborts(self) -> int:
        """Number of ``abort_all`` calls that have ended.

        Read it before a request. If ``num_aborts`` is larger after the request, an ``abort_all`` of this client was in
        progress during the request and may have ended it.
        """
        return self.num_aborts - self._aborting

    # ---- generation --------------------------------------------------------------------------------------------------
    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return one completion of the prompt per seed, in one request.

        Under the same weights, the same seed draws the same tokens, apart from rounding.
        """
        n = len(seeds)
        return await self.extend([token_ids] * n, seeds, [sampling.max_new_tokens] * n, sampling)

    async def extend(
        self,
        token_ids: Sequence[I32],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling,
        *,
        for_training: bool = True,
        dp_rank: int | None = None,
    ) -> list[Completion]:
        """Return one completion of each sequence, in one request. ``max_new_tokens`` overrides that of ``sampling``.

        Routed experts are returned only if ``for_training`` is set. Data-parallel rank ``dp_rank`` serves the request;
        by default SGLang chooses a rank for each sequence.

        Under the same weights, a seed draws the same token at the same position of a sequence, apart from rounding and
        regardless of the position at which the request begins.
        """
        base = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        params = [
            {**base, "max_new_tokens": max_tokens, "sampling_seed": seed}
            for seed, max_tokens in zip(seeds, max_new_tokens, strict=True)
        ]
        return await self._complete("generate", token_ids, params, self._routing if for_training else None, dp_rank)

    async def continuations(self, token_ids: Sequence[I32], temperature: float, num_tokens: int) -> list[Completion]:
        """Sample and return ``num_tokens`` tokens after each sequence; fewer if ``abort_all`` ends the request.

        An end-of-sequence token does not end the sampling.
        """
        base = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
        return await self._complete(
            "continue", token_ids, [{**base, "sampling_seed": seed} for seed in range(len(token_ids))], self._routing
        )

    async def _complete(
        self,
        phase: str,
        token_ids: Sequence[I32],
        params: Sequence[Mapping[str, Any]],
        routing: RoutingShape | None,
        dp_rank: int | None = None,
    ) -> list[Completion]:
        request = {
            "input_ids": token_ids,
            "sampling_params": params,
            "return_logprob": True,
            **COLUMNS,
            "return_routed_experts": routing is not None,
            **({} if dp_rank is None else {"routed_dp_rank": dp_rank}),
        }
        return completions(await self._connection.post(phase, "/generate", request), len(token_ids), routing)

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        """Return [L - 1] per sequence: log-softmax(logits / temperature) of tokens 1 .. L - 1."""
        return scores(await self._score(token_ids, temperature), [len(ids) for ids in token_ids])

    async def score_with_experts(
        self, token_ids: Sequence[I32], temperature: float
    ) -> list[tuple[F32, RoutedExperts | None]]:
        """Return per sequence the result of ``score``, and the routed experts of tokens 0 .. L - 2.

        The experts are None if the engine returns none.
        """
        reply, lengths = await self._score(token_ids, temperature), [len(ids) for ids in token_ids]
        experts = [None] * len(lengths) if self._routing is None else scored_experts(reply, lengths, self._routing)
        return list(zip(scores(reply, lengths), experts, strict=True))

    async def _score(self, token_ids: Sequence[I32], temperature: float) -> Any:
        request = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": temperature, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": self._routing is not None,
        }
        while True:
            aborts = self.num_ended_aborts
            reply = await self._connection.post("score", "/generate", request)
            if self.num_aborts == aborts or not any_aborted(reply):
                return reply

    async def abort_all(self) -> None:
        """End every request that has reached the scheduler; each returns the tokens sampled so far.

        The callers of these requests detect the abort by ``num_aborts`` and may request more tokens.
        """
        self.num_aborts += 1
        self._aborting += 1
        try:
            await self._connection.post("abort", "/abort_request", {"abort_all": True})
        finally:
            self._aborting -= 1

    # ---- pause -------------------------------------------------------------------------------------------------------
    async def pause(self, seconds: float | None = None) -> None:
        """Stop decoding and move requests in flight back to the queue; ``resume`` continues them after their last token.

        Their KV cache is dropped, so that ``flush`` succeeds, and recomputed under the weights in effect at ``resume``.
        """
        await self._connection.request("pause", "POST", "/pause_generation", {"mode": "retract"}, seconds=seconds)

    async def resume(self) -> None:
        """Resume decoding. Raises ``EngineError`` while a weight update is open or after an update has failed."""
        await self._connection.post("resume", "/continue_generation", {"torch_empty_cache": False})

    async def flush(self) -> None:
        """Drop the entire KV cache, so that no prefix computed under old weights is reused."""
        await self._connection.post("flush", "/flush_cache", {})

    # ---- memory ------------------------------------------------------------------------------------------------------
    @property
    def released(self) -> frozenset[str]:
        """Parts (``config.schema.residency``) that this client has released, or may have released by a call that failed."""
        return frozenset(self._released)

    async def release_memory(self, parts: Collection[str]) -> None:
        """Release the device memory of ``parts`` of a paused engine.

        Released weights are lost: the engine refuses to generate until a complete update is committed.
        """
        if tags := [part for part in parts if part not in self._released]:
            self._released.update(tags)
            await self._connection.post("release memory", "/release_memory_occupation", {"tags": tags})

    async def restore_memory(self, parts: Collection[str]) -> None:
        """Allocate the released device memory of ``parts`` again, uninitialised.

        SGLang's scheduler process exits if a request names parts that are not released. Therefore, if the caller is cancelled,
        its request continues, and the next call waits for it.
        """
        if self._restoring is not None and not self._restoring.done():
            await asyncio.wait([self._restoring])
        if tags := [part for part in parts if part in self._released]:
            self._restoring = asyncio.create_task(self._restore(tags))
            # Retrieve the error even if the caller was cancelled.
            self._restoring.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._restoring)

    async def _restore(self, tags: list[str]) -> None:
        await self._connection.post("restore memory", "/resume_memory_occupation", {"tags": tags})
        self._released.difference_update(tags)

    # ---- weights -----------------------------------------------------------------------------------------------------
    async def begin_update(self) -> None:
        """Open a weight update on a paused engine: from now on every parameter of the served model counts as unwritten.

        An update that is already open is discarded, unless the engine refuses the request.
        """
        was_updating, self.is_updating = self.is_updating, True  # stays True if there is no reply: it may be open
        try:
            await self._connection.post("begin update", "/begin_weight_update", UPDATE_SELECTOR)
        except EngineLost:
            raise
        except EngineError:
            self.is_updating = was_updating
            raise

    async def end_update(self, version: int) -> None:
        """Commit the update as ``version``. Raises ``EngineError`` that names the parameters that were not completely written."""
        await self._connection.post("end update", "/end_weight_update", {})
        await self._connection.post(
            "end update", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )
        self.is_updating = False

    async def update_from_tensors(self, *payloads: bytes) -> None:
        """Load one payload on every rank of the engine, or one payload per rank; see ``WeightReceiver.update_from_tensors``."""
        tensors = [base64.b64encode(payload).decode() for payload in payloads]
        request = {"serialized_named_tensors": tensors, "flush_cache": False, **UPDATE_SELECTOR}
        await self._connection.post("update", "/update_weights_from_tensor", request)

    async def init_broadcast_group(
        self, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group whose rank 0 is the sender. The engine's ranks start at ``rank_offset``."""
        request = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._connection.post("join", "/init_weights_update_group", request)

    async def update_from_broadcast(self, metas: Sequence[TensorMeta], group_name: str) -> None:
        """Receive and load the tensors described by ``metas``, which rank 0 of the group broadcasts in this order."""
        request = {
            "names": [meta.name for meta in metas],
            "dtypes": [meta.dtype for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
            "group_name": group_name,
            "flush_cache": False,
            **UPDATE_SELECTOR,
        }
        await self._connection.post("update", "/update_weights_from_distributed", request)

    async def destroy_broadcast_group(self, group_name: str) -> None:
        """Leave a process group."""
        await self._connection.post("leave", "/destroy_weights_update_group", {"group_name": group_name})

    # ---- state -------------------------------------------------------------------------------------------------------
    async def version(self) -> int:
        """Return the version of the last committed update."""
        return weight_version(await self._connection.request("version", "GET", "/model_info", None))

    async def health(self, seconds: float | None = None, *, decodes: bool = False) -> bool:
        """Return whether the server reports itself healthy in time. Raises ``EngineLost`` if the connection fails.

        With ``decodes``, the scheduler must respond too; an idle scheduler decodes a token for this. A paused engine
        cannot decode, so it fails this check.
        """
        path = "/health_generate" if decodes else "/health"
        try:
            await self._connection.request("health", "GET", path, None, seconds=seconds)
        except EngineLost:
            raise
        except (EngineError, DeadlineExceeded):
            return False
        return True

    async def kv_usage(self, seconds: float | None = None) -> KvUsage:
        """Return the KV cache usage since the last call. The scheduler replies between two batches."""
        return kv_usage(await self._connection.request("KV usage", "GET", "/server_info", None, seconds=seconds))

    async def close(self) -> None:
        """Close the connections; the engine keeps running."""
        await self._connection.close()
