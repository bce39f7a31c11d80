"""What the campaign spoils files and names with; each a function of a random number generator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

REPO = Path(__file__).resolve().parent.parent


def damage(path: Path, chance: Random, others: Sequence[Path]) -> str | None:
    """Flip a bit of a file, cut it, put another in its place, or remove it. Returns the kind; None where nothing changed."""
    data = path.read_bytes()
    how = chance.choice(["flip", "flip", "cut", "swap", "delete", "tail of zeros"])
    changed = bytearray(data)
    if how == "flip" and data:
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del changed[chance.randrange(len(data) or 1) :]
    elif how == "swap":
        changed = bytearray(chance.choice(others).read_bytes())
    elif how == "tail of zeros":
        size = chance.randint(1, 4096)
        changed[-size:] = bytes(min(size, len(data)))
    if how == "delete":
        path.unlink()
    elif bytes(changed) == data:
        return None
    else:
        path.write_bytes(changed)
    return how


# --- files of users -----------------------------------------------------------------------------------------------------

CONFIGS = [
    *[(recipe, file) for recipe in ("tiny-oasst2", "llama405b-oasst2") for file in ("recipe.yaml", "accelerate.yaml")],
    ("tiny-oasst2", "model.json"), ("llama8b-lima", "recipe.yaml"),
    ("llama70b-zero3-offload", "recipe.yaml"), ("llama70b-zero3-offload", "accelerate.yaml"),
    *[("llama70b-zero3-offload", "deepspeed.json")] * 2, ("clusters", "dgx-h100.yaml"), ("clusters", "idris-jeanzay-h100.yaml"),
]  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64,
    0.5, 1.5, 1e-9, 1e30, float("nan"), float("inf"), "", " ", "x y", "../../etc", "yes", "1e-4",
    "0x10", "auto", "none", [], [1], ["a", "a"], {}, {"a": 1}, 10**30, -(10**30), "\u202ex", "a" * 5000, "1_000", "$HOME", "~",
)  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every path of a document with what stands there, inner mappings too."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key), inner
        yield from leaves(inner, (*path, key))


def mutate(path: Path, chance: Random) -> str:
    """Spoil a YAML or JSON file; returns what was done."""
    text = path.read_text()
    if chance.random() < 0.25:
        data = bytearray(text.encode())
        for _ in range(chance.choice([1, 1, 3])):
            at = chance.randrange(len(data))
            what = chance.randrange(4)
            if what == 0:
                data[at] = chance.randrange(256)
            elif what == 1:
                del data[at : at + chance.randint(1, 9)]
            elif what == 2:
                data[at:at] = data[at : at + chance.randint(1, 30)]
            else:
                del data[max(1, at) :]
        path.write_bytes(data)
        return f"{path.name}: bytes"
    body = yaml.safe_load(text)
    where, value = chance.choice(list(leaves(body)))
    inner = body
    for key in where[:-1]:
        inner = inner[key]
    last, how = where[-1], chance.choice(["typo", "value", "value", "value", "near", "near", "drop", "more"])
    if how == "typo" and isinstance(last, str):
        at = len(last) // 2
        inner[last[:at] + chance.choice("qxz_-. ") + last[at:]] = inner.pop(last)
    elif how == "drop":
        del inner[last]
    elif how == "more" and isinstance(inner, dict):
        inner["a_key_of_nobody"] = chance.choice(VALUES)
    elif how == "near" and isinstance(value, bool | int | float):
        number = float(value)
        inner[last] = chance.choice(
            [number, int(number), -value, value * 2, value / 2, value + 1, str(value), [value], not value]
        )
    else:
        inner[last] = chance.choice(VALUES)
    shown = repr(inner.get(last) if isinstance(inner, dict) else inner)[:80]
    path.write_text(json.dumps(body) if path.suffix == ".json" else yaml.safe_dump(body, sort_keys=False, allow_unicode=True))
    return f"{path.name}: {how} at {'.'.join(map(str, where))}: {shown}"


def alike(given: Any, found: Any) -> bool:  # noqa: PLR0911 - one line for each way
    """Whether a value of a file and what came of it are the same, written otherwise or not."""
    if given == found or (given in ({}, [], None) and found in ({}, [], None)):
        return True
    if isinstance(given, list) and isinstance(found, list):
        return len(given) == len(found) and all(map(alike, given, found))
    if isinstance(given, Mapping) and isinstance(found, Mapping):
        return all(key in found and alike(value, found[key]) for key, value in given.items())
    if isinstance(found, list) and len(found) == 1:
        return alike(given, found[0])
    if isinstance(found, bool) or isinstance(given, bool):
        return str(given).lower() in {True: ("true", "yes", "on"), False: ("false", "no", "off")}.get(
            found, (str(found).lower(),)
        )
    try:
        return float(str(given).replace("_", "")) == float(found)
    except (TypeError, ValueError):
        return str(given).strip().lower() == str(found).lower()


def differences(path: Path, found: dict[str, Any], file: str) -> list[str]:
    """What an accepted file says and the command did not take as it stands there."""
    given = yaml.safe_load(path.read_bytes())
    if file == "accelerate.yaml":
        taken = found["accelerate"]
    elif file == "deepspeed.json":
        taken = found["deepspeed"]
    elif file == "model.json":
        taken = found["architecture"]
    elif file == "cluster":
        taken = found
    else:
        taken = {}
        for key, entry in found["values"].items():
            taken |= _nest(key, entry)
    wrong = []
    for where, value in leaves(given):
        if isinstance(value, Mapping | list) or isinstance(where[-1], int):
            continue  # its parts are compared, lists whole below
        wrong += _compare(where, value, taken)
    for where, value in leaves(given):
        if isinstance(value, list) and not any(isinstance(part, Mapping) for part in value):
            wrong += _compare(where, value, taken)
    return wrong


def _nest(key: str, entry: Any) -> dict[str, Any]:
    return {key: entry["value"] if isinstance(entry, Mapping) and "value" in entry else entry}


def _compare(where: tuple[Any, ...], value: Any, taken: Any) -> list[str]:
    dotted = ".".join(map(str, where))
    inner = taken
    if isinstance(taken, Mapping) and dotted in taken:
        inner = taken[dotted]
    else:
        for at, key in enumerate(where):
            rest = ".".join(map(str, where[at:]))
            if isinstance(inner, Mapping) and rest in inner:
                inner = inner[rest]
                break
            try:
                inner = inner[key]
            except (KeyError, IndexError, TypeError):
                return [] if value in (None, {}, []) else [f"{dotted}={value!r} is nowhere"]
    return [] if alike(value, inner) else [f"{dotted} is {value!r}, taken as {inner!r}"]


# --- data ---------------------------------------------------------------------------------------------------------------

BAD_LINES: tuple[bytes, ...] = (
    b"{", b"[]", b"3", b"null", b'"text"', b"{}", b'{"messages": []}', b'{"messages": 3}', b'{"messages": [{}]}', b"\xff\xfe{}",
    b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "king", "content": "x"}, {"role": "assistant", "content": "y"}]}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\\u200b"}]}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null}]}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ["a"]}]}',
    b'{"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "y"}]}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}',
    b'{"message": "x"}', b'{"messages": NaN}',
    b'{"messages": {"role": "user"}}', b'{"messages": [["user", "x"]]}', b"{" * 3000, b"[" * 3000,
    b'{"messages": "x"}{"messages": "y"}',
    b"<html><body>404</body></html>", b"version https://git-lfs.github.com/spec/v1", b'{"a": ' + b"9" * 5000 + b"}",
)  # fmt: skip


def data_file(folder: Path, chance: Random) -> tuple[Path, str, int | None, int | None]:
    """A file of conversations, some of them bad, or one spoiled whole: path, format, rows of each kind where known."""
    good = chance.randint(3, 30)
    rows = [
        json.dumps({"messages": [{"role": "user", "content": f"question {n} of {chance.random()}"},
                                 {"role": "assistant", "content": f"answer {n}, at some length"}]}).encode()
        for n in range(good)
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    if chance.random() < 0.7:
        bad = [chance.choice(BAD_LINES) for _ in range(chance.randint(1, 12))]
        lines = rows + bad
        chance.shuffle(lines)
        path.write_bytes(b"\n".join(lines) + chance.choice([b"\n", b"", b"\n\n\n"]))
        return path, "messages", good, len(bad)
    text = b"\n".join(rows) + b"\n"
    array = b"[" + b",\n".join(rows) + b"]"
    spoiled: dict[str, Callable[[], bytes]] = {
        "cut": lambda: text[: chance.randrange(len(text))],
        "empty": lambda: chance.choice([b"", b"\n", b" \n\n"]),
        "binary": lambda: chance.randbytes(3000),
        "BOM": lambda: b"\xef\xbb\xbf" + text,
        "CRLF": lambda: text.replace(b"\n", b"\r\n"),
        "array": lambda: array,
        "cut array": lambda: array[: chance.randrange(len(array))],
        "gz": lambda: b"\x1f\x8b" + chance.randbytes(300),
        "other format": lambda: text,
    }
    how = chance.choice([*spoiled, "folder"])
    path = path.with_name({"array": "rows.json", "cut array": "rows.json", "gz": "rows.jsonl.gz"}.get(how, path.name))
    if how in spoiled:
        path.write_bytes(spoiled[how]())
    else:
        path.mkdir()
    if how in ("BOM", "CRLF", "array"):
        return path, "messages", good, 0
    others = ["alpaca", "sharegpt", "oasst-tree", "prompt-completion"]
    return path, chance.choice(others) if how == "other format" else "messages", None, None


# --- names --------------------------------------------------------------------------------------------------------------


def hostile_name(chance: Random, canary: Path) -> str:
    """A name that would do something where somebody evaluates it; then the file ``canary`` is there."""
    act = f"touch {canary}"
    name = chance.choice([
        f"$({act})", f"`{act}`", f"; {act} ;", f"a\n{act}\n", f"a && {act}", f"a | {act}", f"'; {act}; '", f'"; {act}; "',
        f"a\r\n#SBATCH --wrap={act}",
        f"-oProxyCommand={act}", f"--wrap={act}", f"../../{canary.name}", f"{canary}",
        "{{ cycler.__init__.__globals__.os.popen('" + act + "') }}",
        f"{{% for x in ().__class__.__base__.__subclasses__() %}}{{{{ x }}}}{{% endfor %}}{canary.name}",
        f"<script>alert('{canary.name}')</script>",
        f"<img src=x onerror=alert('{canary.name}')>", f"\x1b]0;{canary.name}\x07", f"\u202e{canary.name}",
        f"!!python/object/apply:os.system ['{act}']",
        f"%(canary)s%n{canary.name}", f"${{IFS}}{act}", f"\x00{canary.name}", f"{canary.name}\t|\t{act}",
        "x" * 300 + canary.name, "..", ".", "~root", "-rf", "con\u0000",
    ])  # fmt: skip
    return chance.choice(["", "", "a", "\u00e9 "]) + name


OVERRIDES = (
    "model.name", "data.name", "data.input", "base", "accelerate", "train.run_name", "model.chat_template", "slurm.time", "x",
)  # fmt: skip
CLUSTER_KEYS = (
    ("slurm", "partition"), ("slurm", "account"), ("container", "image"), ("storage", "shared"), ("network", "interface"),
)  # fmt: skip
"""Where a name can stand in a recipe, and in a cluster file."""


def hostile_command(kind: str, name: str, work: Path, chance: Random) -> list[str]:
    """A command in which the name stands where a user's word is expected."""
    name = name.replace("\x00", "")  # no argument can hold it
    recipe, path = str(REPO / "recipes/tiny-oasst2"), f"./{name}" if name.startswith("-") else name
    if kind == "recipe":
        return [chance.choice(["show", "submit", "plan", "prepare", "run"]), path]
    if kind == "override":
        key = chance.choice(OVERRIDES)
        return [chance.choice(["show", "submit"]), recipe, f"{key}={json.dumps(name)}", *(["--dry-run"] if key == "x" else [])]
    if kind == "run-dir":
        return ["watch", path, "--once"]
    if kind == "template":
        template = work / "t.jinja"
        template.write_text("{{ messages[0].content }}" + name)
        return ["prepare", recipe, f"model.chat_template={template}", "--out", str(work / "data")]
    cluster = yaml.safe_load((REPO / "ops/clusters/dgx-h100.yaml").read_text())
    if kind == "sbatch":
        section, key = chance.choice(CLUSTER_KEYS)
        cluster[section][key] = name
    else:
        cluster["nodes"][1][chance.choice(["name", "address"])] = name
    file = work / "cluster.yaml"
    file.write_text(json.dumps(cluster))
    sbatch = ["submit", recipe, "--dry-run", "--verbose", "--cluster"]
    words = {"sbatch": sbatch, "host": ["nccl-check", "--dry-run", "--cluster"]}
    return [*words.get(kind, ["show-cluster"]), str(file)]


def plant(folder: Path, name: str) -> None:
    """Put a name into what the report shows of a run: its host, its model, its metrics."""
    path = folder / "run.json"
    body = json.loads(path.read_bytes())
    body["host"]["name"] = name
    body["command"] = ["clustertune", name]
    body["versions"]["torch"] = name
    path.write_text(json.dumps(body))
    with (folder / "metrics.jsonl").open("a") as out:
        event = {"event": "start", "time": 1.0, "attempt": 1, "step": 0, "world_size": 2, "resumed_from": name}
        out.write(json.dumps(event) + "\n")
        out.write(json.dumps({"event": "eval", "time": 2.0, "attempt": 1, "step": 1, "eval_loss": 1.0, name: 2.0}) + "\n")
        out.write(json.dumps({"event": "stop", "time": 3.0, "attempt": 1, "step": 1, "exit_code": 1, "reason": name}) + "\n")


def outside(case: Path, work: Path) -> set[str]:
    """What lies in a case's folder beside its work."""
    return {path.name for path in case.iterdir() if path != work and not re.search(r"^(out|run)", path.name)}
