"""The folder of a run or a model that a command line names."""

from __future__ import annotations

from pathlib import Path

from clustertune.errors import UserError
from clustertune.launch import cluster_paths
from clustertune.manifest import MANIFEST


def existing_folder(path: Path, what: str) -> Path:
    """``path``, which must be a folder. ``what`` names the kind that is wanted. Raises UserError.

    ``runs/NAME/ID`` is looked for in the cluster's folder for runs too.
    """
    path = cluster_paths.existing(path)
    if path.is_dir():
        return path
    message = "is a file, not a folder" if path.exists() else "no such folder"
    raise UserError(message, file=str(path), fix=f"give the path of {what}")


def existing_run(path: Path, what: str = "a run folder") -> Path:
    """A run's folder, or the run that ``latest``, a recipe's name or the beginning of an id names. Raises UserError.

    ``what`` names what is wanted where other folders are taken too.
    """
    if not path.exists() and (run := cluster_paths.named_run(str(path))) is not None:
        return run
    try:
        found = existing_folder(path, what)
    except UserError as error:
        below = cluster_paths.found_runs()
        names = ", ".join(list(dict.fromkeys(folder.parent.name for folder in cluster_paths.run_folders(below)))[:8])
        fix = (
            f"give {what}, latest, the beginning of a run's id, or a recipe that has run: {names or f'none has below {below}'}"
        )
        raise UserError(error.problems[0].message, file=str(path), fix=fix) from None
    inside = [] if what != "a run folder" or (found / "run.json").is_file() else cluster_paths.run_folders(found)
    if inside:
        names = ", ".join(str(folder) for folder in inside[:3])
        raise UserError(f"is no run folder; it holds {len(inside)}", file=str(found), fix=f"give one: {names}")
    return found


def merged_or_model(path: Path) -> Path:
    """A model's folder; of a run, its merged model. Raises UserError."""
    found = existing_run(path, "a run or a model")
    if not (found / "run.json").is_file():
        return found
    if not (found / "merged" / "config.json").is_file():
        raise UserError("has no merged model yet", file=str(found), fix=f"clustertune run ... --run-dir {found} --to merge")
    return found / "merged"


def newest_merged(below: Path) -> Path:
    """The merged model that was finished last in a folder of runs. Raises UserError where there is none."""
    found = [path for path in below.glob(f"*/*/merged/{MANIFEST}") if path.is_file()]
    if not found:
        fix = "make demo first, or name a folder: make eval-ifeval MODEL=DIR, clustertune eval DIR"
        raise UserError("no merged model in this folder of runs", file=str(below), fix=fix)
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent
