"""The calculator as an existing agent: a loop over a stock OpenAI client that knows nothing about training.

``rollout.generate=openai_agent rollout.agent=examples.calculator_agent:agent`` trains the model that answers the client
(docs/agents.md has the command and its output). Unlike ``examples.calculator``, the agent sees no token ids: the endpoint
takes care of sampled tokens, their log-probabilities and the selection of trained tokens.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from typing import Any

import openai

from examples.arithmetic import calculate

CALL, CALL_END = "<calc>", "</calc>"
MAX_CALLS = 4
# No certificates: the endpoint uses http on loopback, and reading the machine's certificates takes 25 ms per client.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def agent(base_url: str, api_key: str, prompt: str, metadata: Mapping[str, Any]) -> None:
    """Request an answer to ``prompt``, and reply to calls with the calculator's results, at most ``MAX_CALLS`` times.

    ``reward.name`` scores the last answer.
    """
    del metadata
    messages: list[Any] = [{"role": "user", "content": prompt}]
    plain = openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        for num_calls in range(1 + MAX_CALLS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, stop=CALL_END, logprobs=True
            )
            answer = reply.choices[0]
            # <calc> and </calc> are special tokens: the message omits them, and the list of log-probabilities does not.
            assert answer.logprobs is not None
            call = call_in(item.token for item in answer.logprobs.content or ())
            if call is None or num_calls == MAX_CALLS:
                return
            messages += [answer.message, {"role": "tool", "tool_call_id": "calc", "content": result(call)}]


def call_in(tokens: Iterable[str]) -> str | None:
    """Return the expression of the call that ends an answer, or None. ``tokens``: texts of the answer's tokens."""
    _, start, call = "".join(tokens).rpartition(CALL)
    return call.removesuffix(CALL_END) if start and call.endswith(CALL_END) else None


def result(expression: str) -> str:
    """Return the calculator's reply, which is an error if ``calculate`` rejects ``expression``."""
    try:
        return f"<result>{calculate(expression)}</result>"
    except ValueError:
        return "<result>error</result>"
