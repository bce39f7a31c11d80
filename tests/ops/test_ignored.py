"""``doctor.ignore`` of a cluster file holds for the checks of storage and Slurm, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import REPO, Done, run

NODE = "rno-it-gpu0007-1"


@pytest.mark.parametrize("command", [("storage", "check"), ("slurm", "plan")], ids=" ".join)
def test_ignored_rules_do_not_count(command: tuple[str, str], tmp_path: Path) -> None:
    """An empty tree lacks all storage, and one with another's slurm.conf is not to be overwritten."""
    file, tree = tmp_path / "mine.yaml", tmp_path / "tree"
    (tree / "etc/slurm").mkdir(parents=True)
    (tree / "etc/slurm/slurm.conf").write_text("ClusterName=other\n", encoding="utf-8")
    text = (REPO / "ops/clusters/rno-rtxpro6000.yaml").read_text(encoding="utf-8").replace("name: rno-rtxpro6000", "name: mine")

    def asked(ignore: list[str]) -> tuple[Done, list[str]]:
        file.write_text(f"{text}\ndoctor: {{ignore: [{', '.join(ignore)}]}}\n", encoding="utf-8")
        done = run("ops", *command, "--cluster", file, "--node", NODE, "--root", tree, "--json")
        return done, sorted({item["rule"] for item in done.json["findings"] if item["status"] in ("fail", "warn")})

    before, faults = asked([])
    after, none = asked(faults)
    assert before.code == 2 and faults and none == [] and after.code < 2
