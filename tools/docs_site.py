"""Hooks of ``mkdocs build`` (mkdocs.yml): pages that are made from README, recipes, command line and schema.

The documents stay where a reader of the repository finds them; their links are turned to the site's pages. A link to a file
that has no page becomes plain text, a link to nothing fails the build (``strict``). Nothing is fetched.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Path of a document in the repository to the page that the site makes of it; those below ``docs`` are mkdocs' own."""
    pages = {"README.md": "index.md"}
    pages |= {f"eval/{name}/README.md": f"{name}.md" for name in (path.parent.name for path in ROOT.glob("eval/*/README.md"))}
    pages |= {f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}
    recipes = [path.parent.name for path in ROOT.glob("recipes/*/README.md")]
    return pages | {f"recipes/{name}/README.md": f"recipes/{name}.md" for name in recipes}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of recipes and results, which are as many as there are files."""
    results = [path.relative_to(ROOT / "docs").as_posix() for path in sorted(ROOT.glob("docs/results/**/*.md"))]
    recipes = sorted(page for page in sources().values() if page.startswith("recipes/"))
    for section in config.nav or []:
        section |= {name: pages for name, pages in (("Recipes", recipes), ("Measured", results)) if name in section}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file below ``docs``."""
    made = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in sources().items()}
    made |= {"reference/commands.md": commands(), "reference/recipe.md": recipe(), "reference/cluster.md": cluster()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


NAVIGATION = {"76.25em": "73.75em", "76.234375em": "73.734375em"}
"""Width from which mkdocs-material shows the navigation beside a page: 1,220 pixels; a window of 1,200 would have none."""


def on_post_build(config: MkDocsConfig) -> None:
    """Show the navigation from 1,180 pixels on, in the theme's style sheets and scripts."""
    assets = Path(config.site_dir) / "assets"
    for path in (*assets.glob("stylesheets/*.css"), *assets.glob("javascripts/*.js")):
        text = changed = path.read_text(encoding="utf-8")
        for before, after in NAVIGATION.items():
            changed = changed.replace(before, after)
        if changed != text:
            path.write_text(changed, encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are right in the repository into links that are right in the site."""
    del config, files
    pages = sources()
    source = {page: path for path, page in pages.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda link: _turned(link, source, page, pages), part) for part in parts
    )


def _turned(link: re.Match[str], source: str, page: Page, pages: Mapping[str, str]) -> str:
    mark, text, target = link.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return link[0]
    path, sharp, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(PurePosixPath(source).parent.as_posix(), path))
    inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None)
    if inside is None:
        return text if (ROOT / path).exists() else link[0]
    away = posixpath.relpath(inside, PurePosixPath(page.file.src_uri).parent.as_posix())
    return f"{mark}[{text}]({away}{sharp}{anchor})"


# --- the reference -----------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every public command with its arguments and options, as ``--help`` has them."""
    from clustertune.cli.app import app

    root = typer.main.get_command(app)
    return "# Commands\n\n" + "".join(_command(root, "clustertune"))


def _command(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    context = typer.Context(command, info_name=name.rsplit(maxsplit=1)[-1], parent=parent)
    yield f"## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n\n"
    yield f"```console\n$ {name} {' '.join(command.collect_usage_pieces(context))}\n```\n\n"
    rows = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    if rows:
        yield _table(("argument or option", "meaning"), ((f"`{flags}`", text) for flags, text in rows))
    for word in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, word)
        if inner is not None and not inner.hidden:
            yield from _command(inner, f"{name} {word}", context)


def recipe() -> str:
    """The keys of ``recipe.yaml``."""
    from clustertune.recipe.sections import Recipe

    text = "# Keys of a recipe\n\nKeys under `train:` are the trainer's (TRL), keys under `lora:` PEFT's.\n\n"
    return text + "".join(_keys(Recipe, ""))


def cluster() -> str:
    """The keys of ``ops/clusters/NAME.yaml``."""
    from clustertune.cluster.schema import ClusterFile

    return "# Keys of a cluster file\n\n" + "".join(_keys(ClusterFile, ""))


def _keys(model: type[BaseModel], path: str) -> Iterator[str]:
    """A table of the section's keys, then the sections below it."""
    texts, inner, rows = _docstrings(model), [], []
    for name, field in model.model_fields.items():
        key, below = f"{path}{field.alias or name}", _sections(field.annotation)
        inner += [(section, f"{key}.") for section in below]
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            default = "" if below or value is None else f"`{value}`"
        meaning = texts.get(name) or " ".join(inspect.cleandoc(section.__doc__ or "") for section in below)
        rows.append((f"`{key}`", " or ".join(_kinds(field.annotation)), default, meaning))
    yield f"## {f'`{path[:-1]}`' if path else 'The file'}\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n"
    yield _table(("key", "value", "default", "meaning"), rows)
    for section, below_path in inner:
        yield from _keys(section, below_path)


def _sections(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for part in get_args(kind) for section in _sections(part)]


def _kinds(kind: Any) -> Iterator[str]:
    """What a key takes, for a reader: ``text``, ``list of numbers`` and the like."""
    origin, parts = get_origin(kind), get_args(kind)
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "nothing", Any: "any value"}
    if origin is Literal:
        yield from (f"`{value}`" for value in parts)
    elif origin in (Union, UnionType):
        yield from dict.fromkeys(word for part in parts if part is not type(None) for word in _kinds(part))
    elif hasattr(kind, "__metadata__"):
        yield from _kinds(parts[0])
    elif origin in (list, tuple, frozenset, set):
        yield "list of " + " or ".join(dict.fromkeys(word for part in parts if part is not Ellipsis for word in _kinds(part)))
    elif _sections(kind):
        yield "section"
    else:
        yield names.get(kind, "section")


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Text below each field in the source, that of the parents' fields included."""
    texts: dict[str, str] = {}
    for one in reversed([base for base in model.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        [body] = ast.parse(inspect.cleandoc("\n" + inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def _table(head: tuple[str, ...], rows: Any) -> str:
    def line(cells: Any) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"

    return line(head) + line(["---"] * len(head)) + "".join(map(line, rows)) + "\n"
