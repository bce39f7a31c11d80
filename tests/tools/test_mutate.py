"""The mutations still apply, and the runner tells a fault that tests notice from one that they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.folders import fill
from tools import mutate
from tools.mutate import Mutation, covering_tests, judge, read_mutations

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", read_mutations(), ids=lambda mutation: mutation.id)
def test_a_mutation_applies(mutation: Mutation) -> None:
    """Who moves the code moves ``file``, ``old`` and ``new`` in tests/mutations.yaml, so that the same behaviour breaks."""
    assert mutation.old != mutation.new and mutation.breaks.endswith(".")
    path = REPO / mutation.file
    assert path.is_file(), f"{mutation.id}: {mutation.file} is gone: port the mutation to where that code is now"
    assert path.read_text().count(mutation.old) == 1, f"{mutation.id}: port its text to the code of {mutation.file}"
    assert covering_tests(REPO, mutation.file), f"{mutation.id}: no test names {mutation.file}"
    for first in mutation.first.split():
        assert (REPO / first.split("::")[0]).exists(), f"{mutation.id}: {first} is gone"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product of two functions, of which one is tested where its module is named; another test always fails."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of each pytest's seconds
    files = {
        "clustertune/__init__.py": "",
        "clustertune/shop/__init__.py": "",
        "clustertune/shop/sums.py": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
        "tests/shop/test_sums.py": "import pytest\nfrom clustertune.shop.sums import add, sub\n\n\n"
        "@pytest.mark.parametrize('want', [3], ids=['a sum'])\ndef test_add(want):\n    assert add(1, 2) == want and sub\n",
        "tests/shop/test_that_fails.py": "def test_always():\n    assert False\n",
        "tests/other/test_differences.py": "import importlib\n\n\ndef test_sub():\n"
        "    assert importlib.import_module('clustertune.shop').__name__\n"
        "    assert importlib.import_module('.sums', 'clustertune.shop').sub(2, 1) == 1\n",
        "pytest.ini": "[pytest]\nmarkers =\n    long\n    gpu\n    jobs\n    containers\n",
    }
    fill(tmp_path, files)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(REPO / ".venv/bin/python")
    return tmp_path


def test_a_fault_is_caught_or_missed(tree: Path) -> None:
    """A test that names no module runs only where it is given, and one that fails without the fault catches nothing."""
    text = (tree / "clustertune/shop/sums.py").read_text()
    seen = Mutation("shop-add", "clustertune/shop/sums.py", "return a + b", "return a - b", "Sums are sums.")
    found = judge(tree, replace(seen, first="tests/other"), 60)
    assert (found["status"], found["by"]) == ("caught", "tests/shop/test_sums.py::test_add[a sum]")
    unseen = replace(seen, id="shop-sub", old="return a - b", new="return a + b")
    found = judge(tree, unseen, 60)
    assert (found["status"], found["fail_without"]) == ("missed", ["tests/shop/test_that_fails.py::test_always"])
    found = judge(tree, replace(unseen, first="tests/other"), 60)
    assert (found["status"], found["by"]) == ("caught", "tests/other/test_differences.py::test_sub")
    assert judge(tree, replace(seen, old="return a"), 60)["status"] == "cannot-apply"
    assert (tree / "clustertune/shop/sums.py").read_text() == text


def test_ids_are_unique_and_the_page_counts_what_was_not_ported_as_missed() -> None:
    mutations = read_mutations()
    assert len({mutation.id for mutation in mutations}) == len(mutations) >= 60
    mutations = mutations[:3]
    first, second, third = (mutation.id for mutation in mutations)
    results = {
        first: {"before": {"status": "caught", "by": "tests/a.py::test_b"}},
        second: {"before": {"status": "cannot-apply", "by": ""}},
        third: {"before": {"status": "missed", "by": ""}},
    }
    page = mutate.render(mutations, results)
    assert "| before the rooms were rebuilt | 1 | 2 | 0 |" in page
    assert "| after the rooms were rebuilt | 0 | 0 | 3 |" in page
