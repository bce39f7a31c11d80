"""The files that go with weights: the tokenizer and the chat template that trained, and the EOS at which an answer stops.

They are the base's own files, in which only what the training changed is another: ``save_pretrained`` of transformers 5 writes
tokenizers that transformers 4 does not load.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import agree, find_problem, find_records, read_json

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "spiece.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
"""The files of a tokenizer, as patterns."""
CHAT = ("chat_template.jinja", "chat_template.json")
TEXTS = ("LICENSE*", "USE_POLICY*", "NOTICE*")
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_STOPS = ("eos_token", "pad_token")


def is_tokenizer(name: str) -> bool:
    """Whether a file of this name is part of a tokenizer or its chat template."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in (*TOKENIZER, *CHAT))


def matching(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files of a folder whose names match, by name and sorted. Raises UserError for a link to nothing, a pipe or a device
    of such a name: without it, the tokenizer or the chat template would be another."""
    paths = sorted(path for path in folder.iterdir() if not path.is_dir())
    files = {path.name: path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)}
    raise_if(Problem(_NO_FILE, file=str(path), fix=_COPY) for path in files.values() if not path.is_file())
    return files


_NO_FILE, _COPY = "is not a plain file, or a link to nothing", "copy the file there, or remove the name"


def copy_tokenizer(base: Path, stage: Path, extra: Iterable[str] = ()) -> dict[str, Path]:
    """Copy the base's tokenizer, its chat template and what matches ``extra`` into ``stage``; the copies by name.

    Raises UserError where a file is not what its digest says.
    """
    files = matching(base, (*TOKENIZER, *CHAT, *extra))
    kind, records = find_records(base)
    agree([p for file in files.values() if file in records and (p := find_problem(file, records[file], kind))])
    for name, file in files.items():
        shutil.copyfile(file, stage / name)
    return {name: stage / name for name in files}


def write_trained(base: Path, stage: Path, resolved: Resolved) -> dict[str, int]:
    """Make the tokenizer that :func:`copy_tokenizer` put into ``stage`` the one that trained: its EOS, padding and template,
    with the arguments and the day that the template had (:mod:`clustertune.data.rendering`).

    Returns the ids of ``_STOPS`` by the names that they have in a model's ``config.json``. Raises UserError where the base's
    tokenizer cannot be loaded.
    """
    from clustertune.data import rendering
    from clustertune.data.system_messages import is_rendered_before_user
    from clustertune.data.tokenizer import load_tokenizer

    arguments, day, system = resolved.template_arguments, resolved.template_date, resolved.recipe.data.system_messages
    trained = load_tokenizer(str(base), None, resolved.chat_template, resolved.train_args, chats=False, system=system, date=day)
    trained.chat_template = rendering.pinned(trained.chat_template, day, arguments)
    body = read_json(stage / TOKENIZER_CONFIG) if (stage / TOKENIZER_CONFIG).exists() else {}
    _write_changed(stage / TOKENIZER_CONFIG, body, {name: getattr(trained, name) for name in _STOPS})
    if (stage / _SPECIAL).exists():
        _write_changed(stage / _SPECIAL, read_json(stage / _SPECIAL), {name: getattr(trained, name) for name in _STOPS})
    has_own = "chat_template" in body or any((stage / name).exists() for name in CHAT)
    template, head = trained.chat_template, rendering.header(trained.chat_template)
    is_changed = bool(head.arguments) or head.date is not None or resolved.chat_template is not None
    if isinstance(template, dict) and is_changed:
        _write_named(stage, template)
    elif isinstance(template, str) and (not has_own or is_changed or is_rendered_before_user(template)):
        _write_template(stage, template)
    ids = {f"{name}_id": getattr(trained, f"{name}_id") for name in _STOPS}
    return {name: value for name, value in ids.items() if value is not None}


def _write_template(stage: Path, template: str) -> None:
    """Write the only chat template of a folder: transformers reads this file first."""
    (stage / CHAT[0]).write_text(template, encoding="utf-8")
    (stage / CHAT[1]).unlink(missing_ok=True)
    path = stage / TOKENIZER_CONFIG
    if path.exists() and "chat_template" in (body := read_json(path)):
        del body["chat_template"]
        path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_named(stage: Path, templates: Mapping[str, str]) -> None:
    """Write several chat templates by name, as ``tokenizer_config.json`` lists them."""
    path = stage / TOKENIZER_CONFIG
    listed = [{"name": name, "template": template} for name, template in templates.items()]
    body = {**(read_json(path) if path.exists() else {}), "chat_template": listed}
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in CHAT:
        (stage / name).unlink(missing_ok=True)


def _write_changed(path: Path, body: dict[str, Any], tokens: Mapping[str, str | None]) -> None:
    """Write the special tokens that are others than the file says; nothing where there is none."""
    changed = {name: token for name, token in tokens.items() if token is not None and _content(body.get(name)) != token}
    if changed:
        path.write_text(json.dumps({**body, **changed}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _content(token: Any) -> str | None:
    """A special token's text, which a file holds by itself or in an object with its settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def stop_ids(files: Mapping[str, Path]) -> dict[str, int]:
    """The ids of EOS and padding of a tokenizer's files, by their names in ``config.json``, without loading the tokenizer.

    A token that the files do not name, or give no id, is left out. Raises UserError for a file that is not JSON.
    """
    bodies = {name: read_json(files[name]) for name in _NUMBERED if name in files}
    settings = [bodies[name] for name in (_SPECIAL, TOKENIZER_CONFIG) if name in bodies]
    named = {name: text for body in settings for name in _STOPS if (text := _content(body.get(name)))}
    ids = dict[str, int]()
    for file, body in bodies.items() if named else ():
        for key, read in _NUMBERED[file].items():
            try:
                numbers = {text: int(number) for text, number in read(body) if text in named.values()}
            except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
                fix = "take the file of the model's makers"
                raise UserError("does not give tokens their ids", file=str(files[file]), key=key or None, fix=fix) from None
            ids |= {f"{name}_id": numbers[token] for name, token in named.items() if token in numbers}
    return ids


_Pairs = Iterable[tuple[Any, Any]]


def _decoder(body: dict[str, Any]) -> _Pairs:
    return [(_content(token), int(number)) for number, token in (body.get("added_tokens_decoder") or {}).items()]


def _vocabulary(body: dict[str, Any]) -> _Pairs:
    vocabulary = (body.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # a Unigram model's: [token, score], numbered by their places
        return [(entry[0], number) for number, entry in enumerate(vocabulary)]
    return dict(vocabulary).items()


_NUMBERED: dict[str, dict[str, Callable[[dict[str, Any]], _Pairs]]] = {
    "vocab.json": {"": dict.items},
    "added_tokens.json": {"": dict.items},
    TOKENIZER_CONFIG: {"added_tokens_decoder": _decoder},
    _SPECIAL: {"added_tokens_decoder": _decoder},
    "tokenizer.json": {
        "model.vocab": _vocabulary,
        "added_tokens": lambda body: [(token["content"], int(token["id"])) for token in body.get("added_tokens") or []],
    },
}
"""The files, and the keys in them, that give tokens their ids; what counts more comes later."""


def has_template(files: Mapping[str, Path]) -> bool:
    """Whether a tokenizer's configuration holds a chat template, as transformers 4 writes it."""
    return TOKENIZER_CONFIG in files and bool(read_json(files[TOKENIZER_CONFIG]).get("chat_template"))


def align(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """A model's ``config.json`` or ``generation_config.json`` in which EOS and padding are those of ``ids``.

    As transformers' Trainer aligns them (5.23, ``align_special_tokens``): an EOS is added before those that stop an answer
    already. Ids beyond the vocabulary, which a model without resized embeddings cannot hold, are left out.
    """
    inner = config.get("text_config")
    if isinstance(inner, dict) and not any(name in config for name in ids):
        return {**config, "text_config": align(inner, ids)}
    size = config.get("vocab_size", (inner or {}).get("vocab_size")) if isinstance(inner, dict | None) else None
    changed = dict(config)
    for name, number in ids.items():
        held = config.get(name)
        known = held if isinstance(held, list) else [] if held is None else [held]
        if number in known or (isinstance(size, int) and number >= size):
            continue
        changed[name] = [number, *known] if name == "eos_token_id" and known else number
    return changed


def aligned_configs(config: Mapping[str, Any], generation: Mapping[str, Any] | None, ids: Mapping[str, int]) -> tuple[
    dict[str, Any], dict[str, Any] | None
]:  # fmt: skip
    """Both configurations with the EOS and the padding of the training.

    Of a base without ``generation_config.json`` one is made where its ``config.json`` had to be changed: programs read either.
    """
    new = align(config, ids)
    if generation is None and new == config:
        return new, None
    return new, align(generation or {}, _fitting(_of_text(config), ids))


def _of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ``config.json`` with those of its language model, where it is one of pictures too."""
    inner = config.get("text_config")
    return {**(inner if isinstance(inner, dict) else {}), **config}


def _fitting(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """The ids for which a model has rows."""
    size = config.get("vocab_size")
    return {name: number for name, number in ids.items() if not isinstance(size, int) or number < size}


def write_generation(base: Path, stage: Path, ids: Mapping[str, int]) -> None:
    """Write ``generation_config.json`` of a model without weights, an adapter, with the EOS and padding ``ids``.

    What serves the base with the adapter takes the base's, which does not stop where the training does: it is the base's file
    that :func:`copy_tokenizer` put into ``stage``, else what transformers derives from the base's ``config.json``.
    """
    config = _of_text(read_json(base / "config.json")) if os.path.lexists(base / "config.json") else {}
    own = stage / GENERATION
    held = read_json(own) if own.is_file() else {name: config[name] for name in _DERIVED if config.get(name) is not None}
    aligned = align(held, _fitting(config, ids))
    if aligned != held or not own.is_file():
        own.write_text(json.dumps(aligned, indent=2, sort_keys=True) + "\n")


_DERIVED = ("bos_token_id", "eos_token_id", "pad_token_id")


def problems_of(files: Mapping[str, Path]) -> list[Problem]:
    """What is wrong with the JSON files among these."""
    problems = list[Problem]()
    for name, path in files.items():
        if name.endswith(".json"):
            try:
                read_json(path)
            except UserError as error:
                problems += error.problems
    return problems
