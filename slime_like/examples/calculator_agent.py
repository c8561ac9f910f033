"""The calculator as an agent that somebody has: a stock OpenAI client in a loop, which knows nothing of training.

``rollout.generate=openai_agent rollout.agent=slime_like.examples.calculator_agent:agent`` trains the model that answers it
(docs/agents.md has the command and what it printed). Unlike ``slime_like.examples.calculator`` it sees text only: the tokens
that were sampled, their log-probabilities and what is trained on are the endpoint's business.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import openai

from slime_like.examples.arithmetic import calculate

CALL_END = "</calc>"
MOST_CALLS = 4
# Trusts nobody: the endpoint speaks http on loopback, and to read the machine's certificates takes 25 ms for each client.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def agent(base_url: str, api_key: str, prompt: str, metadata: Mapping[str, Any]) -> None:
    """Asks for the answer of ``prompt``, and calculates for it, ``MOST_CALLS`` times at most. ``reward.name`` scores the last
    answer."""
    del metadata
    messages: list[Any] = [{"role": "user", "content": prompt}]
    plain = openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        for _ in range(1 + MOST_CALLS):
            reply = await client.chat.completions.create(model="policy", messages=messages, stop=CALL_END)
            answer = reply.choices[0].message
            if "+" not in (answer.content or ""):  # <calc> and </calc> are special tokens, and no part of the text
                return
            messages += [answer, {"role": "tool", "tool_call_id": "calc", "content": result(answer.content or "")}]


def result(asked: str) -> str:
    """The calculator's words; a call that is no arithmetic is answered as an error."""
    try:
        return f"<result>{calculate(asked)}</result>"
    except ValueError:
        return "<result>error</result>"
