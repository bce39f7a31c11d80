"""An evaluation as a command line asks for it: its settings, and the folder of its result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe.eval_tasks import unknown_tasks
from clustertune.recipe.layers import did_you_mean
from clustertune.recipe.sections import Eval


def eval_folder(below: Path, model: Path, data: Path | None, settings: Mapping[str, Any]) -> Path:
    """``<parent>-<name>-<12 hex>`` of a model: the same command finds its result, two models of one name never share it."""
    resolved = model.resolve()
    identity = [str(resolved), str(data.resolve()) if data else None, dict(settings)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    parts = (re.sub(r"[^A-Za-z0-9._]+", "_", part)[:40].strip("._") for part in (resolved.parent.name, resolved.name))
    return below / "-".join([*(word for word in parts if word), digest])


def eval_settings(values: Mapping[str, Any]) -> Eval:
    """The settings of an evaluation as the command line gives them. Raises UserError."""

    try:
        found = Eval.model_validate(values)
    except ValidationError as error:
        raise UserError(
            Problem(f"{item['input']!r}: {item['msg']}", file="command line", key=f"--{str(item['loc'][0]).replace('_', '-')}")
            for item in error.errors()
        ) from None
    raise_if(
        Problem(f"lm-eval has no task {task!r}", file="command line", key="--tasks", fix=did_you_mean(task, known))
        for task, known in unknown_tasks(found.tasks).items()
    )
    return found
