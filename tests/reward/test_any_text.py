"""Arbitrary and very long texts are scored in time by every reward, in the real pool and a reward server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_like.config.schema.names import REWARDS
from slime_like.config.schema.rollout import RewardConfig
from slime_like.metrics.types import reduce_metrics
from slime_like.reward.pool import RewardPool
from slime_like.types import SampleGroup
from tests.reward.reward_server import serve
from tests.reward.scored import group
from tests.reward.test_reward_pool import counts

TEXTUAL = [name for name in REWARDS if name != "given"]  # "given" reads no text
NAMES = [*TEXTUAL, *(f"boxed_{name}" for name in TEXTUAL)]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Reward pool with all rewards, and a reward server that always answers 0.5."""

    runner: asyncio.Runner
    pool: RewardPool

    def assert_scores(self, label: str, texts: Sequence[str]) -> None:
        """Assert that every reward scores every text in time, with a finite score and an accuracy of 0 or 1."""
        groups = [
            replace(g, prompt=replace(g.prompt, rm_type=name)) for name in NAMES for g in [group(*texts, label=label)]
        ]
        self.pool.metrics()
        scored_groups: list[SampleGroup] = self.runner.run(self.pool.score(groups))
        assert reduce_metrics(self.pool.metrics()) == counts(calls=len(NAMES) * len(texts))
        for sample in (sample for scored_group in scored_groups for sample in scored_group.samples):
            assert sample.reward is not None and -1.0 <= sample.reward.score <= 1.0
            assert sample.reward.accuracy in (None, 0.0, 1.0) and math.isfinite(sample.reward.score)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with asyncio.Runner() as runner:
        server = serve(lambda *_: (200, "0.5"))
        url, _ = runner.run(server.__aenter__())
        pool = RewardPool(RewardConfig(workers=1, remote_url=url, timeout_s=20))
        yield Scorer(runner, pool)
        runner.run(pool.stop())
        runner.run(server.__aexit__(None, None, None))


LATEX = r"""
\boxed{ \fbox{ { } ( ) [ ] \{ \} $ $$ \( \) \[ \] \frac \dfrac{ \sqrt \sqrt[ ^ _ ! , . ; = < > | % \% + - * / \cdot
\int \sum_{ \prod \lim \log \sin \binom{ \begin{pmatrix} \end{pmatrix} & \\ \text{ \left \right \infty \pi x y i e
"""
WORDS = "0 1 9 12 10000 99999999999 .5 1,234 1e9 ² ٣ ∞ yes A B Answer: answer is option </think> ###Response <|im_end|>"
CHARACTERS = [" ", "\n", "\t", "\0", "\ud800", "\u202e", "é", "\N{PILE OF POO}"]
PIECES = [*LATEX.split(), *WORDS.split(), *CHARACTERS]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join) | st.text(st.characters(), max_size=40)


@pytest.mark.slow
@given(
    label=TEXTS,
    texts=st.lists(TEXTS | TEXTS.map(lambda text: rf"</think>Answer: \boxed{{{text}}}"), min_size=1, max_size=2),
)
@example(label=":", texts=["\N{MODI DIGIT ZERO}"])
def test_any_text_is_scored(scorer: Scorer, label: str, texts: list[str]) -> None:
    scorer.assert_scores(label, texts)


LONG_TEXT_LEN = 60_000
PUMPED = [
    r"\boxed{",
    r"\boxed ",
    "{",
    "$",
    "$$ ",
    r"\(",
    r"\[1",
    "answer ",
    "Answer:",
    "option A ",
    "A is  ",
    "1,",
    "1 ",
    ".",
    " ",
    "</think>",
    r"\frac{1}",
    "^9",
    "!",
    "-",
    "\n",
]


@pytest.mark.slow
def test_long_repetitions_are_scored_in_time(scorer: Scorer) -> None:
    texts = [piece * (LONG_TEXT_LEN // len(piece)) for piece in PUMPED]
    scorer.assert_scores(
        "4", [*texts, *("answer" + text for text in texts[:1]), *(rf"\boxed{{{text}}}" for text in texts)]
    )
    scorer.assert_scores("(" * LONG_TEXT_LEN, ["4", texts[0]])


HOSTILE = [
    "((9999^{9999})^{99})^{99}",
    "(((9^{99})^{99})^{99})^{99}",
    r"\binom{999!}{500!}",
    "(a+b+c+d+e+f)^{99}",
    r"9999^{9999} \cdot 9998^{9998} \cdot 9997^{9997}",
    r"\int_0^1 \sin(x^{99})e^x",
    "(999!)^{999}",
    r"\sqrt[99]{9999^{9999}+1}",
    r"\frac{1}{(x+y+z)^{50}(x-y)^{50}}",
    r"\left(9999^{9999}\right)!",
    "9^{9^{9^{9}}}",
    "2^{9999}!",
    "9999^{9999^{2}}",
    r"\sqrt[3]{" * 9 + "2" + "}" * 9,
    r"\binom{999}{500}^{999}",
    r"\int_0^1 x^{x} dx",
    r"\sum_{n=1}^{999} \frac{1}{n^n}",
    "(1+x)^{999}",
    "999!",
    "1/0",
    "0^{0}",
    r"\log(\log(0))",
    r"\begin{pmatrix}" + r"1 & 2 \\ " * 9 + r"\end{pmatrix}",
    "__import__('os').abort()",
    "x=" * 99 + "1",
]


@pytest.mark.slow
def test_hostile_formulas_are_scored_in_time(scorer: Scorer) -> None:
    scorer.assert_scores(r"\sqrt{2}", [rf"</think>Answer: \boxed{{{latex}}}" for latex in HOSTILE])
