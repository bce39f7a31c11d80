"""Ranks read the same of accelerate's file as ranks that ``accelerate launch`` started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.training import build
from tests.command import REPO, warm

CHILD = "import json, os, sys; os.environ['RANK'] == '0' and json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
HSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_offload_params: true}
parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 1}
"""
FILES = ["tiny-oasst2/accelerate.yaml", "llama405b-oasst2/accelerate.yaml", HSDP]


@pytest.mark.parametrize("given", FILES, ids=["fsdp2", "reference", "hsdp"])
def test_it_is_what_accelerate_launch_passes_on(given: str, repo: Path, tmp_path: Path) -> None:
    """accelerate's variables are its own business: the launcher itself says what they must be."""
    config = repo / "recipes" / given if "\n" not in given else tmp_path / "accelerate.yaml"
    if "\n" in given:
        config.write_text(given)
    (tmp_path / "child.py").write_text(CHILD)
    launcher = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--machine_rank", "0", "--main_process_port", "0"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(build.PREFIXES)}
    words = [*launcher, str(tmp_path / "child.py"), str(tmp_path / "out")]
    with (
        (tmp_path / "said").open("wb") as output,
        warm(stack=True).start(words, REPO, output.fileno(), output.fileno(), clean) as answer,
    ):
        assert answer.recv(64) == b"0", (tmp_path / "said").read_text()
    passed = json.loads((tmp_path / "out").read_text())
    wanted = {key: value for key, value in passed.items() if key.startswith(build.PREFIXES)}
    assert build.accelerate_environment(config, 2) == wanted
    assert len(wanted) > 15


@pytest.mark.parametrize("alone", [True, False])
def test_the_file_decides_and_a_rank_alone_forms_no_group(repo: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """What a shell exports is in no fingerprint; with a rank's variables accelerate takes one process for a group of one."""
    left = dict.fromkeys(build.OF_RANKS, "1")
    monkeypatch.setattr(os, "environ", {**os.environ, **left, "FSDP_OFFLOAD_PARAMS": "true"})
    build.set_environment(repo / "recipes" / FILES[0], 1, alone=alone)
    assert (os.environ["FSDP_VERSION"], os.environ["FSDP_OFFLOAD_PARAMS"]) == ("2", "false")
    assert any(name in os.environ for name in left) is not alone


def test_a_file_that_accelerate_refuses(tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nno_such_key: 1\n")
    with pytest.raises(UserError, match="accelerate refuses it"):
        build.accelerate_environment(config, 2)
