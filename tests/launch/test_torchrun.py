"""launch/torchrun.sh: calls in any order become one attempt, never two; where nodes meet; a run on two that loses a rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune import chain, torchrun
from clustertune.cli.jobs import resolve_for_nodes
from clustertune.errors import ExitCode, UserError
from clustertune.launch import node
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.node import ranks_command
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from clustertune.torchrun import RendezvousServer, TorchrunCall
from tests.command import REPO, SHORT, Done, rank_pid
from tests.slurm import wait_for

PORT = node.free_port(node.first_port(os.getpid(), 1))


def call(run: Path, node: int = 0, *, nodes: int = 2, ranks: int = 1, wait: float = 20) -> TorchrunCall:
    return TorchrunCall(run, node, nodes, ranks, Node(f"n{node}", f"10.0.0.{node}"), port=PORT, wait=wait)


class Guest(threading.Thread):
    """Another node's call in a thread; ``result`` is what it got, or how it failed."""

    def __init__(self, of: TorchrunCall) -> None:
        super().__init__(daemon=True)
        self.of = of
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = torchrun.await_attempt(self.of)
        except UserError as error:
            self.result = error

    def end(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.result

    def refused(self, code: ExitCode, text: str) -> None:
        error = self.end()
        assert isinstance(error, UserError) and error.code is code and text in str(error)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(torchrun, "PARTING_SECONDS", 0.5)


def test_calls_in_any_order_meet(tmp_path: Path) -> None:
    """Before node 0's call and after it; the plan's order is the nodes' numbers, whoever came first."""
    early = Guest(call(tmp_path, 2, nodes=3))
    time.sleep(0.1)
    with RendezvousServer(call(tmp_path, nodes=3)) as server:
        late = Guest(call(tmp_path, 1, nodes=3))
        assert [node.name for node in server.gather()] == ["n0", "n1", "n2"]
        server.answer({"attempt": 7})
        assert (early.end(), late.end()) == (7, 7)


HOST = """
import sys, time
from pathlib import Path
from clustertune.launch.attempt import Node
from clustertune.torchrun import RendezvousServer, TorchrunCall
with RendezvousServer(TorchrunCall(Path("."), 0, 2, 1, Node("a", "b"), port=int(sys.argv[1]))) as server:
    server.gather()
    print("met", flush=True)
    time.sleep(60)
"""


def test_a_round_that_was_killed_is_over_for_all_and_never_joined(tmp_path: Path) -> None:
    """Node 0 was killed before it had told an attempt: who waits there ends, and a new call waits for a new round."""
    words = [sys.executable, "-c", HOST, str(PORT)]
    killed = subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    waiting = Guest(call(tmp_path, 1, wait=60))
    assert killed.stdout is not None and killed.stdout.readline() == b"met\n"
    killed.kill()
    killed.wait()
    waiting.refused(ExitCode.AGAIN, "node 0's call has ended")
    waiting = Guest(call(tmp_path, 1))
    time.sleep(0.2)
    assert waiting.result is None
    with RendezvousServer(call(tmp_path)) as server:
        server.gather()
        server.answer({"attempt": 2})
        assert waiting.end() == 2


def test_calls_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Two with one number would start the same ranks; other counts give other ranks, which nobody starts."""
    with RendezvousServer(call(tmp_path)) as server:
        first = Guest(call(tmp_path, 1))
        server.gather()
        Guest(call(tmp_path, 1)).refused(ExitCode.CONFIG, "node 1 already")
        Guest(call(tmp_path, 1, nodes=3)).refused(ExitCode.CONFIG, "--nodes")
        Guest(call(tmp_path, 1, ranks=4)).refused(ExitCode.CONFIG, "--ranks-per-node")
        with pytest.raises(UserError, match="--port"), RendezvousServer(call(tmp_path)):
            pass
        server.answer({"attempt": 1})
        assert first.end() == 1


def test_a_node_that_does_not_call_is_noticed(tmp_path: Path) -> None:
    Guest(call(tmp_path / "empty", 1, wait=0.2)).refused(ExitCode.AGAIN, "no call of node 0")
    assert not (tmp_path / "empty").exists()  # the run folder is node 0's to make
    server = RendezvousServer(call(tmp_path, nodes=3, wait=0.1))
    with pytest.raises(UserError, match=r"no call of node 1, node 2 within") as caught, server:
        server.gather()
    assert caught.value.code is ExitCode.AGAIN


@pytest.mark.parametrize(("error", "code"), [(None, 0), (UserError("wrong"), 2), (KeyboardInterrupt(), 75)])
def test_who_waits_is_told_how_the_first_node_ended(tmp_path: Path, error: BaseException | None, code: int) -> None:
    """Without it the other calls wait for a preparation that has failed long ago."""
    with contextlib.suppress(UserError, KeyboardInterrupt), RendezvousServer(call(tmp_path)) as server:
        waiting = Guest(call(tmp_path, 1))
        server.gather()
        if error is not None:
            raise error
        server.done()
    assert waiting.end() == ExitCode(code)
    # A call that comes after the end is not told an earlier round's failure, only that nothing is left to train.
    assert "no call of node 0" in str(Guest(call(tmp_path, 1, wait=0.2)).end())
    (tmp_path / "stages").mkdir()
    RunDir(tmp_path).finish_stage("train", 1.0)
    assert Guest(call(tmp_path, 1, wait=0.2)).end() == ExitCode.OK


def test_the_interface_is_the_one_that_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives a machine's own name as 127.0.1.1: gloo would listen where nobody comes."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    assert node.interface_to("127.0.0.1") == ("127.0.0.1", "lo")
    assert node.network_environment("lo") == {"GLOO_SOCKET_IFNAME": "lo"}, "the caller's own choice stays"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    plan = AttemptPlan(attempt=1, nodes=(Node("a", "127.0.0.1"), Node("b", "localhost")), ranks_per_node=1, launcher="slurm")
    for number in (0, 1):  # without network.interface of the cluster file, under every launcher
        expected = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
        assert node.environment_between(plan, number) == expected, "exactly this one"
    assert node.environment_between(replace(plan, interface="bond0"), 0) == {}
    assert node.environment_between(replace(plan, nodes=plan.nodes[:1]), 0) == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    with pytest.raises(UserError, match="--master"):
        node.interface_to("no-such-host.invalid")
    monkeypatch.setattr(node.socket, "getaddrinfo", lambda *a, **k: [(2, 2, 17, "", ("127.0.1.1", 9))])
    with pytest.raises(UserError, match="loopback"):
        node.interface_to("node1")


@pytest.mark.parametrize(
    ("recipe", "gpus", "nodes", "given", "each"),
    [
        ("tiny-oasst2", 0, 2, None, 1),
        ("tiny-oasst2", 0, 1, None, 2),
        ("tiny-oasst2", 0, 1, 4, 4),
        ("llama405b-oasst2", 8, 2, None, 8),
        ("llama405b-oasst2", 0, 4, None, None),
    ],
)
def test_the_ranks_of_each_node(
    monkeypatch: pytest.MonkeyPatch, recipe: str, gpus: int, nodes: int, given: int | None, each: int | None
) -> None:
    monkeypatch.setattr(chain, "visible_gpus", lambda: gpus)
    if each is not None:
        resolved, found = resolve_for_nodes(recipe, [], tiny=False, nodes=nodes, ranks_per_node=given)
        assert (found, resolved.world_size) == (each, nodes * each)
        return
    with pytest.raises(UserError) as caught:
        resolve_for_nodes(recipe, [], tiny=False, nodes=nodes, ranks_per_node=given)
    assert "slurm.nodes=4" in str(caught.value) and "8 GPUs on each node, this machine has 0" in str(caught.value)


def script(*arguments: str | Path, cwd: Path = REPO) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(REPO / "launch" / "torchrun.sh"), *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )


def end(started: subprocess.Popen[str]) -> Done:
    out, err = started.communicate(timeout=1000)
    assert "Traceback" not in err, err
    return Done(started.returncode, out, err)


def test_a_mistake_is_told_in_words(tmp_path: Path) -> None:
    done = end(script("tiny-oasst2", "--node-rank", "2", "--nodes", "2", cwd=tmp_path))
    assert done.code == 2 and "there is no node 2 of 2" in done.err and list(tmp_path.iterdir()) == []


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_two_nodes_lose_a_rank_and_go_on(tmp_path: Path, finished: tuple[Path, Done]) -> None:
    """The same calls again end with the bytes of an uninterrupted run on one machine."""
    run = tmp_path / "run"

    def calls() -> list[subprocess.Popen[str]]:
        common = ("--nodes", "2", "--ranks-per-node", "1", "--port", PORT, "--run-dir", run, *SHORT)
        return [script("tiny-oasst2", "--node-rank", str(node), *common) for node in (1, 0)]

    started = calls()
    saved = lambda: list(run.glob("checkpoints/step-000002*/MANIFEST.json")) or any(c.poll() is not None for c in started)  # noqa: E731
    wait_for(saved, "a checkpoint", 400)
    assert [one.poll() for one in started] == [None, None]
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    broken = [*map(end, started)]
    assert [done.code for done in broken] == [75, 75], broken
    assert "rank 1 on " in broken[1].err and "SIGKILL" in broken[1].err
    whole = [*map(end, calls())]
    assert [done.code for done in whole] == [0, 0], whole
    assert json.loads((run / "attempts" / "0002" / "outcome.json").read_text())["code"] == 0
    adapter = "adapter/adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (finished[0] / adapter).read_bytes()


# --- a port, and what starts the ranks ---------------------------------------------------------------------------------


PLAN = AttemptPlan(attempt=1, nodes=(Node("a", "a"), Node("b", "b")), ranks_per_node=1)


def test_the_others_learn_it_from_the_run_folder(tmp_path: Path) -> None:
    thread = threading.Timer(0.5, node.publish, (tmp_path, "10.0.0.1", 21_000))
    thread.start()
    assert node.await_published(tmp_path, PLAN, lambda: False) == ("10.0.0.1", 21_000)


def test_the_launcher_leaves_nothing_in_tmp(tmp_path: Path) -> None:
    """Torch's elastic agent made a folder there for every node and attempt, and took none away."""
    command = ranks_command(RunDir(tmp_path), resolve("tiny-oasst2", tiny=True, ranks=2), 1)
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    words = [*command[: command.index("train")], "--help"]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.count("Usage:") == 2, done.stderr
    assert not list(tmp_path.glob("torchelastic*"))
