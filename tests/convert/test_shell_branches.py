"""Branches, subshells, loops and functions of launch scripts: variables equal those of bash, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.errors import ConfigError
from slime_like_compat.shell.launch_script import read_launch
from tests.convert.shell_lines import assert_read_as_bash_does, assert_refused, read_script

BRANCHES = {
    "a group in a condition": "if false || { true; }; then :; fi\nif true && ! ( false ); then :; fi\npython3 train.py --a",
    "groups": 'E=vllm\nif [ 1 = 1 ] && { [ "$E" = x ] || [ "$E" = vllm ]; }; then N=1; else N=2; fi\n'
    "if { [ 1 = 2 ]; }; then M=1; else M=2; fi\n{ K=3; }\n[ 1 = 2 ] && { L=4; }\n"
    "f() { A=7; }\nfunction g { B=7; }\nfunction h() { C=7; }\npython3 train.py $N $M $K ${L:-l}",
    "functions that are not called": "f() { X=1; }\ng()\n{\nY=1\n}\nh() ( Z=1 )\npython3 train.py --a",
    "case": 'case "x" in\n  a|b) Y=1 ;;\n  *) Y=2 ;;\nesac\npython3 train.py --a',
    "tests": "[[ -n a && ( -n b ) ]] && true\nif [ 1 -gt 0 ]; then :; else :; fi\npython3 train.py --a",
    "loops": "for x in 1 2; do :; done\nfor ((i=0; i<3; i++)); do if true; then :; fi; done\npython3 train.py --a",
    "a loop that does not run": "X=1\nwhile false; do X=2; done\nuntil true; do X=3; done\npython3 train.py $X",
    "decided by variables": 'D=gpu\nif [ "$D" = npu ]; then N=1; elif [[ $D == g* ]]; then N=2; A=(--x); else N=3; fi\n'
    'if [ 3 -gt 4 ] || ! [ -n "$D" ]; then A+=(--y); else A+=(--z); fi\n[ -z "" ] && B=1\n[ -n "" ] && B=2\n'
    '[ 1 -ne 1 ] || C=7\nif false; then python3 train.py no; fi\npython3 train.py $N "${A[@]}" $B $C',
    "a case by its word": 'D=npu-a\ncase "$D" in gpu) X=1 ;;\n cpu|npu*) X=2\n Y=(3 4);;\n *) X=5; exit 1;; esac\n'
    "case ${E:-none} in\n  a) Z=1;;\n  *) Z=6;;\nesac\nif true; then case x in y) ;; x) W=8;; esac; fi\n"
    "python3 train.py $X ${Y[@]} $Z $W",
    "patterns in parentheses": "case x in (x) Y=1;; (*) Y=2;; esac\npython3 train.py $Y",
    "a quoted pattern": 'case ab in "a*") X=1;; a*) X=2;; esac\npython3 train.py $X',
    "a group in a case": "case x in x) { Y=1; };; *) Y=2;; esac\npython3 train.py $Y",
    "branches that run on": "case a in a) X=1;& b) Y=2;; c) X=3;; esac\ncase a in a) Z=4;;& b) X=5;; *) W=6;; esac\n"
    "case 1 in [12]) A=1;& 1) B=2;;& *) C=3;; esac\npython3 train.py $X $Y $Z $W $A $B $C",
    "the result of a branch": "if true; then false; fi || X=2\nif false; then :; fi && Y=3\npython3 train.py $X $Y",
    "an empty word in a test": "A=\nif [ -n $A ]; then X=1; else X=2; fi\nif [[ -n $A ]]; then Y=1; else Y=2; fi\n"
    "python3 train.py $X $Y",
}
SUBSHELLS = {
    "a command in the background": "LR=1\nexport LR=2 &\nwait\nLR=3 | cat\n[ 1 = 1 ] && LR=5 &\nwait\npython3 train.py $LR",
    "a group in the background": "X=1\n{ X=2; Y=3; } &\nwait\ntrue && { X=4; } &\nwait\npython3 train.py $X ${Y:-y}",
    "branches in the background": "X=1\nif true; then X=2; fi &\ncase a in a) X=3;; esac &\nwait\npython3 train.py $X",
    "a loop in the background": "X=1\nfor i in 1; do X=2; done &\nwait\npython3 train.py $X",
    "parentheses": "X=1\n( X=2 )\n(\nunset X\n: ${Z:=4}\n)\nset -- a b\n( shift )\npython3 train.py $X ${Z:-z} $1",
    "before a pipe": "X=1\n{ X=2; } | cat\ntrue && { X=3; } | cat\npython3 train.py $X",
    "after a pipe": "X=1\necho a | while read l; do X=$l; done\necho a | read X\ntrue |\n{ X=2; }\npython3 train.py $X",
    "within one another": "X=1\n{ X=2; ( X=3 ); { Y=4; } & Z=5; }\nwait\npython3 train.py $X ${Y:-y} $Z",
    "on one line": "X=1; { X=2; }; { X=3; } & python3 train.py $X",
    "a condition": "if ( X=2; true ); then Y=3; fi\npython3 train.py ${X:-x} $Y",
    "a coprocess": "X=1\ncoproc { X=2; }\ncoproc P { X=3; }\npython3 train.py $X",
    "training in parentheses": "X=1\n( X=2; python3 train.py $X )",
    "training in a group before a pipe": "X=1\n{ X=2; python3 train.py $X; } 2>&1 | cat",
    "training before a pipe": "A=1 python3 train.py --a 2>&1 | cat",
}
REFUSED_SCRIPTS = {
    "if hostname; then\n  N=4\nfi\npython3 train.py $N": [
        "inside the block that begins at",
        "run.sh:1",
        "--set N=VALUE",
    ],
    "hostname && N=4\npython3 train.py $N": ["only if another command succeeds", "--set N=VALUE"],
    "[ $D = a ] && N=4\npython3 train.py $N": ["succeeds, which --set D=VALUE may decide", "--set N=VALUE"],
    "if hostname; then :; elif true; then\n  N=4\nfi\npython3 train.py $N": ["run.sh:1", "--set N=VALUE"],
    'case "$D" in\n  a) N=4;;\nesac\npython3 train.py $N': ["run.sh:1", "--set D=VALUE may decide", "--set N=VALUE"],
    "if [ -f x ]; then\n  python3 train.py\nfi": ["run.sh:2", "training starts inside the block", "whether it runs"],
    "if true && { hostname; }; then\n  N=4\nfi\npython3 train.py $N": ["run.sh:1", "--set N=VALUE"],
    "D=$(hostname)\nif [ $D = a ]; then\n  N=4\nfi\npython3 train.py $N": ["run.sh:2", "--set D=VALUE may decide"],
    "A=1\nif [ $A = 1 ] && [ $D = a ]; then\n  N=4\nfi\npython3 train.py $N": ["--set D=VALUE may decide"],
    "function f {\n  N=4\n}\npython3 train.py $N": ["inside the block that begins at", "run.sh:1", "--set N=VALUE"],
    "f() { N=4; }\npython3 train.py $N": ["inside the block that begins at", "run.sh:1", "--set N=VALUE"],
    "f()\n{\nN=4\n}\nf\npython3 train.py $N": ["inside the block that begins at", "run.sh:1", "--set N=VALUE"],
    "N=1\nf() { [ $M = 2 ] && N=5; }\nM=2\nf\npython3 train.py $N": ["inside the block", "run.sh:2", "--set N=VALUE"],
    "X=0 N=1\nfor i in 1 2; do [ $X = 1 ] && N=2; X=1; done\npython3 train.py $N": ["run.sh:2", "--set N=VALUE"],
    "set -- a b\nfor i in 1 2; do [ $1 = b ] && N=2; shift; done\npython3 train.py $N": ["run.sh:2", "--set N=VALUE"],
    "i=5\nfor ((i=0; i<3; i++)); do :; done\npython3 train.py $i": ["i is computed at", "run.sh:2"],
    "LR=1\nif hostname; then : ${LR:=5}; unset LR; fi\npython3 train.py $LR": ["inside the block", "LR=VALUE"],
    'if hostname; then set -- --a; fi\npython3 train.py "$@"': ["inside the block that begins at", "run.sh:1"],
    "set -- a b\nwhile hostname; do shift; done\npython3 train.py $1": ["inside the block that begins at", "run.sh:2"],
    "if hostname; then\nsource a.sh\nfi": [
        "a file is sourced inside the block that begins at",
        "whether it runs is not known",
        "--skip a.sh",
    ],
    "hostname && source a.sh": ["is sourced only if another command succeeds, and whether it runs is not known"],
    "set -o pipefail\nX=0\nhostname | true && X=1\npython3 train.py $X": ["only if another command", "--set X=VALUE"],
    "if [[ b < a ]]; then X=1; fi\npython3 train.py $X": ["run.sh:1", "--set X=VALUE"],
    "case 1 in [[:digit:]]) X=1;; *) X=2;; esac\npython3 train.py $X": ["run.sh:1", "--set X=VALUE"],
    "if hostname; then false; fi || X=1\npython3 train.py $X": ["--set X=VALUE"],
    "if true; then\npython3 train.py": ["run.sh:1", "'if'", "no 'fi'"],
    "true\nfi\npython3 train.py": ["run.sh:2", "'fi' is not expected"],
    "{ true; )\npython3 train.py": ["run.sh:1", "')' is not expected"],
    "for ((;;)) { (\n": ["run.sh:1", "'('", "no ')'"],
    "( " * 5000: ["run.sh", "too deep"],
}


@pytest.mark.parametrize("text", BRANCHES.values(), ids=list(BRANCHES))
def test_branches_are_followed_as_in_bash(text: str, tmp_path: Path) -> None:
    assert_read_as_bash_does(text, tmp_path)


@pytest.mark.parametrize("text", SUBSHELLS.values(), ids=list(SUBSHELLS))
def test_variables_of_a_subshell_do_not_reach_its_parent(text: str, tmp_path: Path) -> None:
    assert_read_as_bash_does(text, tmp_path)


@pytest.mark.parametrize(("text", "words"), REFUSED_SCRIPTS.items(), ids=[text[:60] for text in REFUSED_SCRIPTS])
def test_a_variable_of_unknown_value_is_refused_with_its_line(text: str, words: list[str], tmp_path: Path) -> None:
    assert_refused(text, words, tmp_path)


def test_a_given_variable_is_kept_in_a_loop(tmp_path: Path) -> None:
    text = "N=1\nfor i in 1 2; do [ $D = a ] && N=2; done\npython3 train.py $N"
    launch = read_script(tmp_path, text, D="b")
    assert [(value.text, value.problem) for value in launch.arguments] == [("1", "")]


def test_a_file_sourced_in_a_subshell_sets_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "more.sh").write_text("X=2")
    launch = read_script(tmp_path, "X=1\n( source more.sh )\npython3 train.py $X")
    assert [value.text for value in launch.arguments] == ["1"]
    (tmp_path / "deep.sh").write_text("if true; then " * 10 + "source deep.sh" + "; fi" * 10)
    with pytest.raises(ConfigError, match=r"more than 32 files|too deep"):
        read_launch(tmp_path / "deep.sh", variables={})
