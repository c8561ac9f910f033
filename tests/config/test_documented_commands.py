"""Every ``train.py`` command in the repository's pages and examples composes to a valid configuration.

The models and data that the commands name are not read.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like_compat.flags.translate import translate

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "docker" / "README.md", ROOT / "examples" / "README.md"),
    *sorted((ROOT / "examples").glob("*.py")),
)
FENCED = re.compile(r"^(`{3})[^\n]*\n(.*?)^`{3}", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(`{1,2})(?!`)([^`]+?)\1(?!`)")
COMMAND = re.compile(r"(?:python\S* (?:\S*/)?|bash scripts/)(quickstart\.sh|train\.py)(?=\s|$)([^\n]*)")
LOOP = re.compile(r"for (\w+) in (\S+)")
MINIMAL = ("model.hf_checkpoint=m", "data.train=d", "reward.name=math", "loop.num_rollout=1")
"""Keys that replace the ``...`` of an abbreviated command without a recipe."""


def blocks(text: str) -> Iterator[str]:
    """Yield the code of a page: each fenced block, all indented lines together, and each inline code as one line.

    Indented lines that contain a backtick are text.
    """
    for match in FENCED.finditer(text):
        yield match[2]
    rest = FENCED.sub("", text)
    yield "\n".join(line for line in rest.splitlines() if line.startswith("    ") and "`" not in line)
    for match in INLINE.finditer(rest):
        yield " ".join(match[2].split())


def commands(text: str) -> Iterator[str]:
    """Yield the arguments of every command of ``scripts/quickstart.sh``, and of every ``train.py`` command that has any.

    The variable of a loop is replaced by its first value, other variables by their names.
    """
    for block in blocks(text):
        script = re.sub(r"\\+\n\s*", " ", block)
        for name, value in LOOP.findall(script):
            script = re.sub(rf"\$\{{?{name}\b\}}?", value, script)
        for match in COMMAND.finditer(script):
            arguments = re.split(r"\s#|\s[|>&]|;| -> |\s\(", match[2])[0]
            arguments = " ".join(re.sub(r"\$\{?(\w+)\}?", r"\1", arguments).split())
            if match[1] == "quickstart.sh" and "+recipe=" not in arguments:
                arguments = f"+recipe=quickstart {arguments}".strip()
            if arguments:  # else the command is only mentioned
                yield arguments


DOCUMENTED = {arguments: page for page in PAGES for arguments in commands(page.read_text())}


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """Return a folder with the recipes and the guard policy that the pages assume to be the reader's own.

    They are copies of recipes and a policy of the repository.
    """
    for group, name, source in (
        ("recipe", "qwen3_4b", "qwen3_4b_gsm8k"),
        ("recipe", "qwen3_8b", "qwen3_4b_gsm8k"),
        ("guard", "measured", "auto"),
    ):
        (tmp_path / group).mkdir(exist_ok=True)
        shutil.copy(ROOT / "configs" / group / f"{source}.yaml", tmp_path / group / f"{name}.yaml")
    return tmp_path


def test_the_pages_have_commands() -> None:
    assert len(DOCUMENTED) > 50


@pytest.mark.parametrize("arguments", sorted(DOCUMENTED))
def test_a_documented_command_loads(arguments: str, config_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    argv = [str(config_dir) if word in ("my_configs", "measured") else word for word in shlex.split(arguments)]
    if any("..." in word for word in argv):
        argv = [word for word in argv if "..." not in word]
        argv = argv if any(word.startswith("+recipe=") for word in argv) else [*MINIMAL, *argv]
    if translate(argv).action not in ("train", "plan", "show"):
        return
    try:
        load_config(argv, files=False, machine=False, code=False)
    except ConfigError as error:
        if "is not installed here" not in str(error):  # the page names a package that the lock files do not have
            raise
