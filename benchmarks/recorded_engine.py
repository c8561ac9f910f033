"""HTTP server that answers like an engine, with random tokens from a seed instead of a model's.

`benchmarks/manager.py` starts it as `python benchmarks/recorded_engine.py lists|columns`, and it prints its port.
`columns` are the replies of an engine with this project's plugins, `lists` those of SGLang without them. The server ends
when its standard input closes.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from slime_like.printable import visible  # noqa: E402

VOCAB = 150_000
NUM_RECORDS = 16  # different replies of each length


def item(num_tokens: int, seed: int, *, columns: bool) -> dict[str, Any]:
    """Return one sample of a reply to `/generate`, as SGLang 0.5.23 sends it with or without this project's plugins.

    ``columns``: with the plugins.
    """
    random = np.random.default_rng(seed)
    token_ids = np.exp(random.random(num_tokens) * np.log(VOCAB)).astype(np.int32)  # frequency ~ 1 / rank, as of words
    logprobs = -random.exponential(0.5, num_tokens).astype(np.float32)
    meta: dict[str, Any] = {
        "id": f"{seed:032x}",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 256,
        "weight_version": "0",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 1.25,
        "response_sent_to_client_ts": 1.25,
    }
    if columns:
        meta["slime_like_logprobs"] = base64.b64encode(logprobs.tobytes()).decode()
        return {"output_ids": base64.b64encode(token_ids.tobytes()).decode(), "meta_info": meta}
    values = [float(value) for value in logprobs]
    meta["input_token_logprobs"] = []
    meta["output_token_logprobs"] = [[a, b, None] for a, b in zip(values, token_ids.tolist(), strict=True)]
    meta["output_token_logprobs_length"] = num_tokens
    return {"output_ids": token_ids.tolist(), "meta_info": meta}


def application(*, columns: bool) -> web.Application:
    """Return the server. It replies like SGLang with this project's plugins if ``columns``, otherwise like SGLang alone."""

    @lru_cache
    def reply_item(num_tokens: int, seed: int) -> bytes:
        return orjson.dumps(item(num_tokens, seed, columns=columns))

    async def generate(request: web.Request) -> web.Response:
        params = orjson.loads(await request.read())["sampling_params"]
        items = (
            reply_item(int(sampling["max_new_tokens"]), sampling["sampling_seed"] % NUM_RECORDS) for sampling in params
        )
        return web.Response(body=b"[" + b",".join(items) + b"]", content_type="application/json")

    async def state(_: web.Request) -> web.Response:
        usage = {"capacity_tokens": 1, "used_tokens_max": 1, "running_requests_max": 1, "retractions": 0}
        return web.json_response({"internal_states": [{"slime_like_kv": usage}], "weight_version": "0"})

    async def acknowledge(_: web.Request) -> web.Response:
        return web.json_response({})

    server = web.Application(client_max_size=2**30)
    server.router.add_post("/generate", generate)
    server.router.add_get("/server_info", state)
    server.router.add_get("/model_info", state)
    server.router.add_get("/health", acknowledge)
    server.router.add_get("/health_generate", acknowledge)
    server.router.add_post("/abort_request", acknowledge)
    return server


async def serve(*, columns: bool) -> None:
    """Serve on a free port of loopback, print the port, and end when standard input closes."""
    runner = web.AppRunner(application(columns=columns), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(visible(f"{runner.addresses[0][1]}\n"))
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(columns=sys.argv[1] == "columns"))
