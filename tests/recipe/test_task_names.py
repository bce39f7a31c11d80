"""The names in ``eval.tasks``: one that lm-eval does not know is refused before anything runs, by every command."""

from __future__ import annotations

import pytest

from clustertune.recipe.library_facts import facts
from clustertune.resolve.resolve import resolve
from tests.command import run
from tests.refusal import problems
from tools.library_facts import lm_eval_facts


@pytest.mark.parametrize(
    "words", [("show",), ("run",), ("submit", "--dry-run"), ("plan", "--gpus", "1x8xh100-sxm")], ids=lambda words: words[0]
)
def test_a_misspelt_task_is_refused_with_the_nearest(words: tuple[str, ...]) -> None:
    """After hours of training it would end the evaluation."""
    done = run(words[0], "recipes/tiny-oasst2", *words[1:], "eval.tasks=[ifeval,mmluu]")
    assert done.code == 2 and "eval.tasks" in done.err and "'mmluu'" in done.err and "mmlu" in done.err.replace("mmluu", "")


def test_tasks_groups_and_tags_are_known() -> None:
    """A task, a group, a tag of tasks, one whose tag is in a template, and one of eval/."""
    names = ["arc_easy", "mmlu", "mmlu_international_law", "ai2_arc", "acp_bench_hard", "gsm8k", "ifeval"]
    assert resolve("tiny-oasst2", [f"eval.tasks=[{','.join(names)}]"]).recipe.eval.tasks == names
    for near in ("arc_eazy", "gsm_8k", "ai2arc"):
        (problem,) = problems(resolve, "tiny-oasst2", [f"eval.tasks=[{near}]"])
        assert problem.key == "eval.tasks" and problem.fix


@pytest.mark.jobs
def test_lm_evals_own_index_has_the_same_names() -> None:
    """Its own takes many seconds to build."""
    assert lm_eval_facts() == facts("lm_eval"), "make library-facts"
