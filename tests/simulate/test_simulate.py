"""``plan --simulate``: what it counts is what the plan says, and what is wrong in the product it finds.

A simulation takes ten seconds: most of it imports. Each is made once, and several tests read it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from clustertune.cli.app import app
from clustertune.cluster.load import known_clusters, load_cluster, of_gpus
from clustertune.errors import UserError
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.memory import BACKWARD, EVALUATION, FORWARD, LOSS, REFERENCE, UPDATE
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import Lengths
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.simulate import guard, scratch, simulator
from tests.slurm import wait_for
from tests.tree import REPO

pytestmark = pytest.mark.timeout(900)
needs_compiler = pytest.mark.skipif(shutil.which(guard.COMPILER) is None, reason="a wrong device needs the guard")
DEPTH = 2
MANY = {"llama70b-tp-fsdp2": "8x8xh100-sxm", "mixtral8x7b-tulu3": "4x8xh100-sxm", "qwen2.5-72b-tulu3": "16x4xh100-sxm"}
"""Recipes of more nodes than the example cluster has."""


def recipe(name: str, *overrides: str, depth: int | None = DEPTH) -> Resolved:
    found = resolve(str(REPO / "recipes" / name), list(overrides))
    return found if depth is None else simulator.with_depth(found, depth)


def plan_of(resolved: Resolved, gpus: str | None = None) -> Plan:
    gpus = gpus or MANY.get(resolved.name)
    cluster = find_calibrated(of_gpus(gpus) if gpus else load_cluster("dgx-h100"), None)
    full = Lengths((int(resolved.train_args["max_length"]),), "full rows")
    return make_plan(resolved, cluster.machine(resolved.recipe.slurm.nodes), cluster.constants, lengths=full, sure=False)


@cache
def simulated(name: str, *overrides: str, depth: int | None = DEPTH, ranks: tuple[int, ...] = (0,)) -> tuple[Plan, Any]:
    resolved = recipe(name, *overrides, depth=depth)
    plan = plan_of(resolved)
    return plan, simulator.simulate(resolved, plan.machine, ranks=ranks, tell=lambda _: None)


def hold(plan: Plan, found: simulator.Simulation) -> None:
    """What rests, every moment and every byte that is sent are the plan's."""
    terms = {one.term: one for one in simulator.terms(plan, found)}
    off = {name: one.difference for name, one in terms.items() if one.difference is not None}
    small = 2**22  # bytes of the batch and of rotary tables
    rest = terms["at rest"]
    assert rest.planned is not None and abs(rest.planned - rest.counted) < 0.001 * rest.counted + small, off
    assert -0.01 <= off["peak"] <= 0.03, off  # of two layers; of all of them docs/results/simulate.md
    moments = [name for name in (FORWARD, LOSS, REFERENCE, BACKWARD, UPDATE, EVALUATION) if name in terms]
    for one in (terms[name] for name in moments):
        assert one.planned is not None
        assert -0.02 * one.counted - small <= one.planned - one.counted <= 0.03 * one.counted + small, off
    sent = {term: value for term, value in off.items() if term.startswith(("all-gather", "reduce-scatter", "all-reduce"))}
    assert all(abs(value) < 0.005 for value in sent.values()), off
    assert sent or found.resolved.world_size == 1
    # What recomputation leaves out, adapters and their updates of experts among them; attention is the kernel's, not a product.
    work = terms[simulator.PRODUCTS]
    if found.note:
        assert work.planned is None  # without the guard it is TRL's loss for CPUs
    elif plan.strategy.tp == 1:  # else each rank computes the whole head, but not of all rows
        assert work.difference is not None and abs(work.difference) < (0.06 if plan.shape.all_experts else 0.01), work


RANKS = {"llama405b-oasst2": (0, 9, 15), "llama8b-lima": (0,)}
"""Of both nodes of the 405B: the first rank, one in the middle, the last one. The first is compared with the plan."""


def first_simulated(name: str) -> tuple[Plan, Any]:
    """One simulation that many tests read."""
    return simulated(name, ranks=RANKS[name])


@pytest.mark.parametrize("name", RANKS)
def test_two_layers_at_full_width_and_full_world(name: str) -> None:
    """LoRA on 16 ranks, all parameters on 8: loading, sharding, trainer and loss, at the full width."""
    plan, found = first_simulated(name)
    hold(plan, found)
    moments = found.first["moments"]
    assert moments.keys() == {"loading", "at rest", FORWARD, LOSS, BACKWARD, UPDATE, "save", "evaluation"}
    assert found.first["recomputed"] == "2 of 2"
    shards = found.resolved.world_size
    assert found.first["read_bytes"] * shards == pytest.approx(2 * found.first["parameters"], rel=0.001)
    assert all(sum(peak["parts"].values()) == peak["bytes"] for peak in moments.values())
    marks = dict.fromkeys(mark for _, mark in found.first["curve"]["marks"])
    assert list(marks) == ["at rest", FORWARD, LOSS, BACKWARD, UPDATE]
    step = max(peak["bytes"] for name, peak in moments.items() if name in marks)
    assert max(found.first["curve"]["bytes"]) == step


@needs_compiler
@pytest.mark.parametrize("name", RANKS)
def test_save_and_resume_at_full_width(name: str) -> None:
    """With the product's own code: what is written is what is read on nodes of half as many GPUs, and what the plan says."""
    plan, found = first_simulated(name)
    terms = {one.term: one for one in simulator.terms(plan, found)}
    for name_ in ("checkpoint, written by this rank", "checkpoint, read by this rank", "copy for saves in host memory"):
        term = terms[name_]
        assert term.planned is not None
        assert abs(term.planned - term.counted) < 0.001 * term.counted + 2**20, term  # headers and an index
    saved, resumed = found.first["save"], found.first["resume"]
    assert saved["pinned_bytes"] and not saved["pageable_bytes"]
    assert {"MainThread", "save_0"} <= saved["devices"].keys()
    assert [wait["for"] for wait in saved["waits"]] == ["the default stream"]
    assert resumed["gpus_per_node"] == 4
    assert abs(resumed["rest_bytes"] / found.first["rest_bytes"] - 1) < 0.001
    assert simulator.faults(found) == []


def test_the_picture_is_of_the_same_numbers() -> None:
    """Each moment's parts and the plan's terms stand in it; no script, nothing from elsewhere."""
    plan, found = first_simulated("llama8b-lima")
    picture = ElementTree.fromstring(simulator.svg(plan, found))  # noqa: S314 - made here
    said = [one.text or "" for one in picture.iter() if one.tag.endswith("title")]
    for name, peak in found.first["moments"].items():
        if name != "loading":
            for part, size in peak["parts"].items():
                assert f"simulated: {part} {size / 2**30:.2f} GiB" in said
    assert any(text.startswith("plan: optimizer 1.38") for text in said)
    tags = {one.tag.rpartition("}")[2] for one in picture.iter()}
    assert tags == {"svg", "title", "style", "rect", "text", "polygon", "line"}


@pytest.mark.jobs
@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["llama70b-lora", "llama70b-tp-fsdp2", "llama8b-longcontext-32k", "llama70b-fsdp2", "qwen3-8b", "mistral7b-alpaca",
     "qwen3-30b-a3b-lora", "mixtral8x7b-tulu3"],
)  # fmt: skip
def test_more_recipes_run_at_full_width(name: str) -> None:
    """Tensor and context parallelism, offloading, experts, of which there may be fewer than ranks."""
    hold(*simulated(name))


HSDP = [f"accelerate.parallelism_config.parallelism_config_{key}_size={size}" for key, size in
        (("dp_replicate", 2), ("dp_shard", 4))]  # fmt: skip
ALONE = ["slurm.gpus_per_node=1", "train.global_batch_size=4", "train.per_device_train_batch_size=1"]
TIED = {"tie_word_embeddings": True, "vocab_size": 50_304, "num_hidden_layers": 5}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100_352, "pad_token_id": 0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2560, "intermediate_size": 6912,
         "num_hidden_layers": 3, "num_attention_heads": 20, "num_key_value_heads": 5, "vocab_size": 65_536,
         "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip
SHAPES: dict[str, tuple[str, list[str], dict[str, Any], str | None]] = {
    "tied, another vocabulary": ("qwen3-8b", [], TIED, None),
    "tied, one GPU": ("llama1b-oasst2", ALONE, {"num_hidden_layers": 3}, None),
    "not tied, one GPU": ("llama1b-oasst2", ALONE, {"tie_word_embeddings": False, "num_hidden_layers": 3}, None),
    "replicas": ("llama8b-lima", HSDP, {"num_hidden_layers": 3, "vocab_size": 64_000}, None),
    "512 ranks": ("llama405b-oasst2", ["slurm.nodes=64", "train.global_batch_size=512"], {"num_hidden_layers": 3},
                  "64x8xh100-sxm"),
    "gate and up in one": ("llama8b-lima", [], PHI3, None),
    "gate and up in one, adapted": ("llama70b-lora", ["lora.target_modules=[qkv_proj,o_proj,gate_up_proj,down_proj]"],
                                    PHI3, None),
    "64 experts of 4": ("qwen3-30b-a3b-lora", [], {"num_hidden_layers": 3, "num_experts": 64, "num_experts_per_tok": 4,
                                                   "moe_intermediate_size": 1408}, None),
    "experts that are frozen": ("qwen3-30b-a3b-lora", ["lora.target_parameters=null"], {"num_hidden_layers": 3}, None),
    "16 experts, all trained": ("mixtral8x7b-tulu3", [], {"num_hidden_layers": 3, "num_local_experts": 16,
                                                          "intermediate_size": 6400}, None),
    "preferences, with an adapter": ("tiny-dpo", ["train.bf16=true"], LLAMA, None),
    "preferences, two models": ("tiny-dpo", ["train.bf16=true", "lora=null"], LLAMA, None),
    "wider heads under tp": ("llama70b-tp-fsdp2", [], {"num_hidden_layers": 3, "intermediate_size": 14_336}, None),
}  # fmt: skip
"""Of none of the recipes: one of them, overrides, keys of its model.json, GPUs."""


def of_shape(name: str, folder: Path) -> tuple[Plan, Any]:
    base, overrides, changes, gpus = SHAPES[name]
    for part in ("_base", base):
        shutil.copytree(REPO / "recipes" / part, folder / part)
    whole = {} if "model_type" in changes else recipe(base, depth=None).architecture
    (folder / base / "model.json").write_text(json.dumps(whole | changes))
    resolved = resolve(folder / base, overrides)
    plan = plan_of(resolved, gpus)
    return plan, simulator.simulate(resolved, plan.machine, tell=lambda _: None)


@pytest.mark.jobs
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_in_no_recipe(name: str, tmp_path: Path) -> None:
    """Other layers, vocabularies, heads, experts and worlds: the plan's moments follow from the model, not from a fit."""
    hold(*of_shape(name, tmp_path))


@pytest.mark.jobs
def test_no_wait_of_the_host_grows_with_the_layers() -> None:
    """A value that each layer's forward pass asks the GPU for would leave it idle 126 times a micro batch."""
    both = (first_simulated("llama405b-oasst2"), simulated("llama405b-oasst2", depth=2 * DEPTH))
    counts = [sum(wait["count"] for wait in found.first["waits"]) for _, found in both]
    assert counts[0] == counts[1]
    assert counts[0] <= 8 * 2 + 4


def test_ranks_make_the_same_collectives() -> None:
    """A difference would be a deadlock."""
    found = copy.deepcopy(first_simulated("llama405b-oasst2")[1])
    assert found.ranks.keys() == set(RANKS["llama405b-oasst2"])
    assert simulator.mismatches(found) == []
    lengths = {rank: len(one["sequence"]["step 2"]) for rank, one in found.ranks.items()}
    assert len(set(lengths.values())) == 1 and lengths[0] > 10
    del found.ranks[9]["sequence"]["step 2"][3]  # as a rank that leaves one out
    (problem,) = simulator.mismatches(found)
    assert "step 2, collective 4" in str(problem) and "rank 9" in str(problem)


@pytest.mark.parametrize("name", RANKS)
def test_the_plan_is_never_faster_than_the_roofline(name: str) -> None:
    """On any cluster that has room: what the operators take at the GPU's peak, and the collectives at nominal speed."""
    plan, found = first_simulated(name)
    assert 0 < simulator.least_time(plan, found).seconds < plan.step.seconds
    for cluster in known_clusters():
        machine = find_calibrated(load_cluster(cluster), None).machine(found.resolved.recipe.slurm.nodes)
        if found.resolved.distribution.ranks_per_node <= machine.gpus_per_node:
            other = make_plan(found.resolved, machine, lengths=plan.lengths, sure=False)
            least = simulator.least_time(other, found)
            assert max(least.link, found.first["flops"] / machine.peak_flops) < other.step.seconds, cluster


# --- planted faults -----------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, *changes: tuple[str, str, str], rank: int = 0) -> list[dict[str, Any]]:
    """What the child says of a copy of the package in which lines (file, old, new) are others."""
    shutil.copytree(REPO / "clustertune", tmp_path / "clustertune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO / "ops", tmp_path / "ops")
    for file, old, new in changes:
        path = tmp_path / "clustertune" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    resolved = recipe("tiny-oasst2", depth=None)
    library, _ = guard.build()
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(simulator.specification(resolved, plan_of(resolved).machine, [rank], library)))
    done = subprocess.run(
        [sys.executable, "-m", "clustertune.simulate.child", str(spec)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def counted(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What was counted, with what the resumed rank says."""
    body = {key: line[key] for line in said for key in ("found", "resumed") if key in line}
    found: dict[str, Any] = body["found"]
    return found | {"resume": body["resumed"]}


@pytest.mark.jobs
@needs_compiler
def test_a_tensor_on_the_wrong_device_is_found(tmp_path: Path) -> None:
    """CPU ranks train on through it; on GPUs it ends the run."""
    line = "self._losses.append(loss.detach().reshape(()))"
    change = ("training/trainer.py", line, line.replace("reshape(())", "reshape(1) + torch.zeros(1)"))
    said = damaged(tmp_path, change)
    assert "same device" in said[-1]["error"]
    assert said[-1]["where"].startswith("clustertune/training/trainer.py:")


@pytest.mark.jobs
def test_that_weights_are_not_gathered_again_is_found(tmp_path: Path) -> None:
    """Half of the gathers are missing, and all layers stay whole: the plan beside it shows both."""
    line = "    split_experts_evenly()\n    plugin = getattr(accelerator.state"
    new = line.replace("    plugin", "    accelerator.state.fsdp_plugin.reshard_after_forward = False\n    plugin")
    found = counted(damaged(tmp_path, ("training/sharding.py", line, new)))
    plan, whole = simulated("tiny-oasst2", depth=None)
    broken = simulator.Simulation(whole.resolved, {0: found}, "")
    terms = [{one.term: one for one in simulator.terms(plan, each)} for each in (whole, broken)]
    good, bad = (each["all-gather, 2 ranks"].counted for each in terms)
    assert bad < 0.7 * good


@pytest.mark.jobs
def test_a_wait_in_each_layer_is_found(tmp_path: Path) -> None:
    """With its line."""
    source = (REPO / "clustertune/training/figures.py").read_text()
    old = source[source.index("def attach(trainer: Any") : source.index("    if not resolved.distribution.compiled:\n")]
    hook = "def look(module: Any, given: Any, output: Any) -> None:\n    float(output.sum())\n\n\n"
    new = hook + old + "    for one in layers(trainer.model):\n        one.register_forward_hook(look)\n"
    found = counted(damaged(tmp_path, ("training/figures.py", old, new)))
    waits = {wait["where"]: wait["count"] for wait in found["waits"] if "figures.py" in wait["where"]}
    assert max(waits.values()) >= 4 * 2  # layers, micro batches


@pytest.mark.jobs
@needs_compiler
def test_what_a_save_does_wrong_on_gpus_is_found(tmp_path: Path) -> None:
    """Rank 1: its thread opens a context on GPU 0, copies while training still computes, and its random state is rank 0's."""
    found = counted(damaged(
        tmp_path,
        ("checkpoint/saving.py", 'thread_name_prefix="save", **on_device', 'thread_name_prefix="save"'),
        ("checkpoint/saving.py", "self._stream.wait_event(ready)", "pass"),
        ("training/trainer.py", "torch.cuda.get_rng_state()  #", "torch.cuda.get_rng_state(0)  #"),
        rank=1,
    ))  # fmt: skip
    resolved = recipe("tiny-oasst2", depth=None)
    texts = [str(problem) for problem in simulator.faults(simulator.Simulation(resolved, {1: found}, ""))]
    assert any("save_0" in text and "cuda:0" in text for text in texts)
    assert any("has not waited" in text for text in texts)
    _, good = simulated("tiny-oasst2", depth=None, ranks=(1,))
    assert simulator.faults(good) == []


# --- the command --------------------------------------------------------------------------------------------------------


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_what_cannot_be_simulated_is_refused_in_one_sentence() -> None:
    """Before anything is started; each names the file or key, and what to do."""
    cases = {
        ("llama8b-qlora-1gpu",): "bitsandbytes",
        ("llama1b-oasst2",): "DDP",
        ("llama70b-zero3-offload",): "DeepSpeed",
        ("llama70b-megatron", "--gpus", "8x8xh100-sxm"): "Megatron",
        ("qwen2.5-14b-tulu3", "--gpus", "16x4xh100-sxm"): "Inductor",
        ("qwen3-8b-ifeval-grpo",): "grpo",
    }
    for words, name in cases.items():
        given = words if "--gpus" in words else (*words, "--cluster", "dgx-h100")
        done = call(*given, "--simulate")
        assert isinstance(done.exception, UserError), done.output
        (problem,) = done.exception.problems
        assert name in problem.message and problem.file and problem.fix


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--depth", "2"], "--depth"),
        (["--simulate", "--depth", "0"], "--depth"),
        (["--simulate", "--depth", "127"], "--depth"),
        (["--simulate", "--ranks", "16"], "--ranks"),
        (["--simulate", "--ranks", "some"], "--ranks"),
        (["--simulate", "--advise"], None),
    ],
)
def test_options_that_say_nothing_are_refused(words: list[str], key: str | None) -> None:
    done = call("llama405b-oasst2", "--cluster", "dgx-h100", *words)
    assert isinstance(done.exception, UserError), done.output
    assert [problem.key for problem in done.exception.problems] == [key]


def test_ranks_by_name() -> None:
    resolved = recipe("llama405b-oasst2")
    assert simulator.read_ranks(None, resolved) == [0]
    assert simulator.read_ranks("first,last,each-node,3", resolved) == [0, 15, 8, 3]


def test_the_document_and_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without g++: the same run on tensors called cpu, and a line that says so."""
    monkeypatch.setattr(guard, "COMPILER", "no-such-compiler")
    done = call("tiny-oasst2", "--cluster", "dgx-h100", "--simulate", "--json")
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)["simulation"]
    assert "no-such-compiler" in body["note"] and body["ranks"]["0"]["device"] == "cpu"
    assert {one["term"] for one in body["terms"]} >= {"at rest", FORWARD, LOSS, BACKWARD, UPDATE, "peak"}
    assert body["least_step_s"]["device"] > 0 and body["mismatches"] == []


# --- the guard ----------------------------------------------------------------------------------------------------------


@pytest.mark.jobs
@needs_compiler
def test_the_guard_is_built_once_and_never_taken_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, why = guard.build()
    assert library is not None and not why
    made = library.stat().st_mtime_ns
    assert guard.build() == (library, "") and library.stat().st_mtime_ns == made
    library.write_bytes(b"something else")
    again, _ = guard.build()
    assert again == library and library.read_bytes() != b"something else"
    library.parent.chmod(0o777)
    found, why = guard.build()
    assert found is None and "others may write" in why


@pytest.mark.jobs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_plan_that_is_killed_leaves_no_child_and_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clustertune", "plan", "recipes/tiny-oasst2", "--gpus", "1x2xh100-sxm", "--simulate"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as plan:
        try:
            wait_for(lambda: len(list(tmp_path.glob("clustertune-simulate-*"))) > 1, "the child's folder", 240)
        finally:
            plan.send_signal(number)

    def left() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_child(path, tmp_path)]

    wait_for(lambda: not left() and not list(tmp_path.glob("clustertune-simulate-*")), "the end of all", 60)


def _is_child(path: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in path.read_bytes()
    except OSError:
        return False


def test_what_a_killed_simulation_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young = tmp_path / "clustertune-simulate-left", tmp_path / "clustertune-simulate-young"
    for path in (left, young):
        path.mkdir()
    os.utime(left, (0, 0))
    with scratch.scratch_folder() as mine:
        os.utime(mine, (0, 0))
        with scratch.scratch_folder():
            assert mine.is_dir()
    assert sorted(tmp_path.iterdir()) == [young]
