"""The models whose architecture is known without a download: those of the recipes, and of ``ops/models.yaml``."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clustertune.cluster.hardware import IsoDate
from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe import architecture as arch
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.layers import (
    DESCRIPTION,
    RECIPES,
    find_folder,
    parse_json,
    read_layers,
    read_text,
    read_yaml,
    same_model,
)
from clustertune.recipe.library_facts import config_fields, model_facts
from clustertune.recipe.parameters import Values, parameter_count
from clustertune.recipe.sections import NAME, HubCommit, HubName, Positive, Section
from clustertune.resolve.resolved import Resolved, expand_home
from clustertune.tree import ROOT, how_to_install

MODELS = ROOT / "ops" / "models.yaml"
CONFIG = "config.json"
NO_COMMIT = "0" * 40
"""Git's name for no commit: the revision of a model that is planned and never loaded."""
_OF_THE_PROGRAM = frozenset({
    "_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "quantization_config",
    "vision_config", "text_config", "output_router_logits", "pretraining_tp", "ep_size", "num_nextn_predict_layers",
    "num_mtp_layers",
})  # fmt: skip
"""Keys of a ``config.json`` that describe no architecture, or layers that are not trained."""


PLAIN_TEXT = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""Text models inside models with pictures that have no class of their own in transformers, and the one that computes the same:
for text the three axes of their positions are equal, so that their rotary embedding is the usual one (Qwen2-VL,
arXiv:2409.12191, section 2.1)."""


def plain_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The configuration of a text model of the type ``kind`` without what only pictures need of its rotary embedding."""
    body = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = body.get(key)
        if kind in PLAIN_TEXT and isinstance(rope, dict):
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
            body[key] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    return body


class KnownModel(Section):
    """A model of the list."""

    revision: HubCommit
    date: IsoDate
    parameters: Positive
    stored: str | None = None
    wrapper: str | None = None
    pad_token: str | None = None
    config: dict[str, Any]


class ModelFile(Section):
    """The whole file."""

    models: dict[HubName, KnownModel]


@dataclass(frozen=True)
class FoundModel:
    """A model as a recipe needs it."""

    section: Mapping[str, Any]
    """The recipe's section ``model``."""
    architecture: Mapping[str, Any]
    """What stands in ``model.json``."""
    pad_token: str | None = None
    notes: tuple[str, ...] = field(default=())
    """What a person should know, one sentence each."""


@cache
def read_models(path: Path = MODELS) -> Mapping[str, KnownModel]:
    """The list. Raises UserError with every problem of the file."""
    document = read_yaml(path, "ops/models.yaml" if path == MODELS else str(path))
    return read_model(ModelFile, document, _find_problems).models


def _find_problems(models: ModelFile) -> Iterator[Found]:
    for name, entry in models.models.items():
        for problem in arch.find_problems(dict(entry.config), MODELS.name):
            yield ("models", name, "config", problem.key or ""), problem.message, problem.fix


def known_models() -> list[str]:
    """The Hub ids of the list and of the recipes."""
    names = set(read_models())
    for file in RECIPES.glob(f"*/{DESCRIPTION}"):
        with contextlib.suppress(UserError):
            model = read_yaml(file.parent / "recipe.yaml", str(file.parent / "recipe.yaml")).data.get("model")
            names |= {str(model["name"])} if isinstance(model, dict) and "name" in model else set()
    return sorted(names)


_TRAINED_AS = re.compile(r"-(?:instruct|it|pt|base|chat|sft|dpo|hf)(?=-|$)", re.IGNORECASE)
"""Words of a Hub id that say how a model was trained, and nothing of its shape."""


def shape_name(name: str) -> str:
    """A Hub id without the words that say how it was trained: base and instruct models of one family share it."""
    owner, _, model = name.lower().partition("/")
    return f"{owner}/{_TRAINED_AS.sub('', model.removeprefix('meta-'))}"


def find_model(name: str) -> FoundModel:
    """The model of a recipe's name or folder, of a ``config.json`` (or its folder), or of a Hub id.

    A Hub id that is neither a recipe's nor in the list, nor the base or instruct model of one that is, is asked of the Hub, or
    of its cache. Of such a base or instruct model no commit is known: :func:`pinned`. Raises UserError.
    """
    path = expand_home(name)
    of_model = path.is_dir() and not os.path.lexists(path / "recipe.yaml")
    file = path / CONFIG if of_model else path
    if file.suffix == ".json" and os.path.lexists(file):  # what is no plain file is refused as it is read
        return _of_config(file.absolute())
    if name.lower().endswith("gguf") or (of_model and not os.path.lexists(file) and any(path.glob("*.gguf"))):
        text = "GGUF weights are made for llama.cpp, and are not trained on"
        fix = "name the model that they were made from, OWNER/NAME or a folder with its safetensors; docs/after-training.md "
        raise UserError(text, file=name, key="--model", fix=f"{fix}converts what was trained")
    if (entry := read_models().get(name)) is not None:
        notes = tuple(_obstacles(name, entry))
        return FoundModel({"name": name, "revision": entry.revision}, entry.config, entry.pad_token, notes)
    if (folder := same_model(RECIPES / "_", {"name": name})) is not None:
        return _of_recipe(folder)
    if name.startswith((".", "/", "~")) and not path.exists():
        fix = "give the folder of a model with its config.json, or OWNER/NAME of the Hub"
        raise UserError("no such file or folder", file=name, key="--model", fix=fix)
    if re.fullmatch(f"{NAME}/{NAME}", name):
        if (known := _same_shape(name)) is not None:
            sibling = find_model(known)
            note = f"{name} has the shape of {known}, whose row is taken"
            return replace(sibling, section={"name": name}, notes=(*sibling.notes, note))
        return _of_config(_from_the_hub(name), name)
    if of_model and not (RECIPES / name / "recipe.yaml").exists():
        snapshots = sorted(path.parent for path in path.glob(f"snapshots/*/{CONFIG}"))
        fix = f"name a snapshot of it: {snapshots[-1]}" if snapshots else "name the folder of a model, or a recipe"
        raise UserError(f"holds neither {CONFIG} nor recipe.yaml", file=name, fix=fix)
    return _of_recipe(name)


def _same_shape(name: str) -> str | None:
    return next((known for known in known_models() if shape_name(known) == shape_name(name)), None)


def pinned(model: FoundModel) -> FoundModel:
    """The model with its commit on the Hub, which is asked for it where it is not known. Raises UserError."""
    name = str(model.section["name"])
    if "/" not in name or model.section.keys() & {"revision", "path", "weights"}:
        return model
    try:
        return replace(model, section={**model.section, "revision": _from_the_hub(name).parent.name})
    except UserError as error:
        fix = "state it behind the options: model.revision=COMMIT (hf models info shows it), or model.path=FOLDER"
        text = f"the commit of {name} is not known here: {error.problems[0].message}"
        raise UserError(text, file="command line", key="model.revision", fix=fix) from None


def _obstacles(name: str, entry: KnownModel) -> Iterator[str]:
    """Why the published weights of a listed model are not trained as they are, and what to do."""
    if entry.stored:
        yield f"the Hub's weights of {name} are stored in {entry.stored}: name a folder with a bfloat16 copy in model.path"
    if entry.wrapper:
        yield (
            f"{name} is a {entry.wrapper}, whose other parts LoRA's names would match too: hf download {name}, save its "
            f"{entry.config['architectures'][0]} with clustertune text-model FOLDER OUT, and name OUT in model.path"
        )


def find_obstacles(resolved: Resolved) -> list[Problem]:
    """What keeps a recipe's published weights from being trained, as far as it is known before they are read."""
    model = resolved.recipe.model
    entry = None
    if model.weights == "hub" and not model.path and not resolved.recipe.staged:
        entry = read_models().get(model.name) or read_models().get(_same_shape(model.name) or "")
    obstacles = _obstacles(model.name, entry) if entry is not None else ()
    return [Problem(text, file=resolved.name, key="model", fix="write model.path") for text in obstacles]


def _of_recipe(recipe: str | Path) -> FoundModel:
    layers, problems = read_layers(*find_folder(recipe), [])
    raise_if(problems)
    values = layers.merged()[0]
    model = values.get("model") or {}
    folder = layers.folder if os.path.lexists(layers.folder / DESCRIPTION) else same_model(layers.folder, model)
    body = arch.read_architecture((folder or layers.folder) / DESCRIPTION, f"{layers.shown}/{DESCRIPTION}")
    return FoundModel(model, body, (values.get("train") or {}).get("pad_token"))


def _from_the_hub(name: str) -> Path:
    near = difflib.get_close_matches(name, known_models(), n=3, cutoff=0.3)
    fix = f"give its {CONFIG} as --model FILE, or a known model{': ' * bool(near)}{', '.join(near)}"
    if find_spec("huggingface_hub") is None:
        text = f"{name} is not a known model; asking the Hub for it needs huggingface_hub, which is not installed"
        raise UserError(text, key="--model", fix=f"{fix}; or {how_to_install('train')}")
    import huggingface_hub

    try:
        # hf_hub_download alone retries for 24 s where no name server answers (huggingface_hub 2.4.0).
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, CONFIG), timeout=5)
        return Path(huggingface_hub.hf_hub_download(name, CONFIG))
    except Exception as error:  # the exceptions of the Hub's clients have no common base
        if isinstance(cached := huggingface_hub.try_to_load_from_cache(name, CONFIG), str):
            return Path(cached)
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        text = f"{name} was not found locally, and the Hub did not deliver it: {why}"
        raise UserError(text, key="--model", fix=fix) from None


def _of_config(file: Path, name: str | None = None) -> FoundModel:
    """A published ``config.json``: with ``name`` of the Hub's snapshot, whose folder is the commit; else of a local folder."""
    body = parse_json(read_text(file, str(file)), str(file))
    if not isinstance(body, dict) or not body:
        raise UserError("contains no keys of a model", file=str(file), fix="give the config.json of a model")
    lifted, notes = lift(body)
    raise_if(arch.find_problems(lifted, str(file)))
    if name is not None:
        return FoundModel({"name": name, "revision": file.parent.name}, lifted, notes=tuple(notes))
    of_hub = "of the Hub write model.name and model.revision: hf models info OWNER/NAME"
    if any(file.parent.glob("*.safetensors")):
        notes.append(f"the weights are next to {file}; {of_hub}")
    else:
        notes.append(f"no weights stand next to {file}: they must before the run, or {of_hub}")
    named = {"name": _name_of(file.parent, body, lifted)}
    if (cached := _in_the_hubs_cache(file.parent)) is not None:
        named = dict(zip(("name", "revision"), cached, strict=True))
        notes[-1] = f"{cached[0]} of the Hub at its commit {cached[1]}; {notes[-1].partition(';')[0]}"
    return FoundModel({**named, "path": str(file.parent)}, lifted, notes=tuple(notes))


def _in_the_hubs_cache(folder: Path) -> tuple[str, str] | None:
    """The Hub id and the commit of a snapshot in the Hub's cache, by its path: the one that ``hf download`` prints."""
    for snapshot in (folder, folder.resolve()):  # the folder may be a link to it; its files are read by the path that was given
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repository.startswith("models--") and _COMMIT.fullmatch(snapshot.name):
            name = repository.removeprefix("models--").replace("--", "/")
            return (name, snapshot.name) if re.fullmatch(f"{NAME}/{NAME}", name) else None
    return None


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAYS_NOTHING = re.compile(
    r"(hf|huggingface|models?|weights|base|checkpoints?|final|last|best|latest|merged|output|out|tmp|temp|data|home|root|main|"
    r"snapshots?|downloads?|cache|hub|files?|new|test|full|bf16|fp16|safetensors|transformers|export(ed)?|local|"
    r"checkpoint-\d+|v?\d+|[0-9a-f]{40})",
    re.IGNORECASE,
)
"""Names of folders that hold a model and do not say which."""


def _name_of(folder: Path, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> str:
    """What a model in a folder is called: as the folder, if that says it; as the Hub's cache or its configuration has it; as
    the folder above, if that names a size; else by its type and size."""

    def plain(name: str) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:64]

    cached = [part.removeprefix("models--").split("--")[-1] for part in folder.parts if part.startswith("models--")]
    # transformers writes the second key for what it reads from GGUF.
    origin = str(config.get("_name_or_path") or config.get("_model_name_or_path") or "").rstrip("/").rpartition("/")[2]
    above = folder.parent.name if re.search(r"\d[bm](\b|_)", folder.parent.name, re.IGNORECASE) else ""
    for name in (folder.name, *cached, origin, above):
        if plain(name) and not _SAYS_NOTHING.fullmatch(plain(name)):
            return plain(name)
    return plain(f"{architecture.get('model_type', 'model')}-{size_of(architecture).removeprefix('of ').replace(' ', '-')}")


def lift(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of a ``config.json`` is the architecture of its language model, and notes on what was done.

    Of a model with pictures that is ``text_config``; sizes and tokens that only the outer part holds are taken over.
    """
    inner, notes = config.get("text_config"), []
    body = dict(config)
    if isinstance(inner, dict) and inner.get("model_type"):
        shared = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
        body = {**{key: config[key] for key in shared if key in config}, **inner, "architectures": None}
    if str(body.get("model_type")) in PLAIN_TEXT:  # also of a file that has no text_config, as Qwen2-VL's was published
        inside = str(body["model_type"])
        body = {**plain_rope(body, inside), "model_type": PLAIN_TEXT[inside], "architectures": None}
    if body.get("model_type") != config.get("model_type"):
        notes.append(
            f"the text model of {config.get('model_type')} is taken: clustertune text-model MODEL OUT saves it to train on"
        )
    kind = body.get("model_type")
    stored = config.get("quantization_config") or body.get("quantization_config")
    if isinstance(stored, dict):
        notes.append(f"the weights are stored in {stored.get('quant_method')}: training needs a bfloat16 copy, as model.path")
    if not isinstance(kind, str):
        return body, notes
    try:
        fields, classes = config_fields(kind), model_facts(kind)["classes"]
    except KeyError:
        return body, notes  # arch.find_problems names the model type
    if body.get("architectures") is None:
        body["architectures"] = [name for name in classes if name.endswith(("ForCausalLM", "LMHeadModel"))][:1]
    known = {key: value for key, value in body.items() if key not in _OF_THE_PROGRAM}
    read = arch.common_names({key: value for key, value in known.items() if key in fields | arch._OLD_KEYS})
    if left := sorted(known.keys() - fields - arch._OLD_KEYS):
        notes.append(f"left out of config.json, which the pinned transformers does not read for {kind}: {', '.join(left)}")
    for key in (*arch.INTEGERS, "intermediate_size", "num_key_value_heads", "head_dim"):
        # Published text_configs leave out what is the class's default.
        if key in fields and read.get(key) is None and (value := Values(read).get(key)) is not None:
            read[key] = value
    return read, notes


def size_of(architecture: Mapping[str, Any]) -> str:
    """Parameters for people: 8.2B, 135M."""
    count = parameter_count(architecture)
    if count is None:
        return "of unknown size"
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
