"""Reading of launch scripts without running them: arguments equal those of bash, or are refused with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.errors import ConfigError
from slime_like_compat.shell.launch_script import read_launch
from tests.convert.shell_lines import assert_read_as_bash_does, assert_refused, read_script
from tests.hypothesis_examples import num_examples

FIXTURE = Path(__file__).parent / "slime" / "run-qwen3.5-35B-A3B-flashqla.sh"

SAME_AS_BASH = {
    "arrays": 'A=(--lr 1e-6 "two words" \'$x\')\nB=("${A[@]}" --b)\npython3 train.py "${B[@]}"',
    "an array as one word": 'A=(1 "2 3")\npython3 train.py "x ${A[*]} y" "${A[*]}" ${A[*]}',
    "an unquoted array is split again": 'A=(--x "[1, 2]")\npython3 train.py ${A[@]}',
    "empty arrays": 'A=(\n  # --nothing\n)\npython3 train.py ${A[@]} "${A[@]}" "" --x',
    "appended": "A=(--a)\nA+=(--b 2)\nA[1]=--c\npython3 train.py ${A[@]}",
    "an element appended to": (
        'X=1\nX[0]+=2\nA=(--a 1)\nA[1]+="2 $X"\nA[2]+=--b\nB[0]+=c\nA+=3\npython3 train.py $X "${A[@]}" $B'
    ),
    "an array whose first element is set": 'A=(1 "2 3")\nA=x\nexport A=y\npython3 train.py "${A[@]}" $A',
    "defaults": 'N=${N:-${M:-4}}\nE=""\npython3 train.py $N ${E:-e} ${E-f} "${E:+g}" ${N:+h}',
    "arithmetic": "A=3\nB=$((A * 2 + 1))\npython3 train.py $((B % 4)) $(( ${B} - $A ))",
    "arithmetic of negative numbers": "python3 train.py $((-7 % 3)) $((-7 / 2)) $((7 / -2)) $((7 % -2)) $((-8 / -2))",
    "arithmetic of large numbers": (
        "A=9007199254740993\npython3 train.py $((A / 1)) $((A % 10)) $((-A / 3)) $((-A % 10)) $((A / -7)) $((A % -7))"
    ),
    "quotes": 'python3 train.py "a \\"b\\" \\$c" \'d "e"\' f\\ g $\'h\\ti\' "it\'s" \'#\'no#comment # comment',
    "continued lines": "python3 train.py --a \\\n  1 \\\n  --b\n--not-an-argument 2>/dev/null || true",
    "paths": 'P=/a/b/c.jsonl\npython3 train.py ${P##*/} ${P%/*} ${P%.jsonl} "${P}@[0:10]" ${P#/a}',
    "names of files": (
        'P="$(cd -- "/a/b/.." && pwd)"\nN=$(basename "$P/c.parquet" .parquet)\npython3 train.py $N $(dirname /x/y) '
        '"$(basename /q/r/)"'
    ),
    "seq": 'S=$(seq 2)\npython3 train.py --bs 1 $(seq 2 2 8) --b $(seq 3) "$S"',
    "redirections": "python3 train.py --a 2>&1 --b >/dev/stdout <<< text",
    "json": 'python3 train.py --k \'{"a": false}\' --s "{rollout_id}"',
    "two on a line": "A=1 B=2\npython3 train.py $A $B; true",
    "here-documents": "J=$(cat <<EOF\na ' \" ) b\nEOF\n)\ncat >/dev/null <<-'END'\n\tpython3 train.py no\n\tEND\npython3 train.py --a",
    "positional parameters": 'set -euxo pipefail\nset -- --lr 5e-6 "a b"\npython3 train.py $1 "$@" "x$2" "$*" $* $#',
    "shifted": 'set -- a b c\nshift\npython3 train.py "$@" ${1} ${2:-none} ${3:-none}\nshift 2',
    "no positional parameters": 'set -- a\nset --\nset -x\npython3 train.py --a "$@" "b$1"',
    "options before them": 'set -e -o pipefail -- a b\nset +e\npython3 train.py "$@"',
    "assigned where it is unset": 'E=""\n: ${E:=x} "${F=y}" ${G:=${E}z}\nH=1; : ${H:=2}\npython3 train.py $E $F $G $H',
    "unset": "A=(1)\nunset A\npython3 train.py ${A[@]} --a",
}
REFUSED_ARGUMENTS = {
    "python3 train.py $(hostname)": ["run.sh:1", "hostname", "no command is run"],
    "python3 train.py $HOME": ["run.sh:1", "HOME is not set", "--set HOME=VALUE"],
    "A=$(cd ~/x && pwd)\npython3 train.py $A/y": ["run.sh:2", "$(cd ~/x && pwd)", "write its value"],
    "A=$(cd - && pwd)\npython3 train.py $A/y": ["run.sh:2", "$(cd - && pwd)", "write its value"],
    "A=$(cd -P && pwd)\npython3 train.py $A/y": ["run.sh:2", "$(cd -P && pwd)", "write its value"],
    "python3 train.py\npython3 train.py": ["2 times", "run.sh:1", "run.sh:2"],
    "echo hello": ["starts no train.py"],
    "A=(--lr 1)\npython3 train.py --b\n  ${A[@]} \\\n --c": ["run.sh:3", "begins with --lr", "a backslash"],
    "LR=1\nlet LR=5\nLR+=2\npython3 train.py $LR": ["LR is computed at", "run.sh:2", "--set LR=VALUE"],
    "LR=1\nlet LR=5\npython3 train.py $LR": ["LR is computed at", "run.sh:2", "--set LR=VALUE"],
    'LR=1\nlet "LR <<= 1" X=2\npython3 train.py $LR': ["LR is computed at", "--set LR=VALUE"],
    "LR=1\n(( ++LR ))\npython3 train.py $LR": ["LR is computed at", "--set LR=VALUE"],
    "LR=1\n(( LR <<= 2 ))\npython3 train.py $LR": ["LR is computed at", "--set LR=VALUE"],
    "LR=1\nN=$((LR++))\npython3 train.py $LR": ["LR is computed at", "--set LR=VALUE"],
    "declare -n X=LR\nLR=1\nX=5\npython3 train.py $LR": ["run.sh:1", "declare -n"],
    "f=1\nlocal -rn X=f\npython3 train.py": ["run.sh:2", "local -rn"],
    "declare -i N\nN=3+4\npython3 train.py $N": ["run.sh:1", "declare -i"],
    "set -- $(hostname)\npython3 train.py $@": ["run.sh:1", "hostname", "no command is run"],
    "python3 train.py $PWD": ["the folder in which the script is started", "--set PWD=VALUE"],
    "python3 train.py $(pwd)": ["the folder in which the script is started"],
    "eval $X\npython3 train.py": ["run.sh:1", "eval"],
    "\nsource lib/none.sh\npython3 train.py": ["run.sh:2", "none.sh", "--skip none.sh"],
    "python3 train.py 'open": ["run.sh:1", "never ends: close it"],
    'A="\n\npython3 train.py': ["run.sh:1", "never ends: close it"],
    "A=(--x\npython3 train.py": ["run.sh:1", "closing parenthesis: add it"],
    "python3 train.py {a,b}": ["run.sh:1", "braces"],
    "cat <<EOF\npython3 train.py": ["run.sh:2", "add a line 'EOF'"],
    "A[99999]=1\npython3 train.py": ["run.sh:1", "A[99999]", "below 10000"],
    "read N\npython3 train.py $N": ["N is read at", "run.sh:1"],
    "python3 train.py --n $((NODES * 8))": ["run.sh:1", "NODES is not set", "--set NODES=VALUE"],
    "set -- 4\npython3 train.py --n $(($1 * 8))": ["run.sh:2", "$(($1 * 8)) is not read here", "write its value"],
    "set -- 4\npython3 train.py --n $((8 * ${1}))": ["run.sh:2", "$((8 * ${1})) is not read here", "write its value"],
    "python3 train.py --n $((8#17))": ["run.sh:1", "$((8#17)) is not read here", "write its value"],
    "N=010\npython3 train.py --n $((N * 8))": ["run.sh:2", "$((N * 8)) is not read here", "write its value"],
    "N=abc\npython3 train.py ${N%$SUFFIX}": ["run.sh:2", "SUFFIX is not set", "--set SUFFIX=VALUE"],
    'A=(--a 1)\nI=0\nA[$I]=--b\npython3 train.py "${A[@]}"': ["A has an element set at", "run.sh:3"],
    'A=(--a 1)\nA[${#A[@]}]="--b"\npython3 train.py "${A[@]}"': ["A has an element set at", "run.sh:2"],
    "A=(--a 1)\nA[1+1]+=--b\npython3 train.py ${A[@]}": ["A has an element set at", "run.sh:2"],
    'if [ "$X" -eq 1 ]; then N=2; fi\nX=²\nif [ $X -eq +-5 ]; then N=1; fi\npython3 train.py $N': ["N is set inside"],
    "source run.sh": ["more than 32 files", "--skip FILE"],
    f"source lib/{'a' * 300}": ["run.sh:1", "is missing or cannot be reached", "--skip"],
}


@pytest.mark.parametrize("text", SAME_AS_BASH.values(), ids=list(SAME_AS_BASH))
def test_arguments_equal_those_of_bash(text: str, tmp_path: Path) -> None:
    assert_read_as_bash_does(text, tmp_path)


@pytest.mark.parametrize(("text", "words"), REFUSED_ARGUMENTS.items(), ids=list(REFUSED_ARGUMENTS))
def test_an_unknown_argument_is_refused_with_its_line(text: str, words: list[str], tmp_path: Path) -> None:
    assert_refused(text, words, tmp_path)


def test_given_variables_override_the_script(tmp_path: Path) -> None:
    text = 'N=1\nif true; then N=2; fi\nM="${M:-3}"\npython3 train_async.py $N $M "${X[@]}"'
    launch = read_script(tmp_path, text, N="8", X="--a 1")
    assert launch.program == "train_async.py"
    assert [(value.text, value.problem) for value in launch.arguments] == [("8", ""), ("3", ""), ("--a", ""), ("1", "")]


def test_a_sourced_file_may_be_skipped(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('source "${DIR}/models/m.sh"\npython3 train.py --a "${MODEL_ARGS[@]}"')
    launch = read_launch(script, variables={}, skip=["m.sh"])
    assert "m.sh" in launch.skipped[0]
    assert "MODEL_ARGS is not set" in launch.arguments[-1].problem, "the skipped file may set it"


def test_variables_of_a_source_command_are_restored_after_it(tmp_path: Path) -> None:
    (tmp_path / "more.sh").write_text('W=$X$Y$1\nN=("${A[@]}")\nread Y')
    lines = "read X\nY=1\nA=(5 6)\nset -- $(hostname)\nX=2 Y=3 A=7 source more.sh 4\n"
    lines += 'python3 train.py $W ${X:-b} $Y "${1:-c}" "${N[*]}" "${A[*]}"'
    w, x, y, argument, new_array, array = read_script(tmp_path, lines).arguments
    assert [(value.text, value.problem) for value in (w, y)] == [("234", ""), ("1", "")]
    assert (new_array.text, array.text) == ("7", "5 6")
    assert "X is read at" in x.problem and "hostname" in argument.problem


def test_model_arguments_from_a_command_are_taken_from_config_json(tmp_path: Path) -> None:
    text = "mapfile -t MODEL_ARGS < <(python3 models.py)\nmapfile -t OTHERS < <(ls)\n"
    launch = read_script(tmp_path, text + 'python3 train.py --a "${MODEL_ARGS[@]}" "${OTHERS[@]}"')
    assert [value.text for value in launch.arguments if not value.problem] == ["--a"]
    assert "MODEL_ARGS is read from a command" in launch.notes[0] and len(launch.notes) == 1
    prepared = read_script(tmp_path, "cd /opt && python3 train.py --a")
    assert [value.text for value in prepared.arguments] == ["--a"]


def test_no_command_of_a_script_is_run(tmp_path: Path) -> None:
    witness = tmp_path / "seen"
    text = f"touch {witness}\nX=$(touch {witness})\nY=`touch {witness}`\n((z=1))\ncat <(touch {witness})\npython3 train.py --a"
    launch = read_script(tmp_path, text)
    assert not witness.exists()
    assert launch.commands["touch"] == 1


def test_the_fixture_is_read_completely() -> None:
    launch = read_launch(FIXTURE, variables={"MODEL_ROOT": "/models"})
    texts = [value.text for value in launch.arguments]
    assert texts[texts.index("--expert-model-parallel-size") + 1] == "8"
    assert texts[texts.index("--sglang-cuda-graph-bs") + 1 :][:5] == ["1", "2", "4", "8", "16"]
    assert [value.text for value in launch.arguments if value.problem] == [""], "only --moe-layer-freq is computed"
    layers = next(value for value in launch.arguments if value.text == "--num-layers")
    assert layers.file_line.endswith("models/qwen3.5-35B-A3B.sh:14")


@settings(max_examples=num_examples(300), deadline=None)
@given(st.text(alphabet="ab=$(){}[]'\"`\\#;&|<> \n\t@*:-+%!0", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        launch = read_script(folder, f"python3 train.py --a\n{text}")
    except ConfigError as error:
        assert str(folder / "run.sh") in str(error) or "source" in text
    else:
        assert launch.arguments[0].text == "--a"
