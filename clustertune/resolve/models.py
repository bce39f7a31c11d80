"""The models whose architecture is known without a download: those of the recipes, and of ``ops/models.yaml``."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clustertune.cluster.hardware import IsoDate
from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe import architecture as arch
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.load import DESCRIPTION, RECIPES, find_folder, read_layers, same_model
from clustertune.recipe.parameters import parameter_count
from clustertune.recipe.schema import NAME, HubCommit, HubName, Positive, Section
from clustertune.recipe.values import Values, config_fields, model_facts
from clustertune.recipe.yamlfile import parse_json, read_text, read_yaml
from clustertune.resolve.resolved import Resolved
from clustertune.tree import ROOT, how_to_install

MODELS = ROOT / "ops" / "models.yaml"
CONFIG = "config.json"
_OF_THE_PROGRAM = frozenset({
    "_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "quantization_config",
    "vision_config", "text_config", "output_router_logits", "pretraining_tp", "ep_size", "num_nextn_predict_layers",
    "num_mtp_layers",
})  # fmt: skip
"""Keys of a ``config.json`` that describe no architecture, or layers that are not trained."""


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
    found = set(read_models())
    for file in RECIPES.glob(f"*/{DESCRIPTION}"):
        with contextlib.suppress(UserError):
            model = read_yaml(file.parent / "recipe.yaml", str(file.parent / "recipe.yaml")).data.get("model")
            found |= {str(model["name"])} if isinstance(model, dict) and "name" in model else set()
    return sorted(found)


def find_model(given: str) -> FoundModel:
    """The model of a recipe's name or folder, of a ``config.json`` (or its folder), or of a Hub id.

    A Hub id that is neither a recipe's nor in the list is asked of the Hub, or of its cache. Raises UserError.
    """
    path = Path(given)
    file = path / CONFIG if path.is_dir() and not (path / "recipe.yaml").is_file() else path
    if file.suffix == ".json" and file.is_file():
        return _of_config(file.resolve())
    if (entry := read_models().get(given)) is not None:
        notes = tuple(_obstacles(given, entry))
        return FoundModel({"name": given, "revision": entry.revision}, entry.config, entry.pad_token, notes)
    if (folder := same_model(RECIPES / "_", {"name": given})) is not None:
        return _of_recipe(folder)
    if re.fullmatch(f"{NAME}/{NAME}", given):
        return _of_config(_from_the_hub(given), given)
    return _of_recipe(given)


def _obstacles(name: str, entry: KnownModel) -> Iterator[str]:
    """Why the published weights of a listed model are not trained as they are, and what to do."""
    if entry.stored:
        yield f"the Hub's weights of {name} are stored in {entry.stored}: name a folder with a bfloat16 copy in model.path"
    if entry.wrapper:
        yield (
            f"{name} is a {entry.wrapper}, whose other parts LoRA's names would match too: save its text model alone as "
            f"{entry.config['architectures'][0]}, and name that folder in model.path"
        )


def find_obstacles(resolved: Resolved) -> list[Problem]:
    """What keeps a recipe's published weights from being trained, as far as it is known before they are read."""
    model = resolved.recipe.model
    entry = read_models().get(model.name) if model.weights == "hub" and not model.path and not resolved.recipe.staged else None
    found = _obstacles(model.name, entry) if entry is not None else ()
    return [Problem(text, file=resolved.name, key="model", fix="write model.path") for text in found]


def _of_recipe(recipe: str | Path) -> FoundModel:
    layers, problems = read_layers(*find_folder(recipe), [])
    raise_if(problems)
    values = layers.merged()[0]
    model = values.get("model") or {}
    folder = layers.folder if (layers.folder / DESCRIPTION).is_file() else same_model(layers.folder, model)
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
        if isinstance(found := huggingface_hub.try_to_load_from_cache(name, CONFIG), str):
            return Path(found)
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
    notes.append(f"the weights are next to {file}; of the Hub write model.name and model.revision: hf models info OWNER/NAME")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", file.parent.name).strip(".-_")[:64] or "model"
    return FoundModel({"name": plain, "path": str(file.parent)}, lifted, notes=tuple(notes))


def lift(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of a ``config.json`` is the architecture of its language model, and notes on what was done.

    Of a model with pictures that is ``text_config``; sizes and tokens that only the outer part holds are taken over.
    """
    inner, notes = config.get("text_config"), []
    body = dict(config)
    if isinstance(inner, dict) and inner.get("model_type"):
        shared = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
        body = {**{key: config[key] for key in shared if key in config}, **inner, "architectures": None}
        notes.append(
            f"text_config of {config.get('model_type')} is taken: save that text model alone, and name its folder in model.path"
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
    read = {key: value for key, value in known.items() if key in fields | arch._OLD_KEYS}
    if left := sorted(known.keys() - read.keys()):
        notes.append(f"left out of config.json, which the pinned transformers does not read for {kind}: {', '.join(left)}")
    for key in (*arch.INTEGERS, "intermediate_size", "num_key_value_heads", "head_dim"):
        # Published text_configs leave out what is the class's default.
        if key in fields and read.get(key) is None and (value := Values(read).get(key)) is not None:
            read[key] = value
    return read, notes


def size_of(architecture: Mapping[str, Any]) -> str:
    """Parameters for people: 8.2B."""
    count = parameter_count(architecture)
    return "of unknown size" if count is None else f"{count / 1e9:.3g}B"
