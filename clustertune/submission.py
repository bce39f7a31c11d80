"""One submission: the jobs of a recipe's stages on a cluster, what keeps them from being sent, and what ``submit`` prints."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from clustertune import chain, lock
from clustertune.cluster.load import argument, load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.console import emit_json, say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import bill, cluster_paths, container, image, megatron, serving, shape, signal_margin
from clustertune.launch import submit as launch
from clustertune.launch.allocation import Allocation
from clustertune.launch.environment import Setting, environment
from clustertune.launch.plan import newest_attempt
from clustertune.megatron import settings, shown
from clustertune.plan.schedule import check_schedule_end, find_idle_schedule
from clustertune.resolve.models import find_obstacles
from clustertune.resolve.resolved import Resolved, expand_home, is_there
from clustertune.rundir import STAGES, RunDir, keep_private, require_stage
from clustertune.staging import bundle
from clustertune.tree import ROOT

DONE = "every stage is finished: nothing is left to submit"
KEYS = {"models": "model.name", "datasets": "data.name"}
"""The key of a recipe by the Hub's kind of repository."""
PLANNED = "JOB"
"""Stands for a job's id where nothing was submitted yet."""


@dataclass
class Submission:
    """One submission on its way."""

    resolved: Resolved
    machine: Cluster
    path: Path
    stages: list[str]
    jobs: list[launch.StageJob]
    variables: list[Setting]
    """Of every stage and rank: where caches lie."""
    shapes: dict[str, shape.JobShape]
    """Of the job of each stage, also of those that are finished."""
    evaluation: serving.Evaluation
    number: int
    """Of the description in ``run.json`` that the jobs read."""
    image: image.Image | None = None
    """The cluster's image, once :meth:`find_problems` has held it against its sum."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        recipe: str,
        overrides: list[str],
        tiny: bool,
        cluster: str | None,
        run_dir: Path | None,
        first: str | None,
        last: str,
    ) -> Submission:
        """Resolve and derive. Raises UserError."""
        for key, stage in (("--from", first), ("--to", last)):
            if stage is not None:
                require_stage(stage, key)
        machine = load_cluster(cluster)
        resolved, shaped = shape.resolve_on(recipe, overrides, machine, tiny=tiny)
        variables = cluster_paths.of_jobs(machine)
        collected, notes = bundle.offered(resolved, cluster_paths.folder(machine, "models"))
        if collected is not None:
            shaped += [f"staged={collected}"]
            resolved = resolved.with_staged(collected)
        path = (run_dir or chain.default_run_dir(resolved, cluster_paths.runs(machine))).absolute()
        finished = [stage for stage in STAGES if RunDir(path).stage(stage) is not None]
        stages = launch.left_to_do(finished, first, last)
        shapes = shape.stage_shapes(resolved, machine)
        evaluation = serving.evaluation(resolved, machine)
        number = RunDir(path).describe(resolved, machine, shapes, evaluation, write=False)
        jobs = []
        if stages:
            jobs = launch.make_jobs(
                resolved.name,
                stages,
                shapes,
                path,
                arguments=[resolved.folder, *shaped],
                flags=[
                    *(["--tiny"] if tiny else []),
                    *(["--cluster", argument(cluster)] if cluster else []),
                    *cluster_paths.flags(variables),
                    *("--description", str(number)),
                ],
                signal_seconds=resolved.recipe.slurm.signal_seconds,
            )
        return cls(resolved, machine, path, stages, jobs, variables, shapes, evaluation, number, notes=notes)

    @property
    def trains(self) -> bool:
        """Whether the training is among what is submitted."""
        return "train" in self.stages

    def find_problems(self, dry_run: bool) -> list[Problem]:
        """Everything that keeps this from being submitted, at once."""
        problems = shape.find_problems(self.resolved, self.machine) if self.trains else []
        problems += megatron.find_problems(self.resolved, self.machine)
        if self.resolved.recipe.megatron is not None:
            problems += settings.find_problems(self.resolved)
        problems += find_obstacles(self.resolved) + self._base_problems()
        problems += find_idle_schedule(self.resolved) if self.trains else []
        wrong = bundle.find_problems(self.resolved)
        problems += wrong
        if self.trains and self.machine.container.runtime == "none" and self.resolved.recipe.megatron is None:
            problems += image.trackers(self.resolved.train_args)
        if self.trains:
            minutes = shape.train_shape(self.resolved, self.machine).minutes
            problems += signal_margin.find_problems(self.resolved.recipe.slurm.signal_seconds, minutes, file=self.resolved.name)
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        fix = "give another --run-dir, or correct storage.runs in the cluster file"
        if not there.is_dir():
            problems.append(Problem("is a file, a run needs a folder", file=str(there), fix=fix))
        elif not dry_run and not os.access(there, os.W_OK | os.X_OK):
            problems.append(Problem("you may not write there, where the run folder is to be", file=str(there), fix=fix))
        if not wrong and "prepare" in self.stages:
            problems += bundle.missing_inputs(self.resolved) + self._not_reached()
        if dry_run:
            return problems
        fix = "call this on a login node of the cluster; --dry-run needs no Slurm, clustertune demo-slurm brings its own"
        problems += launch.find_missing(self.machine, [("the run folder", self.path)], fix)
        if self.machine.slurm is None:
            fix = "add a slurm section to its file, or --cluster names another one"
            problems.append(Problem(f"cluster {self.machine.name} has no Slurm", file=self.machine.source, fix=fix))
        return [*problems, *self._image_problems()]

    def _not_reached(self) -> list[Problem]:
        """What prepare would ask the Hub for on a node that does not reach it: neither staged nor in the cache."""
        from clustertune.staging import needs

        recipe, internet = self.resolved.recipe, self.machine.network.internet
        if internet == "all" or self.resolved.tiny or recipe.staged:
            return []
        cache = {setting.name: Path(setting.value) for setting in self.variables if setting.name.startswith("HF_H")}
        hub = cache.get("HF_HUB_CACHE") or cache.get("HF_HOME", Path.home() / ".cache" / "huggingface") / "hub"
        from_hub = recipe.model.weights == "hub" and recipe.model.path is None
        asked = [("models", recipe.model.name, recipe.model.revision)] if from_hub else []
        asked += [("datasets", part.name, part.revision) for _, part in recipe.data.keyed_parts() if part.input is None]
        where = f"network.internet: {internet} of {self.machine.source}"
        models = cluster_paths.folder(self.machine, "models")
        to = f" --to {models / self.resolved.name}" if models else " --to DIR"
        who = "on a login node" if internet == "login" else "on a machine with a network, and copy it"
        fix = f"clustertune stage {self.resolved.folder}{to}, {who}; then submit again"
        return [
            Problem(
                f"{name} is not in {hub}, and the nodes reach no Hub ({where})",
                file=self.resolved.name,
                key=KEYS[kind],
                fix=fix,
            )
            for kind, name, revision in asked
            if revision is not None and not is_there(needs.snapshot(hub, kind, str(name), revision))
        ]

    def _base_problems(self) -> list[Problem]:
        """What of a base that lies here is not what the recipe says: its first job would end with it."""
        from clustertune.doctor.recipe_context import ModelFolder
        from clustertune.training import base_model

        given, found = self.resolved.recipe.model.path, list[Problem]()
        if given is None or self.resolved.tiny or "prepare" not in self.stages or not is_there(folder := expand_home(given)):
            return []
        try:
            base_model.check(str(folder), None, self.resolved)
        except UserError as error:
            found += error.problems
        tokens = {key: self.resolved.train_args[key] for key in ("eos_token", "pad_token")}
        known = ModelFolder(folder).vocabulary if any(tokens.values()) else None
        fix = f"name a token of {folder / 'tokenizer.json'}"
        for key, token in tokens.items():
            if known is not None and token is not None and token not in known:
                found.append(Problem(f"{token!r} is not in the tokenizer's vocabulary", key=f"train.{key}", fix=fix))
        return found

    def _image_problems(self) -> list[Problem]:
        """An image that is not what its sum says, or cannot be shown the run; returns what it is."""
        if self.machine.container.runtime == "none":
            return []
        caches = cluster_paths.binds({setting.name: setting.value for setting in self.variables})
        problems = container.unbindable([ROOT, *container.paths_of(self.resolved, self.path), *caches])
        try:
            self.image, found_problems = image.look(self.machine.container)
            self.notes += found_problems
        except UserError as error:
            problems += error.problems
        return problems

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant."""
        caches = [
            (setting.name, Path(setting.value)) for setting in self.variables if setting.name in ("HF_HOME", "HF_HUB_CACHE")
        ]
        unseen = map(str, cluster_paths.find_unshared(caches, self.machine))
        return [
            *self.resolved.warnings,
            *self.machine.notes,
            *shape.warnings(self.resolved, self.machine),
            *check_schedule_end(self.resolved),
            *self.notes,
            *unseen,
        ]

    def node_lines(self) -> tuple[list[dict[str, str]], list[str]]:
        """The environment of the ranks with the reason of each variable, and the command that starts every node."""
        from clustertune import job as program

        wanted = shape.train_shape(self.resolved, self.machine)
        names = tuple(host.name for host in self.machine.compute_nodes[: wanted.nodes])
        given = Allocation(PLANNED, 0, names, wanted.gpus_per_node, wanted.cpus_per_node, 1, None)
        settings = environment(
            self.machine,
            world_size=self.resolved.world_size,
            ranks_per_node=wanted.ranks_per_node,
            cpus_per_node=wanted.cpus_per_node,
            job=PLANNED,
            cpu_only=not wanted.gpus_per_node,
        )
        environ = {setting.name: setting.value for setting in self.variables}
        command = program.step_command(self.resolved, self.path, newest_attempt(self.path) + 1, self.machine, given, environ)
        return [{"name": s.name, "value": s.value, "reason": s.reason} for s in settings], command

    def commands(self) -> list[list[str]]:
        """The sbatch commands, with a name in place of the id that is not known yet."""
        before: list[str | None] = [None, *(f"<id of {job.stage}>" for job in self.jobs)]
        return [job.command(after) for job, after in zip(self.jobs, before, strict=False)]

    def show(self, as_json: bool, verbose: bool) -> None:
        """Print what ``submit`` would do: a line for each job, or with ``verbose`` everything."""
        if as_json:
            settings, command = self.node_lines()
            jobs = [
                {
                    "stage": job.stage,
                    "shape": vars(job.shape),
                    "file": str(job.path),
                    "script": job.script,
                    "command": command_line,
                }
                for job, command_line in zip(self.jobs, self.commands(), strict=True)
            ]
            document: dict[str, Any] = {"run_dir": str(self.path), "cluster": self.machine.name, "jobs": jobs}
            document["signal_seconds"] = self.resolved.recipe.slurm.signal_seconds
            document["evaluation"] = self.evaluation.as_json()
            planned = bill.of_recipe(self.resolved, self.machine) if self.trains else None
            document["total"] = None if planned is None else planned[1].as_json()
            document["step_s"] = None if planned is None else planned[0].step.seconds
            document["job_environment"] = [vars(setting) for setting in self.variables]
            if self.resolved.recipe.megatron is not None:
                document["megatron"] = shown.document(self.resolved, self.machine, self.path)
            emit_json({**document, "environment": settings, "node_command": command, "warnings": self.warnings()})
            return
        for line in self.lines() if verbose else self.summary():
            typer.echo(line)  # what a person saves or compares

    def summary(self) -> list[str]:
        """What would be submitted, a line for each job."""
        found = [f"run folder: {self.path}", f"cluster: {self.machine.name} ({self.machine.source})"]
        if not self.jobs:
            return [*found, DONE]
        width = max(len(job.stage) for job in self.jobs)
        after = ["", *(f", after {job.stage}" for job in self.jobs)]
        found += [
            "",
            *(f"{job.stage:<{width}}  {job.shape}{then}" for job, then in zip(self.jobs, after, strict=False)),
            *([str(self.evaluation)] if "eval" in self.stages else []),
            *self._whole(),
            *self._site_lines(),
            "",
            *([self._signal()] if self.trains else []),
            "--verbose adds the scripts, the environment with its reasons, and the commands",
        ]
        return found

    def lines(self) -> list[str]:
        """Everything, for people. The body is the same in all scripts and is printed once."""
        found = [f"run folder: {self.path}", f"cluster: {self.machine.name} ({self.machine.source})"]
        if not self.jobs:
            return [*found, DONE]
        for number, (job, command_line) in enumerate(zip(self.jobs, self.commands(), strict=True)):
            header, body = launch.split_script(job.script)
            text = header + body if number == 0 else f"{header}# ... and the body of launch/run.sbatch, as above"
            found += ["", f"# {job.stage}: {job.shape}", f"# {job.path}", text.rstrip("\n"), f"$ {shlex.join(command_line)}"]
        found += self._site_lines()
        if self.variables:
            found += ["", "# environment of every stage, and of every rank"]
            found += [f"{setting.name}={setting.value}  # {setting.reason}" for setting in self.variables]
        if self.trains:
            settings, command = self.node_lines()
            found += ["", f"# {self._signal()}"]
            found += ["# environment of every rank", *(f"{s['name']}={s['value']}  # {s['reason']}" for s in settings)]
            found += ["# on the nodes, for each attempt", f"$ {shlex.join(command)}"]
            if self.resolved.recipe.megatron is not None:
                found += shown.lines(self.resolved, self.machine, self.path)
        return found

    def _whole(self) -> list[str]:
        """What the run takes by the plan, in a line each; nothing of a tiny run, or of one that has trained already."""
        planned = bill.of_recipe(self.resolved, self.machine) if self.trains else None
        if planned is None:
            return []
        plan, whole = planned
        seconds = plan.step.seconds
        step = f"planned: {seconds:.3g} s a step (80 % range {seconds * plan.low:.3g} to {seconds * plan.high:.3g} s)"
        return ["", step, *(f"{name}: {text}" for name, text in whole.rows(plan.machine.gpu).items())]

    def _signal(self) -> str:
        seconds = self.resolved.recipe.slurm.signal_seconds
        return f"Slurm signals the job {seconds} s before its time limit so that it can save (slurm.signal_seconds)"

    def _site_lines(self) -> list[str]:
        """What of the shell takes the place of the header: sbatch reads SBATCH_ACCOUNT and its like before a script's lines."""
        named = ("account", "qos", "constraint", "reservation")
        slurm = self.machine.slurm
        chosen = {name: (os.environ.get(f"SBATCH_{name.upper()}"), getattr(slurm, name, None)) for name in named}
        lines = [
            f"# --{name}={ours}: SBATCH_{name.upper()} of this shell{f', not {theirs} of slurm.{name}' if theirs else ''}"
            for name, (ours, theirs) in chosen.items()
            if ours
        ]
        return ["", *lines] if lines else []

    def send(self, as_json: bool) -> None:
        """Submit, or say why not."""
        keep_private(self.machine)
        opened = chain.open_run(self.resolved, self.path, chain.command_line(), take=False)
        folder = self.path / "jobs"
        if self.image is not None:
            if note := image.changed(opened.read().get("container"), self.image):
                say(f"warning: {note}")
            opened.update(container=self.image.as_json())
        with lock.held(folder / "lock", "submits this run", shown=self.path, fix="wait for it"):
            launch.require_none_live(self.path, "jobs of this run", "clustertune submit --status")
            opened.update(environment=[vars(setting) for setting in self.variables])
            opened.write_own_files(self.resolved)
            if opened.describe(self.resolved, self.machine, self.shapes, self.evaluation) != self.number:
                text = "another command has changed this run meanwhile"
                raise UserError(text, file=str(opened.run_json), fix="submit again", code=ExitCode.AGAIN)
            sent = launch.submit_all(opened.path, self.jobs)
        if as_json:
            emit_json({"run_dir": str(self.path), "jobs": sent})
            return
        for entry, job in zip(sent, self.jobs, strict=True):
            say(f"{entry['stage']}: job {entry['id']}, {job.shape}" + (f", after {entry['after']}" if entry["after"] else ""))
        if not sent:
            say(DONE)
        say(f"run folder: {self.path}")
        say(f"clustertune submit --status {shlex.quote(str(self.path))}")
