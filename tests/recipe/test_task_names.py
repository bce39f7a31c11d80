"""The names in ``eval.tasks``: one that lm-eval does not know is refused before anything runs, by every command."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from clustertune.recipe import eval_tasks
from clustertune.resolve.resolve import resolve
from tests.command import run
from tests.refusal import problems


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
    from lm_eval.tasks._index import TaskIndex

    spec = find_spec("lm_eval")
    assert spec and spec.submodule_search_locations
    place = Path(spec.submodule_search_locations[0]) / "tasks"
    known = set(eval_tasks.unknown_tasks(["no-such-task"])["no-such-task"])
    assert set(TaskIndex.build([place])) <= known and len(known) < 15_000
