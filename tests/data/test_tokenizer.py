"""Tokenizer without transformers: equal results, or a fallback to transformers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_like.data.tokenizer import PlainTokenizer, open_tokenizer
from slime_like.quickstart.model import write_tokenizer
from slime_like.util.deadline import Deadline
from tests.data.character_tokenizer import TEMPLATE, characters

TEXTS = ["12+3=", "a<b [EOS] c", "", "[UNK]x\n", "tabs\tand  spaces"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    characters(template=TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_ids_text_and_template_equal_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer  # takes seconds

    tokenizer, reference = open_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PlainTokenizer)
    kwargs = {"add_special_tokens": False, "return_attention_mask": False}
    ids = reference(TEXTS, **kwargs)["input_ids"]
    assert tokenizer(TEXTS, **kwargs)["input_ids"] == ids
    assert tokenizer.eos_token_id == reference.eos_token_id is not None
    assert tokenizer.chat_template == reference.chat_template
    for row in ids:
        for skip in (True, False):
            assert tokenizer.decode(row, skip_special_tokens=skip) == reference.decode(row, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "1+1"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(messages, **options) == reference.apply_chat_template(messages, **options)
    assert tokenizer.vocab_size == reference.vocab_size


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", lambda c: c.update(tokenizer_class="Qwen2Tokenizer")),
        ("tokenizer_config.json", lambda c: c.update(clean_up_tokenization_spaces=True)),
        ("tokenizer_config.json", lambda c: c.update(pad_token="~")),
        ("tokenizer.json", lambda c: c.update(truncation={"max_length": 2})),
        ("tokenizer.json", lambda c: c.update(post_processor=None)),
    ],
)
def test_unsupported_settings_fall_back_to_transformers(
    folder: Path, file: str, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer  # takes seconds

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **_: f"asked for {path}")
    edit(folder / file, change)
    assert open_tokenizer(str(folder)) == f"asked for {folder}"


def test_the_quickstart_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    code = (
        "import sys; from slime_like.data.tokenizer import open_tokenizer; "
        f"t = open_tokenizer({str(tmp_path)!r}); assert t.decode([2, 12, 1], skip_special_tokens=True) == '0+'; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_token_offsets_equal_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer  # takes seconds

    tokenizer, reference = open_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PlainTokenizer)
    kwargs = {"add_special_tokens": False, "return_offsets_mapping": True}
    offsets = tokenizer(TEXTS, **kwargs)["offset_mapping"]
    assert offsets == reference(TEXTS, **kwargs)["offset_mapping"]
    assert [text[a:b] for text, row in zip(TEXTS[:1], offsets, strict=False) for a, b in row] == list(TEXTS[0])
    assert "offset_mapping" not in tokenizer(TEXTS, add_special_tokens=False)


@pytest.mark.slow
def test_no_hub_is_contacted_for_missing_files(folder: Path) -> None:
    """A hub that accepts connections without answering would block a run until the library's timeout."""
    edit(folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class="Qwen2Tokenizer"))
    empty_folder = folder / "empty"
    empty_folder.mkdir()
    code = (
        "import sys; from slime_like.data.tokenizer import open_tokenizer; from slime_like.errors import ConfigError\n"
        "for folder in sys.argv[1:]:\n"
        "    try: print(type(open_tokenizer(folder)).__name__)\n"
        "    except ConfigError as error: print('refused' if folder in str(error) else error)"
    )
    with socket.create_server(("127.0.0.1", 0)) as hub:
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        result = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(empty_folder), "nobody/no-such-model"],
            env=environment | {"HF_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            check=False,
            timeout=Deadline("test", "hub", 120).limit,
        )
        assert result.stdout.split() == ["Qwen2Tokenizer", "refused", "refused"], result.stderr
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):
            hub.accept()
