"""Reward ``gpqa``: 1 if a response chooses the correct option of a multiple-choice question.

The row gives the correct option: its label is a letter, an index from 0, or the text of a choice. The metadata may
contain ``choices`` (texts of the options, as a list or as a mapping by letter, which is sorted by letter),
``valid_letters`` (letters of the options), ``correct_letter`` (takes precedence over the label), and ``correct_answer`` or
``answer_text`` (text of the correct option), as in data for slime's rm_type ``gpqa``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from slime_like.reward.kinds import checks_rows
from slime_like.types import Prompt, Reward, Sample

DEFAULT_LETTERS = tuple(string.ascii_uppercase[:10])
THOUGHT = "</think>"
OPTION = r"[\s:*$({\[\\]{0,8}(?:(?:boxed|text|mathrm)[{(\s]{1,3}){0,2}([A-Z](?!\w)|[a-z](?=[)}\].*$\s]{0,8}\Z))"
STATEMENTS = (  # phrases that state the chosen option, the most explicit first
    re.compile(rf"\b(?i:answer)(?:\s{{1,3}}(?i:is))?{OPTION}"),
    re.compile(r"(?<!\w)\(?([A-Z])\)?\s{1,3}(?i:is(?:\s{1,3}the)?\s{1,3}correct)\b"),
    re.compile(rf"\b(?i:option|choice)(?:\s{{1,3}}(?i:is))?{OPTION}"),
    re.compile(r"(?<!\w)([A-Z])(?!\w)"),
)
LETTER = re.compile(r"[A-Z]")
INDEX = re.compile(r"[0-9]{1,2}")
NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Question:
    """Options of a row, and which one is correct."""

    letters: tuple[str, ...]
    choices: tuple[str, ...]  # text of each option, if the row has them
    correct: str | None  # letter
    texts: frozenset[str]  # texts of the correct option, normalised


def question(label: str | None, metadata: Mapping[str, Any]) -> Question:
    """Parse the options and the correct one from a row's label and metadata.

    Raises ``ValueError`` if ``choices`` is a mapping whose keys are not distinct letters.
    """
    letters = tuple(text.upper() for text in _texts(metadata.get("valid_letters")))
    if isinstance(metadata.get("choices"), Mapping):
        choice_of = _by_letter(metadata["choices"])
        letters = letters or tuple(choice_of) or DEFAULT_LETTERS
        choices = tuple(choice_of.get(letter, "") for letter in letters)
    else:
        choices = _texts(metadata.get("choices"))
        letters = letters or (tuple(string.ascii_uppercase[: len(choices)]) if choices else DEFAULT_LETTERS)
    text = (label or "").strip()
    correct = str(metadata.get("correct_letter") or "").strip().upper() or None
    if correct is None and text.upper() in letters:
        correct = text.upper()
    index = int(text) if INDEX.fullmatch(text) and text not in choices else len(letters)
    if correct is None and index < len(letters):
        correct = letters[index]
    if correct is None:
        pairs = reversed(list(zip(choices, letters, strict=False)))
        letter_of = {_normal(choice): letter for choice, letter in pairs if choice}
        correct = letter_of.get(_normal(text)) if text else None
    correct_texts = [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    if correct in letters and letters.index(correct) < len(choices):
        correct_texts.append(choices[letters.index(correct)])
    if len(text) > 1 and not INDEX.fullmatch(text):
        correct_texts.append(text)
    return Question(letters, choices, correct, frozenset(filter(None, map(_normal, correct_texts))))


def _scorable(label: str | None, metadata: Mapping[str, Any]) -> str:
    try:
        parsed_question = question(label, metadata)
    except ValueError as error:
        return str(error)
    if parsed_question.correct is not None and parsed_question.correct not in parsed_question.letters:
        return (
            f"its correct option is {parsed_question.correct!r}, which is not one of {', '.join(parsed_question.letters)}; "
            "correct the label, metadata.correct_letter or metadata.choices"
        )
    if parsed_question.correct is None and not parsed_question.texts:
        return (
            "has neither a label nor metadata.correct_letter, so gpqa cannot know the correct option; add a label or "
            "metadata.correct_letter"
        )
    return ""


@checks_rows(_scorable)
def gpqa(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if the response chooses the correct option, else 0.

    Only the text after the last ``</think>`` counts, if there is one. If this text states no letter, or the row's correct
    letter is unknown, the response is correct if this text contains the text of the correct option.
    Raises ``ValueError`` as ``question`` does.
    """
    parsed_question = question(prompt.label, prompt.metadata)
    text = sample.text.rpartition(THOUGHT)[2]
    letter = chosen_letter(text, parsed_question.letters)
    if letter is not None and parsed_question.correct is not None:
        correct = letter == parsed_question.correct
    else:
        normalised = f" {_normal(text)} "
        correct = any(f" {target} " in normalised for target in parsed_question.texts)
    return Reward(score=float(correct), accuracy=float(correct))


def chosen_letter(text: str, letters: tuple[str, ...]) -> str | None:
    """Return the letter that a response chooses; None if it chooses none of ``letters``.

    The patterns in ``STATEMENTS`` are tried in order, the most explicit first. The first pattern that finds one of
    ``letters`` decides; if it finds several, the last one in the text counts.

    Example: ``chosen_letter("B looks right, but the answer is (C).", ("A", "B", "C")) == "C"``.
    """
    for pattern in STATEMENTS:
        valid = [m[1].upper() for m in pattern.finditer(text) if m[1].upper() in letters]
        if valid:
            return valid[-1]
    return None


def _by_letter(choices: Mapping[Any, object]) -> dict[str, str]:
    """Return the text of each option by its letter, in the order of the letters.

    Raises ``ValueError`` if the keys of ``choices`` are not distinct letters.
    """
    choice_of = {str(key).strip().upper(): str(item) for key, item in choices.items()}
    if len(choice_of) < len(choices) or not all(LETTER.fullmatch(letter) for letter in choice_of):
        keys = ", ".join(repr(key) for key in choices)
        raise ValueError(
            f"metadata.choices has the keys {keys}; a mapping needs the letters A, B, C, ...; else write a list"
        )
    return dict(sorted(choice_of.items()))


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(str(item) for item in cast("Mapping[Any, object]", value).values())
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in cast("list[object]", value))
    return ()


def _normal(text: str) -> str:
    return NOT_ALPHANUMERIC.sub(" ", text.lower()).strip()
