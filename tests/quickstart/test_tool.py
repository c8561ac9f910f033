"""Data of the tool job: disjoint sums, guesses without a carry, and calls that the calculator example understands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from examples.arithmetic import calculate
from examples.calculator import CALL, CALL_END, CallTokens
from slime_like.data.chat import render
from slime_like.data.tokenizer import open_tokenizer
from slime_like.quickstart.model import TOOL, write_tokenizer
from slime_like.quickstart.tool import LongSum, ToolSpec, split


def test_a_sum_its_guess_and_its_call() -> None:
    problem = LongSum(475, 386)
    assert (problem.text, problem.answer, problem.guess) == ("475+386=", "861", "475")
    assert (problem.call, problem.result) == ("<calc>475+386</calc>", "<result>861</result>")


def test_files_are_disjoint_and_demonstrations_have_the_stated_shares(tmp_path: Path) -> None:
    spec = replace(ToolSpec(), num_demonstrations=4000)
    spec.write(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout", "sft")
    }
    sums = {name: {row["prompt"].split("=")[0] for row in dataset} for name, dataset in rows.items()}
    assert (len(sums["train"]), len(sums["heldout"])) == (4000, 300)
    assert not sums["heldout"] & (sums["train"] | sums["sft"])
    firsts = [row for row in rows["sft"] if row["prompt"].endswith("=")]
    calls = [row for row in firsts if row["label"].startswith(CALL)]
    seconds = [row for row in rows["sft"] if row["prompt"].endswith("</result>")]
    assert len(firsts) + len(seconds) == len(rows["sft"])
    assert abs(len(calls) / len(firsts) - spec.call_share) < 0.03
    assert abs(len(seconds) / len(rows["sft"]) - spec.second_turn_share) < 0.03
    for row in calls[:100]:
        assert row["label"] == f"{CALL}{row['prompt'].rstrip('=')}{CALL_END}"
    for row in seconds[:100]:
        assert row["label"] == calculate(row["prompt"].split("=")[0])
        assert "result" not in row["label"], "results of the calculator are not trained"


def test_a_guess_is_never_right() -> None:
    train, heldout = split(ToolSpec())
    assert not any(problem.guess == problem.answer for problem in (*train, *heldout))


def test_the_tokenizer_has_a_token_for_each_mark(tmp_path: Path) -> None:
    from examples import (
        calculator_agent,
    )  # imports openai, which takes a second in each process that collects this file

    write_tokenizer(tmp_path, TOOL.tool_tokens, TOOL.chat_template)
    tokenizer = open_tokenizer(str(tmp_path))
    tokens, problem = CallTokens.of(tokenizer), LongSum(475, 386)
    assert tokens.start != tokens.stop
    ids = tokenizer([problem.call + problem.result], add_special_tokens=False, return_attention_mask=False)[
        "input_ids"
    ][0]
    assert len(ids) == 1 + 7 + 1 + 1 + 3 + 1
    assert max(ids) < TOOL.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=True) == "475+386861"
    turns = [problem.text, problem.call, calculator_agent.result("475+386")]
    conversation = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "tool"), turns, strict=True)
    ]
    assert render(tokenizer, conversation, {}) == problem.text + problem.call + problem.result, (
        "the agent's conversation renders like a tool rollout"
    )
    assert calculator_agent.result("475+") == "<result>error</result>"
