"""Columns instead of lists in replies to ``/generate``: sampled tokens and their log-probabilities as base64.

SGLang replies with a list of ``[log-probability, token, text]`` and a list of tokens. Building and parsing these lists takes
several hundred nanoseconds per token in the server and in its client. A request gets columns if it sets
``return_flat_raw_output_top_logprobs`` and ``return_flat_raw_top_logprobs_b64``, which ask SGLang for its top
log-probabilities in this form, and ``return_logprob``, but not ``top_logprobs_num``, ``token_ids_logprob`` or ``stream``.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from slime_like_plugins.sglang_hooks import Hook

LOGPROBS = "slime_like_logprobs"  # in meta_info: base64 of float32


def wants_columns(request: Any) -> bool:
    """Return True if a ``GenerateReqInput`` sets both flags that ask for columns, and does not stream."""
    return bool(
        getattr(request, "return_flat_raw_output_top_logprobs", False)
        and request.return_flat_raw_top_logprobs_b64
        and not request.stream
    )


def add_logprobs(
    original: Callable[..., None], manager: Any, meta_info: dict[str, Any], state: Any, *args: Any, **kwargs: Any
) -> None:
    """Hook around ``TokenizerManager.add_logprob_to_meta_info``.

    For a request that gets columns, add the log-probabilities as base64 once it has finished, and none before.
    """
    names = ("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "finished")
    call = dict(zip(names, args, strict=False)) | kwargs
    if not wants_columns(state.obj) or call["top_logprobs_num"] or call["token_ids_logprob"] is not None:
        original(manager, meta_info, state, *args, **kwargs)
    elif call["finished"]:
        meta_info[LOGPROBS] = encoded(state.output_token_logprobs_val, np.float32)


async def generate(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any]:
    """Hook around ``TokenizerManager.generate_request``: encode token ids as base64 in replies with columns."""
    async for reply in original(manager, obj, *args, **kwargs):
        for item in reply if isinstance(reply, list) else [reply]:
            if LOGPROBS in item.get("meta_info", ()):
                item["output_ids"] = encoded(item["output_ids"], np.int32)
        yield reply


def encoded(values: list[Any], dtype: type[np.generic]) -> str:
    """Return ``values`` as the base64 of an array of ``dtype``."""
    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


HOOKS = (
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info", "around", add_logprobs),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "around", generate),
)
