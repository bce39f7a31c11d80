"""Starting, watching and ending vLLM's servers, with a program in its place: nothing is left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from clustertune.errors import UserError
from clustertune.evaluate import run as evaluating
from clustertune.evaluate import servers
from clustertune.evaluate.model import check_model
from clustertune.evaluate.run import evaluate
from clustertune.evaluate.servers import READY, Servers, ServingJob, ask, commands, find_program, lora_rank
from clustertune.launch.serving import Serving
from clustertune.merge.base import check_tensors
from clustertune.recipe.schema import Eval
from tests.command import run
from tests.serving.conftest import FAKE, Start, alive, gone, job, processes, program, step, without
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
    assert ask(f"{servers.job.urls[1]}/health") is not None


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


def test_the_deadline_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = replace(job(tmp_path), start_seconds=1.0)
    monkeypatch.setenv("FAKE_MODES", f'{{"{described.port}": "late"}}')
    with Servers(described, program=FAKE) as servers, pytest.raises(UserError, match="no answer after 1 s from server 0"):
        servers.wait()


def test_a_follower_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes whose servers run and do not meet: the first one's deadline passes, and nothing of either is left."""
    monkeypatch.setenv("FAKE_MEET", "alone")
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    described = replace(over_two(tmp_path), interface=None, nodes=("127.0.0.1", "127.0.0.1"), start_seconds=3.0)
    with Servers(described, 1, FAKE), Servers(described, 0, FAKE) as head:
        with pytest.raises(UserError, match=r"no answer after 3 s from node 0") as caught:
            head.wait()
        pids = processes(tmp_path)
    text = str(caught.value)
    assert "node-1.log: node 1: last wrote" in text
    assert "s ago: waits for the others" in text
    assert gone(pids)


def test_a_vllm_that_does_not_say_its_version_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(tmp_path / "vllm"))
    job(tmp_path).write(tmp_path / "job.json")
    with pytest.raises(UserError, match="vLLM is not installed"):
        Servers(job(tmp_path)).__enter__()
    (tmp_path / "vllm").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "vllm").chmod(0o700)
    monkeypatch.setattr(servers, "VERSION_SECONDS", 0.5)
    assert servers.main([str(tmp_path), "0"]) == 1
    assert "does not say its version" in (tmp_path / "failed-0.json").read_text()


NODES = ("n1", "n2")


def over_two(folder: Path, **more: object) -> ServingJob:
    return replace(job(folder, **more), shape=Serving(1, 8, 2, 4096, 256), nodes=NODES, interface="ib0", gpus=tuple("01234567"))


def test_the_arguments_of_one_server_each_gpu() -> None:
    described = ServingJob("/m", Serving(4, 2, 1, 4096, 64), "bfloat16", "/logs", 20000, "/tmp/c", gpus=tuple("01234567"))
    found = commands(described, 0)
    assert [c.environment["CUDA_VISIBLE_DEVICES"] for c in found] == ["0,1", "2,3", "4,5", "6,7"]
    assert len({c.environment["VLLM_CACHE_ROOT"] for c in found}) == 4
    assert [c.url for c in found] == [f"http://127.0.0.1:{20000 + i}" for i in range(4)]
    text = " ".join(found[3].arguments)
    for words in ("serve /m", "--dtype bfloat16", "--tensor-parallel-size 2", "--max-model-len 4096", "--max-num-seqs 64",
                  "--host 127.0.0.1 --port 20003"):  # fmt: skip
        assert words in text
    assert "--nnodes" not in text


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


def test_an_adapter_is_served_by_its_name(tmp_path: Path) -> None:
    [command] = commands(replace(job(tmp_path), adapter="/a", rank=24), 0)
    assert "--enable-lora --lora-modules adapter=/a --max-lora-rank 32" in " ".join(command.arguments)
    assert [lora_rank(n) for n in (1, 8, 9, 256, 1000)] == [1, 8, 16, 256, 1000]


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


@pytest.mark.parametrize("where", ["here", "in a job"])
def test_the_backend_s_model(where: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of its own, or of a Slurm job, one model after the other; each says what it is."""
    other = shutil.copytree(tiny_model, tmp_path / "base")
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(program(tmp_path)))
    process = None
    if where != "here":
        job(tmp_path, "", servers=2).write(tmp_path / "job.json")
        process = step(tmp_path, 0)
        monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(tmp_path))
    for model in (tiny_model, other):
        facts = check_model(model, 16)[0]
        assert facts is not None
        found = evaluating.describe("vllm", facts)
        assert (found.name, found.version, found.dtype) == ("vllm", "0.0", "bfloat16")
        assert found.servers == (1 if process is None else 2)
        with evaluating.model_for(found, facts, Eval(), device="cpu") as lm:
            root = ask(f"{lm.base_url}/v1/models")
            answers = lm.generate_until([Instance("generate_until", {}, ("Hello", {"until": [], "max_gen_toks": 4}), 0)])
        assert root is not None
        assert root["data"][0]["root"] == str(model)
        assert answers[0].startswith("answer")
    if process is not None:
        pids = processes(tmp_path)
        process.terminate()
        process.communicate()
        assert gone(pids)


def test_servers_of_a_job_that_give_up(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = job(tmp_path, "")
    monkeypatch.setenv("FAKE_MODES", f'{{"{described.port + 16}": "exit"}}')
    described.write(tmp_path / "job.json")
    monkeypatch.setenv("CLUSTERTUNE_SERVERS", str(tmp_path))
    facts = check_model(tiny_model, 16)[0]
    assert facts is not None
    process = step(tmp_path, 0)
    found = evaluating.describe("vllm", facts)
    with pytest.raises(UserError, match="no GPU here"), evaluating.model_for(found, facts, Eval(), device="cpu"):
        pass
    process.communicate()
    assert process.returncode == 1


def test_a_damaged_model_starts_no_server(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without(tiny_model, tmp_path / "model", "lm_head.weight")
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(program(tmp_path)))
    settings = Eval(backend="vllm", limit=1, max_gen_toks=8)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        evaluate(folder, tmp_path / "out", settings=settings, benchmark=False, device="cpu")
    assert not list((tmp_path / "pids").glob("[1-9]*"))


@pytest.mark.parametrize("part", ["", "[1:]", None])
def test_what_a_model_lacks_is_named(tmp_path: Path, tiny_model: Path, part: str | None) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = without(tiny_model, tmp_path / "model", "nothing" if part is None else name + part)
    assert [problem.key for problem in check_tensors(folder)] == ([] if part is None else [name])


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
