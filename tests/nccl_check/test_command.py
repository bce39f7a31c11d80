"""``clustertune nccl-check`` as it is typed: here, on recorded logs, and with what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clustertune.cli.app import app
from clustertune.errors import UserError
from tests.command import Done, run
from tests.nccl_check.command_line import command_line, program

SHORT = ["--seconds", "30", "--max", "64K"]


@pytest.fixture(scope="module")
def local_check(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """The check of this machine, on CPUs whatever it has."""
    out = tmp_path_factory.mktemp("here") / "out"
    return run("nccl-check", "--backend", "gloo", "--out", out, *SHORT, "--json"), out


def test_here_two_ranks_talk_over_gloo(local_check: tuple[Done, Path]) -> None:
    """Named as what it is, judged, with one document on stdout that is the file in the folder."""
    done, out = local_check
    document = done.json
    assert done.code == {"pass": 0, "warn": 1, "fail": 2}[document["verdict"]["status"]], document["verdict"]
    assert document["verdict"]["status"] != "fail", document["verdict"]
    assert (document["backend"], document["nodes"], document["gpus_per_node"]) == ("gloo", 1, 2)
    assert document["transport"].startswith("gloo TCP")
    assert {entry["scope"] for entry in document["results"]} == {"intra"}
    assert all(entry["correct"] for entry in document["results"])
    assert document == json.loads((out / "result.json").read_text())
    assert "NCCL" not in done.err.replace("nccl-check", "")
    assert len(document["facts"]) == 1


def test_links_that_were_not_measured_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a laptop the ranks talk over gloo, which says nothing of NCCL or of a cluster elsewhere; a script must stop."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words, reason = ["--cluster", "rno-rtxpro6000"], "no compute node of rno-rtxpro6000, of which nothing was measured"
    one = ["--seconds", "10", "--max", "64K", "--collectives", "all_reduce"]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["nccl-check", *one, *words, "--json"])
    verdict = json.loads(done.stdout)["verdict"]
    assert list(tmp_path.glob("runs/nccl-check/*/result.json")), "the cluster's folders are not made on another machine"
    assert verdict["status"] in ("unknown", "warn"), verdict
    if verdict["status"] == "unknown":
        assert verdict["headline"].startswith("UNKNOWN: ") and reason in verdict["headline"]
    assert done.exit_code == 1 and reason in json.loads(done.stdout)["not_judged"]


def test_the_folder_of_a_check_is_not_used_again(local_check: tuple[Done, Path]) -> None:
    """Records are added to files: two checks would mix."""
    done = CliRunner().invoke(app, ["nccl-check", "--backend", "gloo", "--out", str(local_check[1]), *SHORT])
    assert "holds a check already" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--logs"], "no file was given"), (["x.log"], "files are read only with --logs"),
        (["--logs", "no/such.log", "also/not.log"], "also/not.log: cannot be read"),
        (["--collectives", "all_reduc"], "did you mean all_reduce?"), (["--collectives", ""], "unknown: ''"),
        (["--scopes", "worlds"], "did you mean world?"), (["--backend", "mpi"], "'mpi' is not a backend"),
        (["--max", "1X"], "'1X' is not a size"), (["--time", "10"], "is read only with --submit"),
        (["--nodes", "2"], "is read only with --submit"),
        (["--ranks", "1", "--backend", "gloo"], "one rank has no peer"),
        (["--cluster", "no-such-cluster"], "there is no cluster"), (["--seconds", "nan"], "--seconds"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(words: list[str], message: str) -> None:
    """In words, before anything is measured; that such an error ends with exit 2 is tested once, below."""
    done = CliRunner().invoke(app, ["nccl-check", *words])
    assert message in (str(done.exception) if isinstance(done.exception, UserError) else done.output)
    assert done.exit_code


def test_everything_wrong_is_told_at_once() -> None:
    """Not one thing a call."""
    done = run("nccl-check", "--collectives", "a,b", "--scopes", "c", "--max", "0", "--json")
    assert (done.code, len(done.json["problems"])) == (2, 4)


def test_a_dry_run_shows_environment_and_command(tmp_path: Path) -> None:
    """And does nothing."""
    done = run("nccl-check", "--backend", "gloo", "--out", tmp_path / "new", "--dry-run")
    assert done.code == 0
    assert "PYTHONNOUSERSITE=1" in done.out
    assert "-m clustertune.nccl_check.link_measure" in done.out
    assert not (tmp_path / "new").exists()
    as_json = json.loads(CliRunner().invoke(app, ["nccl-check", "--backend", "gloo", "--dry-run", "--json"]).stdout)
    assert as_json["setup"]["backend"] == "gloo"
    assert as_json["command"][1:3] == ["-m", "clustertune.nccl_check.link_measure"]


@pytest.mark.parametrize(
    ("gpus", "nodes", "changes", "found"),
    [
        (8, 2, {}, ("nccl", "8 GPUs", 8)), (8, 1, {"ranks": 4}, ("nccl", "4 of 8 GPUs", 4)),
        (1, 1, {}, ("gloo", "one GPU has no peer: gloo between CPU ranks", 2)), (1, 2, {}, ("nccl", "1 GPUs", 1)),
        (0, 1, {}, ("gloo", "no GPU here: gloo between CPU ranks", 2)),
        (0, 3, {}, ("gloo", "no GPU here: gloo between CPU ranks", 1)), (8, 1, {"backend": "gloo"}, ("gloo", "asked for", 2)),
    ],
)  # fmt: skip
def test_the_backend_is_chosen_and_said(gpus: int, nodes: int, changes: dict[str, object], found: tuple[str, str, int]) -> None:
    """NCCL wherever two GPUs can talk."""
    assert program._backend(command_line(**changes), gpus, nodes) == found
