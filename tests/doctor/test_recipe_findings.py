"""All rules together: on the shipped recipes, without torch, and where storage does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustertune.check.rule import FAIL, WARN
from clustertune.config.cluster import load_cluster
from clustertune.config.resolve import resolve
from clustertune.doctor import recipe_context
from clustertune.doctor.recipe_findings import recipe_findings
from tests.doctor.recipe_case import Case, make, write_run

REPO = Path(__file__).resolve().parents[2]


def test_the_shipped_recipes(tmp_path: Path) -> None:
    """The tiny one is clean. Of the 405B one only what is true is said: packed under sdpa, saved every 20 steps."""
    quiet = {"NLTK_DATA": str(tmp_path), "HF_HOME": "/pool/hf_cache"}
    tiny = recipe_findings(
        resolve("tiny-oasst2"), load_cluster("rno-rtxpro6000"), None, environment=quiet, env_file=tmp_path / ".env"
    )
    assert [item for item in tiny if item.status in (WARN, FAIL)] == []
    large = recipe_findings(
        resolve("llama405b-oasst2"), load_cluster("rno-rtxpro6000"), None, environment=quiet, env_file=tmp_path / ".env"
    )
    assert {item.rule for item in large if item.status == WARN} == {
        "gated-model", "model-absent", "recipe-doubtful", "saves-seldom",
        "small-micro-batch", "weights-on-network",
    }  # fmt: skip
    assert [item for item in large if item.status == FAIL] == []


def test_a_login_node_needs_no_torch() -> None:
    """Importing it takes seconds there, and a bare environment does not have it."""
    program = (
        "import json, sys\n"
        "from clustertune.config.cluster import load_cluster\n"
        "from clustertune.config.resolve import resolve\n"
        "from clustertune.doctor.recipe_findings import recipe_findings\n"
        "found = recipe_findings(resolve('llama405b-oasst2'), load_cluster('rno-rtxpro6000'), None)\n"
        "heavy = sorted({'torch', 'transformers', 'trl', 'peft', 'datasets', 'nltk'} & set(sys.modules))\n"
        "json.dump([len(found), heavy], sys.stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, cwd=REPO)
    count, heavy = json.loads(done.stdout)
    assert count > 0
    assert heavy == []


def test_a_folder_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard mount whose server is gone: told as such, and no rule looks there again."""
    case = make(tmp_path)
    write_run(case)
    (case.run / "run.json").write_text("{}")  # what a look there would complain of
    monkeypatch.setattr(recipe_context, "unanswered", lambda paths: tuple(path for path in paths if path == case.run))
    found = case.findings()
    assert [(item.rule, item.status, item.where) for item in found] == [("storage-silent", FAIL, str(case.run))]


def test_a_look_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is left behind and named; that nothing is there is an answer."""
    monkeypatch.setattr(recipe_context, "is_there", lambda path: path == tmp_path or time.sleep(60))
    assert recipe_context.unanswered([tmp_path, Path("/hangs")], seconds=0.5) == (Path("/hangs"),)
    monkeypatch.undo()
    assert recipe_context.unanswered([tmp_path, Path("/nowhere/x"), Path("x" * 5000)], seconds=30) == ()


def test_variables_that_name_the_cache(tmp_path: Path) -> None:
    """As huggingface_hub takes them, the first that is set."""
    case = make(tmp_path)
    del case.environment["HF_HOME"]
    for name, value, where in (
        ("XDG_CACHE_HOME", "/x", "/x/huggingface/hub"),
        ("HF_HOME", "/h", "/h/hub"),
        ("HUGGINGFACE_HUB_CACHE", "/c", "/c"),
        ("HF_HUB_CACHE", "/d", "/d"),
    ):
        case.environment[name] = value
        assert case.context().hub == Path(where)


def test_another_machines_disks_are_taken_from_the_cluster_file(tmp_path: Path) -> None:
    """On a laptop /pool is not a pool; the cluster file says what it is where jobs run."""
    case = make(tmp_path)
    case.hostname = "laptop"
    for path, kind in (("/pool/x", "fuse.mergerfs"), ("/shared/x", "nfs4"), ("/other", "ext4")):
        assert case.context().lies_on(Path(path)).kind == kind


def test_no_token_is_repeated(tmp_path: Path) -> None:
    """A finding goes into reports and mails."""
    case = make(tmp_path)
    secret = "hf_" + "Qx7" * 11
    case.env.write_text(f"HF_TOKEN={secret} x\n{secret}\n")
    case.env.chmod(0o644)
    case.environment |= {"HF_TOKEN": secret, "WANDB_API_KEY": secret}
    found = case.findings()
    assert {item.rule for item in found} == {"env-file", "token-in-environment"}
    assert secret not in json.dumps([vars(item) for item in found])


@pytest.mark.parametrize("missing", ["cluster", "everything"])
def test_little_is_enough(missing: str, tmp_path: Path) -> None:
    """A CPU cluster, no facts, no run folder: rules that cannot judge stay silent or say so."""
    case: Case = make(tmp_path)
    case.cluster |= {
        "compute.gpus": 0,
        "compute.gpu": None,
        "compute.interconnect": "none",
        "compute.numa_gpus": (),
        "slurm": None,
    }
    case.cluster.pop("slurm.max_time")
    if missing == "everything":
        resolved = case.context().resolved
        found = recipe_findings(resolved, case.made_cluster(), None, environment={}, env_file=tmp_path / "none" / ".env")
        assert {item.status for item in found if item.rule == "rule-broken"} == set()
    else:
        assert "not-planned" in {item.rule for item in case.findings()}
