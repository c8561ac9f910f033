"""A user's data source: its errors name the key and the line, and its prompts are checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slime_like.config.schema import names
from slime_like.data.demonstrations import Demonstrations
from slime_like.data.prompts import FileSource
from slime_like.data.user_source import UserSource, open_rows, open_source
from slime_like.errors import ConfigError, DataError, UserCodeError
from tests.data.sources import TEN, context, data, plain_tokenizer, write

CODE = """
import dataclasses
from slime_like.data.prompts import FileSource

class Rows(FileSource):
    pass

class BrokenRows(FileSource):
    def next(self, num_prompts):
        raise KeyError("rows")
    def state(self):
        raise KeyError("rows")
    def load_state(self, state):
        raise KeyError("rows")

class OtherRows(FileSource):
    def next(self, num_prompts):
        return [dataclasses.replace(prompt, prompt_id=77) for prompt in super().next(num_prompts)]

class NoRows(FileSource):
    def __init__(self, config, context):
        pass

class Stream:
    def __init__(self, config, context):
        self.rows = FileSource(config, context)
    def __len__(self):
        return len(self.rows)
    def next(self, num_prompts):
        return self.rows.next(num_prompts)
    def metrics(self):
        return self.rows.metrics()
    def state(self):
        return self.rows.state()
    def load_state(self, state):
        self.rows.load_state(state)

class Short(Stream):
    def next(self, num_prompts):
        return self.rows.next(num_prompts)[1:]

class Texts(Stream):
    def next(self, num_prompts):
        return [prompt.text for prompt in self.rows.next(num_prompts)]

class Nothing(Stream):
    def next(self, num_prompts):
        return None

class Broken(Stream):
    def __len__(self):
        raise KeyError("rows")
    def next(self, num_prompts):
        raise KeyError("rows")
    def metrics(self):
        raise KeyError("rows")
    def state(self):
        return {"row": {1}}
    def load_state(self, state):
        raise KeyError("rows")

class Unopened(Stream):
    def __init__(self, config, context):
        raise ValueError("no server")

def empty(config, context):
    return []
"""


@pytest.fixture(autouse=True)
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_sources.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_sources", raising=False)


def opened(folder: Path, name: str) -> UserSource:
    """Return the user's source ``name`` over a file of ten rows."""
    source = open_source(data(source=f"own_sources:{name}"), context(write(folder / "ten.jsonl", TEN)))
    assert isinstance(source, UserSource)
    return source


def test_a_stream_gives_the_prompts_of_its_rows_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.DATA_SOURCES, "mine", "own_sources:Stream")
    path = write(tmp_path / "ten.jsonl", TEN)
    shipped, stream = open_source(data(), context(path)), open_source(data(source="mine"), context(path))
    assert isinstance(shipped, FileSource) and isinstance(stream, UserSource)
    assert len(stream) == 10 and stream.metrics() == shipped.metrics()
    assert [p.prompt_id for p in stream.next(7)] == [p.prompt_id for p in shipped.next(7)]
    state = stream.state()
    following = [p.prompt_id for p in stream.next(7)]
    stream.load_state(state)
    assert [p.prompt_id for p in stream.next(7)] == following


@pytest.mark.parametrize(
    ("name", "words"),
    [("Short", r"2 items \(Prompt\)"), ("Texts", r"3 items \(str\)"), ("Nothing", "a NoneType")],
)
def test_wrong_prompts_are_named(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserCodeError, match=rf"^data\.source=own_sources:{name} returned {words} from next\(3\): return"
    ):
        opened(tmp_path, name).next(3)


def assert_errors_are_named(source: str, calls: Mapping[str, Callable[[], object]]) -> None:
    """Assert that each call, by its subject, raises an error that names the key, the line and the subject."""
    for subject, call in calls.items():
        with pytest.raises(
            UserCodeError,
            match=rf"^data\.source=own_sources:{source} raised KeyError: 'rows' \(.*own_sources.py:\d+\), for {subject}",
        ):
            call()


def test_an_error_names_the_key_and_the_line(tmp_path: Path) -> None:
    source = opened(tmp_path, "Broken")
    calls = {
        "the number of prompts": source.__len__,
        "the next 3 prompts": lambda: source.next(3),
        "the metrics of the data": source.metrics,
        r"the cursor \{'row': 1\}": lambda: source.load_state({"row": 1}),
    }
    assert_errors_are_named("Broken", calls)
    with pytest.raises(
        UserCodeError, match=r"raised TypeError: .*not JSON serializable .*, for the cursor of a checkpoint"
    ):
        source.state()


def test_a_source_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.source='own_sources:Unopened': .* raised ValueError: no server \(.*:\d+\)"
    ):
        opened(tmp_path, "Unopened")
    with pytest.raises(
        ConfigError, match=r"^data\.source='own_sources:empty' has no method next\(num_prompts\): add it"
    ):
        opened(tmp_path, "empty")
    with pytest.raises(DataError):  # of FileSource: raised unchanged
        open_source(data(source="own_sources:Stream"), context(tmp_path / "absent.jsonl"))


def test_supervised_fine_tuning_reads_rows_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "ten.jsonl", TEN)
    assert len(open_rows(data(source="own_sources:Rows"), context(path)).prompts) == 10
    with pytest.raises(
        ConfigError, match=r"^data\.source='own_sources:Stream' with algo=sft, .*: set data\.source=file"
    ):
        open_rows(data(source="own_sources:Stream"), context(path))


def demonstrations(folder: Path, name: str) -> Demonstrations:
    rows = open_rows(data(source=f"own_sources:{name}"), context(write(folder / "ten.jsonl", TEN)))
    return Demonstrations(rows, plain_tokenizer(), max_context_len=64)


def test_supervised_fine_tuning_names_errors_of_the_source(tmp_path: Path) -> None:
    broken = demonstrations(tmp_path, "BrokenRows")
    calls = {
        "the next 3 prompts": lambda: broken.next(3, 0),
        "the cursor of a checkpoint": broken.state,
        r"the cursor \{'row': 1\}": lambda: broken.load_state({"row": 1}),
    }
    assert_errors_are_named("BrokenRows", calls)
    with pytest.raises(
        UserCodeError, match=r"^data\.source=own_sources:NoRows raised AttributeError: .+, for all prompts"
    ):
        demonstrations(tmp_path, "NoRows")
    with pytest.raises(
        UserCodeError, match=r"^data\.source returned prompt 77 from next, which is none of its prompts"
    ):
        demonstrations(tmp_path, "OtherRows").next(3, 0)
