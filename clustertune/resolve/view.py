"""What is known of a recipe, each value with where it came from, and of a cluster: for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from clustertune.cluster.schema import Cluster
from clustertune.console import make_table
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import architecture
from clustertune.recipe.layers import BESIDE, leaves
from clustertune.recipe.parameters import parameter_count, trained_count, uncounted
from clustertune.resolve.resolved import Derived, Resolved

if TYPE_CHECKING:
    from rich.console import Console

SECTIONS = (
    "base", "model", "data", "trainer", "reward", "rollout", "servers", "train", "lora", "activation_checkpointing",
    "reduce_dtype", "accelerate", "megatron", "slurm", "eval", "expect", "push",
)  # fmt: skip

_BY_TRAINER = {"trainer": ("dpo", "grpo"), "reward": ("grpo",), "rollout": ("grpo",)}
"""Sections that only recipes with these trainers show."""


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The document of ``show --json``: every set value with its origin, what was derived, and the resolved sections."""
    values = {key: {"value": value, "origin": origin} for key, value, origin in _rows(resolved)}
    shown = {".".join(key.split(".")[:2]) for key in values}  # TRL's own defaults aside
    return {
        "recipe": resolved.name,
        "folder": resolved.folder,
        "tiny": resolved.tiny,
        "values": values,
        "derived": [vars(item) for item in resolved.derived],
        "world_size": resolved.world_size,
        "data_parallel_size": resolved.data_parallel_size,
        "train_args": {key: value for key, value in resolved.train_args.items() if f"train.{key}" in shown},
        "architecture": resolved.architecture,
        "parameters": parameter_count(resolved.architecture),
        "trainable_parameters": trained_count(resolved.architecture, resolved.lora),
        "accelerate_file": resolved.accelerate_file,
        "accelerate": resolved.accelerate,
        **({"deepspeed": resolved.deepspeed} if resolved.deepspeed is not None else {}),
        "warnings": resolved.warnings,
        "fingerprint": resolved.fingerprint(),
    }


def render(resolved: Resolved, console: Console) -> None:
    """Print the table: key, value, origin; then the architecture, the distribution and the warnings."""
    from rich.text import Text

    title = resolved.name + (" --tiny" if resolved.tiny else "")
    table = make_table("key", "value", "origin", title=title, text_columns=3)
    section = ""
    for key, value, origin in _rows(resolved):
        name = key.split(".")[0] if "." in key else section
        if section and name != section:
            table.add_section()
        section = name
        table.add_row(Text(key), Text(_plain(value)), Text(origin, style=_style(origin)))
    console.print(table)
    for line in _notes(resolved):
        console.print(Text(line), soft_wrap=True)
    for warning in resolved.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def _rows(resolved: Resolved) -> Iterator[tuple[str, Any, str]]:
    """Key, value and origin of everything that is set, section by section, the derived values with their formula."""
    derived = {item.key: item for item in resolved.derived if item.key != "architecture"}
    body = resolved.recipe.model_dump(mode="json")
    stated = {".".join(key.split(".")[:2]) for key in resolved.origins}
    for name, complete in {
        "train": {"global_batch_size": resolved.global_batch_size, **resolved.train_args},
        "lora": resolved.lora,
    }.items():
        body[name] = complete and {key: value for key, value in complete.items() if f"{name}.{key}" in stated}
    for section in SECTIONS:
        if section == "accelerate" and not resolved.accelerate:
            continue  # Megatron's recipes have no such file
        if section in _BY_TRAINER and resolved.recipe.trainer not in _BY_TRAINER[section]:
            continue
        own = {key: item for key, item in derived.items() if key.split(".")[0] == section}
        for path, value in leaves(body[section], (section,)):
            if (key := ".".join(path)) in own:
                continue
            origin = resolved.origins.get(key, "default")
            if value not in (None, {}) or origin == "override" or (value is None and origin != "default"):
                yield key, value, origin
        for key, item in own.items():
            yield key, item.value, f"derived: {item.reason}"
        if section == "accelerate":
            overrides = {f"{name}.{key}": v for name in BESIDE for key, v in getattr(resolved, f"{name}_overrides").items()}
            yield from ((key, value, "override") for key, value in overrides.items() if key not in derived)
            yield from _deepspeed(resolved, derived)
        if section == "slurm":
            for key, item in derived.items():
                if "." not in key and key not in SECTIONS:
                    yield key, item.value, f"derived: {item.reason}"


def _deepspeed(resolved: Resolved, derived: Mapping[str, Derived]) -> Iterator[tuple[str, Any, str]]:
    """DeepSpeed's file, the values in the place of its ``auto``; what the command line gave was shown before."""
    if not resolved.deepspeed:
        return
    file = acc.deepspeed_file(resolved.accelerate)
    for path, value in leaves(resolved.deepspeed, ("deepspeed",)):
        if (key := ".".join(path)) in derived:
            yield key, derived[key].value, f"derived: {derived[key].reason}"
        elif key.partition(".")[2] not in resolved.deepspeed_overrides:
            yield key, value, str(file)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return json.dumps(value)


def _style(origin: str) -> str:
    kind = origin.replace(":", " ").split(" ", maxsplit=1)[0]
    return {"override": "bold", "tiny": "magenta", "derived": "cyan", "base": "dim", "default": "dim"}.get(kind, "")


def _notes(resolved: Resolved) -> Iterator[str]:
    total, trainable = parameter_count(resolved.architecture), trained_count(resolved.architecture, resolved.lora)
    counted = f", {total:,} parameters" if total else f" ({uncounted(resolved.architecture)})"
    if total and trainable:
        counted += f", {trainable:,} trained ({Decimal(f'{100 * trainable / total:.2g}'):f} %)"
    yield f"model.json: {architecture.summary(resolved.architecture)}{counted}"
    if not resolved.accelerate:
        return
    details = ", ".join(f"{key}={_plain(value)}" for key, value in acc.fsdp_settings(resolved.accelerate).items())
    yield f"{resolved.accelerate_file}: {acc.distributed_type(resolved.accelerate)}" + (f" ({details})" if details else "")


# --- a cluster -----------------------------------------------------------------------------------------------------------


def render_cluster(cluster: Cluster, console: Console) -> None:
    """Print the machines, the facts of a compute node, network, storage, Slurm and container, and the notes."""
    from rich.text import Text

    table = make_table("machine", "address", "roles", title=f"{cluster.name} ({cluster.source})", text_columns=3)
    for host in cluster.nodes:
        table.add_row(Text(host.name), Text(host.address), Text(", ".join(host.roles)))
    console.print(table)
    for label, text in _cluster_lines(cluster):
        console.print(Text(f"{label:<10} {text}"), soft_wrap=True)
    for note in cluster.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _cluster_lines(cluster: Cluster) -> Iterator[tuple[str, str]]:
    compute, network, storage, slurm = cluster.compute, cluster.network, cluster.storage, cluster.slurm
    gpus = f"{compute.gpus} x {compute.gpu or 'GPU'}" + (f" ({compute.interconnect})" if compute.interconnect else "")
    cpus = f"{compute.sockets} sockets, {compute.cores} cores, {compute.threads} threads, {compute.memory_gb:g} GB"
    yield "each node", f"{gpus if compute.gpus else 'no GPU'}; {cpus}"
    for node in range(max(len(compute.numa_gpus), len(compute.numa_cpus))):
        group = compute.numa_gpus[node] if compute.numa_gpus else ()
        sizes = [
            f"GPUs {', '.join(map(str, group))}" if group else "",
            f"CPUs {compute.numa_cpus[node]}" if compute.numa_cpus else "",
        ]
        yield f"NUMA {node}", "; ".join(filter(None, sizes))
    ports = f"{network.ports} x " if network.ports > 1 else ""
    speed = f", {ports}{network.gbit:g} Gbit/s" if network.gbit else ""
    yield "network", f"{network.kind}{speed}, {network.interface or 'default-route interface'}"
    for name, value in network.environment.items():
        yield "", f"{name}={value}"
    for brick in storage.bricks:
        yield "brick", f"{brick.mount}: {brick.node}:{brick.path}, {brick.filesystem}, {brick.tb:g} TB"
    if storage.pool:
        yield "pool", f"{storage.pool.mount}: {storage.pool.kind}, create={storage.pool.create}"
    yield "folders", f"shared {storage.shared or 'not given'}, scratch {storage.scratch}"
    defaults = {"caches": "~/.cache, or $HF_HOME", "models": "the caches", "runs": "./runs"}
    for what, default in defaults.items():
        yield what, storage.folder(what) or default
    if slurm:
        count = cluster.gres(compute.gpus) if compute.gpus else "no gres"
        sacct = "accounting" if slurm.accounting else "no accounting (sacct)"
        yield "Slurm", f"partition {slurm.partition}, {count}, time limit {slurm.max_time}, {sacct}"
        if slurm.site_options() or slurm.modules:
            yield "", " ".join([*slurm.site_options(), *(f"module load {name};" for name in slurm.modules)]).rstrip(";")
    else:
        yield "Slurm", "none"
    yield "container", f"{cluster.container.runtime}" + (f" {cluster.container.image}" if cluster.container.image else "")
    if cluster.container.megatron:
        yield "container of Megatron recipes", cluster.container.megatron
    if cluster.container.vllm:
        yield "vLLM", cluster.container.vllm
