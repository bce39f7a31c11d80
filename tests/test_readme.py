"""What the documents tell a person to type is there, is run by a test, and does what they say."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from clustertune.cli import app
from clustertune.manifest import find_problems
from tests import tree
from tests.command import Done, run

DOCUMENTS = {
    name: text
    for name, text in tree.texts().items()
    if name.endswith(".md") and (name == "README.md" or name.startswith(("docs/", "recipes/", "eval/")))
}

CHAIN = "tests/test_chain.py::"
HERE = "tests/test_readme.py::"
ON_A_RUN, ON_MODELS = f"{HERE}test_the_commands_on_a_run", f"{HERE}test_the_commands_on_models"
ON_A_CLUSTER = "tests/cluster/test_commands.py::test_up_run_status_down"
SWEEP, ISOLATED = "tests/sweep/test_command.py::", "test_here_a_failure_is_isolated_and_the_same_command_goes_on"
SKY = "tests/launch/test_skypilot.py::test_the_command_prints_it_or_writes_it"

PLAN = "tests/plan/test_documents.py::test_the_commands_of_the_documents"
SET_UP, TRIED = (
    f"tests/ops/test_slurm_setup.py::{name}"
    for name in ("test_the_way_to_the_first_job", "test_the_files_are_tried_where_the_page_says")
)
STORED = "tests/ops/test_storage_setup.py::test_only_a_blank_disk_is_formatted_and_only_when_told"
STAGED = "tests/staging/"
CALIBRATE = "tests/plan/test_documents.py::test_learning_from_a_run"

NCCL, DOCTOR = "tests/nccl_check/", "tests/doctor/test_command.py::"

COMMANDS = {
    "clustertune nccl-check --submit --cluster rno-rtxpro6000": f"{NCCL}test_submit.py::test_on_two_nodes_of_a_real_slurm",
    "clustertune nccl-check --submit --cluster rno-rtxpro6000 --nodes 2 --dry-run": (
        f"{NCCL}test_submit.py::test_the_command_prints_what_it_would_submit"
    ),
    "clustertune nccl-check --cluster mine.yaml --node-rank 0 --out DIR": (
        f"{NCCL}test_shaped.py::test_the_slow_node_of_three_is_found"
    ),
    "clustertune nccl-check --logs LOG...": f"{NCCL}test_command.py::test_recorded_logs_are_judged_alone",
    "clustertune nccl-check --tune": f"{NCCL}test_tune.py::test_the_faster_interface_is_found",
    "clustertune plan llama405b-oasst2 --cluster rno-rtxpro6000": PLAN,
    "clustertune plan llama405b-oasst2 --cluster rno-rtxpro6000 --why memory": PLAN,
    "clustertune plan llama405b-oasst2 --cluster rno-rtxpro6000 accelerate.fsdp_config.fsdp_activation_checkpointing=false"
    " 'activation_checkpointing.save=[attention]'": "tests/plan/test_recomputation.py::test_the_command_of_the_page",
    "clustertune plan llama405b-oasst2 --cluster rno-rtxpro6000 --advise": PLAN,
    "clustertune plan llama405b-oasst2 --cluster rno-rtxpro6000 --json": PLAN,
    "clustertune plan --compare llama405b-oasst2 tiny-oasst2 --cluster rno-rtxpro6000": PLAN,
    "clustertune plan --calibrate runs/llama405b-oasst2/ID --cluster rno-rtxpro6000": CALIBRATE,
    "clustertune run recipes/tiny-oasst2": f"{CHAIN}test_the_document",
    "clustertune run recipes/llama405b-oasst2 --tiny": f"{CHAIN}test_the_reference_recipe_runs_tiny",
    "clustertune run recipes/tiny-oasst2 lora.r=32 --to export": f"{HERE}test_a_run_that_is_only_told",
    "clustertune show recipes/llama405b-oasst2": f"{HERE}test_the_commands_before_training",
    "clustertune show recipes/tiny-oasst2": f"{HERE}test_the_commands_before_training",
    "clustertune show recipes/tiny-oasst2 --json": f"{HERE}test_the_commands_before_training",
    "clustertune show recipes/llama405b-oasst2 accelerate.parallelism_config.parallelism_config_dp_replicate_size=2": (
        f"{HERE}test_the_commands_before_training"
    ),
    "clustertune show recipes/llama405b-oasst2 accelerate.fsdp_config.fsdp_activation_checkpointing=false "
    "activation_checkpointing.ratio=0.5": f"{HERE}test_the_commands_before_training",
    "clustertune prepare recipes/tiny-oasst2 --out /tmp/data": f"{HERE}test_the_commands_before_training",
    "clustertune checkpoint verify runs/tiny-oasst2/ID": ON_A_RUN,
    "clustertune export runs/tiny-oasst2/ID --out /tmp/adapter": ON_MODELS,
    "clustertune merge BASE ADAPTER OUT": ON_MODELS,
    "clustertune eval MODEL --data prompts.jsonl": ON_MODELS,
    "clustertune report runs/tiny-oasst2/ID": ON_A_RUN,
    "clustertune submit recipes/llama405b-oasst2": "tests/launch/test_submit.py::test_a_chain_with_names_chosen_to_hurt",
    "clustertune submit recipes/llama405b-oasst2 --dry-run": (
        "tests/launch/test_submit.py::test_dry_run_of_every_recipe_on_every_cluster"
    ),
    "clustertune submit llama70b-megatron --cluster mine.yaml --dry-run --verbose": (
        "tests/megatron/test_submit.py::test_what_would_be_done_is_printed"
    ),
    "clustertune push RUN --repo OWNER/NAME --dry-run": "tests/push/test_push.py::test_a_dry_run_asks_nobody",
    "clustertune push RUN --repo OWNER/NAME --publish": ("tests/push/test_push.py::test_pushed_private_in_one_commit_and_once"),
    "clustertune submit --status runs/llama405b-oasst2/ID": "tests/launch/test_status.py::test_on_a_real_slurm",
    "clustertune doctor sbatch launch/run.sbatch": "tests/doctor/test_sbatch.py::test_the_command",
    "clustertune doctor": f"{DOCTOR}test_this_machine",
    "clustertune doctor recipes/llama405b-oasst2 --cluster rno-rtxpro6000": f"{DOCTOR}test_a_recipe_on_a_cluster",
    "clustertune doctor --cluster rno-rtxpro6000 --submit --dry-run": f"{DOCTOR}test_the_job_of_the_reference_cluster",
    "clustertune doctor --list": f"{DOCTOR}test_the_rules_are_listed",
    "clustertune demo-slurm": "tests/cluster/test_commands.py::test_the_demo_as_it_is_told",
    "clustertune cluster up --nodes 2 --gpus 2": ON_A_CLUSTER,
    "clustertune cluster run -- sinfo": ON_A_CLUSTER,
    "clustertune cluster status": ON_A_CLUSTER,
    "clustertune cluster down": ON_A_CLUSTER,
    "clustertune show-cluster rno-rtxpro6000": f"{HERE}test_the_commands_before_training",
    "clustertune ops storage plan --cluster rno-rtxpro6000 --node rno-it-gpu0007-1": (
        "tests/ops/test_storage_tree.py::test_another_machine_is_shown_from_nothing_and_never_touched"
    ),
    "clustertune ops storage apply --cluster rno-rtxpro6000": STORED,
    "clustertune ops storage check --cluster rno-rtxpro6000": STORED,
    "clustertune ops slurm apply --cluster rno-rtxpro6000": SET_UP,
    "clustertune ops slurm plan --cluster rno-rtxpro6000 --try": TRIED,
    "clustertune stage recipes/llama405b-oasst2 --cluster mycluster.yaml": (
        f"{STAGED}test_node.py::test_by_hand_in_an_allocation"
    ),
    "clustertune stage recipes/llama405b-oasst2 --cluster mycluster.yaml --dry-run": (
        f"{STAGED}test_command.py::test_on_this_node_and_away_again"
    ),
    "clustertune stage --clean --cluster mycluster.yaml": f"{STAGED}test_command.py::test_on_this_node_and_away_again",
    "clustertune stage recipes/llama405b-oasst2 --to /media/staged": (
        f"{STAGED}test_bundle.py::test_collected_again_what_is_whole_is_kept"
    ),
    "clustertune stage --verify /media/staged": f"{STAGED}test_bundle.py::test_verified_without_a_network",
    "clustertune run recipes/llama405b-oasst2 staged=/pool/staged": (
        f"{STAGED}test_bundle.py::test_the_chain_runs_from_the_parcel_alone"
    ),
    "clustertune submit recipes/llama405b-oasst2 staged=/pool/staged": (
        f"{STAGED}test_bundle.py::test_a_job_is_told_where_the_parcel_is"
    ),
    "clustertune show-cluster local": f"{HERE}test_the_commands_before_training",
    "clustertune sky recipes/llama405b-oasst2 --gpu H100 --out task.yaml": SKY,
    "clustertune sky recipes/llama405b-oasst2 --tiny": SKY,
    "clustertune sweep recipes/tiny-oasst2 train.learning_rate=1e-3,5e-3 lora.r=8,16 --here": f"{SWEEP}{ISOLATED}",
    "clustertune sweep recipes/llama405b-oasst2 train.learning_rate=1e-5,5e-5 lora.r=16,32 "
    "--cluster rno-rtxpro6000 --dry-run": f"{SWEEP}test_the_job_array_of_the_reference_cluster",
    "clustertune sweep --results runs/llama405b-oasst2/sweep-ID": f"{SWEEP}{ISOLATED}",
}
"""Every command of the documents, and the test that runs it."""

NEWCOMER = "tests/config/test_newcomer.py::"
COMMANDS |= {
    "clustertune plan my-qwen --cluster dgx-h100": f"{NEWCOMER}test_the_page_makes_a_recipe",
    "clustertune submit my-qwen --cluster dgx-h100 --dry-run": f"{NEWCOMER}test_the_page_makes_a_recipe",
    "clustertune run my-qwen --tiny --to export": f"{NEWCOMER}test_the_recipe_of_the_page_runs",
}

BENCH = "tests/bench/test_command.py::"
COMMANDS |= {
    "clustertune bench tiny-oasst2 --steps 4 --warmup 1 --profile 1 --out /tmp/bench": (
        f"{BENCH}test_a_recipe_is_measured_against_trl"
    ),
    "clustertune bench tiny-oasst2 --against trl --steps 4 --warmup 1 --out /tmp/bench-trl": (
        f"{BENCH}test_a_recipe_is_measured_against_trl"
    ),
    "clustertune bench llama405b-oasst2 --synthetic --submit --cluster rno-rtxpro6000 --dry-run": (
        f"{BENCH}test_the_job_of_a_full_size_model_is_shown"
    ),
    "clustertune compare RUN_OR_JSON...": "tests/report/test_compare.py::test_the_command",
}


# --- reading the documents ---------------------------------------------------------------------------------------------


def code_blocks(text: str, language: str = "") -> Iterator[str]:
    """The fenced blocks of a Markdown text; with ``language`` only those of that name."""
    for name, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not language or name == language:
            yield body


def commands(text: str, program: str) -> list[str]:
    """The lines of a document's shell blocks that start ``program``, without prompt and comments, blanks folded."""
    found = []
    for block in code_blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] in (program, f".venv/bin/{program}"):
                found.append(shlex.join([program, *words[1:]]))
    return found


def every_command(program: str) -> list[tuple[str, str]]:
    return [(name, line) for name, text in DOCUMENTS.items() for line in commands(text, program)]


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def mentioned_targets(text: str) -> set[str]:
    """``make X`` in a code block or between backquotes."""
    inline = "\n".join(re.findall(r"`([^`\n]+)`", text))
    return set(re.findall(r"^\s*\$?\s*make ([a-z][a-z-]*)", "\n".join([*code_blocks(text), inline]), re.MULTILINE))


def missing_paths(text: str, name: str) -> list[str]:
    """Linked files, and paths between backquotes below a folder of the tree, that are not there."""
    root, here = tree.REPO, (tree.REPO / name).parent
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    # Of the repository, not of what lies there: builds and runs leave folders that a fresh clone has not.
    tops = {file.split("/")[0] for file in tree.files() if "/" in file}
    told = [word.rstrip("/") for word in re.findall(r"`([\w./-]+)`", text) if "/" in word and word.split("/")[0] in tops]
    return [path for path in linked if path and not (here / path).exists()] + [
        path for path in told if "NAME" not in path and not (root / path).exists() and not (here / path).exists()
    ]


def untold_folders(text: str, files: tuple[str, ...]) -> set[str]:
    """Top folders of the tree that its drawing leaves out; hidden ones are no part of it."""
    drawn = next(block for block in code_blocks(text) if re.search(r"^clustertune/ ", block, re.MULTILINE))
    tops = {name.split("/")[0] for name in files if "/" in name and not name.startswith(".")}
    return tops ^ set(re.findall(r"^(\w+)/", drawn, re.MULTILINE))


def usage_error(line: str) -> str | None:
    """What the command line says against a command's arguments, none of it run; None where it takes them."""
    words = shlex.split(line)[1:]
    try:
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            default = getattr(command, "default", None)  # doctor RECIPE is doctor check RECIPE
            if not (words and words[0] in command.commands) and not default:
                return f"no command {' '.join(words[:1])!r}"
            command = command.commands[words.pop(0) if words and words[0] in command.commands else default]
        command.make_context(command.name, words)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


OF_RECIPES = "tests/test_recipes.py::test_the_commands_of_a_readme_are_run"
COMMANDS |= {
    line: OF_RECIPES for name, line in every_command("clustertune") if name.startswith("recipes/") and line not in COMMANDS
}


# --- the rules ---------------------------------------------------------------------------------------------------------


def test_the_documents_are_read() -> None:
    """A search that finds nothing passes every rule."""
    assert len(commands(DOCUMENTS["README.md"], "clustertune")) > 5
    assert {"demo", "test"} <= mentioned_targets(DOCUMENTS["README.md"])


def test_every_target_that_is_told_exists() -> None:
    """The first command that a newcomer types must not be an error."""
    there = make_targets(tree.texts()["Makefile"])
    assert {name: gone for name, text in DOCUMENTS.items() if (gone := mentioned_targets(text) - there)} == {}
    assert mentioned_targets("```sh\nmake demo x\n```\nand `make all`, but to make sure") == {"demo", "all"}


def test_every_command_that_is_told_is_run() -> None:
    """A command that no test runs is wrong after the next change, and a person finds out."""
    told = every_command("clustertune")
    assert [f"{name}: {line}" for name, line in told if line not in COMMANDS] == [], "give it a test, and a line in COMMANDS"
    assert set(COMMANDS) - {line for _, line in told} == set(), "no document tells these any more"
    for test in set(COMMANDS.values()):
        path, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", tree.texts()[path], re.MULTILINE), test


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_that_is_told_parses(line: str) -> None:
    """An option that was renamed."""
    assert usage_error(line) is None


@pytest.mark.parametrize(
    "line", ["clustertune", "clustertune fly", "clustertune show", "clustertune run x --fast", "clustertune checkpoint look x"]
)
def test_a_planted_command_is_found(line: str) -> None:
    """No command, an unknown one, a missing argument, an unknown option, an unknown command of a group."""
    assert usage_error(line) is not None


def test_commands_are_found_in_any_form() -> None:
    """With a prompt, a path, a comment, over two lines."""
    text = "clustertune prose\n```sh\n$ clustertune a  # why\n.venv/bin/clustertune b \\\n  --c\necho clustertune\n```\n"
    assert commands(text, "clustertune") == ["clustertune a", "clustertune b --c"]


def test_every_path_that_is_told_exists() -> None:
    """A link that leads nowhere."""
    assert {name: gone for name, text in DOCUMENTS.items() if (gone := missing_paths(text, name))} == {}
    planted = "[a](docs/none.md) `tests/none/` `recipes/NAME/` [b](README.md#x) `runs/x/y` `either/or`"
    assert missing_paths(planted, "README.md") == ["docs/none.md", "tests/none"]


def test_the_tree_is_drawn_as_it_is() -> None:
    """A folder that is not drawn is not found; one that is drawn and gone is searched for."""
    assert untold_folders(DOCUMENTS["README.md"], tree.files()) == set()
    planted = "```\nclustertune/  x\nold/  y\n```"
    assert untold_folders(planted, ("clustertune/a", "new/b", "c", ".ci/run")) == {"old", "new"}


# --- the commands ------------------------------------------------------------------------------------------------------


def told(start: str, replaced: dict[str, Path | str]) -> list[str]:
    """The arguments of the one told command that begins so, its example paths replaced."""
    (line,) = (line for line in COMMANDS if line.startswith(f"clustertune {start}"))
    words = shlex.split(line)[1:]
    assert set(replaced) <= set(words), f"{line} has other example paths"
    return [str(replaced.get(word, word)) for word in words]


def test_the_commands_before_training(tmp_path: Path) -> None:
    """``show`` and ``prepare`` as they are told."""
    for line in (line for line in COMMANDS if line.startswith("clustertune show-cluster ")):
        done = run(*shlex.split(line)[1:])
        assert done.code == 0 and line.rpartition(" ")[2] in done.err
    for line in (line for line in COMMANDS if line.startswith("clustertune show ")):
        done = run(*shlex.split(line)[1:])
        assert done.code == 0 and (done.json if "--json" in line else "learning_rate" in done.err)
    done = run(*told("prepare", {"/tmp/data": tmp_path / "data"}))
    assert done.code == 0
    assert find_problems(tmp_path / "data", "dataset", allow_extra=True) == []  # tokens/ has a manifest of its own
    assert find_problems(tmp_path / "data" / "tokens", "tokens") == []


def test_a_run_that_is_only_told(tmp_path: Path) -> None:
    """An override and a choice of stages, up to the point where the ranks would start."""
    done = run(*told("run recipes/tiny-oasst2 lora", {}), "--dry-run", "--run-dir", tmp_path / "run")
    assert done.code == 0
    assert "stages: prepare, train, export\n" in done.err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished_copy(finished: tuple[Path, Done], tmp_path: Path) -> Path:
    """The finished run for this test alone: another worker's tests may hold the lock of the shared one."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_the_commands_on_a_run(finished_copy: Path) -> None:
    """``checkpoint verify`` and ``report`` as they are told."""
    (finished_copy / "report.html").unlink()
    for start in ("checkpoint verify", "report"):
        done = run(*told(start, {"runs/tiny-oasst2/ID": finished_copy}))
        assert done.code == 0, done.err
    assert (finished_copy / "report.html").is_file()


def test_the_commands_on_models(finished_copy: Path, tmp_path: Path) -> None:
    """``export``, ``merge`` and ``eval`` as they are told, each with what the one before made."""
    adapter, merged, prompts = tmp_path / "adapter", tmp_path / "merged", tmp_path / "prompts.jsonl"
    prompts.write_text(tree.texts()["eval/ifeval/prompts.jsonl"].partition("\n")[0] + "\n")
    (base,) = (finished_copy / "model").iterdir()
    for step in (
        told("export", {"runs/tiny-oasst2/ID": finished_copy, "/tmp/adapter": adapter}),
        told("merge", {"BASE": base, "ADAPTER": adapter, "OUT": merged}),
        [*told("eval", {"MODEL": merged, "prompts.jsonl": prompts}), "--out", str(tmp_path / "eval"), "--max-gen-toks", "4"],
    ):
        done = run(*step)
        assert done.code == 0, (step, done.err)
    assert find_problems(adapter, "adapter") == [] == find_problems(merged, "merged")
    assert (tmp_path / "eval" / "ifeval.json").is_file()
