"""The check before a job ends the job only for a fault that is certain. It reports everything else."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.check import report
from clustertune.check.rule import FAIL
from clustertune.doctor import preflight
from clustertune.doctor.preflight import NodeReports
from clustertune.errors import UserError
from clustertune.launch.allocation import Allocation
from tests.doctor.machine_cases import XID, Patch, machine


def run(monkeypatch: pytest.MonkeyPatch, facts: Patch, cluster: Any) -> tuple[list[str], list[Any]]:
    """Preflight on one node with these facts: what it says."""
    found = report.machine_findings(machine(facts))
    monkeypatch.setattr(preflight, "look", lambda *_args, **_words: NodeReports({"gpu01": machine(facts).facts}))
    monkeypatch.setattr(preflight, "findings", lambda *_args: found)
    messages: list[str] = []
    given = Allocation("7", 0, ("gpu01",), 0, 2, 1, None)
    preflight.check(cluster, given, 8, gpus=True, binds=[], say=messages.append, log=lambda *_args, **_words: None)
    return messages, found


@pytest.mark.parametrize(
    ("rule", "facts"),
    [
        ("gpu-xid", {"xids.+": XID.format(79)}),
        ("gpu-ecc", {"gpus.5.ecc_uncorrected": 2}),
        ("disk-full", {"mounts.0.free_bytes": 0}),
        ("node-names", {"names.gpu02": []}),
        ("flock", {"probes.1.ok": False, "probes.1.said": "No locks available"}),
    ],
)
def test_what_may_be_harmless_stops_nothing(monkeypatch: pytest.MonkeyPatch, rule: str, facts: Patch) -> None:
    """A GPU that was reset since, a full disk that the job does not write to, a name that no rank asks for."""
    from clustertune.config.cluster import load_cluster

    messages, found = run(monkeypatch, facts, load_cluster(None))
    assert [item.rule for item in found if item.status == FAIL] == [rule]
    assert any(line.startswith(f"FAIL    {rule}") for line in messages) and any("continues" in line for line in messages)


def test_what_stops_a_job_is_told_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU too few: no rank would start."""
    from clustertune.config.cluster import load_cluster

    with pytest.raises(UserError, match="gpu-count") as caught:
        run(monkeypatch, {"cuda_devices": 7}, load_cluster(None))
    assert caught.value.code == 2


def test_those_that_stop_are_rules() -> None:
    """A name that is misspelt would stop nothing."""
    assert {rule.id for rule in report.machine_rules()} >= preflight.STOPS
    assert "node-silent" in preflight.STOPS
