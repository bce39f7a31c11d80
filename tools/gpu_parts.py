"""The parts of ``make gpu-check``: what each runs, and when it passes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertune.containers import pins
from tools.gpu_commands import LONGEST, REPO, EndedCommand, Failed, GpuCheck, NotHere, end_tree, output_of
from tools.runs import events

Part = Callable[[GpuCheck], dict[str, Any]]

FIRST_LOSS, LATER_LOSS = 0.005, 0.03
"""How far a loss may be from the CPU's, as a share of it: the first is of the same weights and rows; from then on bfloat16's
rounding (2**-8) and another order of sums go into the updates, over six steps."""
RESUMED_LOSS = 0.01
"""How far the losses of a resumed run may be from those of one that was not killed: on a GPU the backward pass of attention
adds in no fixed order."""
PEAK = (-0.02, 0.05)
"""How far the plan's peak may be from what torch allocated, as a share of it."""
SHORT = {"versions": 60.0, "eval": 300.0}
"""Seconds of the parts that need less than the longest."""
_VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = "absent"
gpu = {}
try:
    import torch
    gpu = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    if gpu["gpus"]:
        p = torch.cuda.get_device_properties(0)
        gpu |= {"gpu": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}
        gpu["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except ImportError as error:
    gpu["error"] = str(error)
print(json.dumps({"versions": found, **gpu}))
"""
BENCHES: dict[str, tuple[str, list[str]]] = {
    "bench-1b-full": ("llama1b-oasst2", []),
    "bench-1b-lora": ("llama1b-oasst2", ["lora.r=32", "lora.lora_alpha=64", "lora.target_modules=all-linear"]),
    "bench-8b-lora": ("llama8b-qlora-1gpu", ["train.model_init_kwargs.quantization_config=null"]),
    "bench-8b-qlora": ("llama8b-qlora-1gpu", []),
    "bench-8b-full": ("llama8b-lima", ["train.packing=true"]),
}
"""Recipe and overrides of each shape. On several GPUs a recipe of one keeps its one."""
FIRST = (
    "versions", "nccl", "chain", "telemetry", "context", "gpu-tests", "peak", "bench-8b-lora", "bench-1b-full",
    "tiny-llama405b-oasst2", "tiny-llama8b-lima", "tiny-llama70b-qlora",
)  # fmt: skip
"""What half an hour on one GPU is best spent on."""


def parts() -> dict[str, Part]:
    """All parts by name, in the order in which they run: :data:`FIRST`, then the rest."""
    by_name: dict[str, Part] = {"versions": versions, "nccl": nccl, "chain": chain, "context": context}
    by_name |= {"telemetry": telemetry, "eval": evaluation, "gpu-tests": gpu_tests, "peak": peak}
    for name in BENCHES:
        by_name[name] = _bench(name)
    for recipe in sorted(path.parent.name for path in (REPO / "recipes").glob("*/recipe.yaml")):
        by_name[f"tiny-{recipe}"] = _tiny(recipe)
    return {name: by_name[name] for name in (*FIRST, *(name for name in by_name if name not in FIRST))}


def choose(words: str, known: Mapping[str, Part]) -> tuple[list[str], list[str]]:
    """The parts that a list with commas names, in their own order, and the words that name none. Empty: all.

    A word that is not a name, but the beginning of some up to a hyphen, takes all of these: ``tiny``, ``bench-8b``.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]

    def takes(word: str, name: str) -> bool:
        return name == word if word in known else name.startswith(word + "-")

    unknown = [word for word in names if not any(takes(word, name) for name in known)]
    if not names:
        return list(known), unknown
    return [name for name in known if any(takes(word, name) for word in names)], unknown


def seconds(part: str) -> float:
    """The longest that a part may take."""
    return SHORT.get(part, LONGEST)


def gpu_name() -> str:
    """The first GPU's name in the form of a file's."""
    first = (output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines() or ["gpu"])[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", first.replace("nvidia", "")).strip("-") or "gpu"


def pinned() -> dict[str, str]:
    """Packages and versions of ``containers/versions.env`` that train."""
    pins_by_set = pins.read()
    return {**pins_by_set[pins.PY], "deepspeed": pins_by_set[pins.DEV]["deepspeed"]}


# --- the machine --------------------------------------------------------------------------------------------------------


def versions(check: GpuCheck) -> dict[str, Any]:
    """Python, packages, driver and GPUs; which versions differ from the project's pins."""
    expected = pinned()
    document = check.run(check.python, "-c", _VERSIONS, *expected).document()
    if "error" in document:
        raise Failed(f"torch is not installed for {check.python}: {document['error']}")
    if check.backend == "nccl" and not document["gpus"]:
        raise Failed(f"torch {document['versions']['torch']} sees no GPU: a build for CPUs, or the driver is missing")
    have = document["versions"]
    differ = {k: f"{have[k]} (pinned: {v})" for k, v in expected.items() if have[k].partition("+")[0] != v}
    driver = ""
    if shutil.which("nvidia-smi"):
        driver = check.run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").out.strip().partition("\n")[0]
    return {
        **document,
        "driver": driver,
        "differ": differ,
        "why": f"{len(differ)} packages differ from the pins" if differ else "",
    }


def nccl(check: GpuCheck) -> dict[str, Any]:
    """What the links between GPUs carry."""
    if check.backend == "nccl" and check.gpus < 2:
        raise NotHere("there is one GPU, and NCCL refuses two ranks on one")
    limit = ["--seconds", "10", "--max", "1M"] if check.short or check.backend == "gloo" else ["--seconds", "120"]
    done = check.clustertune("nccl-check", *limit, "--backend", check.backend, "--json")
    document = done.document()
    verdict = document.get("verdict") or {}
    if done.code > 1:
        raise Failed(f"exit code {done.code}: {json.dumps(verdict)[:300]}")
    return {"why": f"exit code {done.code}", "verdict": verdict}


# --- the chain ----------------------------------------------------------------------------------------------------------


def losses(run: Path) -> dict[int, float]:
    """Step to loss; of a step that was taken twice the last."""
    return {int(one["step"]): float(one["loss"]) for one in events(run, "step")}


def furthest(ours: Mapping[int, float], theirs: Mapping[int, float], first: float, later: float) -> float:
    """The largest difference of two runs' losses as a share. Raises Failed beyond the limits, or where steps are missing."""
    if not ours or ours.keys() != theirs.keys():
        raise Failed(f"steps {sorted(ours)} against {sorted(theirs)}")
    apart = {step: abs(ours[step] - theirs[step]) / max(abs(theirs[step]), 1e-9) for step in ours}
    for step, share in apart.items():
        limit = first if step == min(ours) else later
        if not share <= limit:
            raise Failed(
                f"step {step}: loss {ours[step]:.5f} against {theirs[step]:.5f}, {share:.2%} apart; {limit:.1%} allowed"
            )
    return max(apart.values())


def chain(check: GpuCheck) -> dict[str, Any]:
    """The chain in bf16: killed behind its first checkpoint, resumed to its end, and the losses of one that was not killed."""
    check.need("trl", "datasets", "peft", "pydantic")
    folder = fresh(check, "chain")
    killed, undisturbed = folder / "killed", folder / "whole"
    bf16 = "true" if check.backend == "nccl" else "false"  # CPUs without AMX emulate it
    settings = {"bf16": bf16, "max_steps": 12, "save_steps": 4, "eval_steps": 6, "eval_on_start": "false"}
    words = ["run", "recipes/tiny-oasst2", *(f"train.{key}={value}" for key, value in settings.items())]
    words += ["--ranks", str(min(check.ranks, 2))]
    child, log = check.start([check.python, "-m", "clustertune", *words, "--run-dir", str(killed)])
    try:
        while child.poll() is None and not any(one.get("status") == "saved" for one in events(killed, "checkpoint")):
            if time.monotonic() > check.deadline:
                break
            time.sleep(0.2)
        if child.poll() is None:
            for file in killed.glob("attempts/*/rank-0.pid"):
                os.kill(int(file.read_text()), signal.SIGKILL)
    finally:
        done = check.wait(child, log)
    if done.code == 0 or not events(killed, "checkpoint"):
        raise Failed(f"ended with {done.code} before it could be killed behind a checkpoint: {done.last_error()}")
    last = "merge" if check.has("lm_eval") else "report"
    for run in (killed, undisturbed):
        done = check.clustertune(*words, "--run-dir", str(run), "--to", last if run == killed else "train")
        if done.code:
            raise Failed(f"{run.name}: exit code {done.code}: {done.last_error()}")
    resumed = [int(one["step"]) for one in events(killed, "start") if one.get("step")]
    if not resumed:
        raise Failed("the second command began from the base model: the checkpoint was not used")
    apart = furthest(losses(killed), losses(undisturbed), RESUMED_LOSS, RESUMED_LOSS)
    return {
        "why": f"resumed from step {resumed[-1]}, ended with {last}; losses at most {apart:.2%} from an undisturbed run's",
        "losses": losses(killed), "model": str(killed / "merged"),
    }  # fmt: skip


def telemetry(check: GpuCheck) -> dict[str, Any]:
    """Of the chain's undisturbed run: how long saves held training up, and what was measured of each GPU meanwhile."""
    run = check.work / "chain" / "whole"
    saves = [one for one in events(run, "checkpoint") if one.get("status") == "saved"]
    if not saves:
        raise NotHere("the part chain left no run here")
    behind = [one for one in saves if one["save_copy_s"]]
    if not behind:
        raise Failed("training waited for every save: none was written behind it")
    why = f"saves of {behind[0]['bytes'] / 1e6:.0f} MB held training up {max(one['save_stall_s'] for one in behind):.3f} s"
    if check.backend == "nccl":
        check.need("pynvml")
        nodes = check.clustertune("watch", str(run), "--once", "--json").document()["nodes"]
        gpus = [gpu for node in nodes for gpu in node["gpus"]]
        unknown = sorted({name for gpu in gpus for name, value in gpu.items() if value is None})
        if unknown or not gpus:
            raise Failed(f"NVML gave no {', '.join(unknown) or 'GPU'}")
        why += f"; {gpus[0]['power_w']:.0f} W, {gpus[0]['memory_gib']:.1f} GiB, {gpus[0]['temperature_c']:.0f} C at the end"
    return {"why": why, "saves": saves}


def context(check: GpuCheck) -> dict[str, Any]:
    """After a save behind training each rank has a CUDA context on its own GPU, and on no other one."""
    if check.backend == "gloo":
        raise NotHere("these are CPUs")
    if check.gpus < 2:
        raise NotHere("there is one GPU, which is every thread's: another GPU than the rank's own is needed")
    if not shutil.which("nvidia-smi"):
        raise NotHere("nvidia-smi is not installed")
    check.need("trl", "datasets", "peft", "pydantic")
    run = fresh(check, "context") / "run"
    settings = ("train.max_steps=2000", "train.save_steps=4", "train.eval_on_start=false", "train.eval_strategy=no")
    words = ["run", "recipes/tiny-oasst2", *settings, "--ranks", str(check.ranks), "--to", "train", "--run-dir", str(run)]
    child, log = check.start([check.python, "-m", "clustertune", *words])
    seen: list[str] = []
    try:
        while child.poll() is None and time.monotonic() < check.deadline:
            if any(one.get("status") == "saved" for one in events(run, "checkpoint")):
                query = "--query-compute-apps=pid,gpu_uuid"
                seen = output_of(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
                break
            time.sleep(0.2)
    finally:
        end_tree(child)
    if not seen:
        raise Failed(f"no process was seen on a GPU behind a save: {EndedCommand(1, '', log).last_error()}")
    counts = Counter(line.partition(",")[0].strip() for line in set(seen))
    if twice := sorted(pid for pid, count in counts.items() if count > 1):
        raise Failed(f"{len(twice)} of {len(counts)} processes have a context on more than one GPU")
    return {"why": f"{len(counts)} processes, a context each", "contexts": len(seen)}


def peak(check: GpuCheck) -> dict[str, Any]:
    """The most that torch allocated in a step against the plan's peak of the same recipe. One rank gathers nothing."""
    check.need("trl", "datasets", "peft", "pydantic")
    recipe, overrides = BENCHES["bench-1b-lora" if check.short else "bench-8b-lora"]
    if check.backend == "gloo":
        raise NotHere("these are CPUs: what a process has in memory is no measure of its tensors")
    words = [*overrides, "slurm.gpus_per_node=1", "slurm.nodes=1", "train.global_batch_size=4"]
    if "per_device" not in " ".join(words):
        words.append("train.per_device_train_batch_size=1")
    folder = fresh(check, "peak")
    options = ["--synthetic", "--steps", "2", "--warmup", "1", "--json", "--run-dir", str(folder / "run")]
    try:
        done = check.clustertune("bench", recipe, *words, *options)
        body = done.document()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = ((body.get("plan") or {}).get("rows") or {}).get("peak_gib_per_gpu") or {}
    measured, planned = row.get("measured"), row.get("plan")
    if done.code or not measured or not planned:
        raise Failed(f"exit code {done.code}: {done.last_error()}")
    why = f"measured {measured:.2f} GiB, planned {planned:.2f} ({planned / measured - 1:+.1%}); one rank, so no gathered layers"
    if not PEAK[0] <= planned / measured - 1 <= PEAK[1]:
        raise Failed(why)
    return {"why": why, "measured_gib": measured, "planned_gib": planned}


def evaluation(check: GpuCheck) -> dict[str, Any]:
    """The model that the chain made, scored on 16 prompts."""
    check.need("lm_eval", "nltk", "langdetect")
    model = check.work / "chain" / "killed" / "merged"
    if not (model / "MANIFEST.json").is_file():
        raise NotHere("the part chain left no merged model here")
    out = fresh(check, "eval")
    done = check.clustertune("eval", str(model), "--limit", "16", "--max-gen-toks", "32", "--out", str(out), "--json")
    if done.code:
        raise Failed(f"exit code {done.code}: {done.last_error()}")
    document = done.document()
    return {"why": f"{sum(task['n'] for task in document['tasks'].values())} prompts", "scores": document["tasks"]}


# --- every strategy -----------------------------------------------------------------------------------------------------


def mesh(recipe: str) -> list[str]:
    """The axes of a recipe's mesh that need more ranks than one: tp, cp, dp_replicate."""
    file = REPO / "recipes" / recipe / "accelerate.yaml"
    return re.findall(r"parallelism_config_(tp|cp|sp|dp_replicate)_size", file.read_text() if file.is_file() else "")


def _tiny(recipe: str) -> Part:
    def part(check: GpuCheck) -> dict[str, Any]:
        if "megatron" in recipe:
            check.need("megatron")
        axes = mesh(recipe)
        if axes and check.backend == "nccl" and check.gpus < 4:
            raise NotHere(f"{' and '.join(axes)} need 4 GPUs, there {'is' if check.gpus == 1 else 'are'} {check.gpus}")
        most = 4 if axes else 2
        ranks = 1 if "1gpu" in recipe else min(check.ranks, most) if check.backend == "nccl" else most
        folder = fresh(check, f"tiny-{recipe}")
        dropout = ["lora.lora_dropout=0"] if _has_lora(check, recipe) else []  # a GPU draws other numbers than a CPU
        words = ["run", f"recipes/{recipe}", *dropout, "--tiny", "--ranks", str(ranks), "--to", "train"]
        runs = {"here": {}, "cpu": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}}
        for name, env in runs.items():
            done = check.clustertune(*words, "--run-dir", str(folder / name), **env)
            if done.code:
                message = done.last_error()
                raise (NotHere if "is not installed" in message else Failed)(f"{name}: {message}")
        measured, cpu = (losses(folder / name) for name in runs)
        apart = furthest(measured, cpu, FIRST_LOSS, LATER_LOSS)
        shutil.rmtree(folder, ignore_errors=True)
        return {
            "why": f"{ranks} rank{'s' if ranks > 1 else ''}, losses at most {apart:.2%} from the CPU's",
            "here": measured, "cpu": cpu, "ranks": ranks,
        }  # fmt: skip

    part.__doc__ = f"{recipe} --tiny on this device, its losses against the CPU's."
    return part


def _has_lora(check: GpuCheck, recipe: str) -> bool:
    values = check.clustertune("show", f"recipes/{recipe}", "--json").document().get("values") or {}
    return any(key.startswith("lora.") for key in values)


# --- speed --------------------------------------------------------------------------------------------------------------


def _bench(name: str) -> Part:
    def part(check: GpuCheck) -> dict[str, Any]:
        check.need("trl", "datasets", "peft", "pydantic")
        recipe, overrides = BENCHES[name]
        ranks = 1 if "1gpu" in recipe else check.ranks
        words = [*overrides, f"slurm.gpus_per_node={ranks}", "slurm.nodes=1", f"train.global_batch_size={4 * ranks}"]
        if "per_device" not in " ".join(words):
            words.append("train.per_device_train_batch_size=1")
        if check.backend == "gloo":
            if name != "bench-1b-full":
                raise NotHere("these are CPUs: one small model, in bench-1b-full, tries the script")
            recipe, words = "tools/recipes/llama60m", []
            words += ["train.max_length=32"]
        else:
            _fits(check, name, recipe, words)
        steps, warmup = (2, 1) if check.short else (12, 3)
        folder = fresh(check, name)
        words += ["--synthetic", "--rounds", "1", "--steps", str(steps), "--warmup", str(warmup)]
        try:
            done = check.run(check.python, "-m", "tools.bench_trl", recipe, *words, "--work", str(folder / "runs"), "--json")
            body = done.document()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if done.code or "ratio" not in body:
            raise Failed(f"exit code {done.code}: {done.last_error()}")
        return _bench_facts(body)

    part.__doc__ = f"{' '.join(name.split('-')[1:])}: speed against TRL with the same arguments, a training each."
    return part


def _fits(check: GpuCheck, name: str, recipe: str, words: list[str]) -> None:
    """Raises NotHere where the plan says that full fine-tuning needs more memory than there is."""
    if "full" not in name:
        return
    done = check.clustertune("plan", recipe, *words, "--json")
    plan = done.document()
    if plan.get("fits") is False:
        raise NotHere(
            f"the plan says that it does not fit: {json.dumps(plan.get('memory', {}).get('needed', plan.get('why', '')))[:200]}"
        )


def _bench_facts(body: Mapping[str, Any]) -> dict[str, Any]:
    ours, ratio = body["bench"], body["ratio"]
    around = f" ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio["low"] is not None else ""
    return {
        "why": f"{ratio['median']:.3f}{around} of TRL's step", "step_s": ours["step_s"]["median"],
        "tokens_per_s_per_gpu": ours["tokens_per_s_per_gpu"], "mfu": ours["utilisation"]["mfu"],
        "peak_gib": ours["peak"]["allocated_gib"] or ours["peak"]["rss_gib"],
        "planned": (ours["plan"].get("rows") or {}).get("step_s"),
        "ratio": ratio, "overrides": ours["overrides"],
    }  # fmt: skip


def gpu_tests(check: GpuCheck) -> dict[str, Any]:
    """The tests that are marked ``gpu``."""
    if check.backend == "gloo":
        raise NotHere("these are CPUs: the tests marked gpu need CUDA")
    check.need("pytest", "pytest_timeout")
    # Only their files: others import what is not installed beside a machine's own torch.
    files = [str(path) for path in sorted((REPO / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    done = check.run(check.python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "400", *files)
    last = (done.out.strip().splitlines() or [""])[-1]
    if done.code == 5:
        raise NotHere("no test is marked gpu")
    if done.code:
        raise Failed(f"{last} {done.last_error()}")
    return {"why": last}


def fresh(check: GpuCheck, name: str) -> Path:
    """An empty folder for the runs of a part."""
    folder = check.work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
