"""File source: formats, bad rows, slices, order and resume."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.config.schema.rollout import RewardConfig
from slime_like.errors import ConfigError, DataError
from slime_like.metrics.types import reduce_metrics
from slime_like.reward.check import label_rule
from tests.data.sources import TEN, chat_tokenizer, data, plain_tokenizer, source, texts, write
from tests.hypothesis_examples import num_examples


def test_a_row_becomes_a_prompt_with_tokens_label_and_reward(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "label": 4, "metadata": {"source_name": "sums", "rm_type": "exact"}}
    prompt = source(write(tmp_path / "a.jsonl", [row])).next(1)[0]
    assert plain_tokenizer().decode(prompt.token_ids) == prompt.text == "2+2="
    assert (prompt.prompt_id, prompt.label, prompt.rm_type, prompt.dataset) == (0, "4", "exact", "train")
    assert prompt.metadata["source_name"] == "sums"


def test_rm_type_of_the_row_overrides_its_metadata(tmp_path: Path) -> None:
    row = {"prompt": "2", "label": "4", "rm_type": "math", "metadata": {"rm_type": "exact"}}
    assert source(write(tmp_path / "a.jsonl", [row])).next(1)[0].rm_type == "math"


def test_other_column_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1", "answer": "2", "info": {"k": 3}}])
    config = data(input_key="question", label_key="answer", metadata_key="info")
    prompt = source(path, config).next(1)[0]
    assert (prompt.text, prompt.label, prompt.metadata) == ("1", "2", {"k": 3})


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": messages, "label": "1"}])
    assert source(path, tokenizer=chat_tokenizer()).next(1)[0].text == "<user>hi<assistant>yo<assistant>"


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]'])
def test_the_tools_column_is_rendered_and_kept(tools: object, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": messages, "label": "1", "tools": tools, "metadata": {"a": 1, "tools": "other"}}]
    rows += [{"prompt": messages, "label": "1", "tools": None}, {"prompt": "hi", "label": "1", "tools": tools}]
    prompts = source(write(tmp_path / "a.jsonl", rows), tokenizer=chat_tokenizer(), shuffle=False).next(3)
    assert texts(prompts) == ["<tool>add<user>hi<assistant>", "<user>hi<assistant>", "hi"]
    parsed_tools = [{"name": "add"}]
    assert [p.metadata for p in prompts] == [{"a": 1, "tools": parsed_tools}, {}, {"tools": parsed_tools}]
    table = [{"prompt": messages, "label": "1", "tools": parsed_tools}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    assert texts(source(tmp_path / "a.parquet", tokenizer=chat_tokenizer()).next(1)) == texts(prompts[:1])


@pytest.mark.parametrize("tools", [3, "text", {"name": "add"}, '{"name": "add"}'])
def test_tools_that_are_not_a_list_are_a_bad_row(tools: object, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "label": "1", "tools": tools}
    with pytest.raises(DataError, match=r"line 1: 'tools' is .*; tools must be a list of JSON schemas"):
        source(write(tmp_path / "a.jsonl", [row]), tokenizer=chat_tokenizer())


def test_apply_chat_template_wraps_a_string_as_a_user_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "hi", "label": "1"}])
    config = data(apply_chat_template=True, chat_template_kwargs={"think": True})
    prompt = source(path, config, tokenizer=chat_tokenizer()).next(1)[0]
    assert prompt.text == "<user>hi<assistant>?"
    assert chat_tokenizer().decode(prompt.token_ids) == prompt.text


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": r["prompt"]}], "label": r["label"]} for r in TEN]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    jsonl = source(write(tmp_path / "a.jsonl", rows), tokenizer=chat_tokenizer(), shuffle=False)
    parquet = source(f"{tmp_path}/a.parquet@[-3:]", tokenizer=chat_tokenizer(), shuffle=False)
    assert texts(parquet.next(3)) == texts(jsonl.next(10))[-3:]


@pytest.mark.parametrize(
    "slice_", ["[2:5]", "[:3]", "[7:]", "[-4:]", "[:-8]", "[-6:-2]", "[5:100]", "[:]"]
)  # fmt: skip
def test_slices_follow_python(tmp_path: Path, slice_: str) -> None:
    path = write(tmp_path / "a.jsonl", ["", *TEN, ""])
    start, stop = (int(part) if part else None for part in slice_[1:-1].split(":"))
    sliced_source = source(f"{path}@{slice_}", shuffle=False)
    expected = list(range(10))[start:stop]
    assert [p.prompt_id for p in sliced_source.next(len(sliced_source))] == expected


# ---- bad input -------------------------------------------------------------------------------------------------------
BAD_ROWS: dict[str, tuple[Mapping[str, Any] | str, str]] = {
    "not json": ('{"prompt": ', r"line 2: is not JSON \([^:]+ at column 12\); each line must be one JSON object"),
    "not an object": ("[1, 2]", r"line 2: is a JSON list; each line must be one JSON object"),
    "no prompt": ({"text": "a", "label": "1"}, r"line 2: has no 'prompt' but 'text', 'label'; set data.input_key"),
    "empty prompt": ({"prompt": "", "label": "1"}, r"line 2: 'prompt' has no token"),
    "prompt of a wrong type": ({"prompt": 5, "label": "1"}, r"line 2: 'prompt' is 5; it must be a string or a list"),
    "no messages": ({"prompt": [], "label": "1"}, r"line 2: 'prompt' is \[\]; it must be"),
    "message without role": (
        {"prompt": [{"content": "a"}], "label": "1"},
        r"line 2: 'prompt' message 0 has role=None; it must be a string",
    ),
    "template refuses": (
        {"prompt": [{"role": "system", "content": "a"}], "label": "1"},
        r"line 2: the chat template of /models/tiny refused 'prompt': no system turn",
    ),
    "label missing": ({"prompt": "1"}, r"line 2: label missing: no 'label'.+set data.label_key"),
    "label empty": ({"prompt": "1", "label": ""}, r"line 2: label missing"),
    "label of a wrong type": ({"prompt": "1", "label": ["1"]}, r"line 2: 'label' is \['1'\]; a label is a string"),
    "unknown reward": (
        {"prompt": "1", "label": "1", "rm_type": "maths"},
        r"line 2: rm_type='maths' is unknown: did you mean 'math'\?",
    ),
    "reward by path": ({"prompt": "1", "rm_type": "os:system"}, r"line 2: rm_type='os:system' is unknown"),
    "reward of a wrong type": ({"prompt": "1", "rm_type": 3}, r"line 2: 'rm_type' is 3; it must be the name"),
    "metadata of a wrong type": ({"prompt": "1", "label": "1", "metadata": [1]}, r"line 2: 'metadata' is \[1\]"),
    "too long": (
        {"prompt": "x" * 64, "label": "1"},
        r"line 2: 'prompt' has 64 tokens.+a context of 64 .rollout.max_context_len.+shorten the prompt",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_ends_the_run_with_file_line_and_fix(tmp_path: Path, name: str) -> None:
    row, message = BAD_ROWS[name]
    path = write(tmp_path / "bad.jsonl", [TEN[0], row, TEN[1]])
    with pytest.raises(DataError, match=message) as error:
        source(path, tokenizer=chat_tokenizer())
    assert str(path) in str(error.value)
    assert "data.on_bad_row=skip" in str(error.value)


def test_a_prompt_above_max_prompt_len_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", [TEN[0], {"prompt": "x" * 20, "label": "1"}, TEN[1]])
    with pytest.raises(DataError, match=r"line 2: 'prompt' has 20 tokens, more than data.max_prompt_len=19"):
        source(path, data(max_prompt_len=19))
    assert len(source(path, data(max_prompt_len=20))) == 3
    assert len(source(path, data(max_prompt_len=19, on_bad_row="skip"))) == 2


def test_skipped_rows_are_counted_and_their_reasons_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [TEN[0], *(row for row, _ in BAD_ROWS.values()), TEN[1]])
    prompts = source(path, data(on_bad_row="skip"), tokenizer=chat_tokenizer(), shuffle=False)
    assert texts(prompts.next(2)) == ["0+1=", "1+1="]
    assert prompts.num_bad_rows == len(BAD_ROWS)
    assert "line 2: is not JSON" in prompts.bad_rows[0]
    assert reduce_metrics(prompts.metrics()) == {"data/bad_rows": len(BAD_ROWS)}


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: is not JSON"):
        source(path)


def test_a_prompt_that_leaves_one_token_is_accepted(tmp_path: Path) -> None:
    assert len(source(write(tmp_path / "a.jsonl", [{"prompt": "x" * 63, "label": "1"}]))) == 1


def test_a_dataset_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", ["x", "y"])
    with pytest.raises(DataError, match=r"data.train='.+' has no usable row: all 2 are bad; .+line 1"):
        source(path, data(on_bad_row="skip"))


def test_a_user_reward_needs_no_label(tmp_path: Path) -> None:
    rule = label_rule(RewardConfig(name="tests.reward.rewards_of_users:length"))
    assert len(source(write(tmp_path / "a.jsonl", [{"prompt": "1"}]), needs_label=rule)) == 1


def test_messages_without_a_chat_template_name_the_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "label": "1"}])
    with pytest.raises(ConfigError, match=r"tokenizer in '/models/tiny' has no chat template.+add chat_template.jinja"):
        source(path, data(on_bad_row="skip"))


def test_apply_chat_template_without_one_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"and data\.apply_chat_template=true needs one"):
        source(write(tmp_path / "a.jsonl", TEN), data(apply_chat_template=True))


def test_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", TEN)
    with pytest.raises(DataError, match=r"data\.train='.+trian\.jsonl': there is no file") as error:
        source(tmp_path / "trian.jsonl")
    assert f"did you mean {tmp_path}/train.jsonl?" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none/train.jsonl", r"the folder .+none does not exist \(but .+ does\)"),
        ("train.txt", r"\.txt is not one of \.jsonl, \.parquet; convert the file"),
        ("train", r"no suffix is not one of"),
        ("train.jsonl@[3]", r"write a slice as path@\[a:b\]"),
        ("train.jsonl@[10:]", r"has no rows: its slice of 10 rows is empty"),
        ("empty.jsonl", r"has no rows: the file is empty; a dataset needs at least one"),
        ("broken.parquet", r"not a readable parquet file"),
    ],
)
def test_bad_paths_name_key_value_and_fix(tmp_path: Path, spec: str, message: str) -> None:
    write(tmp_path / "train.jsonl", TEN)
    write(tmp_path / "empty.jsonl", [""])
    (tmp_path / "broken.parquet").write_text("PAR0")
    with pytest.raises(DataError, match=message):
        source(tmp_path / spec)


# ---- order and resume ------------------------------------------------------------------------------------------------
def test_every_epoch_holds_every_prompt_in_a_new_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEN)
    prompts = source(path, seed=7)
    first, second = [p.prompt_id for p in prompts.next(10)], [p.prompt_id for p in prompts.next(10)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [p.prompt_id for p in source(path, seed=7).next(20)] == first + second
    assert [p.prompt_id for p in source(path, seed=8).next(10)] != first


@settings(max_examples=num_examples(60), deadline=None)
@given(
    batch=st.integers(1, 10),
    refills=st.integers(0, 2),
    calls=st.lists(st.integers(1, 7), max_size=12),
    resume_index=st.integers(0, 11),
)
def test_no_batch_across_two_epochs_repeats_a_prompt(
    tmp_path_factory: pytest.TempPathFactory, batch: int, refills: int, calls: list[int], resume_index: int
) -> None:
    """Prompts are distinct within a batch, for any call sizes and a resume between two calls."""
    path = write(tmp_path_factory.getbasetemp() / "border.jsonl", TEN)
    sizes: dict[str, Any] = {"batch_size": batch, "max_prompts": batch * (1 + refills)}
    prompt_source = source(path, seed=5, **sizes)
    prompt_ids: list[int] = []
    for i, n in enumerate([*calls, 35]):
        if i == resume_index:
            state = json.loads(json.dumps(prompt_source.state()))
            prompt_source = source(path, seed=5, **sizes)
            prompt_source.load_state(state)
        prompt_ids += [p.prompt_id for p in prompt_source.next(n)]
    width = max(batch, min(4 * batch * (1 + refills), 5))
    assert all(len(set(prompt_ids[i : i + width])) == width for i in range(len(prompt_ids) - width))
    epochs = [prompt_ids[i : i + 10] for i in range(0, len(prompt_ids) - 9, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)


def test_a_batch_larger_than_the_file_still_holds_every_prompt(tmp_path: Path) -> None:
    data_source = source(write(tmp_path / "a.jsonl", TEN), batch_size=25, max_prompts=25)
    assert [sorted(p.prompt_id for p in data_source.next(10)) for _ in range(3)] == [list(range(10))] * 3


def test_epochs_of_a_long_file_stay_shuffled(tmp_path: Path) -> None:
    """With 400 prompts and batches of 8, few prompts are moved: positions in two epochs are uncorrelated."""
    rows = [{"prompt": f"{i}+1=", "label": "1"} for i in range(400)]
    data_source = source(write(tmp_path / "a.jsonl", rows), batch_size=8, max_prompts=8, seed=1)
    first, second = (np.argsort([p.prompt_id for p in data_source.next(400)]) for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15


def test_without_shuffle_prompts_are_in_file_order(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", TEN), shuffle=False)
    assert [p.prompt_id for p in prompts.next(25)] == [*range(10), *range(10), *range(5)]


@settings(max_examples=num_examples(25), deadline=None)
@given(calls_before=st.lists(st.integers(0, 13), max_size=4), num_after=st.integers(1, 25), shuffle=st.booleans())
def test_resume_continues_with_the_next_prompt(
    tmp_path_factory: pytest.TempPathFactory, calls_before: list[int], num_after: int, shuffle: bool
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "resume.jsonl", TEN)
    prompt_source = source(path, seed=3, shuffle=shuffle)
    for n in calls_before:
        prompt_source.next(n)
    state = json.loads(json.dumps(prompt_source.state()))
    resumed_source = source(path, seed=3, shuffle=shuffle)
    resumed_source.load_state(state)
    assert [p.prompt_id for p in resumed_source.next(num_after)] == [p.prompt_id for p in prompt_source.next(num_after)]
    assert resumed_source.state() == prompt_source.state()


@pytest.mark.parametrize("previous_epoch", [None, 5, ["a"], [1.5], [-3], [99, 8], [1, 1], list(range(10)), [True]])
def test_a_cursor_with_invalid_rows_of_the_previous_epoch_is_refused(tmp_path: Path, previous_epoch: object) -> None:
    prompts = source(write(tmp_path / "a.jsonl", TEN), batch_size=4, max_prompts=4)
    prompts.next(13)
    state = prompts.state()
    assert len(state["before"]) == 4
    with pytest.raises(DataError, match=r"cursor of the checkpoint.*before.*: resume from another checkpoint"):
        prompts.load_state({**state, "before": previous_epoch})
    prompts.load_state({name: item for name, item in state.items() if name != "before"})


@pytest.mark.parametrize(
    ("rows", "changes", "key"),
    [
        (TEN[:9], {}, "rows was 10.+restore data.train"),
        ([*TEN[:9], {"prompt": "x", "label": "1"}], {}, "fingerprint was .+restore data.train"),
        (TEN, {"seed": 1}, "seed was 0.+restore run.seed"),
        (TEN, {"shuffle": False}, "shuffle was True.+restore data.shuffle"),
    ],
)
def test_resume_on_other_prompts_is_refused(tmp_path: Path, rows: list[Any], changes: dict[str, Any], key: str) -> None:
    state = source(write(tmp_path / "a.jsonl", TEN)).state()
    changed_source = source(write(tmp_path / "b.jsonl", rows), **changes)
    with pytest.raises(DataError, match=key):
        changed_source.load_state(state)


def test_a_source_can_be_pickled(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "a.jsonl", TEN))
    prompts.next(3)
    copy = pickle.loads(pickle.dumps(prompts))  # noqa: S301 - as Ray does
    assert texts(copy.next(9)) == texts(prompts.next(9))
