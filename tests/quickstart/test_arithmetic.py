"""Problems and demonstrations of the quickstart."""

from pathlib import Path

from slime_like.quickstart.arithmetic import ArithmeticSpec, Problem, demonstrations, split, write_datasets


def test_answers_by_hand() -> None:
    problem = Problem(475, 6)
    assert (problem.text, problem.answer, problem.careless_answer) == ("475+6=", "481", "471")
    assert Problem(198, 5).answer == "203"
    assert Problem(412, 5).answer == Problem(412, 5).careless_answer == "417"


def test_training_and_held_out_problems_are_disjoint() -> None:
    train, heldout = split(ArithmeticSpec())
    assert len(heldout) == 300
    assert len(train) == 900 * 5 - 300
    assert not set(train) & set(heldout)


def test_no_demonstration_shows_a_held_out_problem(tmp_path: Path) -> None:
    write_datasets(tmp_path, ArithmeticSpec())
    prompts = {
        name: {line.split('"')[3] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "heldout", "sft")
    }
    assert len(prompts["heldout"]) == 300
    assert not prompts["heldout"] & (prompts["train"] | prompts["sft"])
    assert prompts["sft"] == prompts["train"]


def test_the_share_of_careless_demonstrations_is_as_stated() -> None:
    spec = ArithmeticSpec()
    rows = demonstrations([Problem(105, 6)] * 1000, spec)
    careless = sum(response == "101" for _, response in rows) / len(rows)
    assert abs(careless - spec.careless) < 0.03
    assert {response for _, response in rows} == {"101", "111"}
