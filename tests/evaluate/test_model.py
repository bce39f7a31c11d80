"""Models that cannot be scored: refused before, and half copied ones after, the weights are read; and damaged ones."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.evaluate.model import check_model, pick_device
from clustertune.evaluate.run import evaluate, load_lm
from tests.evaluate.conftest import SETTINGS


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy without a manifest, to be damaged."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "MANIFEST.json").unlink()
    return tmp_path / "model"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no config", lambda m: (m / "config.json").unlink(), "config.json: missing"),
    ("unknown architecture", lambda m: edit_json(m / "config.json", model_type="none"), "transformers does not accept it"),
    ("code in the folder", lambda m: edit_json(m / "config.json", auto_map={}, model_type="own"), "names code of the folder"),
    ("no weights", lambda m: (m / "model.safetensors").unlink(), "neither model.safetensors nor"),
    ("weights cut off", lambda m: cut(m / "model.safetensors"), "truncated or damaged"),
    ("no tokenizer", lambda m: [f.unlink() for f in m.glob("tokenizer*")], "has no tokenizer"),
    ("tokenizer damaged", lambda m: cut(m / "tokenizer.json"), "its tokenizer does not load"),
    ("no template", lambda m: (m / "chat_template.jinja").unlink(), "has no chat template"),
    ("template damaged", lambda m: (m / "chat_template.jinja").write_text("{% if %}"), "does not render a user's turn"),
    ("template drops", lambda m: (m / "chat_template.jinja").write_text("assistant:"), "drops the user's text"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damaged(damage: Callable[[Path], object], message: str, model: Path) -> None:
    assert check_model(model, 32)[1] == []
    damage(model)
    facts, problems = check_model(model, 32)
    assert facts is None
    assert message in "\n".join(map(str, problems))


def test_the_fingerprint_follows_the_model(model: Path) -> None:
    def take() -> str:
        facts, _ = check_model(model, 32)
        assert facts is not None
        return facts.fingerprint

    first = take()
    assert take() == first
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    second = take()
    assert second != first
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content)
    assert take() != second


@pytest.mark.parametrize(
    ("gpus", "free", "asked", "picked"),
    [
        (0, 0, None, "cpu"), (0, 0, "auto", "cpu"), (1, 10, None, "cuda"), (1, 10, "auto", "cuda"), (8, 10, None, "auto"),
        (8, 1 << 30, None, "cuda"), (8, 1 << 30, "auto", "auto"), (8, 10, "cuda:3", "cuda:3"), (8, 10, "cpu", "cpu"),
    ],
)  # fmt: skip
def test_a_model_that_one_gpu_does_not_hold_takes_all(
    model: Path, gpus: int, free: int, asked: str | None, picked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``free``: bytes of the first GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 80 << 30))
    assert pick_device(asked, model) == picked


def drop_tensor(model: Path) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[name]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return name


def test_a_missing_tensor_is_refused(model: Path) -> None:
    name = drop_tensor(model)
    with pytest.raises(UserError, match=f"{name}: no weight file holds it"):
        load_lm(model, "cpu", 1)


# --- damages of a model with a manifest --------------------------------------------------------------------------------


SMALL = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def sealed(tiny_model: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / manifest.MANIFEST).unlink(missing_ok=True)
    manifest.seal(folder, "merged", {})
    return folder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.jobs) for seed in range(1, 6))])
def test_a_damaged_model_is_not_scored(seed: int, sealed: Path, parity_data: Path, tmp_path: Path) -> None:
    for path in [sealed / name for name in [*SMALL, WEIGHTS, manifest.MANIFEST]]:
        before, data, draw = path.read_bytes(), bytearray(path.read_bytes()), random.Random(f"{path.name} {seed}")
        data[draw.randrange(len(data) // 2, len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError, match=path.name.partition(".")[0]):
            evaluate(sealed, tmp_path / "out", settings=SETTINGS, data=parity_data)
        assert not (tmp_path / "out" / manifest.MANIFEST).exists()
        path.write_bytes(before)
