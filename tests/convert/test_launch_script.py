"""Arguments of launch scripts, read without running them, are those that bash would give; the rest is refused by place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.convert.launch_script import Launch, read_launch
from slime_like.errors import ConfigError

FIXTURE = Path(__file__).parent / "slime" / "run-qwen3.5-35B-A3B-flashqla.sh"
PYTHON = "python3() { shift; printf '%s\\0' \"$@\"; }\n"  # stands in for training when bash runs a script

SAME_AS_BASH = {
    "arrays": 'A=(--lr 1e-6 "two words" \'$x\')\nB=("${A[@]}" --b)\npython3 train.py "${B[@]}"',
    "an unquoted array is split again": 'A=(--x "[1, 2]")\npython3 train.py ${A[@]}',
    "empty arrays": 'A=(\n  # --nothing\n)\npython3 train.py ${A[@]} "${A[@]}" "" --x',
    "appended": "A=(--a)\nA+=(--b 2)\nA[1]=--c\npython3 train.py ${A[@]}",
    "defaults": 'N=${N:-${M:-4}}\nE=""\npython3 train.py $N ${E:-e} ${E-f} "${E:+g}" ${N:+h}',
    "arithmetic": "A=3\nB=$((A * 2 + 1))\npython3 train.py $((B % 4)) $(( ${B} - $A ))",
    "quotes": 'python3 train.py "a \\"b\\" \\$c" \'d "e"\' f\\ g $\'h\\ti\' "it\'s" \'#\'no#comment # comment',
    "continued lines": "python3 train.py --a \\\n  1 \\\n  --b\n--not-an-argument 2>/dev/null || true",
    "paths": 'P=/a/b/c.jsonl\npython3 train.py ${P##*/} ${P%/*} ${P%.jsonl} "${P}@[0:10]" ${P#/a}',
    "seq": "python3 train.py --bs 1 $(seq 2 2 8) --b $(seq 3)",
    "redirections": "python3 train.py --a 2>&1 --b >/dev/stdout <<< text",
    "functions that are not called": "f() { X=1; }\npython3 train.py --a",
    "json": 'python3 train.py --k \'{"a": false}\' --s "{rollout_id}"',
    "two on a line": "A=1 B=2\npython3 train.py $A $B; true",
    "here-documents": "J=$(cat <<EOF\na ' \" ) b\nEOF\n)\ncat >/dev/null <<-'END'\n\tpython3 train.py no\n\tEND\npython3 train.py --a",
    "case": 'case "x" in\n  a|b) Y=1 ;;\n  *) Y=2 ;;\nesac\npython3 train.py --a',
    "tests": "[[ -n a && ( -n b ) ]] && true\nif [ 1 -gt 0 ]; then :; else :; fi\npython3 train.py --a",
    "loops": "for x in 1 2; do :; done\nfor ((i=0; i<3; i++)); do if true; then :; fi; done\npython3 train.py --a",
    "unset": "A=(1)\nunset A\npython3 train.py ${A[@]} --a",
}
REFUSED = {
    "python3 train.py $(hostname)": ["run.sh:1", "hostname", "no command is run"],
    "if true; then\n  N=4\nfi\npython3 train.py $N": ["inside what begins at", "run.sh:1", "--set N=VALUE"],
    "true && N=4\npython3 train.py $N": ["only if another command succeeds", "--set N=VALUE"],
    "python3 train.py $HOME": ["run.sh:1", "HOME is not set", "--set HOME=VALUE"],
    "if true; then\n  python3 train.py\nfi": ["run.sh:2", "training starts", "inside what begins at"],
    "python3 train.py\npython3 train.py": ["2 times", "run.sh:1", "run.sh:2"],
    "echo hello": ["starts no train.py"],
    "eval $X\npython3 train.py": ["run.sh:1", "eval"],
    "\nsource models/none.sh\npython3 train.py": ["run.sh:2", "none.sh", "--skip none.sh"],
    "python3 train.py 'open": ["run.sh:1", "never ends"],
    'A="\n\npython3 train.py': ["run.sh:1", "never ends"],
    "A=(--x\npython3 train.py": ["run.sh:1", "closing parenthesis"],
    "python3 train.py {a,b}": ["run.sh:1", "braces"],
    "if true; then\npython3 train.py": ["run.sh:1"],
    "cat <<EOF\npython3 train.py": ["run.sh:2", "EOF"],
    "read N\npython3 train.py $N": ["N is read at", "run.sh:1"],
    "source run.sh": ["more than 32 files"],
}


def read(folder: Path, text: str, **given: str) -> Launch:
    script = folder / "run.sh"
    script.write_text(text)
    return read_launch(script, given=given)


@pytest.mark.parametrize("text", SAME_AS_BASH.values(), ids=list(SAME_AS_BASH))
def test_arguments_are_those_of_bash(text: str, tmp_path: Path) -> None:
    found = read(tmp_path, text)
    ran = subprocess.run(
        ["bash", "--norc"],
        input=(PYTHON + text).encode(),
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    expected = ran.stdout.decode().split("\0")[:-1]
    assert [value.text for value in found.arguments] == expected
    assert expected or "empty" in text, "bash gave arguments"


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=list(REFUSED))
def test_what_cannot_be_known_is_refused_with_its_place(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        found = read(tmp_path, text)
        raise ConfigError(" ".join(f"{value.where}: {value.problem}" for value in found.arguments if value.problem))
    assert all(word in str(caught.value) for word in words), caught.value


def test_variables_from_outside_win(tmp_path: Path) -> None:
    text = 'N=1\nif true; then N=2; fi\nM="${M:-3}"\npython3 train_async.py $N $M "${X[@]}"'
    found = read(tmp_path, text, N="8", X="--a 1")
    assert found.program == "train_async.py"
    assert [(value.text, value.problem) for value in found.arguments] == [("8", ""), ("3", ""), ("--a", ""), ("1", "")]


def test_a_sourced_file_may_be_left_out(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('source "${DIR}/models/m.sh"\npython3 train.py --a "${MODEL_ARGS[@]}"')
    found = read_launch(script, given={}, skip=["m.sh"])
    assert "m.sh" in found.skipped[0]
    assert "MODEL_ARGS is not set" in found.arguments[-1].problem, "it might have been set there"


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = f"touch {seen}\nX=$(touch {seen})\nY=`touch {seen}`\n((z=1))\ncat <(touch {seen})\npython3 train.py --a"
    found = read(tmp_path, text)
    assert not seen.exists()
    assert found.commands["touch"] == 1


def test_the_fixture_is_read_whole() -> None:
    found = read_launch(FIXTURE, given={"MODEL_ROOT": "/models"})
    texts = [value.text for value in found.arguments]
    assert texts[texts.index("--expert-model-parallel-size") + 1] == "8"
    assert texts[texts.index("--sglang-cuda-graph-bs") + 1 :][:5] == ["1", "2", "4", "8", "16"]
    assert [value.text for value in found.arguments if value.problem] == [""], "--moe-layer-freq alone is computed"
    layers = next(value for value in found.arguments if value.text == "--num-layers")
    assert layers.where.endswith("models/qwen3.5-35B-A3B.sh:14")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab=$(){}[]'\"`\\#;&|<> \n\t@*:-+%!0", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        found = read(folder, f"python3 train.py --a\n{text}")
    except ConfigError as error:
        assert str(folder / "run.sh") in str(error) or "source" in text
    else:
        assert found.arguments[0].text == "--a"
