"""Are all ranks there? Asked right after the process group is up, before anybody loads 800 GB for nothing."""

from __future__ import annotations

import os

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.plan import Plan
from clustertune.training.collectives import Group

FIX = "every node must be given the same rendezvous address, and its own node rank; look at the node-N.log files"


def check_world(group: Group, world_size: int, plan: Plan | None) -> None:
    """Raise UserError (exit 1) where the process group is not the one that was planned.

    ``world_size`` is the recipe's; ``plan`` is None where whoever started the ranks left none.
    """
    rank = int(os.environ.get("RANK", "0"))
    problems = []
    if plan is not None and plan.world_size != world_size:
        problems.append(Problem(f"the plan of this attempt is for {plan.world_size} ranks, the run for {world_size}"))
    if group.world_size != world_size:
        text = f"rank {rank} sees a world of {group.world_size}, the run is for {world_size}: the ranks did not find each other"
        problems.append(Problem(text, fix=FIX))
    elif plan is not None and not problems:
        problems += _node_problems(group, plan)
    if problems:
        raise UserError(problems, ExitCode.FAILED)


def _node_problems(group: Group, plan: Plan) -> list[Problem]:
    """Ranks that sit on other nodes than planned, by what their launchers told them (torchrun, accelerate, Ray)."""
    found = group.gather((os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")))
    if plan.launcher == "ray" or any(local is None for local, _ in found):  # Ray's plan names a place for each rank
        return []
    nodes = sum(local == "0" for local, _ in found)
    if nodes != len(plan.nodes):
        return [Problem(f"the ranks run on {nodes} nodes, the plan names {len(plan.nodes)}", fix=FIX)]
    sizes = sorted({int(size) for _, size in found if size is not None} - {plan.ranks_per_node})
    if sizes:
        return [Problem(f"{sizes[0]} ranks on one node, the plan says {plan.ranks_per_node} on each", fix=FIX)]
    return []
