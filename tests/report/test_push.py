"""``clustertune push`` against a Hub on loopback: what goes, what is refused, and that the token stays here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest, secrets
from clustertune.chain import Chain
from clustertune.cli import app as cli
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.command import Done
from tests.damage import flip
from tests.fake_hub import TOKEN, FakeHub, Repo
from tests.report.conftest import change, reseal

REPO = "me/oasst2-adapter"
Push = Callable[..., Done]


@pytest.fixture
def push(
    trained: RunDir, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Push:
    """The command as it is typed, with a ``.env`` of this test; the token must be in nothing that it says."""

    def start(*words: str, token: str | None = TOKEN, env: str = "", run: Path = trained.path, repo: str | None = REPO) -> Done:
        lines = [*([f"HF_TOKEN={token}"] if token else []), f"HF_ENDPOINT={hub.url}", env]
        (tmp_path / ".env").write_text("\n".join(line for line in lines if line) + "\n")
        (tmp_path / ".env").chmod(0o600)
        monkeypatch.setattr(secrets, "DEFAULT", tmp_path / ".env")
        monkeypatch.setattr(sys, "argv", ["clustertune", "push", str(run), *(["--repo", repo] if repo else []), *words])
        code = cli.main()
        out, err = capsys.readouterr()
        assert (token or TOKEN) not in out + err and "Traceback" not in err
        return Done(code, out, err)

    return start


def test_pushed_private_in_one_commit_and_once(push: Push, hub: FakeHub) -> None:
    """The whole way; and the same command again sends nothing."""
    done = push("--publish", "--json")
    assert done.code == 0, done.err
    repo = hub.repos[REPO]
    assert done.json["status"] == "pushed" and done.json["url"] == f"{hub.url}/{REPO}"
    assert done.json["commit"] == repo.commits[-1]
    assert repo.private and len(repo.commits) == 2
    assert set(repo.files) == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    again = push("--publish", "--json")
    assert again.code == 0 and again.json["status"] == "unchanged"
    assert len(repo.commits) == 2


def test_a_dry_run_asks_nobody(push: Push, hub: FakeHub) -> None:
    """Files, sizes, card and target, without a token."""
    done = push("--dry-run", "--json", token=None)
    assert done.code == 0 and hub.asked == [] and done.json["status"] == "planned" and done.json["private"] is True
    assert [file["name"] for file in done.json["files"]] == ["adapter_model.safetensors", "adapter_config.json", "README.md"]
    shown = push("--dry-run", token=None)
    assert shown.out == done.json["card"] and f"private repository {REPO}" in shown.err


@pytest.mark.parametrize(
    ("words", "asked", "says"),
    [
        ([], {}, "--publish"),
        (["--publish"], {"token": None}, "has no HF_TOKEN"),
        (["--publish"], {"repo": None}, "no repository is named"),
        (["--dry-run", "--license", "MIT\nx: y"], {}, "is not a licence identifier"),
        *(
            (["--publish"], {"repo": name}, "is not a repository's name")
            for name in ("adapter", "../me/x", "me/x/y", "me/..", "me/a--b", "me/a b", "-/x", "me/x.git")
        ),
    ],
)
def test_what_is_refused_before_anything_is_asked(
    words: list[str], asked: dict[str, Any], says: str, push: Push, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that a shell happens to export is nobody's decision."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = push(*words, **asked)
    assert done.code == 2 and says in done.err and hub.asked == []


def test_a_public_repository_wants_the_word(push: Push, hub: FakeHub) -> None:
    """And a private one is not opened by it."""
    hub.repos[REPO] = Repo(private=False)
    done = push("--publish")
    assert done.code == 2 and "is public" in done.err and len(hub.repos[REPO].commits) == 1
    assert push("--publish", "--public").code == 0
    hub.repos[REPO] = Repo(private=True)
    assert "is private, and --public was asked for" in push("--publish", "--public").err


def test_files_of_the_same_names_are_replaced_and_others_stay(push: Push, hub: FakeHub) -> None:
    hub.repos[REPO] = repo = Repo(private=True)
    repo.files |= dict.fromkeys(["adapter_config.json", "notes.md"], b"{}")
    assert push("--publish").code == 0 and len(repo.commits) == 2
    assert b"LORA" in repo.files["adapter_config.json"] and repo.files["notes.md"] == b"{}"


@pytest.mark.parametrize(("part", "status"), [("/commit/", 0), ("/commit/", 503), ("/info/lfs/", 0), ("/api/repos/create", 0)])
def test_a_failure_midway_leaves_nothing_and_the_next_call_goes_on(
    push: Push, hub: FakeHub, part: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)  # its five tries
    hub.fail[part] = status
    done = push("--publish")
    assert done.code == 75 and "nothing was committed" in done.err
    assert all(set(repo.files) == {".gitattributes"} for repo in hub.repos.values())
    hub.fail.clear()
    assert push("--publish").code == 0 and len(hub.repos[REPO].commits) == 2


def test_a_damaged_adapter_is_not_pushed(push: Push, hub: FakeHub, trained: RunDir) -> None:
    flip(trained.adapter / "adapter_model.safetensors", -1)
    done = push("--publish")
    assert done.code == 2 and "SHA-256" in done.err and "nothing is pushed" in done.err and hub.asked == []


def test_the_tokenizer_of_the_training_goes_with_it(push: Push, hub: FakeHub, trained: RunDir) -> None:
    """Without it whoever loads the adapter takes the base's template and end."""
    own = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "x", "generation_config.json": "{}"}
    for name, text in own.items():
        (trained.adapter / name).write_text(text)
    meta = manifest.read_manifest(trained.adapter, "adapter").meta
    (trained.adapter / manifest.MANIFEST).unlink()
    manifest.seal(trained.adapter, "adapter", meta)
    assert push("--publish").code == 0
    assert {name: hub.repos[REPO].files.get(name) for name in own} == {name: text.encode() for name, text in own.items()}


def test_other_files_of_the_folder_stay_here(push: Push, hub: FakeHub, trained: RunDir) -> None:
    (trained.adapter / "notes.txt").write_text("mine")
    done = push("--publish")
    assert done.code == 0 and "notes.txt stays here" in done.err and "notes.txt" not in hub.repos[REPO].files


@pytest.mark.parametrize(
    ("config", "metadata", "says"),
    [
        ({"note": "hf_" + "Ab1" * 8}, None, "looks like a token"),
        ({"note": "x AKIA" + "Q" * 16}, None, "looks like a token"),
        ({"base_model_name_or_path": "/lustre/models/llama"}, None, "names a path of this machine: /lustre/models/llama"),
        (None, {"format": "pt", "from": "RUN/data"}, "names a path of this machine: "),
        (None, {"format": "pt", "key": "sk-" + "a1" * 12}, "looks like a token"),
    ],
)
def test_tokens_and_paths_do_not_leave(
    push: Push, hub: FakeHub, trained: RunDir, config: dict[str, Any] | None, metadata: dict[str, str] | None, says: str
) -> None:
    """Neither in a text nor in the tensors' own words."""
    reseal(trained, config, {k: v.replace("RUN", str(trained.path)) for k, v in (metadata or {}).items()})
    done = push("--publish")
    assert done.code == 2 and says in done.err and hub.asked == []
    assert "Ab1" not in done.err and "AKIA" not in done.err


def test_a_token_of_the_file_in_the_card_is_found(push: Push, hub: FakeHub, trained: RunDir) -> None:
    """One that has no form of its own: it is looked for by its value."""
    key = "0123456789abcdef" * 3
    change(trained, lambda document: document["recipe"]["lora"].update(bias=key))
    done = push("--publish", env=f"WANDB_API_KEY={key}")
    assert done.code == 2 and "README.md: holds what looks like a token" in done.err and key not in done.err and not hub.repos


def test_the_card_says_what_the_run_was(push: Push, trained: RunDir) -> None:
    """Base and revision, data, losses, scores with their errors, versions, commit, sums; and no path, no host.

    A cluster file with GPUs is no proof that they were used.
    """

    def act(document: dict[str, Any]) -> None:
        document["recipe"]["recipe"]["model"] |= {"name": "org/base", "weights": "hub", "revision": "c" * 40, "path": "/srv/m"}
        document["recipe"]["recipe"]["data"] |= {"name": "org/data"}
        document["container"] = {"sha256": "d" * 64}
        document["cluster"] = {"name": "mine", "compute": {"gpus": 8, "gpu": "h200"}}

    change(trained, act)
    scores = trained.eval / "results.json"
    body = json.loads(scores.read_bytes())
    body["details"]["ifeval"]["comparable"] = True
    scores.write_text(json.dumps(body))
    card = push("--dry-run", "--license", "llama3.1", token=None).out
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == "org/base" and head["datasets"] == ["org/data"] and head["license"] == "llama3.1"
    metrics = head["model-index"][0]["results"][0]["metrics"]
    assert metrics[0] == {"type": "prompt_level_strict_acc", "value": 0.166667, "name": "prompt_level_strict_acc"}
    for text in (
        'revision="' + "c" * 40, "0.1667 | 0.0630", "0123456789abcdef0123456789abcdef01234567", "d" * 64, "2.13.0+cpu",
        "| GPU | - |", "| optimizer steps | 8 |", "step-000008.a3", "lora_alpha", "| ranks | 2 |",
    ):  # fmt: skip
        assert text in card, text
    for text in ("/srv", " /data", "/scratch", "node01"):
        assert text not in card
    assert "random weights" not in card


def test_a_recipe_pushes_when_its_chain_has_ended(
    push: Push, trained: RunDir, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Private; off without the key and under --tiny; a failure leaves the run finished, and the command repeats it."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    before, asked = resolve("tiny-oasst2"), resolve("tiny-oasst2", [f"push.repo={REPO}"])
    assert asked.fingerprint() == before.fingerprint()
    for stage in ("export", "merge", "eval"):
        trained.finish_stage(stage, 1.0)
    assert resolve("tiny-oasst2", tiny=True).recipe.push is None
    assert push("--dry-run").code == 0 and not hub.repos  # writes the .env
    Chain(trained, before).go("report")
    assert not hub.asked and "push" not in trained.read()
    hub.fail["/commit/"] = 503
    Chain(trained, asked).go("report")
    said = capsys.readouterr().err
    assert trained.read()["push"]["status"] == "failed" and trained.stage("report")
    assert "not pushed" in said and f"--repo {REPO} --publish" in said and TOKEN not in said
    hub.fail.clear()
    Chain(trained, asked).go("report")
    assert trained.read()["push"]["status"] == "pushed" and hub.repos[REPO].private
    assert TOKEN not in trained.run_json.read_text()
    with pytest.raises(UserError, match="only adapters"):
        resolve("tiny-oasst2", ["lora=null", f"push.repo={REPO}"])
