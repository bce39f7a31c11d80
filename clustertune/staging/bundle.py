"""One folder with everything that a recipe needs from outside: what lies where in it, and how a run reads from it alone.

``hub/`` is a cache of the Hub (plain files in place of links, as huggingface_hub itself makes where links cannot be):
``HF_HUB_CACHE`` names it for any program. ``model/``, ``data/`` and ``eval/`` hold what was named by path, ``container/`` the
image, ``recipes/`` the recipe. ``MANIFEST.json`` is written last; ``SHA256SUMS`` says the same to ``sha256sum --check``.

``stage --verify`` compares its checksums, then tries what the chain reads of it, in a process without network: with empty
caches and, by ``unshare --net``, nothing but loopback. That is the chain's own ``prepare``, which needs data, tokenizer and
chat template; then ``python -m clustertune.staging.bundle``, which opens the model and the evaluation's tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.data.prompts import read_prompts
from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.manifest import MANIFEST, SHA256, Manifest, read_manifest
from clustertune.process import captured
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import EVAL_DATA, Resolved, expand_home, is_there
from clustertune.staging import hashed_copy

KIND = "parcel"
HUB, MODEL, DATA, EVAL, CONTAINER, RECIPES, SUMS = (
    *("hub", "model", "data", "eval", "container", "recipes"),
    "SHA256SUMS",
)
OWN = "own prompts"
"""What a bundle calls the part that ``eval.data`` names."""
STAGED = "staged"
"""The recipe key that names a bundle."""


def read(folder: Path) -> Manifest:
    """The manifest of a bundle. Raises UserError where the folder is none."""
    try:
        return read_manifest(folder, KIND)
    except UserError as error:
        fix = f"clustertune stage RECIPE --to {folder} makes it"
        raise UserError([*error.problems, Problem("is not a folder of staged inputs", file=str(folder), fix=fix)]) from None


def parts(sealed: Manifest) -> dict[str, Any]:
    """What a bundle holds: ``model``, ``data``, ``benchmark``, ... with name, revision and path."""
    held = sealed.meta.get("parts")
    return held if isinstance(held, dict) else {}


def model_folder(folder: Path) -> Path | None:
    """The base model in a bundle; None where its recipe makes its own."""
    return _part(folder, "model")


def data_input(resolved: Resolved) -> Path | None:
    """The file or folder with a recipe's conversations in its bundle; None where they lie where the recipe says.

    A recipe scaled down has conversations of its own, which come with the project.
    """
    folder = staged_folder(resolved)
    if folder is None or bool(read(folder).meta.get("tiny")) != resolved.tiny:
        return None
    return _part(folder, "data")


def data_inputs(resolved: Resolved) -> dict[str, Path]:
    """Files and folders with a recipe's conversations by their keys, of its bundle where it has one; none of the Hub."""
    staged, prompts = data_input(resolved), eval_data(resolved)
    if staged is None:
        return resolved.inputs
    return {"data.input": staged, **({EVAL_DATA: prompts} if prompts else {})}


def eval_data(resolved: Resolved) -> Path | None:
    """The file of a recipe's own prompts, of its bundle where it has one; None: the recipe names none."""
    folder = staged_folder(resolved)
    return (folder and _part(folder, OWN)) or resolved.inputs.get(EVAL_DATA)


def missing_inputs(resolved: Resolved) -> list[Problem]:
    """Those of them that are not there, and every bad row of one's own prompts."""
    problems = [
        Problem("no such file or folder", file=str(path), key=key, fix=f"{key}=PATH names another")
        for key, path in data_inputs(resolved).items()
        if not is_there(path)
    ]
    if (path := eval_data(resolved)) is not None and is_there(path):
        with collect_problems(problems):
            read_prompts(path, EVAL_DATA)
    return problems


def prompts(resolved: Resolved) -> Path | None:
    """The file of prompts in a recipe's bundle; None: the benchmark in the cache, or the project's own."""
    folder = staged_folder(resolved)
    return _part(folder, "benchmark") if folder else None


def _part(folder: Path, what: str) -> Path | None:
    part = parts(read(folder)).get(what) or {}
    return folder / part["path"] if part.get("path") else None


def staged_folder(resolved: Resolved) -> Path | None:
    """The bundle that a recipe reads from, as an absolute path."""
    return expand_home(resolved.recipe.staged).absolute() if resolved.recipe.staged else None


def find_problems(resolved: Resolved) -> list[Problem]:
    """What keeps a recipe from running on the bundle that it names: none there, or one of another model or dataset."""
    folder = staged_folder(resolved)
    if folder is None:
        return []
    if not expand_home(str(resolved.recipe.staged)).is_absolute():
        fix = f"staged={folder}"
        return [Problem("is relative, and jobs run elsewhere", file=str(resolved.recipe.staged), key=STAGED, fix=fix)]
    try:
        held = parts(read(folder))
    except UserError as error:
        return error.problems
    problems: list[Problem] = []
    if resolved.tiny:  # makes its model, and its conversations come with the project
        return problems
    for what, own in (("model", _model_of(resolved)), ("data", _data_of(resolved))):
        have = {key: (held.get(what) or {}).get(key) for key in own}
        if have != own and own["name"] is not None:
            text = f"holds {_as_text(have)}, the recipe asks for {_as_text(own)}"
            fix = "stage the recipe again into a new folder, or name its folder: staged=DIR"
            problems.append(Problem(text, file=str(folder), key=what, fix=fix))
    return problems


def offered(resolved: Resolved, models: Path | None) -> tuple[Path | None, list[str]]:
    """The bundle for a recipe in the cluster's folder of models, under the recipe's name, and why it is skipped.

    It is taken where only this user can have written it: who names ``staged=DIR`` trusts the folder, this is found by its name.
    """
    if models is None or resolved.recipe.staged or resolved.tiny or resolved.recipe.model.weights == "random":
        return None, []
    folder = models / resolved.name
    try:
        if not (folder / MANIFEST).is_file():
            return None, []
        info = folder.stat()
    except OSError as error:
        return None, [f"{folder} is skipped: {error.strerror or error}"]
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        return None, [f"{folder} is skipped: others can write there -> staged={folder} takes it all the same"]
    recipe = resolved.recipe.model_copy(update={STAGED: str(folder)})
    if problems := find_problems(replace(resolved, recipe=recipe)):
        return None, [f"{folder} is skipped: {problems[0].message}"]
    return folder, []


def _model_of(resolved: Resolved) -> dict[str, Any]:
    model = resolved.recipe.model
    if model.weights == "random":  # made by the run
        return {"name": None}
    return {"name": model.name, "revision": model.revision}


def _data_of(resolved: Resolved) -> dict[str, Any]:
    data = resolved.recipe.data
    return {"name": data.name, "revision": None if data.input or data.sources else data.revision}


def _as_text(source: dict[str, Any]) -> str:
    name, revision = source.get("name"), source.get("revision")
    return f"{name}@{revision[:12]}" if revision else str(name)


def variables(folder: Path) -> dict[str, str]:
    """The environment in which every library finds what it needs in a bundle, and asks no server."""
    return {"HF_HUB_CACHE": str(folder / HUB), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def enter(resolved: Resolved, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, and all that it starts, read from the recipe's bundle. Call before a library of the Hub is loaded.

    Nothing happens for a recipe without one. Raises UserError where it does not fit the recipe.
    """
    folder = staged_folder(resolved)
    if folder is None:
        return
    raise_if(find_problems(resolved))
    ours = variables(folder)
    if environ.get("WANDB_MODE"):
        del ours["WANDB_MODE"]
    environ.update(ours)


# --- verification -----------------------------------------------------------------------------------------------------

SECONDS = 3600.0
"""How long a part of the rehearsal may take: some gigabytes from a slow disk, some million conversations."""
_NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
_LOOPBACK = ("sh", "-c", 'ip link set lo up 2> /dev/null; exec "$@"', "sh")
_INHERITED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "VIRTUAL_ENV", "TZ", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""What a rehearsal takes over from the environment: no cache, no token, no address of a hub."""


@dataclass
class Verification:
    """What a verification found."""

    files: int = 0
    bytes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    """``{"step", "found", "problems"}`` of each part of the rehearsal."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``, without the problems."""
        own = {"files": self.files, "bytes": self.bytes, "steps": self.steps, "notes": self.notes}
        return {"ok": not self.problems, **own}


def verify(
    folder: Path, recipe: str | None, overrides: Sequence[str], *, tiny: bool, stall: float, tell: Callable[[str], None]
) -> Verification:
    """Check an offline bundle. Problems are in the verdict; raises UserError where the folder is none.

    ``recipe``: another one than the copy in the bundle.
    """
    folder = folder.absolute()
    verdict, sealed = Verification(), read(folder)
    check_sums(folder, sealed, verdict, stall)
    if verdict.problems:
        return verdict
    tell(f"{verdict.files} files, {hashed_copy.amount(verdict.bytes)}: sums are right")
    meta = sealed.meta
    recipe = recipe or str(folder / RECIPES / str(meta["recipe"]))
    words = [*(list(overrides) or list(meta["overrides"])), f"{STAGED}={folder}"]
    tiny = tiny or (str(recipe).startswith(str(folder)) and bool(meta["tiny"]))
    with tempfile.TemporaryDirectory(prefix="clustertune-verify-") as scratch:
        _rehearse(folder, [recipe, *words, *(["--tiny"] if tiny else [])], Path(scratch), verdict, tell)
    return verdict


def check_sums(folder: Path, sealed: manifest.Manifest, verdict: Verification, stall: float) -> None:
    """Every file by its SHA-256, several at once, and nothing beside them that a library would read."""
    names = sorted(sealed.files)
    answers = hashed_copy.hash_files([(folder / name, sealed.files[name]) for name in names], SHA256, stall, "sums")
    fix = "copy it again from where it was staged, or stage it again"
    for name, answer in zip(names, answers, strict=True):
        record, file = sealed.files[name], str(folder / name)
        if isinstance(answer, str):
            verdict.problems.append(Problem(f"cannot be read: {answer}", file=file, fix=fix))
        elif answer.size != record.size:
            verdict.problems.append(Problem(f"{answer.size} bytes, the manifest says {record.size}", file=file, fix=fix))
        elif answer != record:
            verdict.problems.append(Problem("its content differs from the manifest's SHA-256", file=file, fix=fix))
    for name in sorted(set(manifest.list_files(folder)) - sealed.files.keys()):
        fix = "remove it: a library may read it in place of what was staged"
        verdict.problems.append(Problem("is not named by the manifest", file=str(folder / name), fix=fix))
    verdict.files, verdict.bytes = len(names), sum(record.size for record in sealed.files.values())


def no_namespace() -> str | None:
    """Why this machine gives a process no network of its own; None where it does."""
    try:
        done = captured([*_NO_NETWORK, "true"], 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or "unshare failed"


def _rehearse(folder: Path, words: list[str], scratch: Path, verdict: Verification, tell: Callable[[str], None]) -> None:
    prefix: tuple[str, ...] = (*_NO_NETWORK, *_LOOPBACK)
    if (refused := no_namespace()) is not None:
        text = f"no network namespace here ({refused}): the rehearsal is not cut off, libraries are only asked to stay offline"
        verdict.notes.append(text)
        tell(f"warning: {text}")
        prefix = ()
    environment = _environment(folder, scratch)
    prepare = ["clustertune", "prepare", *words, "--out", str(scratch / "data")]
    if "--tiny" in words:  # `prepare` has no such option
        prepare = ["clustertune", "run", *words, "--to", "prepare", "--run-dir", str(scratch / "run")]
    order = json.dumps({"words": words, "scratch": str(scratch)})
    for name, command in (("prepare", prepare), ("load", ["clustertune.staging.bundle", order])):
        output, problems = _run([*prefix, sys.executable, "-m", *command], environment, name, folder)
        verdict.steps.append({"step": name, "found": output, "problems": [asdict(problem) for problem in problems]})
        verdict.problems += problems
        tell(f"{name}: {'; '.join(problem.message for problem in problems) or output}")


def _run(command: Sequence[str], environment: Mapping[str, str], name: str, folder: Path) -> tuple[str, list[Problem]]:
    """What a program printed last where it ended well; else what is wrong."""
    try:
        done = captured(command, SECONDS, environment)
    except subprocess.TimeoutExpired:
        return "", [Problem(f"{name} timed out after {SECONDS:g} s", file=str(folder), fix="is the storage slow?")]
    lines = [line for line in done.stderr.strip().splitlines() if line] or ["without a message"]
    if done.returncode:
        shown = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
        return "", [Problem(f"{name} ended with code {done.returncode}: {text}", file=str(folder)) for text in shown]
    return (done.stdout.strip().splitlines() or lines)[-1], []


def _environment(folder: Path, scratch: Path) -> dict[str, str]:
    """What a fresh account on a machine without network has: empty caches."""
    for name in ("home", "tmp"):
        (scratch / name).mkdir()
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    package = str(Path(__file__).resolve().parents[2])
    return {
        **inherited,
        **variables(folder),
        "HOME": str(scratch / "home"),
        "TMPDIR": str(scratch / "tmp"),
        "PYTHONPATH": os.pathsep.join(filter(None, [package, inherited.get("PYTHONPATH", "")])),
        "PYTHONNOUSERSITE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


# --- the load: model and evaluation from a bundle alone --------------------------------------------------------------


def load_model(resolved: Resolved) -> str:
    """Configuration, tokenizer and the header of every shard."""
    if resolved.recipe.model.weights == "random":
        return "the run makes its model itself"
    from transformers import AutoConfig

    from clustertune.data.tokenizer import open_tokenizer
    from clustertune.merge.base import read_base
    from clustertune.training.base_weights import check_tensors

    folder = model_folder(Path(str(resolved.recipe.staged)))
    if folder is None:
        raise UserError("contains no model", file=str(resolved.recipe.staged), fix="stage the recipe again")
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    open_tokenizer(str(folder))
    raise_if(check_tensors(folder))
    if resolved.lora is None:
        return f"{config.model_type}, weights are complete"
    base = read_base(folder)
    return f"{config.model_type}, {len(base.tensors)} tensors in {len(base.headers)} files"


def load_tasks(resolved: Resolved, scratch: Path) -> str:
    """lm-eval's tasks on the prompts that the chain will score."""
    from clustertune.evaluate import run, tasks

    evaluation, published = resolved.recipe.eval, resolved.recipe.model.weights == "hub"
    benchmark = prompts(resolved)
    texts = []
    with run.quiet():
        own = tasks.read_inputs(evaluation.tasks, benchmark, published)
        asked = read_prompts(path, EVAL_DATA) if (path := eval_data(resolved)) else None
        loaded, _ = tasks.load(evaluation.tasks, own.write_tasks(evaluation, scratch / "task"), evaluation, asked)
        for rows in own.rows.values():
            hub, source = rows.task.hub, rows.called
            lacks = f" (the folder has no {hub.name})" if published and hub and benchmark is None and source != hub.name else ""
            texts.append(f"{len(rows.rows)} prompts of {source}{lacks}")
        others = {name: len(task.eval_docs) for name, task in loaded["tasks"].items() if name not in own.rows}
    others_text = ", ".join(f"{count} documents of {name}" for name, count in others.items())
    return "; ".join([*texts, *([others_text] if others else [])])


def main() -> int:
    """Load what the order on the command line names, and print what was found; whatever libraries print goes to stderr."""
    order = json.loads(sys.argv[1])
    tiny = "--tiny" in order["words"]
    recipe, *overrides = [word for word in order["words"] if word != "--tiny"]
    try:
        resolved = resolve(recipe, overrides, tiny=tiny)
        enter(resolved)
        with contextlib.redirect_stdout(sys.stderr):
            results = [load_model(resolved), load_tasks(resolved, Path(order["scratch"]))]
    except UserError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return int(error.code)
    sys.stdout.write("; ".join(filter(None, results)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
