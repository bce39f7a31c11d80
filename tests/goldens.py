"""Writes the golden documents: ``make golden``, then read the diff. Few are whole; of the others what differs is kept."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from difflib import unified_diff
from functools import cache, partial
from typing import Any

from typer.testing import CliRunner

from clustertune import submission as submissions
from clustertune.cli.app import app
from clustertune.cluster.load import load_cluster
from clustertune.launch.srun import EXPORTED
from clustertune.launch.stage_jobs import SCRIPT, split_script
from clustertune.nccl_check.link_rules import page
from clustertune.resolve import view
from clustertune.resolve.resolve import resolve
from clustertune.setup.rendered import all_texts
from tests.launch.machines import OURS, RECIPES, REPO, cluster_of
from tests.nccl_check.command_line import job

GOLDEN = REPO / "tests" / "golden"
RUNS = [(recipe, tiny) for recipe in RECIPES for tiny in ((False, True) if recipe in OURS else (False,))]
WHOLE = ("llama405b-oasst2", "llama70b-zero3-offload", "tiny-oasst2")
"""Recipes whose documents are kept whole: FSDP2 with LoRA on two nodes, ZeRO-3 with offloading, the tiny one."""
KINDS = (
    "llama405b-oasst2-hsdp-qlora", "llama405b-megatron", "llama70b-tp-fsdp2", "mixtral8x7b-tulu3", "llama8b-longcontext-32k",
    "llama8b-qlora-1gpu",
)  # fmt: skip
"""Recipes whose jobs are kept where they differ: one of each further kind of distribution."""
REFERENCE, OTHER = "rno-rtxpro6000", "idris-jeanzay-h100"
"""The cluster whose files are kept whole, and one of which it is kept how they differ."""
GB200 = ("idris-dalia-gb200", "slurm.nodes=8", "train.per_device_train_batch_size=4")
PLANS: list[tuple[str, ...]] = [(recipe, cluster_of(recipe)) for recipe in RECIPES] + [
    ("qwen2.5-14b-tulu3", *GB200, "activation_checkpointing.ratio=0"),
    ("qwen2.5-32b-tulu3", *GB200, "activation_checkpointing.ratio=0.5"),
    ("qwen2.5-72b-tulu3", *GB200, "activation_checkpointing.ratio=1"),
    ("mistral7b-alpaca", "nebius-h100", "slurm.nodes=2", "train.global_batch_size=16"),
]
"""Each recipe on its machine, and the other form of a recipe, of which its README speaks."""


def shown(name: str, tiny: bool = False) -> dict[str, Any]:
    """``show --json`` without what differs between machines."""
    return {k: v for k, v in view.as_json(resolve(name, tiny=tiny)).items() if k not in {"folder", "warnings"}}


def resolutions() -> str:
    """What decides the weights of every recipe, in a line each: another fingerprint is another run folder."""
    rows = []
    for name, tiny in RUNS:
        body = shown(name, tiny)
        train = body["train_args"]
        kind = (body["accelerate"] or {}).get("distributed_type", "Megatron")
        rows.append(
            f"{name}{' --tiny' if tiny else ''}: {kind}, {body['world_size']} ranks, {body['data_parallel_size']} data parallel"
            f", accumulation {train.get('gradient_accumulation_steps')}, recompute {train.get('activation_checkpointing')}"
            f", trained {body['trainable_parameters']}, {body['fingerprint'][:16]}\n"
        )
    return "".join(rows)


def submission(recipe: str, tiny: bool) -> str:
    """``submit --dry-run`` without what differs between machines."""
    before = dict(os.environ)
    for name in EXPORTED:
        os.environ.pop(name, None)
    os.environ |= {"PATH": "/usr/bin", "HOME": "/h/me", "USER": "me"}
    try:
        cluster = load_cluster(cluster_of(recipe))
        plan = submissions.plan_submission(recipe, [], tiny, cluster, REPO / "runs" / "X", None, "report")
        problems, _, _ = submissions.check(plan, dry_run=True)
        lines = [*map(str, problems), *submissions.warnings(plan), *submissions.lines(plan)]
    finally:
        os.environ.clear()
        os.environ.update(before)
    _, body = split_script(SCRIPT.read_text())
    text = "\n".join(lines).replace(body.rstrip("\n"), "<the body of launch/run.sbatch>")
    return text.replace(sys.executable, "PYTHON").replace(str(REPO), "CHECKOUT") + "\n"


ALWAYS = re.compile(
    r"#!|# (CHECKOUT|Derived|\.\.\.)|<the body|#SBATCH --(job-name|nodes|ntasks-per-node|cpus-per-task|mem|time|requeue"
    r"|open-mode|export|partition)\b|cluster: |run folder: |$"
)
"""Lines that the whole documents show, or that say again what a job's first line says."""


def differing(recipe: str, tiny: bool) -> str:
    """What a submission has of its own: warnings, the shape of each job and its further options, the training's command and
    environment without the reasons."""
    lines = []
    for line in submission(recipe, tiny).splitlines():
        if line.startswith("$ sbatch"):
            if line.endswith("--to train"):
                lines.append(re.sub(r"^.* (CHECKOUT/recipes/.*?) --run-dir .*", r"\1", line))
        elif not ALWAYS.match(line):
            lines.append(re.sub(r"^([A-Z_]+=\S*)  # .*", r"\1", line).removeprefix("#SBATCH "))
    return "\n".join(lines) + "\n"


FIGURES = (
    "step_s", "steps", "hours", "gpu_hours", "total.gpu_hours", "total.cost.on_demand",
    "needed_gib_per_gpu", "peak_gib_per_gpu", "host_gib_per_node",
    "mfu", "storage_gb.checkpoints", "storage_gb.merged model",
)  # fmt: skip


def plan_text(recipe: str, cluster: str, *overrides: str) -> str:
    """What ``plan`` says to a person, without the age of its prices."""
    done = CliRunner().invoke(app, ["plan", recipe, *overrides, "--cluster", cluster])
    assert done.exit_code == 0, done.output
    return re.sub(r"\d+ days old", "N days old", done.stdout)


def plans() -> str:
    """The figures of every plan, in a line each."""
    rows = []
    for recipe, cluster, *overrides in PLANS:
        done = CliRunner().invoke(app, ["plan", recipe, *overrides, "--cluster", cluster, "--json"])
        assert done.exit_code == 0, done.output
        figures = dict(_leaves(json.loads(done.stdout)))
        shown = [f"{key} {figures[key]:.6g}" for key in FIGURES if figures.get(key) is not None]
        rows.append(f"{' '.join((recipe, cluster, *overrides))}: {', '.join(shown)}\n")
    return "".join(rows)


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _leaves(inner, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), value)]


def cluster_facts(name: str) -> str:
    """Every fact of a cluster file, in a line each."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in _leaves(load_cluster(name).model_dump(mode="json")))


@cache
def slurm_files(name: str) -> str:
    """Every file of a cluster; of those that accounting changes the lines that it adds."""
    cluster = load_cluster(name)
    without, with_it = (all_texts(cluster, accounting=on) for on in (False, True))
    text = "".join(f"==> {path} <==\n{body}\n" for path, body in without.items())
    for path, body in with_it.items():
        known = set(without.get(path, "").splitlines())
        added = [line for line in body.splitlines() if line not in known]
        text += f"==> {path} (--accounting) <==\n" + "\n".join(added) + "\n\n" if added else ""
    return text


def nccl_job(name: str) -> str:
    """What ``nccl-check --submit`` submits, without what differs between machines."""
    made = job(name)
    return "\n".join([f"$ {' '.join(made.command())}", made.script.rstrip("\n")]).replace(str(REPO), "CHECKOUT") + "\n"


def beside_reference(text: Callable[[str], str], name: str) -> str:
    """The whole text of the reference cluster; of another one how it differs from that."""
    if name == REFERENCE:
        return text(name)
    found = unified_diff(text(REFERENCE).splitlines(), text(name).splitlines(), n=0, lineterm="")
    return "\n".join(line for line in found if not line.startswith(("---", "+++", "@@"))) + "\n"


def documents() -> dict[str, Callable[[], str]]:
    """Every golden document by the name of its file."""
    found: dict[str, Callable[[], str]] = {"resolutions.txt": resolutions, "plans.txt": plans}
    for name in ("llama405b-oasst2", "tiny-oasst2"):
        found[f"show-{name}.json"] = lambda name=name: json.dumps(shown(name), indent=1, ensure_ascii=False) + "\n"
    for name in WHOLE:
        found[f"plan-{name}.txt"] = partial(plan_text, name, cluster_of(name))
        found[f"submit-{name}.txt"] = partial(submission, name, False)
    for name in KINDS:
        found[f"submit-{name}.txt"] = partial(differing, name, False)
    found["submit-tiny-oasst2-tiny.txt"] = partial(differing, "tiny-oasst2", True)
    found[f"cluster-{REFERENCE}.txt"] = partial(cluster_facts, REFERENCE)
    for name in (REFERENCE, OTHER):
        found[f"slurm-{name}.txt"] = partial(beside_reference, slurm_files, name)
        found[f"nccl-check-{name}.txt"] = partial(beside_reference, nccl_job, name)
    return found


def main() -> None:
    texts = {name: make() for name, make in documents().items()}
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, text in texts.items():
        (GOLDEN / name).write_text(text)
    (REPO / "docs" / "nccl-verdicts.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
