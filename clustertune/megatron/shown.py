"""What ``submit --dry-run`` shows of a Megatron recipe: image, command of the ranks, conversion and configuration."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.launch import image, node
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.shape import train_shape
from clustertune.megatron import megatron_files, program, settings
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

ADDRESS, PORT = "<node 0>", 29500
"""In the place of what is known once the job runs."""


def document(resolved: Resolved, cluster: Cluster, run_path: Path) -> dict[str, Any]:
    """The same for ``--json``. What depends on the packed data is null."""
    where = megatron_files.paths(run_path)
    named: dict[str, str | None] = {key: str(path) for key, path in where.items()}
    named |= {"save": str(run_path.absolute() / "checkpoints"), "load": None}
    shape = train_shape(resolved, cluster)
    plan = AttemptPlan(1, tuple(Node(f"<node {n}>", f"<node {n}>") for n in range(shape.nodes)), shape.ranks_per_node)
    command = node.ranks_command(RunDir(run_path), resolved, 1, plan, 0, ADDRESS, PORT)
    model = resolved.recipe.model
    section = resolved.recipe.megatron
    assert section is not None
    source = {"model": model.path or model.name, "revision": model.revision}
    exported = "adapter" if resolved.lora is not None else "model"
    return {
        "image": image.of_training(resolved, cluster).container.image,
        "ranks_command": ["python3", *command[1:]],
        "conversion": {
            "from": source, "to": str(where["base"]), "ranks": resolved.world_size,
            "cut": {key: value for key, value in section.model_dump().items() if value not in (None, 1, False)},
            "exported": {"what": exported, "to": str(megatron_files.exported(run_path))},
        },
        "configuration_file": f"{run_path.absolute()}/attempts/0001/{program.PLAN_FILE}",
        "configuration": settings.build(resolved, named),
    }  # fmt: skip


def lines(resolved: Resolved, cluster: Cluster, run_path: Path) -> list[str]:
    """For people. What depends on the packed data reads null, and is known once rank 0 has packed it."""
    found = document(resolved, cluster, run_path)
    conversion = found["conversion"]
    source = conversion["from"]
    body = json.dumps(found["configuration"], indent=1)
    return [
        "", f"# the ranks run in {found['image']}, on node 0 of {resolved.recipe.slurm.nodes} by",
        f"$ {shlex.join(found['ranks_command'])}",
        f"# first, once in a run: AutoBridge.from_hf_pretrained({source['model']!r}) by {conversion['ranks']} ranks",
        f"#   to {conversion['to']}",
        f"# last: the {conversion['exported']['what']} in the form of Hugging Face, to {conversion['exported']['to']}",
        f"# {found['configuration_file']}; what is null is known once the data is packed",
        *body.splitlines(),
    ]  # fmt: skip
