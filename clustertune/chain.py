"""The chain on this machine: prepare, train, export, merge, eval, report. What is finished is not done again."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clustertune import manifest, secrets
from clustertune.checkpoint import store
from clustertune.cluster.schema import Cluster
from clustertune.console import say, show_error
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_cause, storage_error
from clustertune.launch import container_packages, progress
from clustertune.launch.agent import Agent, measured
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.node import random_port, ranks_command
from clustertune.launch.outcome import Outcome, conclude
from clustertune.launch.serving import beside_serving
from clustertune.manifest import hash_file
from clustertune.monitor import live
from clustertune.process import die_with_parent, end
from clustertune.recipe.sections import Push
from clustertune.report import content, cost, source
from clustertune.resolve import tiny as scaled_down
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import ROLLOUT_SERVERS, SCORES, STAGES, RunDir, keep_private
from clustertune.staging import bundle, needs
from clustertune.training.engine import engine_of
from clustertune.training.event_log import EventLog
from clustertune.tree import IS_INSTALLED, ROOT

MARKS = {"pass_mark", "pass_difference", "stall_seconds"}
"""Settings of an evaluation that judge it or guard it, and do not change it."""
LOOK_SECONDS, AGAIN_SECONDS, SCORE_TRIES = 2.0, 30.0, 3
"""Between two looks for a checkpoint to score beside the trainer; before the next try where that failed; and tries of each."""
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "lm_eval", "safetensors", "wandb")


def visible_gpus() -> int:
    """GPUs that this process may use, without importing torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([part for part in listed.split(",") if part.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def resolve_here(
    recipe: str, overrides: Sequence[str], *, tiny: bool, ranks: int | None = None, made_up: bool = False
) -> Resolved:
    """The recipe for the GPUs of this machine; of a small model without GPUs for as many processes.

    ``made_up``: its weights are random though it does not say so. Raises UserError.
    """
    resolved = resolve(recipe, overrides, tiny=tiny, ranks=ranks)
    resolved.require_startable()
    gpus, asked = visible_gpus(), resolved.world_size
    small = tiny or made_up or resolved.recipe.model.weights == "random"
    on_cpus = not gpus and not small and scaled_down.is_small(resolved.architecture)
    few = gpus or scaled_down.ranks(resolved.accelerate)
    if ranks is not None or asked <= (few if small or on_cpus else gpus):
        return resolved
    if not (small or on_cpus):
        fix = "use --tiny to run a scaled-down version, clustertune submit on a cluster, or --ranks N to force N processes"
        raise UserError(f"needs {asked} GPUs, this machine has {gpus}", file=recipe, key="slurm", fix=fix)
    resolved = resolve(recipe, overrides, tiny=tiny, ranks=few)
    if on_cpus:
        slow = "; train.bf16=false is faster on most CPUs" if resolved.train_args["bf16"] else ""
        say(f"note: the recipe is for {asked} GPUs and there is none here: {few} processes train on the CPUs{slow}")
    return resolved


def check_folder(resolved: Resolved, path: Path) -> None:
    """Refuse a folder that holds a run of other settings, or files that are not a run's. Writes nothing. Raises UserError."""
    raise_if(bundle.find_problems(resolved))
    run = RunDir(path)
    if path.is_dir():
        parts = (part for part in path.iterdir() if not part.is_symlink())  # whose target is the user's own choice
        raise_if(list(filter(None, map(manifest.find_shared, [path.resolve(), *sorted(parts)]))))
    if run.run_json.exists():
        if not run.is_of(resolved):
            raise UserError(_differences(run, resolved))
    elif run.foreign():
        raise UserError("is not empty and is not a run folder", file=str(path), fix="give a new or empty --run-dir")


def require_training(run: RunDir | None = None) -> None:
    """Raises ModuleNotFoundError if this Python lacks what trains and a stage needs it: before a folder is made for nothing."""
    if find_spec("torch") is None and (run is None or None in map(run.stage, STAGES[:-1])):  # a report needs no torch
        raise ModuleNotFoundError(name="torch")


def open_run(resolved: Resolved, path: Path, command: Sequence[str], *, take: bool = True) -> RunDir:
    """Take the run folder: write ``run.json`` first, or check that the one there is of the same recipe.

    Without ``take`` a run that is there is left as it is: jobs of it may be at work.
    """
    run = RunDir(path)
    check_folder(resolved, path)
    if run.run_json.exists() and not take:
        return run
    if run.run_json.exists():
        run.write_own_files(resolved)
        before = run.resolved()
        # The ranks read where inputs lie, how they divide the work, what they may take, and who scores their checkpoints.
        keys = ("staged", "budget", "push", "save", "servers")
        same = all(getattr(before.recipe, key) == getattr(resolved.recipe, key) for key in keys)
        same = same and before.recipe.eval.during == resolved.recipe.eval.during
        same = same and before.train_args == resolved.train_args
        if not same or (before.world_size, before.accelerate) != (resolved.world_size, resolved.accelerate):
            run.describe(resolved)
        return run
    host = {"name": platform.node(), "platform": platform.platform(), "cpus": os.cpu_count(), "gpus": visible_gpus()}
    run.create(resolved, command=list(command), versions=_versions(), host=host, git=_git())
    return run


@contextlib.contextmanager
def taken(resolved: Resolved, path: Path) -> Iterator[RunDir]:
    """The run folder of a command on this machine, taken and locked while the context lasts."""
    for warning in resolved.warnings:
        say(f"warning: {warning}")
    check_folder(resolved, path)  # before anything is written there: it may be no run folder at all
    require_training(RunDir(path))
    keep_private()
    with RunDir(path).lock():
        yield open_run(resolved, path, command_line())


def keep_forecast(run: RunDir, resolved: Resolved, cluster: Cluster | None = None) -> None:
    """What ``plan`` says about this run into ``run.json``, once: later facts do not change a prediction.

    ``cluster``: where it runs; None: this machine, which gets a forecast where it has GPUs.
    """
    if "forecast" in run.read() or (cluster is None and not visible_gpus()):
        return
    from clustertune.cluster.load import load_cluster
    from clustertune.plan.calibration import forecast

    try:
        predicted = forecast(resolved, cluster or load_cluster(None))
    except UserError as error:
        predicted = {"unknown": str(error.problems[0])}
    run.update(forecast=predicted)


def _differences(run: RunDir, resolved: Resolved) -> list[Problem]:
    before, now = (dict(content.flatten(side.as_dict())) for side in (run.resolved(), resolved))
    free = [key for key in resolved.train_args | run.resolved().train_args if not resolved.counts(key)]
    may_change = ("recipe.save.", *(f"train_args.{key}" for key in ("save_", *free)))
    ignored = ("origins.", "derived", "distribution.", "warnings", "folder", "template_date", "row_arguments", *may_change)
    changed = sorted(
        key for key in before.keys() | now.keys() if before.get(key) != now.get(key) and not key.startswith(ignored)
    )
    fix = "give another --run-dir, or leave it out: each setting has its own run folder"
    shown = [
        Problem(f"{before.get(k)!r} in this run, {now.get(k)!r} asked for", file=str(run.run_json), key=k) for k in changed[:10]
    ]
    return [Problem("holds a run of another recipe or other settings", file=str(run.path), fix=fix), *shown]


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def _git() -> dict[str, Any]:
    def ask(*arguments: str) -> str | None:
        if IS_INSTALLED:  # git would find another repository, such as the one whose folder holds this environment
            return None
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(status) if status is not None else None}


@dataclass
class Chain:
    """The stages of one run. Each returns what its record should hold beside the seconds."""

    run: RunDir
    resolved: Resolved
    quiet: bool = False
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    ring: Path | None = None
    """What the servers beside the trainer are found by, while those run."""
    _scoring: threading.Lock = field(default_factory=threading.Lock)

    def go(self, first: str = STAGES[0], last: str = STAGES[-1]) -> dict[str, dict[str, Any]]:
        """Run the stages from ``first`` to ``last``; a finished one before ``first`` is taken as it is.

        A stage named by ``--from`` is looked at again: what it made is verified and reused where it is whole.
        Raises UserError where a stage fails, or where one before ``first`` is missing.
        """
        stages = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
        missing = [stage for stage in STAGES[: STAGES.index(first)] if self.run.stage(stage) is None]
        if missing:
            raise UserError(f"not finished in this run: {', '.join(missing)}", key="--from", fix=f"--from {missing[0]}")
        ours = self.resolved.recipe.megatron is None and self.run.stage("train") is None and "train" in stages
        if ours and (problems := container_packages.lacking_here(self.resolved.train_args, gpus=visible_gpus() > 0)):
            raise UserError(problems)
        if "train" in stages and self.run.stage("train") is None and self.resolved.recipe.server_nodes:
            self.server_nodes()  # before a stage runs in vain
        self.run.write_own_files(self.resolved)
        for stage in stages:
            if (record := self.run.stage(stage)) and self._still_there(stage) and stage != "report":
                self.results[stage] = {**record, "status": "reused"}
                say(f"{stage}: finished earlier")
                continue
            self.run_stage(stage)
        if last == STAGES[-1] and self.resolved.recipe.push is not None:
            self._push(self.resolved.recipe.push)
        return self.results

    def _push(self, target: Push) -> None:
        """Send the adapter and its card to the Hub. Where that fails, the run is finished, and says how to repeat it."""
        from clustertune.report import push as hub

        try:
            done = vars(hub.send(self.run, target.repo, public=target.public)[1])
            say(f"push: {done['status']}, {done['url']}")
        except UserError as error:
            done = {"status": "failed", "problems": [str(problem) for problem in error.problems]}
            for problem in error.problems:
                say(f"warning: not pushed: {problem}")
            say(f"the run is finished; again: clustertune push {self.run.path} --repo {target.repo} --publish")
        with contextlib.suppress(OSError):
            self.run.update(push={"repo": target.repo, **done})

    def _still_there(self, stage: str) -> bool:
        kinds = {
            "prepare": (self.run.data, "dataset"),
            "export": (self.run.adapter, "adapter") if self.resolved.lora is not None else (self.run.merged, "merged"),
            "merge": (self.run.merged, "merged"),
        }
        if stage in kinds:
            folder, kind = kinds[stage]
            return manifest.looks_whole(folder, kind) and self._has_base(stage)
        if stage == "train" and not (self.run.stage("export") and self._still_there("export")):
            newest, _ = store.newest_whole(self.run.checkpoints)
            return newest is not None and store.is_final(newest.path)
        return self._eval_holds() if stage == "eval" else True

    def _eval_holds(self) -> bool:
        """The evaluation there is of the settings asked for and passes the marks asked for; neither changes the run-id."""
        from clustertune.evaluate.scores import judge, read_result

        record, settings = self.run.stage("eval") or {}, self.resolved.recipe.eval
        if record.get("settings") != self._eval_settings():
            return False
        result = read_result(self.run.eval)
        return result is not None and bool(judge(result, settings)["passed"])

    def _eval_settings(self) -> dict[str, Any]:
        """What is asked for, but the marks; of one's own prompts their digest, None where they are not there."""
        settings, path = self.resolved.recipe.eval.model_dump(exclude=MARKS), bundle.eval_data(self.resolved)
        return settings if path is None else {**settings, "data": hash_file(path).sha256 if path.is_file() else None}

    def _has_base(self, stage: str) -> bool:
        """What the first stage makes beside the conversations is there; true of all other stages."""
        if stage != "prepare":
            return True
        recipe = self.resolved.recipe
        if recipe.megatron is None and not self._has_tokens():
            return False
        return recipe.model.weights != "random" or manifest.looks_whole(self.base_folder(), "model")

    def _has_tokens(self) -> bool:
        """The tokens that the first stage makes, by the packages that are installed now: the ranks accept no others."""
        if not manifest.looks_whole(self.run.tokens, "tokens"):
            return False
        made_from = manifest.read_manifest(self.run.tokens).meta["made_from"]
        with contextlib.suppress(ModuleNotFoundError):  # outside of the image that has them: the ranks compare
            from clustertune.data import tokens

            return bool(made_from["tokens"]["versions"] == tokens.versions())
        return True

    def run_part(self, stage: str, command: Sequence[str], where: str = "its process") -> dict[str, Any]:
        """Run one stage in a process of its own, by ``command``; its record. Raises UserError where it fails: its lines said
        why.
        """
        bound = partial(die_with_parent, signal.SIGKILL)  # a stage goes on where it was killed; SIGTERM it may take for a while
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, preexec_fn=bound).returncode
        record = self.run.stage(stage)
        if code or record is None:
            known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
            raise UserError(f"{stage} failed in {where} (exit code {code})", fix="the lines above say why", code=known)
        return record

    def part(self, stage: str) -> list[str]:
        """The command of :meth:`run_part` on this machine; servers that run beside the trainer answer it."""
        command = [sys.executable, "-m", "clustertune", "part", stage, "--run-dir", str(self.run.path.resolve())]
        return command if self.ring is None else [*command, "--servers", str(self.ring.parent)]

    def run_scores(self) -> None:
        """Score a checkpoint in a process that gives the GPUs back."""
        self.run_part(SCORES, self.part(SCORES))

    def run_stage(self, stage: str) -> None:
        """Run one stage here and record it. Raises what the stage raises."""
        say(f"{stage} ...")
        log = EventLog(self.run.metrics, 0)
        log.write("stage", stage=stage, status="started")
        began = time.perf_counter()
        bundle.enter(self.resolved)
        try:
            # DeepSpeed, where it is installed, logs its import to stdout, which is for the command's one document.
            with secrets.lent(self._tokens(stage)), contextlib.redirect_stdout(sys.stderr):
                values: dict[str, Any] = getattr(self, stage)()
        except BaseException as error:
            code = int(error.code) if isinstance(error, UserError) else 1
            seconds = round(time.perf_counter() - began, 3)
            with contextlib.suppress(OSError):  # a full disk is often the reason itself
                log.write("stage", stage=stage, status="failed", seconds=seconds, exit_code=code)
            is_known = isinstance(error, UserError) or not isinstance(error, Exception)
            if not is_known and (cause := storage_cause(error)):  # which may name no file
                raise storage_error(cause, f"{stage} cannot continue", cause.filename or self.run.path) from error
            raise
        seconds = time.perf_counter() - began
        log.write("stage", stage=stage, status="done", seconds=round(seconds, 3))
        log.close()
        self.results[stage] = self.run.finish_stage(stage, seconds, **values)
        say(f"{stage}: {seconds:.1f} s")

    def _tokens(self, stage: str) -> dict[str, str]:
        """What ``.env`` holds for the Hub, where a stage may load from it. The ranks of the training read it themselves."""
        return secrets.of_the_hub() if stage in ("prepare", "merge", "eval", SCORES) else {}

    def prepare(self) -> dict[str, Any]:
        """The conversations, the base model where the recipe makes its own, and the tokens that the ranks read."""
        from clustertune.data import sequences, tokens
        from clustertune.data.prepare import prepare
        from clustertune.data.tokenizer import load_tokenizer
        from clustertune.training import base_model, base_weights

        recipe = self.resolved.recipe
        folder = Path(self.resolved.folder)
        seed = int(self.resolved.train_args["seed"])
        source = bundle.data_input(self.resolved)
        result = prepare(recipe.data, recipe_folder=folder, seed=seed, out=self.run.data, input_path=source)
        if recipe.model.weights == "random":
            from clustertune.data.local_model import conversation_texts, make_local_model

            texts, own = conversation_texts(self.run.data), self.resolved.chat_template is None
            make_local_model(self.resolved.architecture, texts, self.base_folder(), seed, template=own)
        counts = {"conversations": {split: result[split]["conversations"] for split in ("train", "eval")}}
        from_where, train_args = needs.base_of(self.resolved, self.run).source, self.resolved.train_args
        if (engine := engine_of(self.resolved)) is not None:
            engine.prepare(self.run.pinned(self.resolved), self.run.path, self.run.data, from_where)
            return counts
        base_model.check(*from_where, self.resolved)
        base_weights.check(*from_where, self.resolved)
        kinds: dict[str, Any] = {"chats": recipe.data.has_chats, "system": recipe.data.system_messages}
        kinds["date"] = self.run.description().resolved.template_date
        tokenizer = load_tokenizer(*from_where, self.resolved.chat_template, train_args, **kinds)
        made = tokens.make(self.run.data, tokenizer, train_args, shared=self.run.shared_tokens)
        self.run.pin(made["row_arguments"])
        sequences.check_ends(self.run.data, tokenizer, recipe.data)
        sequences.check_ids(self.run.data, tokenizer, int(self.resolved.architecture["vocab_size"]))
        if self.resolved.is_grpo:
            sequences.check_prompts(self.run.data, self.resolved)
        return {**counts, **{key: made[key] for key in tokens.SUMMARY}}

    def train(self) -> dict[str, Any]:
        """Attempt after attempt, each from the newest whole checkpoint, as long as :meth:`may_repeat` allows another one here.

        Raises UserError where the last one ended otherwise than finished, or where a job makes no progress (exit 93).
        """
        with contextlib.ExitStack() as stack:
            return self._attempts(stack)

    def _attempts(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        """``stack``: where the servers beside the trainer are entered, with the first attempt."""
        for earlier in itertools.count():
            newest, broken = store.newest_whole(self.run.checkpoints)
            if self._waits_for_scores(newest):
                self._serve(stack)
                self._score(SCORE_TRIES if self.ring is not None else 1)
            if newest is not None and store.is_final(newest.path):
                break
            step = newest.step if newest else 0
            if self.job is not None:
                progress.check_progress(self.run.path, self.job, step)
            if not earlier:
                self.get_ready()
                self._serve(stack)
            for bad, problems in broken if self.quiet else []:  # the ranks' own messages go to their logs only
                say(f"checkpoint {bad.path.name} is incomplete or damaged and is skipped: {problems[0]}")
            cost.check(self.run, self.resolved.recipe.budget)
            outcome = self.run_attempt(self.make_plan(self.run.new_attempt(), step))
            with contextlib.suppress(OSError, UserError):  # a page more or less
                live.refresh(self.run.path)
            if outcome.code is ExitCode.OK:
                source.write(self.run.read(), self.run.path)
            newest, _ = store.newest_whole(self.run.checkpoints)
            is_orderly = outcome.code in (ExitCode.OK, ExitCode.AGAIN) and not outcome.stop_requested
            if is_orderly and self._waits_for_scores(newest):
                continue
            if outcome.code is ExitCode.OK:
                break
            stopped = Problem("stopped on request after saving", file=str(self.run.path), fix="the same command continues")
            problems = outcome.problems or [stopped]
            if not self.may_repeat(outcome):
                raise UserError(problems, outcome.code)
            show_error(UserError(problems, ExitCode.AGAIN))
            say("the next attempt begins in this allocation")
        return {"checkpoint": Path(store.find_checkpoint(self.run.path)).name}

    def _serve(self, stack: contextlib.ExitStack) -> None:
        """Start the servers beside the trainer where the recipe has some, unless they run; and what scores by them."""
        if not self.resolved.recipe.server_nodes or self.ring is not None:
            return
        self.ring = stack.enter_context(self.servers_beside())
        stack.callback(setattr, self, "ring", None)
        if self.resolved.recipe.scores_beside:
            over = threading.Event()
            threading.Thread(target=self._keep_scoring, args=(over,), daemon=True).start()
            stack.callback(over.set)

    def _keep_scoring(self, over: threading.Event) -> None:
        """Score checkpoints as they come, while the ranks train. What fails is tried again, and costs the training nothing."""
        failures = Counter[Path]()
        while not over.wait(LOOK_SECONDS):
            path = self.run.checkpoints
            try:
                due = self._to_score()  # a checkpoint may be rotated away while it is looked at
                if due is None or failures[due.path] == SCORE_TRIES:
                    continue
                path = due.path
                self._score()
            except (UserError, OSError) as error:
                failures[path] += 1
                if not over.is_set() and path.exists():  # at the end the servers are gone, and one may be rotated away
                    say(f"warning: {path.name} is not scored: {error}")
                over.wait(AGAIN_SECONDS)

    def _score(self, tries: int = 1) -> None:
        """Score what is due, one checkpoint at a time. Raises UserError where the last of ``tries`` fails."""
        for left in reversed(range(tries)):
            try:
                with self._scoring:
                    if self._to_score() is not None:
                        self.run_scores()
                return
            except UserError as error:
                if not left:
                    raise
                say(f"warning: not scored, and tried again: {error}")

    def _to_score(self) -> store.Checkpoint | None:
        """The newest whole checkpoint that is due (``eval.during``); None where it has its scores. Raises UserError where
        others can write to it.
        """
        from clustertune.evaluate.during import next_to_score

        checkpoint = next_to_score(self.run, self.resolved.recipe)
        if checkpoint is not None:
            store.require_own(checkpoint.path)
        return checkpoint

    def _waits_for_scores(self, newest: store.Checkpoint | None) -> bool:
        """Whether the training waits for scores: behind its last step, and without servers beside it each time."""
        beside = self.resolved.recipe.scores_beside and not (newest is not None and store.is_final(newest.path))
        return not beside and self._to_score() is not None

    def scores(self) -> dict[str, Any]:
        """The scores of the checkpoint that is due."""
        from clustertune.evaluate import during

        recipe, adapter, began = self.resolved.recipe, None, time.perf_counter()
        if recipe.scores_beside:  # lm-eval's bar would stand within the lines of the training
            os.environ.setdefault("TQDM_DISABLE", "1")
        while adapter is None and (checkpoint := self._to_score()) is not None:
            adapter = during.export_adapter(self.run, checkpoint, self.base_folder())
        if recipe.eval.during is None or checkpoint is None or adapter is None:
            return {}
        beside = recipe.scores_beside
        with contextlib.ExitStack() as stack:
            if not beside:  # the attempt is measured itself
                stack.enter_context(measured(self.run.path))
                stack.callback(self.run.evaluating.unlink, missing_ok=True)
            scored = during.take(
                self.run,
                recipe.eval.of_checkpoints(recipe.eval.during),
                self.base_folder(),
                adapter,
                checkpoint,
                data=bundle.prompts(self.resolved),
                benchmark=recipe.model.weights == "hub",
                beside=beside,
            )
        seconds = round(time.perf_counter() - began, 3)
        with contextlib.closing(EventLog(self.run.metrics, checkpoint.attempt)) as log:
            log.write("scores", step=checkpoint.step, **scored, seconds=seconds, beside=beside)
        return {"step": checkpoint.step}

    @contextlib.contextmanager
    def servers_beside(self) -> Iterator[Path]:
        """The servers beside the trainer, until the training has ended; the file by which they are found."""
        from clustertune.evaluate import servers

        nodes, gpus = self.server_nodes()
        folder = self.run.path.resolve() / "servers" / f"beside-{time.time_ns()}"
        folder.mkdir(parents=True, exist_ok=True)
        lora, recipe = self.resolved.lora or {}, self.resolved.recipe
        job = servers.ServingJob(
            str(self.base_folder().resolve()),
            beside_serving(self.resolved, len(gpus)),
            servers.dtype_of(self.base_folder()),
            str(folder),
            random_port(),
            f"{self.scratch()}/clustertune-{folder.name}",
            servers.new_key(folder),
            nodes=nodes,
            gpus=gpus,
            rank=max([int(lora["r"]), *(lora.get("rank_pattern") or {}).values()]),
            adapters=(recipe.rollout == "servers") + recipe.scores_beside,
            program=self.server_program(),
            kept=True,
        )
        with servers.kept(job, partial(self.begin_servers, folder), partial(end, seconds=servers.END_SECONDS + 5)) as ring:
            yield ring

    def server_nodes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Where they run, and the GPUs of each that they take: here, those that no rank has. Raises UserError where these are
        fewer than one server takes, and without vLLM.
        """
        from clustertune.evaluate.servers import PROGRAM, find_program

        count, ranks, recipe = visible_gpus(), self.resolved.world_size, self.resolved.recipe
        wide = recipe.beside.tensor_parallel_size if recipe.beside is not None else 1
        key, without = "servers", "servers=null: the training then stops for each score"
        if recipe.rollout == "servers":
            key, without = "rollout", f"rollout=colocate{' servers=null' if recipe.servers is not None else ''}"
        if 0 < count < ranks + wide:
            text = f"{count} GPUs here, of which {ranks} ranks leave {max(0, count - ranks)}, and a server takes {wide}"
            raise UserError(text, key=key, fix=f"--ranks with fewer; or {without}")
        if find_program() is None:
            fix = f"set {PROGRAM} to the program of an environment of its own; or {without}"
            raise UserError("vLLM is not installed here, and servers beside the trainer are its", key=key, fix=fix)
        return ("127.0.0.1",), tuple(map(str, range(ranks, count)))

    def scratch(self) -> str:
        """A folder on a node's own disk."""
        return tempfile.gettempdir()

    def server_program(self) -> str | None:
        """vLLM's program; None: that of this machine."""
        return None

    def begin_servers(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start the program of the servers on each of their nodes."""
        return subprocess.Popen(
            [sys.executable, "-m", "clustertune.evaluate.servers", str(folder), "0"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C asks the ranks to save first
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 - libc only
        )

    def attempt_environment(self) -> dict[str, str]:
        """Variables for the ranks: the file that names the servers, where some run."""
        return {ROLLOUT_SERVERS: str(self.ring)} if self.ring is not None else {}

    def run_attempt(self, plan: AttemptPlan) -> Outcome:
        """One attempt at training, from its plan to its outcome."""
        folder = self.run.attempt(plan.attempt)
        plan.write(folder)
        requested = self.start(plan)
        return conclude(folder, plan, requested=requested)

    # What differs between the launchers: the nodes, and how the ranks of an attempt are started there.

    @property
    def job(self) -> str | None:
        """The id of the job in which attempts without progress are counted; None: a person decides each time."""
        return None

    def get_ready(self) -> None:
        """Have every node of the training ready, before its first attempt. Raises UserError."""

    def make_plan(self, attempt: int, from_step: int) -> AttemptPlan:
        """Who takes part in an attempt: here, all ranks on this machine."""
        nodes = (Node("here", "127.0.0.1"),)
        return AttemptPlan(
            attempt=attempt,
            nodes=nodes,
            ranks_per_node=self.resolved.world_size,
            from_step=from_step,
            environment=self.attempt_environment(),
        )

    def start(self, plan: AttemptPlan) -> bool:
        """Run the ranks of an attempt to their end. Returns whether they were asked to stop in a way that no record says."""
        command = ranks_command(self.run, self.resolved, plan.attempt, quiet=self.quiet)
        Agent(self.run.path, plan, node=0).run(command, quiet=self.quiet, environment=plan.environment)
        return False

    def may_repeat(self, outcome: Outcome) -> bool:  # noqa: ARG002 - of this machine's
        """Whether another attempt makes sense here and now. On this machine a person decides."""
        return False

    def export(self) -> dict[str, Any]:
        from clustertune.export.export import export, export_model

        path = store.find_checkpoint(self.run.path)
        if (checkpoint := store.parse(path)) is None or not store.is_final(checkpoint.path):
            raise UserError(
                "is not the final checkpoint; that one is missing or damaged", file=str(path), fix="--from train makes it again"
            )
        if (engine := engine_of(self.resolved)) is not None:
            path = engine.exported(self.run.path)
        if (during := self.resolved.recipe.eval.during) is not None and during.keep == "best":
            path = self._best(path)
        if self.resolved.lora is None:
            return {"summary": export_model(path, self.run.merged, self.base_folder())}
        return {"summary": export(path, self.run.adapter, self.base_folder())}

    def _best(self, last: Path) -> Path:
        """The checkpoint with the best scores; the last one where none has a difference to the base."""
        from clustertune.evaluate.during import best

        if (chosen := best(self.run)) is None:
            say("warning: eval.during.keep: best: no checkpoint has a paired difference to the base; the last one is exported")
            return last
        say(f"export of {chosen.path.name}: the largest difference to the base")
        return chosen.path

    def merge(self) -> dict[str, Any]:
        from clustertune.merge import merge

        if self.resolved.lora is None:  # all parameters were trained: the export is the model
            return {"summary": {"out": str(self.run.merged), "merged": 0}}
        return {"summary": merge(self.base_folder(), self.run.adapter, self.run.merged)}

    def base_folder(self) -> Path:
        """The base model's folder; one of the Hub is downloaded."""
        return needs.base_of(self.resolved, self.run).fetch()

    def eval(self) -> dict[str, Any]:
        from clustertune.evaluate.run import evaluate
        from clustertune.evaluate.scores import require_pass

        recipe = self.resolved.recipe
        section = recipe.eval
        settings = self._eval_settings()
        if (before := self.run.stage("eval")) and before.get("settings") != settings and self.run.eval.exists():
            self.run.eval.rename(self.run.path / f"eval-{int(before['finished'])}")  # a finished one is never written over
        # Random weights are never worth the benchmark's 541 prompts.
        benchmark = recipe.model.weights == "hub"
        data = bundle.prompts(self.resolved)
        # Without an adapter nothing is merged, and the base is what the training began with.
        base = self.base_folder() if section.base else None
        with measured(self.run.path), contextlib.ExitStack() as stack:
            stack.callback(self.run.evaluating.unlink, missing_ok=True)
            result = evaluate(
                self.run.merged,
                self.run.eval,
                settings=section,
                data=data,
                prompts=bundle.eval_data(self.resolved),
                benchmark=benchmark,
                base=base,
                base_out=base and self._base_scores(settings),
                progress_file=self.run.evaluating,
            )
        require_pass(result)
        return {"tasks": result["tasks"], "settings": settings}

    def _base_scores(self, settings: Mapping[str, Any]) -> Path:
        """Where the base's answers to these settings lie; the points of a sweep share them, where they ask in the same way."""
        from clustertune.data import rendering

        template = self.run.merged / "chat_template.jinja"
        given = rendering.header(template.read_text(encoding="utf-8")) if template.is_file() else None
        if given is not None and (given.arguments or given.date):
            settings = {**settings, "given": [given.arguments, given.date]}
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        shared = self.run.shared_tokens
        is_shared = shared is not None and self.resolved.recipe.model.weights == "hub"
        return (shared.parent if shared is not None and is_shared else self.run.path) / "eval-base" / name

    def report(self) -> dict[str, Any]:
        from clustertune.report.page import build

        return {"file": str(build(self.run.path, self.run.report))}


def export_trained(source: Path, out: Path | None = None, base: Path | None = None) -> dict[str, Any]:
    """Export the adapter, or the model where the recipe trained all parameters, of a run folder or of one checkpoint.

    ``out`` defaults to the run's ``adapter`` or ``merged``; ``base`` to the run's base model as far as it is on this machine.
    """
    from clustertune.export.export import export, export_model, read_recipe, verify

    checkpoint = store.find_checkpoint(source)
    run = RunDir(source if checkpoint != source else checkpoint.parent.parent)
    verify(checkpoint)
    trained = read_recipe(checkpoint)
    base = base or needs.base_of(trained, run).find()
    if trained.lora is None:
        return export_model(checkpoint, out or run.merged, base)
    return export(checkpoint, out or run.adapter, base)


def command_line() -> list[str]:
    """How this process was started."""
    return ["clustertune", *sys.argv[1:]]
