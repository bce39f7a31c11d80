"""What a public repository needs beside its code: licence, notice, contact, citation, workflows."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from clustertune import __version__
from tests import tree
from tests.tree import REPO

PLACEHOLDERS = {
    "PLACEHOLDER-AUTHORS": "CITATION.cff",
    "PLACEHOLDER-REPOSITORY": "CITATION.cff",
    "PLACEHOLDER-SECURITY-CONTACT": "SECURITY.md",
}
"""Names and addresses that whoever publishes the repository puts in, and the file of each."""
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""
PUBLIC = ("NOTICE", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "CITATION.cff", ".github/")


def read(name: str) -> Any:
    return yaml.safe_load(tree.texts()[name])


def test_the_licence_is_the_whole_text_and_the_package_names_it() -> None:
    assert hashlib.sha256((REPO / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert re.search(r'^license = "Apache-2.0"$', tree.texts()["pyproject.toml"], re.MULTILINE)
    assert read("CITATION.cff")["license"] == "Apache-2.0"


def test_the_notice_names_every_chat_template() -> None:
    named = {path for path in tree.files() if path.endswith(".jinja") and not path.endswith((".html.jinja", ".md.jinja"))}
    assert named and {path for path in named if path not in tree.texts()["NOTICE"]} == set()


def test_placeholders_stand_where_the_list_says_and_no_contact_is_invented() -> None:
    found = {
        (word, name)
        for name, text in tree.texts().items()
        if name != "tests/test_public.py"
        for word in re.findall(r"PLACEHOLDER-[A-Z][A-Z-]*", text)
    }
    assert found == set(PLACEHOLDERS.items())
    texts = {name: text for name, text in tree.texts().items() if name.startswith(PUBLIC)}
    assert {name: found for name, text in texts.items() if (found := re.findall(r"[\w.]+@[\w-]+\.\w+", text))} == {}


def test_the_citation_is_of_this_version() -> None:
    found = read("CITATION.cff")
    assert found["version"] == __version__ and found["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= set(found)


def test_the_workflow_runs_both_commands_of_the_readme_on_a_runner_as_it_comes() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    runs = {step["run"].split(" WORKERS=")[0]: job for job in jobs.values() for step in job["steps"] if "run" in step}
    two = re.search(r"^## Two commands\n(.*?)\n## ", tree.texts()["README.md"], re.MULTILINE | re.DOTALL)
    assert two
    commands = re.findall(r"^(make \w+)\s+#", two[1], re.MULTILINE)
    assert len(commands) == 2 and set(commands) <= set(runs)
    for command in commands:
        assert [step.get("uses", "").partition("@")[0] for step in runs[command]["steps"]] == ["actions/checkout", ""]


def test_workflows_only_read_and_actionlint_finds_nothing() -> None:
    """actionlint comes as a binary from GitHub, so that it is run where it is installed; the workflow runs it itself."""
    files = [name for name in tree.files() if name.startswith(".github/workflows/")]
    for name in files:
        assert read(name)["permissions"] == {"contents": "read"} and "pull_request_target" not in tree.texts()[name]
    actionlint = shutil.which("actionlint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if actionlint:
        done = subprocess.run([actionlint, *files], cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    assert any("actionlint" in step.get("run", "") for job in read(files[0])["jobs"].values() for step in job["steps"])


def test_issue_forms_and_hooks_are_whole() -> None:
    for name in ("bug", "proposal"):
        form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids)) > 0 and all(field["attributes"]["label"] for field in form["body"])
    pins = tree.texts()["containers/versions.env"]
    for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert re.search(rf"^DEV_{tool.upper()}(_PY)?=", pins, re.MULTILINE), tool
