"""launch/torchrun.sh: calls in any order become one attempt, never two; and a real run on two nodes that loses a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune import chain
from clustertune.cli.launchers import resolve_for_nodes
from clustertune.errors import ExitCode, UserError
from clustertune.launch import torchrun
from clustertune.launch.plan import Node
from clustertune.launch.torchrun import RendezvousClient, RendezvousServer
from tests.command import REPO, SHORT, Done, rank_pid

LOCAL = Node("n0", "127.0.0.1")


def client(
    run: Path, node: int = 1, *, nodes: int = 2, ranks: int = 1, seconds: float = 20, dead: float = 20
) -> RendezvousClient:
    return RendezvousClient(run, node, nodes, ranks, Node(f"n{node}", f"10.0.0.{node}"), seconds, dead)


class Call(threading.Thread):
    """A guest's call in a thread; ``said`` is what it got, or how it failed."""

    def __init__(self, of: RendezvousClient) -> None:
        super().__init__(daemon=True)
        self.of = of
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.of.join()
        except UserError as error:
            self.result = error

    def end(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.result


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(torchrun, "POLL_SECONDS", 0.02)


def test_calls_in_any_order_meet(tmp_path: Path) -> None:
    """Before node 0's call and after it; the plan's order is the nodes' numbers, whoever came first."""
    early = Call(client(tmp_path, 2, nodes=3))
    time.sleep(0.1)
    with RendezvousServer(tmp_path, 3, 1, LOCAL) as server:
        until((server.folder / "node-2.json").exists)
        late = Call(client(tmp_path, 1, nodes=3))
        assert [node.name for node in server.gather(20)] == ["n0", "n1", "n2"]
        server.tell(7)
        assert (early.end(), late.end()) == (7, 7)


def test_an_earlier_round_s_attempt_is_never_joined(tmp_path: Path) -> None:
    """Node 0 was killed after it had told an attempt, or before: a new call waits for a new id."""
    for announced in (True, False):
        killed = RendezvousServer(tmp_path, 2, 1, LOCAL)
        killed.__enter__()
        killed._stop.set()  # kill -9: no beat, no last word
        if announced:
            killed.tell(1)
        waiting = Call(client(tmp_path))
        time.sleep(0.3)
        assert waiting.result is None
        with RendezvousServer(tmp_path, 2, 1, LOCAL) as server:
            server.gather(20)
            server.tell(2)
            assert waiting.end() == 2
        assert [path.name for path in (tmp_path / "torchrun").iterdir() if path.is_dir()] == [server.call_id]


def test_two_calls_with_one_number_are_told(tmp_path: Path) -> None:
    """Both would start the same ranks."""
    with RendezvousServer(tmp_path, 2, 1, LOCAL) as server:
        first = Call(client(tmp_path))
        until((server.folder / "node-1.json").exists)
        second = Call(client(tmp_path))
        refused = second.end()
        assert isinstance(refused, UserError) and refused.code is ExitCode.CONFIG and "node 1 already" in str(refused)
        server.tell(1)
        assert first.end() == 1


def test_a_call_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Other counts give other ranks: the rendezvous would wait for processes that nobody starts."""
    with RendezvousServer(tmp_path, 2, 1, LOCAL):
        for other, option in ((client(tmp_path, nodes=3), "--nodes"), (client(tmp_path, ranks=4), "--ranks-per-node")):
            refused = Call(other).end()
            assert isinstance(refused, UserError) and refused.code is ExitCode.CONFIG and option in str(refused)


def test_a_dead_first_node_is_noticed(tmp_path: Path) -> None:
    with RendezvousServer(tmp_path, 2, 1, LOCAL) as server:
        waiting = Call(client(tmp_path, dead=1.0))
        server.gather(20)
        time.sleep(1.5)
        assert waiting.result is None  # it beats
        server._stop.set()
        refused = waiting.end()
    assert isinstance(refused, UserError) and refused.code is ExitCode.AGAIN and "no life" in str(refused)
    nobody = Call(client(tmp_path / "empty", seconds=0.2)).end()
    assert isinstance(nobody, UserError) and nobody.code is ExitCode.AGAIN and "no call of node 0" in str(nobody)
    assert not (tmp_path / "empty").exists()  # the run folder is node 0's to make


def test_missing_nodes_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"no call of node 1, node 2 within") as caught,
        RendezvousServer(tmp_path, 3, 1, LOCAL) as server,
    ):
        server.gather(0.1)
    assert caught.value.code is ExitCode.AGAIN


@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("recipe", 2), ("signal", 75)])
def test_who_waits_is_told_how_the_first_node_ended(tmp_path: Path, ends: str, code: int) -> None:
    """Without it the other calls wait for a preparation that has failed long ago."""
    waiting: list[Call] = []
    try:
        with RendezvousServer(tmp_path, 2, 1, LOCAL) as server:
            waiting.append(Call(client(tmp_path)))
            server.gather(20)
            if ends == "recipe":
                raise UserError("wrong")
            if ends == "signal":
                raise KeyboardInterrupt
            server.done()
    except (UserError, KeyboardInterrupt):
        pass
    assert waiting[0].end() == ExitCode(code)
    # A call that comes after the end is not told an earlier round's failure, only that nothing is left to train.
    late = Call(client(tmp_path, 1, seconds=0.5)).end()
    assert late == ExitCode.OK if code == 0 else "no call of node 0" in str(late)


def test_the_interface_is_the_one_that_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives a machine's own name as 127.0.1.1: gloo would listen where nobody comes."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun.interface_to("127.0.0.1") == ("127.0.0.1", "lo")
    assert torchrun.network_environment("lo") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    assert torchrun.network_environment("lo") == {"GLOO_SOCKET_IFNAME": "lo"}
    with pytest.raises(UserError, match="--master"):
        torchrun.interface_to("no-such-host.invalid")
    monkeypatch.setattr(torchrun.socket, "getaddrinfo", lambda *a, **k: [(2, 2, 17, "", ("127.0.1.1", 9))])
    with pytest.raises(UserError, match="loopback"):
        torchrun.interface_to("node1")


def test_the_ranks_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "visible_gpus", lambda: 0)
    assert resolve_for_nodes("tiny-oasst2", [], tiny=False, nodes=2, ranks_per_node=None)[1] == 1
    assert resolve_for_nodes("tiny-oasst2", [], tiny=False, nodes=1, ranks_per_node=None)[1] == 2
    assert resolve_for_nodes("tiny-oasst2", [], tiny=False, nodes=1, ranks_per_node=4)[0].world_size == 4
    with pytest.raises(UserError) as caught:
        resolve_for_nodes("llama405b-oasst2", [], tiny=False, nodes=4, ranks_per_node=None)
    assert "slurm.nodes=4" in str(caught.value) and "8 GPUs on each node, this machine has 0" in str(caught.value)
    monkeypatch.setattr(chain, "visible_gpus", lambda: 8)
    found, each = resolve_for_nodes("llama405b-oasst2", [], tiny=False, nodes=2, ranks_per_node=None)
    assert (found.world_size, each) == (16, 8)


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


def test_a_mistake_is_told_in_words(tmp_path: Path) -> None:
    with script("tiny-oasst2", "--node-rank", "2", "--nodes", "2", cwd=tmp_path) as call:
        _, err = call.communicate(timeout=120)
    assert call.returncode == 2 and "there is no node 2 of 2" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_two_nodes_lose_a_rank_and_go_on(tmp_path: Path, finished: tuple[Path, Done]) -> None:
    """The same calls again end with the bytes of an uninterrupted run on one machine."""
    run = tmp_path / "run"

    def calls() -> list[subprocess.Popen[str]]:
        common = ("--nodes", "2", "--ranks-per-node", "1", "--master", "127.0.0.1", "--run-dir", run, *SHORT)
        return [script("tiny-oasst2", "--node-rank", str(node), *common) for node in (1, 0)]

    def end(started: list[subprocess.Popen[str]]) -> list[Done]:
        done = []
        for call in started:
            out, err = call.communicate(timeout=1000)
            assert "Traceback" not in err, err
            done.append(Done(call.returncode, out, err))
        return done

    started = calls()
    until(
        lambda: bool(list(run.glob("checkpoints/step-000002*/MANIFEST.json"))) or any(c.poll() is not None for c in started),
        400,
    )
    assert [call.poll() for call in started] == [None, None]
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    broken = end(started)
    assert [done.code for done in broken] == [75, 75], broken
    assert "rank 1 on " in broken[1].err and "SIGKILL" in broken[1].err
    whole = end(calls())
    assert [done.code for done in whole] == [0, 0], whole
    assert json.loads((run / "attempts" / "0002" / "outcome.json").read_text())["code"] == 0
    adapter = "adapter/adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (finished[0] / adapter).read_bytes()
