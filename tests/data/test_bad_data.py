"""Invalid data files: one message that names file, row, column and fix, before a process starts."""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_like import cli
from slime_like.cluster.start import processes
from slime_like.config.schema.rollout import RewardConfig
from slime_like.errors import DataError
from slime_like.reward.check import label_rule, row_rule
from tests.config.model_folder import write_model
from tests.data.character_tokenizer import TEMPLATE, characters
from tests.data.sources import TEN, chat_tokenizer, data, source, texts, write
from tests.hypothesis_examples import num_examples

REWARD = RewardConfig()
GOOD_ROW = TEN[0]


def rules() -> dict[str, Any]:
    """Return a tokenizer and the rules that a row must meet."""
    return {"tokenizer": chat_tokenizer(), "needs_label": label_rule(REWARD), "row_problem": row_rule(REWARD)}


BadRow = tuple[dict[str, Any], str]
ROWS: dict[str, BadRow] = {
    "column missing": ({"question": "1", "label": "1"}, "has no 'prompt' but 'question', 'label'"),
    "column null": ({"prompt": None, "label": "1"}, "has no 'prompt' but"),
    "number for a prompt": ({"prompt": 5, "label": "1"}, "'prompt' is 5; it must be a string or a list"),
    "empty prompt": ({"prompt": "", "label": "1"}, "'prompt' has no token"),
    "no turn": ({"prompt": [], "label": "1"}, "'prompt' is []; it must be"),
    "turn without text": (
        {"prompt": [{"role": "user", "content": None}], "label": "1"},
        "'prompt' message 0 has content=None",
    ),
    "label missing": ({"prompt": "1", "label": None}, "label missing: no 'label'"),
    "labels": ({"prompt": "1", "label": ["1", "2"]}, "'label' is ['1', '2']; a label is a string or a number"),
    "truth for a label": ({"prompt": "1", "label": True}, "'label' is True"),
    "unknown rm_type": ({"prompt": "1", "label": "1", "rm_type": "boxed_mth"}, "did you mean 'boxed_math'?"),
    "server without address": ({"prompt": "1", "rm_type": "remote_rm"}, "set reward.remote_url"),
    "number for rm_type": ({"prompt": "1", "label": "1", "rm_type": 3}, "'rm_type' is 3"),
    "no option is right": (
        {"prompt": "1", "label": "1", "rm_type": "gpqa", "metadata": {"correct_letter": "Z"}},
        "its correct option is 'Z', which is not one of A, B",
    ),
    "list for metadata": ({"prompt": "1", "label": "1", "metadata": [1]}, "'metadata' is [1]"),
    "text for metadata": ({"prompt": "1", "label": "1", "metadata": "{"}, "'metadata' is text that is not JSON"),
    "deep metadata": (
        {"prompt": "1", "label": "1", "metadata": "[" * 100_000},
        "'metadata' is text that is not JSON (nested too deeply)",
    ),
    "too long": ({"prompt": "x" * 64, "label": "1"}, "'prompt' has 64 tokens"),
}
TYPED: dict[str, BadRow] = {
    "bytes for a label": ({"prompt": "1", "label": b"1"}, "'label' is b'1'; a label is a string or a number"),
    "bytes for a prompt": ({"prompt": b"1", "label": "1"}, "'prompt' is b'1'; it must be a string"),
    "day for a label": ({"prompt": "1", "label": datetime.date(2026, 1, 2)}, "'label' is datetime.date(2026, 1, 2)"),
    "metadata beyond JSON": (
        {"prompt": "1", "label": "1", "metadata": {"day": datetime.date(2026, 1, 2)}},
        "'metadata' contains a value that JSON cannot represent",
    ),
}


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, name: str) -> None:
    row, message = ROWS[name]
    path = write(tmp_path / "bad.jsonl", [GOOD_ROW, row])
    with pytest.raises(DataError) as error:
        source(path, **rules())
    assert f"{path}, line 2: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", [*ROWS, *TYPED])
def test_a_bad_row_of_parquet_is_named(tmp_path: Path, name: str) -> None:
    """Each table has a single row, because a parquet column has one type."""
    row, message = (ROWS | TYPED)[name]
    path = parquet(tmp_path / "bad.parquet", [row])
    with pytest.raises(DataError) as error:
        source(path, **rules())
    assert f"{path}, row 0: " in str(error.value) and message in str(error.value)


def test_rows_of_several_kinds_in_one_file(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "hi", "label": 4},
        {"prompt": turn, "label": "4.5", "metadata": None, "source": "b"},
        {"prompt": "ho", "label": None, "rm_type": "gpqa", "metadata": {"correct_letter": "A"}},
        {"prompt": "hi", "label": 0.5, "rm_type": " f1 ", "metadata": '{"k": 1}'},
    ]
    prompts = source(write(tmp_path / "mixed.jsonl", rows), shuffle=False, **rules()).next(4)
    assert [p.text for p in prompts] == ["hi", "<user>hi<assistant>", "ho", "hi"]
    assert [(p.label, p.rm_type) for p in prompts] == [("4", None), ("4.5", None), (None, "gpqa"), ("0.5", "f1")]
    assert prompts[3].metadata == {"k": 1}


def test_nested_columns_of_verl_are_read_by_dotted_keys(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2="}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    config = data(label_key="reward_model.ground_truth", metadata_key="extra_info")
    (prompt,) = source(parquet(tmp_path / "a.parquet", [row]), config, **rules()).next(1)
    assert (prompt.text, prompt.label, prompt.metadata) == ("<user>2+2=<assistant>", "4", {"index": 0})


def test_parquet_types_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "label": pa.array([Decimal("1.50"), Decimal("2.00")]),
            "metadata": pa.array([[("k", "1")], []], pa.map_(pa.string(), pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    prompts = source(tmp_path / "a.parquet", shuffle=False, **rules()).next(2)
    assert [(p.text, p.label, dict(p.metadata)) for p in prompts] == [("a", "1.50", {"k": "1"}), ("b", "2.00", {})]


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_parquet_file_is_named(tmp_path: Path, keep: float) -> None:
    path = parquet(tmp_path / "a.parquet", TEN * 500)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(
        DataError, match=rf"{path} is not a readable parquet file .+ write the file again or choose another"
    ):
        source(path)


def test_a_parquet_file_damaged_in_the_middle_is_named_with_the_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"prompt": f"{i}", "label": "1"} for i in range(5000)], row_group_size=1000)
    content = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata
    start = metadata.row_group(3).column(0).data_page_offset
    content[start : start + 400] = b"\xff" * 400
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"{path}, row \d+ or after: cannot be read \(.+\); write the file again"):
        source(path)
    assert len(source(f"{path}@[0:1000]")) == 1000


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (pa.array([b"1", b"\xff"]).view(pa.string()), "'utf-8' codec can't decode byte 0xff"),
        (pa.array([0, 10**8], pa.int32()).view(pa.date32()), "date value out of range"),
    ],
)
def test_a_parquet_value_that_python_cannot_represent_is_named(tmp_path: Path, values: pa.Array, problem: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2"], "x": values}), path)
    with pytest.raises(
        DataError, match=rf"{path}, row 0 or after: cannot be read \({problem}.*\); write the file again"
    ):
        source(path)


def test_a_prompt_beyond_the_models_vocabulary_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "1+1=", "label": "2"}])
    (prompt,) = source(path).prompts
    top = int(prompt.token_ids.max())
    assert len(source(path, vocab_size=top + 1).prompts) == 1
    with pytest.raises(
        DataError, match=rf"data.jsonl, line 1: 'prompt' has token {top}, .* vocabulary ends at {top - 1}"
    ):
        source(path, vocab_size=top)


@pytest.mark.parametrize(("column", "place"), [("prompt", 2), ("label", 0)])
def test_a_lone_surrogate_is_a_bad_row(tmp_path: Path, column: str, place: int) -> None:
    row = {"prompt": "1", "label": "1"} | {column: "ab"[:place] + "\ud83d"}
    with pytest.raises(
        DataError, match=rf"line 1: '{column}' has '\\ud83d' at character {place}, which is a lone surrogate"
    ):
        source(write(tmp_path / "a.jsonl", [row]))


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = tmp_path / ("x" * 300 + ".jsonl")
    with pytest.raises(
        DataError, match=rf"data\.train='.+': {too_long} cannot be read \(File name too long\): correct"
    ):
        source(too_long)

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=rf"there is no file .+; the folder {tmp_path} cannot be listed \(Permission"):
        source(tmp_path / "a.jsonl")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "k"]), inner),
    max_leaves=6,
)
COLUMNS = st.dictionaries(st.sampled_from(["prompt", "label", "rm_type", "metadata", "x"]), JSON)
LINES = COLUMNS.map(json.dumps) | JSON.map(json.dumps) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=12))
def test_any_lines_are_prompts_or_counted_bad_rows(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in [json.dumps(GOOD_ROW), *lines]).encode())
    rows = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
    data_source = source(path, data(on_bad_row="skip"), **rules())
    assert len(data_source) + data_source.num_bad_rows == rows
    assert GOOD_ROW["prompt"] in texts(data_source.prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with a tokenizer that can be opened."""
    path = write_model(tmp_path_factory.mktemp("model"), vocab_size=128)
    characters(template=TEMPLATE).save_pretrained(path)
    return path


def bad_train(tmp_path: Path) -> list[str]:
    return [f"data.train={write(tmp_path / 'a.jsonl', [GOOD_ROW, {'prompt': '1'}])}"]


def bad_heldout(tmp_path: Path) -> list[str]:
    train, heldout = (
        write(tmp_path / "a.jsonl", [GOOD_ROW]),
        parquet(tmp_path / "b.parquet", [{"question": "1", "label": "1"}]),
    )
    return [f"data.train={train}", f"evaluation.datasets.b={heldout}"]


def bad_column(tmp_path: Path) -> list[str]:
    path = write(tmp_path / "a.jsonl", [GOOD_ROW])
    return [f"data.train={path}", f"evaluation.datasets.b={path}", "evaluation.overrides.b.label_key=answer"]


def truncated_parquet(tmp_path: Path) -> list[str]:
    path = parquet(tmp_path / "a.parquet", TEN)
    path.write_bytes(path.read_bytes()[:-5])
    return [f"data.train={path}"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bad_train, "a.jsonl, line 2: label missing"),
        (bad_heldout, "b.parquet, row 0: has no 'prompt' but 'question', 'label'"),
        (bad_column, "a.jsonl, line 1: label missing: no 'answer'"),
        (truncated_parquet, "a.parquet is not a readable parquet file"),
    ],
)
def test_train_py_reports_bad_data_in_one_line_before_a_process_starts(
    folder: Path,
    tmp_path: Path,
    make: Callable[[Path], list[str]],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def start(*args: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(processes, "Placement", start)
    code = cli.main(
        [f"model.hf_checkpoint={folder}", f"run.dir={tmp_path / 'run'}", "placement.device=cpu", *make(tmp_path)]
    )
    stderr = capfd.readouterr().err  # output of the driver, a child process
    assert code == 2
    assert stderr.startswith("DataError: ") and stderr.count("\n") == 1 and words in stderr
