"""Starting, watching and ending vLLM's servers, with a program in its place: nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.evaluate.run import evaluate
from clustertune.evaluate.servers import JOB, READY, ServingJob, commands, find_program, kept, offline_environment
from clustertune.launch.server_requests import ask
from clustertune.launch.serving import Serving
from clustertune.recipe.sections import Eval
from tests.command import run
from tests.serving.conftest import Start, alive, gone, job, processes, program, step, without
from tests.slurm import wait_for


def test_nothing_is_left(start: Start, tmp_path: Path) -> None:
    servers = start("ok", "ok")
    pids = processes(tmp_path)
    assert len(alive(pids)) == 4
    servers.stop()
    assert gone(pids)


def test_a_dead_api_server_takes_its_engine_along(start: Start, tmp_path: Path) -> None:
    servers = start("ok", "ok")
    first = servers._running[0][1].pid
    engine = int((tmp_path / "pids" / str(servers.job.port)).read_text().split()[1])
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: servers.poll() == 1, "the end of the first")
    assert gone([engine])
    assert list(servers.dead) == ["server 0"]
    assert "SIGKILL" in servers.dead["server 0"]
    assert ask(servers.job.urls[1], "/health", servers.job.read_key()) is not None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("exit", r"(?s)server 1 ended while it started.*no GPU here"),
        ("other", "another server answers there, of /other"),
    ],
)
def test_a_server_that_does_not_start_is_named(start: Start, mode: str, message: str) -> None:
    """Or one whose port another server has taken."""
    servers = start("ok", mode, wait=False)
    with pytest.raises(UserError, match=message):
        servers.wait()


NODES = ("n1", "n2")


def over_two(folder: Path, **more: object) -> ServingJob:
    return replace(job(folder, **more), shape=Serving(1, 8, 2, 4096, 256), nodes=NODES, interface="ib0", gpus=tuple("01234567"))


def test_the_arguments_of_a_server_over_two_nodes(tmp_path: Path) -> None:
    described = over_two(tmp_path)
    [head], [follower] = commands(described, 0, "10.0.0.1"), commands(described, 1, "10.0.0.2")
    both = (f"--pipeline-parallel-size 2 --nnodes 2 --node-rank {{}} --master-addr n1 --master-port {described.port + 1} "
            "--distributed-executor-backend mp")  # fmt: skip
    assert both.format(0) in " ".join(head.arguments)
    assert both.format(1) in " ".join(follower.arguments)
    assert "--headless" in follower.arguments
    assert "--port" not in follower.arguments
    assert follower.url is None
    assert follower.environment["VLLM_HOST_IP"] == "10.0.0.2"
    assert follower.environment["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert follower.environment["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_whose_part_ends_ends_the_step(
    tmp_path: Path, tiny_model: Path, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pids").mkdir(exist_ok=True)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    described = replace(over_two(tmp_path, model=tiny_model), interface=None, nodes=("127.0.0.1", "127.0.0.1"))
    described.write(tmp_path / "job.json")
    described.write(tmp_path / "model-1.json")
    process = step(tmp_path, node)
    name = str(described.port if node == 0 else 0)
    wait_for((tmp_path / "pids" / name).exists, "the server", 60)
    wait_for(lambda: node or (tmp_path / READY.format(1)).exists(), "its answer", 60)
    time.sleep(0.2)
    pids = processes(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    output = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert f"node {node} (127.0.0.1) ended: ended with SIGKILL" in output
    assert gone(pids)


def test_a_step_that_is_ended_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("job.json", "model-1.json"):
        job(tmp_path, tiny_model, servers=2).write(tmp_path / name)
    process = step(tmp_path, 0)
    wait_for((tmp_path / READY.format(1)).exists, "the servers", 60)
    pids = processes(tmp_path)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["0-0", "0-1"]
    process.terminate()
    assert process.wait(60) == 0
    assert gone(pids) and not (tmp_path / "cache").exists()


def test_a_damaged_model_starts_no_server(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without(tiny_model, tmp_path / "model", "lm_head.weight")
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(program(tmp_path)))
    settings = Eval(backend="vllm", limit=1, max_gen_toks=8)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        evaluate(folder, tmp_path / "out", settings=settings, benchmark=False, device="cpu")
    assert not list((tmp_path / "pids").glob("[1-9]*"))


@pytest.mark.skipif(find_program() is None, reason="vLLM is not installed here (CLUSTERTUNE_VLLM names its program)")
@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_vllm_itself_answers_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``eval BASE``, with and without an adapter, by both backends in float32 on a CPU; a head of 32 is vLLM's least there."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from clustertune.data.local_model import make_local_model
    from tests.conftest import TEXTS, TINY_LLAMA

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # With an adapter lm-eval's HFLM cuts the embeddings to the tokenizer's length, which a random model's answers show.
    words = len(AutoTokenizer.from_pretrained(make_local_model(TINY_LLAMA, TEXTS, tmp_path / "words", seed=0)))
    settings = {**TINY_LLAMA, "hidden_size": 128, "initializer_range": 0.2, "vocab_size": words}
    made = make_local_model(settings, TEXTS, tmp_path / "m", seed=0)
    base = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(made).save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(base, lora)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    wrapped.save_pretrained(tmp_path / "adapter")

    def answers(name: str, *words: str | Path) -> list[str]:
        out = tmp_path / name
        done = run("eval", tmp_path / "base", *words, "--limit", "12", "--max-gen-toks", "24", "--device", "cpu", "--out", out)
        assert done.code == 0, done.err
        lines = (out / "samples.jsonl").read_text().splitlines()
        return [json.loads(line)["resps"][0][0].rstrip("\ufffd") for line in lines]

    want = answers("hf", "--adapter", tmp_path / "adapter", "--backend", "hf")
    assert answers("vllm", "--adapter", tmp_path / "adapter", "--backend", "vllm") == want
    alone = answers("alone", "--backend", "hf")
    assert answers("alone-vllm", "--backend", "vllm") == alone != want


def test_what_holds_the_key_is_private_where_the_group_reads_runs(tmp_path: Path) -> None:
    """``storage.group_reads`` lets the umask give the group all else."""
    one = job(tmp_path / "servers")
    (tmp_path / "servers" / READY.format(0)).write_text('{"port": 1}')
    before = os.umask(0o027)
    try:
        with kept(one, lambda: subprocess.Popen(["sleep", "60"]), lambda child: child.kill()) as ring:
            files = [ring, tmp_path / "servers" / JOB, Path(one.key_file)]
            assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * 3
    finally:
        os.umask(before)


def test_servers_have_no_keys_of_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run offline: a token would only be there to be read."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "secret")
    assert not offline_environment().keys() & set(names) and "PATH" in offline_environment()
