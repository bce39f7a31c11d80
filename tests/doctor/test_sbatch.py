"""The lint of batch scripts: each rule, good scripts, any bytes, and the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from clustertune.check.rule import SCRIPT, checks
from clustertune.check.sbatch import lint
from clustertune.cli.app import run_command
from clustertune.cli.options import doctor_app
from tests.tree import REPO

GOOD = """#!/usr/bin/env bash
#SBATCH --job-name=tune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""
"""A header and a rendezvous without fault: the cases below add to it."""

CASES_FILE = Path(__file__).with_name("cases.txt")


def script(text: str) -> str:
    """A case's script: its header put in, and a made-up key, which no file of the tree may hold."""
    first, _, rest = text.partition("\n")
    if first.startswith("GOOD"):
        header = GOOD
        for old, new in re.findall(r"\|(.*?)\|(.*?)\|", first):
            assert header.count(old) == 1
            header = header.replace(old, new)
        text = header + rest
    return text.replace("hf_KEY", "hf_" + "Qx7" * 10)


def read_cases() -> list[tuple[str, str, str]]:
    """Rule, script with the mistake, script without."""
    blocks = re.split(r"^=== ", CASES_FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = []
    for block in blocks:
        rule, _, body = block.partition("\n")
        bad, good = body.split("---\n")
        found.append((rule, script(bad), script(good)))
    return found


CASES = read_cases()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where sbatch would be called: it has a folder for logs."""
    (tmp_path / "logs" / "run").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("rule", "bad", "good"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_a_rule_finds_its_mistake_and_nothing_else(rule: str, bad: str, good: str, checkout: Path) -> None:
    """At its line, with a remedy and a link; and a script without it gives no finding of any rule."""
    line = next(number for number, row in enumerate(bad.split("\n"), 1) if "<here>" in row)
    found = lint(bad, "job.sbatch", checkout)
    assert [(f.rule, int(f.where)) for f in found if f.rule == rule] == [(rule, line)]
    assert all(f.found and f.fix and f.link.startswith("https://") for f in found)
    assert [(f.rule, int(f.where), f.found) for f in lint(good, "job.sbatch", checkout)] == []


def test_every_rule_has_a_case() -> None:
    """A rule without one may never find anything, or everything."""
    assert {case[0] for case in CASES} == {one.rule.id for one in checks(SCRIPT)}


@pytest.mark.parametrize(("processes", "rules"), [(8, ["idle-gpus"]), (16, []), (32, ["more-processes-than-gpus"]), ("x", [])])
def test_accelerates_file_beside_the_script_is_read(processes: object, rules: list[str], checkout: Path) -> None:
    (checkout / "fsdp.yaml").write_text(f"num_machines: 2\nnum_processes: {processes}\n")
    text = GOOD + "srun accelerate launch --config_file fsdp.yaml --main_process_ip $host t.py\n"
    assert [one.rule for one in lint(text, "job.sbatch", checkout)] == rules
    assert lint(text.replace("fsdp.yaml", "not-there.yaml"), "job.sbatch", checkout) == []


def test_a_script_beside_that_srun_starts_is_read(checkout: Path) -> None:
    own = "torchrun --nnodes=2 --rdzv-endpoint={}:29500 t.py\n"
    for host, rules in (("$(hostname)", ["own-host"]), ("$host", [])):
        (checkout / "node.sh").write_text("#!/bin/bash\n# MASTER_ADDR=$(hostname) was wrong\n" + own.format(host))
        found = lint(GOOD + "export host\nsrun bash node.sh\n", "job.sbatch", checkout)
        assert [(one.rule, one.where) for one in found] == [(rule, "12") for rule in rules]


def test_line_ends_and_marks_of_windows_hide_nothing(checkout: Path) -> None:
    """sbatch refuses such a file with a message of its own; here its lines are read as what they are."""
    found = lint("\ufeff" + (GOOD + "export MASTER_PORT=29500\n").replace("\n", "\r\n"), "job.sbatch", checkout)
    assert [(f.rule, int(f.where)) for f in found] == [("fixed-port", 11)]
    assert lint(GOOD, "job.sbatch", checkout) == []


def test_a_key_is_never_repeated(checkout: Path) -> None:
    """A finding is printed into logs and tickets."""
    key = "hf_" + "Zk9" * 10
    script = GOOD + f"export HF_TOKEN={key}\nsrun a --hub_token={key}\necho {key}\n#SBATCH --comment={key}\n"
    found = lint(script, "job.sbatch", checkout)
    assert {int(f.where) for f in found if f.rule == "secret-in-file"} == {11, 12, 13, 14}
    assert key not in "".join(f.found + f.fix for f in found)


# --- the lint as a whole -----------------------------------------------------------------------------------------------

GOOD_SCRIPTS = re.findall(
    r"^=== (\w+)\n(.*?)(?=^=== |\Z)", Path(__file__).with_name("good.txt").read_text(), re.MULTILINE | re.DOTALL
)


def test_the_own_script_has_no_finding() -> None:
    """What is asked of others' scripts holds for the one that everybody here uses."""
    text = (REPO / "launch" / "run.sbatch").read_text(encoding="utf-8")
    assert text.count("#SBATCH") > 5
    assert lint(text, "launch/run.sbatch", REPO) == []


@pytest.mark.parametrize(("name", "text"), GOOD_SCRIPTS, ids=[name for name, _ in GOOD_SCRIPTS])
def test_good_scripts_have_no_finding(name: str, text: str, tmp_path: Path) -> None:
    """A lint that cries wolf is switched off: whole scripts in the styles that people write."""
    (tmp_path / "logs").mkdir()
    assert text.startswith("#!") and lint(text, f"{name}.sbatch", tmp_path) == []


PIECES = """
srun_ bash_-c_ $( ` ${ } ) $(( )) " ' \\ | & || [[_ _]] case_x_in esac { f()_{ A=( A= $A $SLURM_PROCID # scontrol_requeue
#!/bin/bash@ #SBATCH_--nodes=2@ #SBATCH_-t <<EOF@ EOF@ @ trap_x_USR1 HF_TOKEN= --rdzv_endpoint= MASTER_PORT= $SLURM_NODELIST
""".split()  # noqa: SIM905 (a piece a word; _ is a blank, @ a line end)
PIECES = ["\0", "\r\n", "\r", "\ufeff", "\u2028", *(piece.replace("_", " ").replace("@", "\n") for piece in PIECES)]


@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)))
def test_any_text_is_taken(text: str) -> None:
    """Half a script, another language or a binary: findings or none, in lines that exist, and no exception."""
    rows = text.count("\n") + 1
    assert all(1 <= int(f.where) <= rows and f.found and f.fix for f in lint(text, "x.sbatch"))


# --- launchers on several nodes ------------------------------------------------------------------------------------------

HEADER = "#!/bin/bash\n#SBATCH --time=1\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --output=x.log\n"
TORCHRUN = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$H:$((20000 + SLURM_JOB_ID % 10000)) t.py"
ALONE = [
    "TORCHRUN",
    "exec TORCHRUN",
    "nohup TORCHRUN &\nwait",
    "time TORCHRUN",
    "timeout 3h TORCHRUN",
    "NCCL_DEBUG=INFO TORCHRUN",
    "env A=b TORCHRUN",
    "CMD='TORCHRUN'\n$CMD",
    'CMD="TORCHRUN"\neval "$CMD"',
    'CMD=(TORCHRUN)\n"${CMD[@]}"',
    "bash -c 'TORCHRUN'",
    "run() {\n TORCHRUN\n}\nrun",
    "apptainer exec --nv img.sif TORCHRUN",
    "srun hostname\nTORCHRUN",
    "x=$(srun --nodes=1 --ntasks=1 hostname -i)\nTORCHRUN",
    "python -u -m torch.distributed.run --nnodes=2 t.py",
    "python3 -m torch.distributed.launch --nnodes=2 t.py",
    "accelerate launch --num_machines 2 t.py",
    "deepspeed --num_gpus 8 t.py",
    "python -m accelerate.commands.launch t.py",
    ".venv/bin/torchrun --nnodes 2 t.py",
    "cd x && TORCHRUN || exit 1",
    "conda run -n e TORCHRUN",
    "uv run torchrun --nnodes=2 t.py",
    "if true; then\n TORCHRUN\nfi",
    'LAUNCH="python -m torch.distributed.run --nnodes=2"\n$LAUNCH t.py',
    "conda run -n e --no-capture-output accelerate launch --num_machines 2 t.py",
    "for i in 1 2; do\n TORCHRUN --seed $i\ndone",
    "singularity run --nv i.sif python -m torch.distributed.run t.py",
    'bash -lc "cd /x; TORCHRUN"',
    "source env.sh; TORCHRUN 2>&1 | tee log",
    "NNODES=$SLURM_NNODES llamafactory-cli train a.yaml",
    "axolotl train config.yaml --launcher torchrun",
    "NPROC_PER_NODE=8 swift sft --model m",
    "tune run --nnodes 2 --nproc_per_node 8 lora_finetune_distributed --config c",
    "fabric run --num-nodes=2 t.py",
    "composer -n 8 --world_size 16 t.py",
]
"""What the batch shell starts, so on the first node only; TORCHRUN stands for the line above."""
EVERYWHERE = [
    "srun TORCHRUN",
    "srun bash -c 'TORCHRUN'",
    "CMD='TORCHRUN'\nsrun bash -c \"$CMD\"",
    'CMD=(TORCHRUN)\nsrun "${CMD[@]}"',
    "L='srun torchrun'\n$L --nnodes=2 --rdzv-endpoint=$X t.py",
    "run() {\n TORCHRUN\n}\nexport -f run\nsrun bash -c run",
    'run() {\n TORCHRUN\n}\nsrun bash -c "$(declare -f run); run"',
    'for h in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n ssh $h "TORCHRUN" &\ndone\nwait',
    "pdsh -w $X 'TORCHRUN'",
    "mpirun -np 2 TORCHRUN",
    "cat > r.sh <<'EOF'\nTORCHRUN\nEOF\nsrun bash r.sh",
    "srun bash <<'EOF'\nTORCHRUN\nEOF",
    "for n in a b; do\n srun -N1 -n1 -w $n TORCHRUN &\ndone\nwait",
    "deepspeed --hostfile=hosts t.py",
    "deepspeed -H hosts t.py",
    "accelerate launch --deepspeed_hostfile hosts t.py",
    "srun python t.py",
    "python t.py",
    "srun TORCHRUN\ntorchrun --nproc-per-node=8 eval.py",
    "if [[ $SLURM_NNODES == 1 ]]; then\n torchrun t.py\nelse\n srun TORCHRUN\nfi",
    "pip install deepspeed\nsrun python t.py",
    "echo torchrun t.py\nsrun python t.py",
    "which torchrun",
    "torchrun --help > /dev/null; srun python t.py",
    "accelerate env",
    "clush -w $X torchrun t.py",
    "srun apptainer exec i.sif TORCHRUN",
    'export L="TORCHRUN"\nsrun --jobid $SLURM_JOB_ID bash -c "$L"',
    "python run_pdsh.py --cmd 'torchrun t.py'",
    "ray start --head\nsrun ray start --address=x",
    "mpirun -x PATH bash -c 'TORCHRUN'",
    "deepspeed --version",
    "axolotl preprocess config.yaml\nsrun axolotl train config.yaml",
    "llamafactory-cli export a.yaml",
    "docker compose up\nsrun swift sft --model m",
    "python -m torch.distributed.run --help",
]
"""What starts on all nodes, reaches them by itself, or starts no training."""
SSH_TWICE = ["srun deepspeed --hostfile=h t.py", "srun bash -c 'deepspeed --hostfile h t.py'",
             "C='deepspeed -H h t.py'\nsrun $C", "srun accelerate launch --deepspeed_hostfile h t.py"]  # fmt: skip
SSH_ONCE = ["srun --nodes=1 --ntasks=1 deepspeed --hostfile=h t.py", "srun -N1 -n1 deepspeed --hostfile=h t.py",
            "srun deepspeed --hostfile=h --no_ssh --node_rank=$SLURM_NODEID t.py", "deepspeed --hostfile=h t.py"]  # fmt: skip


def about_launchers(body: str) -> set[str]:
    """The rules of this kind that have a finding."""
    found = {item.rule for item in lint(HEADER + body.replace("TORCHRUN", TORCHRUN) + "\n", "x")}
    return found & {"launcher-without-srun", "hostfile-under-srun"}


@pytest.mark.parametrize("body", ALONE)
def test_a_launcher_that_only_the_first_node_starts_is_found(body: str) -> None:
    assert about_launchers(body) == {"launcher-without-srun"}


@pytest.mark.parametrize("body", EVERYWHERE)
def test_a_launcher_that_reaches_all_nodes_is_well(body: str) -> None:
    assert about_launchers(body) == set()


def test_a_hostfile_under_srun_is_found() -> None:
    """DeepSpeed starts the ranks of all hosts itself: once is enough."""
    assert [about_launchers(body) for body in SSH_TWICE] == [{"hostfile-under-srun"}] * len(SSH_TWICE)
    assert [about_launchers(body) for body in SSH_ONCE] == [set()] * len(SSH_ONCE)


# --- the command -------------------------------------------------------------------------------------------------------


BAD, FINE = ("#!/bin/bash\n#SBATCH --time=1\n" + line for line in ("export MASTER_PORT=29500\n", "true\n"))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    app = typer.Typer()
    app.add_typer(doctor_app, name="doctor")
    app.callback()(lambda: None)
    monkeypatch.setattr(sys, "argv", ["clustertune", "doctor", "sbatch", *arguments])
    return run_command(app)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """``clustertune doctor sbatch``: findings on stdout, one JSON document with --json, every unreadable file at once."""
    bad, good = tmp_path / "bad.sbatch", tmp_path / "good.sbatch"
    bad.write_text(BAD)
    good.write_text(FINE)
    assert call(monkeypatch, str(good)) == 0
    assert capfd.readouterr().out == ""
    assert call(monkeypatch, str(bad), str(good)) == 1
    assert capfd.readouterr().out.startswith(f"{bad}:3: fixed-port: ")
    assert call(monkeypatch, "--json", str(bad)) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["findings"] == 1 and document["files"][0]["findings"][0]["link"].startswith("https://")
    assert call(monkeypatch, "--json", str(tmp_path / "one"), str(tmp_path)) == 2
    assert len(json.loads(capfd.readouterr().out)["problems"]) == 2


def test_what_a_script_says_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its words stand in the findings."""
    script = tmp_path / "a.sbatch"
    script.write_bytes(b"#!/bin/bash\n#SBATCH --time=1 \x1b[2J\xc2\x9b31m\xff\n#SBATCH --nodes=$N\x1b]0;x\x07N\n")
    call(monkeypatch, str(script))
    shown = capfd.readouterr().out
    assert shown and not set(shown) & set("\x1b\x07\x9b")
