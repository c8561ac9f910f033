"""Random scripts of branches, subshells, loops and functions: known arguments equal those of bash."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.convert.shell_lines import arguments_in_bash, read_script
from tests.hypothesis_examples import num_examples

NAMES = st.sampled_from("XYZ")
WORDS = st.sampled_from(
    ("1", "2", "ab", "a*", '"a*"', '""', '"$X"', "$Y", '"$X b"', "${Z:-d}", "${Y:+p}", "${X%b}", "$(seq 2)")
)
PATTERNS = st.sampled_from(("1", "a*", '"a*"', "*", "$X", "2 | ab", "[12]"))
COMMANDS = ("{}={}", "export {}={}", "{}+={}", "unset {}", ": ${{{}:={}}}", "let {}=3", "{}=$((7 % 2))")
TESTS = ("[ {} = {} ]", "[[ {} == {} ]]", "[[ {} != {} ]]", "[ -n {} ]", "[[ -z {} ]]", "true", "false", "no_command")
ENDS = ("\n", "; ", " &\n")

tests = st.builds(str.format, st.sampled_from(TESTS), WORDS, WORDS)
simple = st.builds(str.format, st.sampled_from(COMMANDS), NAMES, WORDS) | tests


def compound(command: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Build commands that contain other commands."""
    terminated_command = st.builds("{}{}".format, command, st.sampled_from(ENDS))
    body = terminated_command | st.builds("{}{}".format, terminated_command, terminated_command)
    signs, branch_ends = st.sampled_from(("&&", "||", "|")), st.sampled_from((";;", ";&", ";;&"))
    return st.one_of(
        st.builds("{} {} {}".format, command, signs, command),
        st.builds("{{ {}}}".format, body),
        st.builds("( {})".format, body),
        st.builds("if {}; then {}else {}fi".format, tests, body, body),
        st.builds("case {} in\n{}) {}{}\n({}) {}esac".format, WORDS, PATTERNS, body, branch_ends, PATTERNS, body),
        st.builds("for i in 1 2; do {}done".format, body),
        st.builds("{{ f()\n{{ {}}}\nf; }}".format, body),
        st.builds("{{ f() {{ {}}}\n}}".format, body),
    )


commands = st.recursive(simple, compound, max_leaves=6)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.lists(st.builds("{}{}".format, commands, st.sampled_from(ENDS)), max_size=3))
def test_known_arguments_equal_those_of_bash(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    text = f'X=1\nY=ab\n{"".join(lines)}python3 train.py "x$X" "y$Y" "z${{Z:-unset}}"'
    expected = arguments_in_bash(text)
    values = read_script(tmp_path_factory.getbasetemp(), text).arguments
    assert len(values) == len(expected) == 3, text
    pairs = [(value.text, bash) for value, bash in zip(values, expected, strict=True) if not value.problem]
    assert all(text_read == bash for text_read, bash in pairs), text
