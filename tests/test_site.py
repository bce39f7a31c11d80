"""The documentation as a site: every page, every link, the reference, and nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from clustertune.cli.app import app
from clustertune.cluster.schema import ClusterFile
from clustertune.recipe.sections import Recipe
from tests.command import REPO
from tools.pictures import plan, svg


def build(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *words]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the configuration of the repository; links and anchors to nothing would end the build."""
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build("--site-dir", folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_every_document_and_recipe_has_a_page(site: Path) -> None:
    for document in (REPO / "docs").rglob("*.md"):
        name = document.relative_to(REPO / "docs").with_suffix(".html")
        name = name.with_name("index.html") if name.name == "README.html" else name
        assert (site / name).is_file(), name
    for recipe in REPO.glob("recipes/*/README.md"):
        assert (site / "recipes" / f"{recipe.parent.name}.html").is_file(), recipe


def test_the_reference_has_every_command_option_and_key(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text()

    def walk(command: object, name: str) -> None:
        assert f"<code>{name}</code>" in text, name
        for parameter in command.params:  # type: ignore[attr-defined]
            for option in parameter.opts if not getattr(parameter, "hidden", False) else ():
                assert option in text or not option.startswith("-"), (name, option)
        for word, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                walk(inner, f"{name} {word}")

    walk(typer.main.get_command(app), "clustertune")
    for page, model in (("recipe", Recipe), ("cluster", ClusterFile)):
        text = (site / "reference" / f"{page}.html").read_text()
        assert not [key for key in model.model_fields if f"<code>{key}</code>" not in text]
    assert "40 hex digits" in (site / "reference" / "recipe.html").read_text()


def test_links_lead_to_pages_and_nothing_is_fetched(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    text = (site / "index.html").read_text()
    assert 'href="plan.html"' in text and 'href="recipes/tiny-oasst2.html"' in text
    assert 'href="../index.html"' in (site / "recipes" / "tiny-oasst2.html").read_text()
    for page in site.rglob("*.html"):
        wanted = re.findall(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"?([^\" >]+)", page.read_text())
        assert not [address for address in wanted if re.match(r"(https?:)?//", address)], page


def test_a_line_stays_text() -> None:
    """Program output is escaped and broken at the width; committed pictures fetch and run nothing."""
    picture = svg(["$ a <b>", "x y " * 60], "t & u")
    texts = [node.text or "" for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314  # made above
    assert texts[:2] == ["t & u", "$ a <b>"] and len(texts) == 5 and max(map(len, texts)) <= 104
    for path in (REPO / "docs" / "pictures").glob("*.svg"):
        text = path.read_text()
        assert "<script" not in text and not re.search(r"\b(href|src)=|url\(|@import", text), path


def test_the_picture_of_the_plan_is_what_plan_prints_today() -> None:
    """Else the README shows another program: ``make pictures`` writes it anew."""
    assert (REPO / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8") == plan()
