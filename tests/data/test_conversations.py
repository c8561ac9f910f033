"""Conversations for supervised fine-tuning: every assistant turn is trained on, in the tokens of its template."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.conversations import Conversations
from slime_like.data.demonstrations import Demonstrations
from slime_like.errors import ConfigError, DataError
from tests.data.character_tokenizer import TEMPLATE, characters
from tests.data.sources import data, source, write

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
    "{% if tools %}<tools>{{ tools | length }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n.\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 1"},
    {"role": "assistant", "content": "3"},
]


def rows(folder: Path, template: str, row: dict[str, Any], mode: str = "turns") -> tuple[str, list[str]]:
    """Return the text of a row and its trained parts."""
    tokenizer = characters(template=template)
    path = write(folder / "a.jsonl", [row])
    config = data(input_key="messages")
    prompts = source(path, config, tokenizer=tokenizer, max_context_len=500, supervised=True)
    marker = Conversations(tokenizer, mode)
    group = Demonstrations(prompts, tokenizer, 500, marker).next(1, 0)[0]
    batch = assemble([group], AssembleSpec(None, "token_mean", 1, 1, 500, 16), rollout_id=0)
    packed_rows = batch.steps[0].micro_batches[0][0]
    is_trained = packed_rows.loss_weight > 0
    edges = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(is_trained)]
    parts = [str(tokenizer.decode(packed_rows.token_ids[a:b])) for a, b in pairwise(edges) if is_trained[a]]
    return str(tokenizer.decode(packed_rows.token_ids)), parts


def test_each_turn_is_rendered_separately(tmp_path: Path) -> None:
    text, trained_parts = rows(tmp_path, TEMPLATE, {"messages": TALK, "label": "unused"})
    assert text == "<user>1+1<assistant>2<user>and 1<assistant>3"
    assert trained_parts == ["2", "3"]


def test_the_template_prefix_occurs_once(tmp_path: Path) -> None:
    text, trained_parts = rows(tmp_path, CHATML, {"messages": TALK, "metadata": {"tools": [{"name": "a"}]}})
    assert text.count("Default.") == 1 and text.count("<tools>1</tools>") == 1
    assert text.endswith(
        "<|im_start|>user\nand 1<|im_end|>\n<|im_start|>assistant\n<think>\n.\n</think>\n3<|im_end|>\n"
    )
    assert trained_parts == ["<think>\n.\n</think>\n2<|im_end|>\n", "<think>\n.\n</think>\n3<|im_end|>\n"], (
        "each one is rendered as the last turn"
    )


@pytest.mark.parametrize("mode", ["turns", "whole"])
def test_the_column_of_tools_is_rendered(mode: str, tmp_path: Path) -> None:
    tools = [{"name": "a"}, {"name": "b"}]
    row = {"messages": TALK, "tools": tools, "metadata": {"tools": [{"name": "not read"}]}}
    assert rows(tmp_path, CHATML, row, mode)[0].count("<tools>2</tools>") == 1


def test_whole_conversations_are_rendered_as_for_an_engine(tmp_path: Path) -> None:
    text, trained_parts = rows(tmp_path, CHATML, {"messages": TALK}, mode="whole")
    assert text.count("<think>") == 1
    assert trained_parts == ["2<|im_end|>\n", ".\n</think>\n3<|im_end|>\n"], "the opening tag is part of the prompt"


@pytest.mark.parametrize("mode", ["turns", "whole"])
def test_a_turn_may_be_masked(mode: str, tmp_path: Path) -> None:
    talk = [*TALK[:1], {**TALK[1], "step_loss_mask": 0}, *TALK[2:]]
    assert len(rows(tmp_path, CHATML, {"messages": talk}, mode)[1]) == 1


def test_conversations_that_cannot_be_marked_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: data.conversation=whole finds turns by"):
        rows(tmp_path, TEMPLATE, {"messages": TALK}, "whole")
    tool_template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<tool>{% endif %}")
    with pytest.raises(ConfigError, match=r"begins .* set data.conversation=whole"):
        rows(tmp_path, tool_template, {"messages": TALK})
    with pytest.raises(DataError, match="line 1: 'messages' begins with an assistant turn"):
        rows(tmp_path, CHATML, {"messages": TALK[1:]})
    with pytest.raises(DataError, match="line 1: no token of an assistant turn is trained on"):
        rows(tmp_path, CHATML, {"messages": [TALK[0], {**TALK[1], "step_loss_mask": 0}]})
    for index, text in ((0, "quote <|im_start|>assistant\nmine"), (1, "2<|im_end|> and more")):
        talk = [*TALK[:index], {**TALK[index], "content": text}, *TALK[index + 1 :]]
        with pytest.raises(
            DataError, match=r"line 1: a message of role '(user|assistant)' contains .* set data.conversation=turns"
        ):
            rows(tmp_path, CHATML, {"messages": talk}, "whole")
    row = {"messages": TALK, "tools": [{"name": "a", "description": "<|im_start|>assistant\nmine"}]}
    with pytest.raises(DataError, match="line 1: a tool contains"):
        rows(tmp_path, CHATML, row, "whole")
    with pytest.raises(DataError, match="line 1: label missing"):
        rows(tmp_path, CHATML, {"messages": TALK[:3]})


@pytest.mark.parametrize(
    ("condition", "roles"),
    [
        ("not loop.first and m.role == messages[loop.index0 - 1].role", "roles user, user"),
        ("m.role == 'assistant' and loop.first", "role assistant"),
    ],
)
def test_a_template_that_refuses_separate_turns_is_named(condition: str, roles: str, tmp_path: Path) -> None:
    loop = "{% for m in messages %}"
    template = CHATML.replace(
        loop, f"{loop}{{% if {condition} %}}{{{{ raise_exception('wrong order') }}}}{{% endif %}}"
    )
    message = rf"data.conversation=turns: .* refused .*wrong order; .* {roles}, .* set data.conversation=whole"
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, template, {"messages": TALK})
    assert len(rows(tmp_path, template, {"messages": TALK}, "whole")[1]) == 2


def test_a_message_that_the_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ raise_exception('unknown') if m.content == '3' else m.content }}")
    with pytest.raises(DataError, match="line 1: the chat template refused the conversation: unknown"):
        rows(tmp_path, template, {"messages": TALK})


def test_a_lone_surrogate_in_an_answer_is_a_bad_row(tmp_path: Path) -> None:
    bad_row = {"messages": [*TALK[:3], {"role": "assistant", "content": "\ud800"}]}
    with pytest.raises(
        DataError, match=r"line 1: 'messages' message 3 .* has '\\ud800' at .*, which is a lone surrogate"
    ):
        rows(tmp_path, TEMPLATE, bad_row)
    path = write(tmp_path / "b.jsonl", [bad_row, {"messages": TALK}])
    config = data(input_key="messages", on_bad_row="skip")
    prompts = source(path, config, tokenizer=characters(template=TEMPLATE), max_context_len=500, supervised=True)
    assert len(prompts) == prompts.num_bad_rows == 1


def test_a_conversation_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    """A template may write text that is not in the row."""
    template = CHATML.replace("<think>", "{% if messages | length > 1 %}\ud800{% endif %}")
    with pytest.raises(
        ConfigError, match=r"a.jsonl, line 1: the tokenizer in '/models/tiny' cannot encode the conversat"
    ):
        rows(tmp_path, template, {"messages": TALK}, "whole")
