"""What the ranks read, made by the stage ``prepare`` in the project's own stack: conversations and tokenizer in Bridge's form.

NVIDIA's image has no TRL. Bridge takes the mask of what the assistant says from the chat template's ``generation`` marks
(``_chat_preprocess`` in ``megatron/bridge/data/datasets/utils.py``) and refuses a template without them, as Llama's own is;
TRL has the same templates with the marks in them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from clustertune import manifest
from clustertune.data import rendering
from clustertune.errors import Problem, UserError
from clustertune.manifest import open_text
from clustertune.resolve.resolved import Resolved

FOLDER = "megatron"
"""Below the run folder: ``data``, ``tokenizer``, and the converted base model."""
DATA_KIND, TOKENIZER_KIND = "megatron-data", "megatron-tokenizer"
SPLITS = {"train": "training.jsonl", "eval": "validation.jsonl"}
"""Our splits, and the names that ``FinetuningDatasetBuilder`` looks for."""


def paths(run_path: Path) -> dict[str, Path]:
    """Where each input of the ranks lies."""
    folder = run_path.resolve() / FOLDER
    return {"data": folder / "data", "tokenizer": folder / "tokenizer", "base": folder / "base"}


def exported(run_path: Path) -> Path:
    """What was trained, in HF's form: an adapter, or the whole model."""
    return run_path.resolve() / FOLDER / "export"


def make(resolved: Resolved, run_path: Path, prepared: Path, source: tuple[str, str | None]) -> dict[str, int]:
    """Write data and tokenizer of a run, or leave what is whole. Returns the conversations of each split.

    ``prepared``: the run's conversations; ``source``: the base model's folder or id, and its revision. Raises UserError.
    """
    where = paths(run_path)
    counts = _write_data(prepared, where["data"])
    if manifest.find_problems(where["tokenizer"], TOKENIZER_KIND):
        _write_tokenizer(resolved, source, where["tokenizer"])
    return counts


def _write_data(prepared: Path, out: Path) -> dict[str, int]:
    """``{"messages": [{"role", "content"}]}`` a line: the form that Bridge hands to the tokenizer's template as it is."""
    identity = manifest.hash_file(prepared / manifest.MANIFEST).sha256
    if not manifest.find_problems(out, DATA_KIND, allow_extra=True):  # Bridge packs, and puts it beside
        meta = manifest.read_manifest(out, DATA_KIND).meta
        if meta.get("prepared") == identity:
            return {split: int(meta["conversations"][split]) for split in SPLITS}
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    counts = {}
    for split, name in SPLITS.items():
        with (out / name).open("w", encoding="utf-8") as stream:
            counts[split] = sum(stream.write(line) > 0 for line in _lines(prepared / f"{split}.jsonl"))
    if not counts["train"]:
        raise UserError(Problem("has no conversation to train on", file=str(prepared / "train.jsonl")))
    manifest.seal(out, DATA_KIND, {"prepared": identity, "conversations": counts})
    return counts


def _lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    with open_text(path) as stream:
        for line in stream:
            if line.strip():
                yield json.dumps({"messages": json.loads(line)["messages"]}, ensure_ascii=False) + "\n"


def _write_tokenizer(resolved: Resolved, source: tuple[str, str | None], out: Path) -> None:
    from clustertune.data.tokenizer import has_generation_markers, load_tokenizer, training_template

    system, day = resolved.recipe.data.system_messages, resolved.template_date
    tokenizer = load_tokenizer(*source, resolved.chat_template, resolved.train_args, system=system, date=day)
    arguments = resolved.template_arguments
    tokenizer.chat_template = rendering.pinned(training_template(tokenizer, marked=True), arguments=arguments)
    if not has_generation_markers(tokenizer.chat_template):  # Megatron-Bridge finds the answers by them
        fix = "put the template with {% generation %} around what the assistant says beside the recipe, and name it there"
        raise UserError("the chat template does not mark what the assistant says", key="model.chat_template", fix=fix)
    shutil.rmtree(out, ignore_errors=True)
    tokenizer.save_pretrained(out)
    manifest.seal(out, TOKENIZER_KIND, {"source": resolved.recipe.model.name, "revision": source[1]})
