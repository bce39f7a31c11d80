"""What the commands of a batch script start: processes for GPUs, where they meet, and what becomes of their exit status, their
environment and their GPUs. The rules of ``sbatch.yaml`` that no pattern over one line finds."""

from __future__ import annotations

import ast
import operator
import re
import shlex
import stat
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from clustertune.check.batch_script import ASIDE, PIECE, SRUN, Script, options_of, pattern_of, substitutions

Hit = tuple[str, int, dict[str, Any]]
"""Id of a rule, line, and what its texts name in braces."""
_BESIDE_BYTES = 64 * 1024
"""Of a file that the script names: accelerate's, or a script that srun starts."""


def _beside(script: Script, name: str) -> str:
    """The text of a file that lies where the script or its caller is; empty where it is not there, or cannot be one."""
    if not name or re.search(r"[$`*@\0\n]", name):
        return ""
    for place in (script.cwd, Path(script.path).parent):
        try:
            file = place / name
            info = file.stat()
            if stat.S_ISREG(info.st_mode) and info.st_size <= _BESIDE_BYTES:
                return file.read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            continue
    return ""


# --- how many processes for how many GPUs ----------------------------------------------------------------------------------

_LAUNCHER = re.compile(
    r"(?:^|(?<=[\s'\"/(]))(?P<name>accelerate launch|accelerate-launch|accelerate\.commands\.launch|torchrun|"
    r"torch\.distributed\.(?:run|launch)|deepspeed|tune run)(?=\s)"
)
_OF_ALL = ("accelerate",)
"""Launchers whose number of processes is that of all machines."""
_SHARED = re.compile(r"CUDA_VISIBLE_DEVICES|\bvllm[ -]serve\b|\bnvidia-cuda-mps|--use_cpu\b|--cpu\b|vllm\.entrypoints|sglang")
"""Where it stands, GPUs of a node are shared out by hand, or not used."""
_ALONE_ON_ALL = re.compile(
    r"(?i)eval|infer|generat|predict|export|convert|merge|quantiz|tokeniz|prepare|preprocess|download|bench|serve|vllm|gradio|"
    r"parallelize|device_map|(?:tensor|pipeline|model)[-_]parallel"
)
"""Programs and options of one process that takes several GPUs by itself, or needs none."""
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def gpus_of(script: Script) -> int:
    """GPUs of each node, where the header says it; else 0."""
    if match := re.search(r"(?:^|,)(?:[\w.-]+:)?(\d{1,3})$", script.value("gpus-per-node")):
        return int(match[1])
    if match := re.search(r"(?:^|,)gpu(?::[\w.-]*[A-Za-z][\w.-]*)?(?::(\d{1,3}))?(?=,|$|\()", script.value("gres")):
        return int(match[1] or 1)
    if script.count("gpus-per-task"):
        return script.count("gpus-per-task") * script.tasks
    total = re.search(r"(\d{1,4})$", script.value("gpus"))
    return int(total[1]) // script.least_nodes if total else 0


def _nodes(script: Script) -> int:
    """Nodes of the job, where the header says one number; else 0."""
    return script.count("nodes") or (1 if "nodes" not in script.directives and "ntasks" not in script.directives else 0)


def _known(script: Script) -> dict[str, int]:
    """What Slurm's variables are by the header."""
    nodes, gpus, tasks = _nodes(script), gpus_of(script), script.tasks
    known = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus),
        **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), nodes * tasks),
        "SLURM_GPUS": nodes * gpus,
    }
    return {name: value for name, value in known.items() if value}


def _number(script: Script, text: str, line: int, depth: int = 4) -> int | None:
    """The whole number that an expression of the shell is; None where it is not known here."""

    def named(match: re.Match[str]) -> str:
        name, known = match[1], _known(script)
        if name in known:
            return str(known[name])
        one = script.last(name, line)
        value = _number(script, one.text.strip("\"'"), one.line, depth - 1) if one is not None and depth else None
        return "?" if value is None else str(value)

    text = re.sub(r"^\$\(\s*expr\s+(.*)\)$", r"\1", text.strip()).replace("\\*", "*").strip("$()[]\"' ")
    text = re.sub(r"\$?\{?(?<!\w)([A-Za-z_]\w*)(?::?[-=]\d+)?\}?", named, text)
    if len(text) > 200 or not re.fullmatch(r"[\d\s+*/%()-]+", text):
        return None
    try:
        return _calculated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10**6:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise ValueError


_VALUE = r"""(?P<value>\$\(\([^;&|]*?\)\)|\$\([^;&|()]*\)|`[^`]*`|[^\s'";&|]+)"""


def _option(script: Script, text: str, names: str, line: int) -> int | None:
    """The number behind an option of a launcher; None where it is not there or not known, -1 where it is not a plain one."""
    match = re.search(rf"""--(?:{names})(?:[= ]|\s)\s*["'\\]*{_VALUE}""", text)
    if match is None:
        return None
    value = _number(script, match["value"], line)
    return -1 if value is None else value


def _of_config(script: Script, text: str) -> dict[str, Any]:
    """The keys of the accelerate file that a command names, where the file is in the folder of the script."""
    named = re.search(r"""--config[-_]file[= ]["']?([^\s"';]+)""", text)
    try:
        body = yaml.safe_load(_beside(script, named[1])) if named else None
    except (yaml.YAMLError, RecursionError, ValueError):
        body = None
    return body if isinstance(body, dict) else {}


def _launches(script: Script) -> Iterator[tuple[int, str, str, str]]:
    """Line, launcher, its own text, and what stands in front of it in its line, of each call of a launcher."""
    for start, raw in script.lines:
        if not re.search(r"^\s*\w+=|^\s*export\s|^\s*(echo|printf|pip|which|cat)\b", raw):
            text = script.expand(raw, start)
            found = list(_LAUNCHER.finditer(text))
            for match, following in zip_longest(found, found[1:]):
                own = text[match.end() : following.start() if following else len(text)]
                yield (
                    start + text.count("\n", 0, match.start()),
                    match["name"],
                    re.split(r";|&&|\|", own)[0],
                    text[: match.start()],
                )


def _processes(script: Script) -> Iterator[Hit]:
    """Launchers that start fewer or more processes than there are GPUs."""
    gpus = gpus_of(script)
    if not gpus:
        return
    shared = _SHARED.search(script.raw) is not None
    for line, launcher, text, before in _launches(script):
        step = re.search(r"\bsrun((?:\s+-\S+(?:\s+[\w$\"'{}]+)?)*)", before)
        options = {one.name: one.value for one in options_of((step[1].split() if step else []), line)[0]}
        if {"gpus-per-task", "gpus", "gres", "gpus-per-node"} & options.keys():
            continue
        own, each, machines = _asked(script, launcher, text, line, options)
        if own is None or own < 1 or machines < 0:
            continue
        whole = max(machines, 1) * gpus
        most = whole if machines or not each else max(_nodes(script), 1) * gpus
        words = {"launcher": launcher, "processes": own, "gpus": whole, "each": gpus, "machines": machines}
        words["option"] = f"--num_processes $((SLURM_NNODES * {gpus}))" if each else f"--nproc-per-node={gpus}"
        if own < whole and not shared and not (own == 1 and _ALONE_ON_ALL.search(text)):
            yield "idle-gpus", line, words
        elif own > most and not re.search(r"--use_cpu|--cpu\b|gloo", text):
            yield "more-processes-than-gpus", line, words


def _asked(script: Script, launcher: str, text: str, line: int, options: dict[str, str]) -> tuple[int | None, bool, int]:
    """How many processes a launcher starts, whether that is the number of all machines, and of how many: 0 where it does not
    say, -1 where they are not known here."""
    if launcher.startswith(_OF_ALL):
        config = _of_config(script, text)
        number, machines = (_option(script, text, names, line) for names in ("num[-_]processes", "num[-_]machines"))
        filed = {key: config.get(key) if type(config.get(key)) is int else None for key in ("num_processes", "num_machines")}
        number = filed["num_processes"] if number is None else number
        machines = filed["num_machines"] if machines is None else machines
        return number, True, 0 if machines is None else machines
    if script.tasks > 1 and options.get("ntasks-per-node") != "1":
        return None, False, -1  # of another rule
    names = "num[-_]gpus" if launcher == "deepspeed" else "nproc[-_]per[-_]node"
    return _option(script, text, names, line), False, 1


def _tasks(script: Script) -> Iterator[Hit]:
    """More tasks on a node than it has GPUs, each of them a rank."""
    gpus, nodes = gpus_of(script), max(1, _nodes(script))
    if not gpus or _SHARED.search(script.raw):
        return
    for line, text in script.commands:
        match = _RANKS.match(text)
        if match is None or ASIDE.search(text) or _LAUNCHER.search(text) or _ALONE_ON_ALL.search(match["program"]):
            continue
        if match["starter"] == "srun":
            options = {one.name: one.value for one in options_of(match["options"].split(), line)[0]}
        else:
            total = re.search(r"\s--?(?:np?|ntasks)[= ](\d+)", match["options"])
            options = {"ntasks": total[1] if total else ""}
        own = _tasks_of(script, options, nodes)
        if own > gpus:
            words = {"launcher": match["starter"], "processes": own, "gpus": gpus, "each": gpus, "machines": 1}
            yield "more-processes-than-gpus", line, {**words, "option": f"--ntasks-per-node={gpus}"}
            return


_RANKS = re.compile(
    r"^(?:(?:exec|time|nohup|env|\w+=\S*) )*(?:\S*/)?(?P<starter>srun|mpirun|mpiexec)"
    r"(?P<options>(?:\s+-\S+(?:\s+[^\s-]\S*)?)*?)"
    r"\s+(?P<program>(?:\S*/)?python[\d.]*\s.*)"
)
"""A program of which a rank runs in each task."""


def _tasks_of(script: Script, options: dict[str, str], nodes: int) -> int:
    """Tasks on each node of a step, by its options, else the header's; 0 where GPUs are shared out to them."""
    if {"gpus-per-task", "gpus", "gres", "gpus-per-node"} & options.keys():
        return 0
    numbers = {name: int(value) for name, value in options.items() if value.isascii() and value.isdecimal()}
    if "ntasks-per-node" in numbers:
        return numbers["ntasks-per-node"]
    if "ntasks" in options:
        return -(-numbers.get("ntasks", 0) // (numbers.get("nodes") or nodes))
    return script.tasks


# --- where processes meet --------------------------------------------------------------------------------------------------

_INSIDE = r"(?:[^()]|\([^()]*(?:\([^()]*\)[^()]*)*\))*"
"""What stands in the brackets of a substitution, with brackets of its own."""
_HOST = r"(?:/\S*/)?(?:hostname|hostnamectl|uname\s+-n|ip\s|ifconfig|(?:cat\s+|<\s*)/etc/hostname|python[\d.]*\s[^`]*gethost)"
_SELF = (
    rf"(?:\$\(\s*{_HOST}{_INSIDE}\)|`\s*{_HOST}[^`]*`|"
    r"\$\(\s*scontrol\s+show\s+hostnames?\s+[\"']*\$\{?SLURMD_NODENAME[^()]*\)|"
    r"\$\{?(?:HOSTNAME|HOST|SLURMD_NODENAME|SLURM_TOPOLOGY_ADDR)\b\}?)"
)
_END = (
    r"(?:(?<!\w)(?!(?:\w+_)?(?:HOST|NODE|LOCAL|MY|OWN|SELF|THIS|WORKER|POD)_?(?:ADDR|ADDRESS|HOST|IP)=)"
    r"(?:\w+_)?(?:ADDR|ADDRESS|HOST|IP|ENDPOINT)=|"
    r"--(?:rdzv|master|main.process).(?:endpoint|addr|ip)(?:=|\s+))[\"'\\]*"
)
"""Where nodes meet. A name such as VLLM_HOST_IP or NODE_IP is each node's own address, and right so."""
_OWN_HOST = re.compile(rf"{_END}(?P<text>{_SELF})")
_TAKEN = re.compile(rf"(?:^|[\s;&])(?:export\s+)?(?P<name>[A-Za-z_]\w*)=[\"']?(?P<text>{_SELF})")
_OF_ONE = re.compile(r"(?:NODEID|PROCID|NODE_RANK|node_rank|RANK)[\"'}\])]*\s*(?:-eq|-ne|==?|!=|\))")
"""A branch for one of the nodes: which one it is, is not read here."""
_STARTS = re.compile(r"(?:^|[\s;&|(])(?:srun|mpirun|mpiexec|pdsh|clush|ssh)\s")


def _late(script: Script, text: str, line: int, depth: int = 4) -> str:
    """What is left of a line for the shell of a task: single quotes and escaped ``$`` as they are; what the batch shell itself
    puts in is ``@``, but for variables whose value it does not expand."""

    def early(part: str) -> str:
        part = part.replace("\\$", "\0").replace("\\`", "\1")
        for _ in range(20):
            fewer = re.sub(rf"\$\(\([^()]*\)\)|\$\({_INSIDE}\)|`[^`]*`", "@", part)
            if fewer == part:
                break
            part = fewer
        part = re.sub(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?[^\s{}\"'/;:]*?\}?(?![\w}])", put_in, part)
        return part.replace("\0", "$").replace("\1", "`")

    def put_in(match: re.Match[str]) -> str:
        one = script.last(match[1], line)
        if one is None or not depth or match[0] in one.text or len(text) > 20_000:
            return "@"
        if one.text and not one.shell.strip():  # in single quotes: not expanded by the batch shell
            return one.text.replace("$", "\0").replace("`", "\1")
        return _late(script, f'"{one.text}"', one.line, depth - 1).replace("$", "\0").replace("`", "\1")

    parts = []
    for piece in PIECE.findall(text):
        inner = piece[1:-1] if piece[0] in "'\"" and len(piece) > 1 else piece
        parts.append(piece[1:-1] if piece[0] == "'" and len(piece) > 1 else early(inner))
    return "".join(parts)[:20_000]


def _documents(script: Script) -> Iterator[tuple[int, str, str, bool]]:
    """First line, text, the command in front, and whether the shell leaves it alone, of each here-document."""
    for start, text in script.lines:
        if shown := re.search(r"(?<!<)<<-?\s*(['\"\\]?)(\w+)", text):
            first = start + text.count("\n")
            rows = []
            for row in script.rows[first:]:
                if row.strip() == shown[2]:
                    break
                rows.append(row)
            yield first + 1, "\n".join(rows), text, bool(shown[1])


def _task_texts(script: Script) -> Iterator[tuple[int, str]]:
    """Each text that the shells of tasks read, with its first line: in quotes behind srun, here-documents, scripts beside."""
    written: dict[str, tuple[int, str]] = {}
    for line, body, command, alone in _documents(script):
        text = body if alone else _late(script, f'"{body}"' if '"' not in body else body, line)
        if _STARTS.search(command):
            yield line, text
        elif target := re.search(r">\s*[\"']?([\w./-]+)", command):
            written[Path(target[1]).name] = (line, text)
    for start, raw in script.lines:
        if not _STARTS.search(raw) and not _STARTS.search(script.expand(raw, start)):
            continue
        yield start, _late(script, raw, start)
        for name in re.findall(r"(?:^|[\s\"'])([\w./-]+\.(?:sh|bash))(?=$|[\s\"'])", script.expand(raw, start)):
            if Path(name).name in written:
                yield written[Path(name).name]
            elif content := _beside(script, name):
                yield start, re.sub(r"(?m)^\s*#.*$", "", content).replace("\n", " ; ")


def _meeting(script: Script) -> Iterator[Hit]:
    """A rendezvous at the host that each node takes itself for."""
    if script.count("nodes") == 1:
        return
    for start, text in _task_texts(script):
        if _OF_ONE.search(text) or re.search(r"\bsrun\s.*?(?:-n ?1|--ntasks[= ]1)(?=\s)", text):
            continue
        for found in [_OWN_HOST.search(text), *_by_name(text)]:
            if found is not None:
                line = start + text.count("\n", 0, found.start("text"))
                yield "own-host", min(line, len(script.rows)), {"text": found["text"].strip()}
                break


def _by_name(text: str) -> Iterator[re.Match[str] | None]:
    """Where a variable of the task that holds its own host becomes the rendezvous."""
    for taken in _TAKEN.finditer(text):
        if re.search(rf"{_END}\$\{{?{taken['name']}\b", text):
            yield taken


# --- what becomes of the exit status ---------------------------------------------------------------------------------------

_TRAINS = pattern_of(
    r"(?:^|\s|/)(?:<TRAINER>|python[\d.]*\s+(?:-\S+\s+)*(?:\S+\.py|-m\s+\S*(?:train|sft|dpo|grpo|finetune|fine_tune)\S*)(?=\s|$))"
)
_INFORMS = re.compile(
    r"\bpython[\d.]*\s+(?:-\S+\s+)*?-c\s|\bcollect_env\b|\s--version\b|\bpip3?\s|\bds_report\b|\baccelerate env\b"
)
"""Calls that show what is installed."""
_AFTER = re.compile(
    r"^(?:(?:fi|done|else|then|esac)\s+)?(?:echo|printf|date|sleep|cp|mv|rm|rsync|cat|touch|ls|hostname|nvidia-smi|true|:|mkdir|tar|"
    r"seff|sacct|squeue|(?:conda\s+)?deactivate|module|exit\s+0|fi|\w+=\S*)(?=\s|$)"
)
"""Commands that seldom fail, and so give the script their 0."""
_HANDLED = re.compile(
    r"\b(?:exit|return)\b(?!\s*0\b)|\b(?:false|kill|requeue|scancel|PIPESTATUS|continue|break)\b|"
    r"(?:\[|\btest)\s.*\$\{?(?:\?|\w*(?i:rc|status|code|ret|err))"
)
"""What makes the script end with another status than 0."""


def _joined(text: str) -> list[tuple[str, str]]:
    """The commands of a line as text, each with what joins it to the next: ``|``, ``||``, ``&&``, ``&``, ``;`` or nothing.

    Those of substitutions are left out: what they print is a value.
    """
    text = re.sub(r"\d?>&\d?-?|&>>?|<&\d", " ", substitutions(text.replace("\n", " "))[0])
    reader = shlex.shlex(text, posix=True, punctuation_chars=";&|()")
    reader.whitespace_split, reader.commenters = True, ""
    try:
        words = list(reader)
    except ValueError:
        return []
    found: list[tuple[str, str]] = []
    held: list[str] = []
    for word in [*words, ""]:
        if not word or set(word) <= set(";&|()"):
            found.append((" ".join(held), word))
            held = []
        else:
            held.append(word)
    return [pair for pair in found if pair[0]]


def _is_training(command: str) -> bool:
    stepped = SRUN.search(command) is not None and ASIDE.search(command) is None and _INFORMS.search(command) is None
    return (stepped or _TRAINS.search(command) is not None) and not command.startswith(
        ("if ", "while ", "until ", "! ", "echo ")
    )


def _statuses(script: Script) -> Iterator[Hit]:
    """Calls whose failure ends the job with 0."""
    body = script.body
    pipefail = re.search(r"\bset\b[^\n#;&]*\bpipefail\b|\bPIPESTATUS\b", body) is not None
    calls = [
        (start, command, then)
        for start, raw in script.lines
        if raw.strip()
        for command, then in _joined(script.expand(raw, start))
    ]
    last, tested, background = -1, False, []
    looped = re.search(r"(?m)^\s*(?:for|while)\b", body) is not None
    for at, (start, command, then) in enumerate(calls):
        if then == "&" and _is_training(command):
            background.append(start)
        elif _is_training(command) or (background and not looped and re.match(r"wait\s+\S", command)):
            last, tested = (at, False) if then in (";", "", ")") else (last, tested)
            rest = [text for line, text, _ in calls[at + 1 :] if line == start]
            if then in ("|", "|&") and pipefail:
                last, tested = at + next((n for n, one in enumerate(calls[at:]) if "|" not in one[2]), 0), False
            elif then in ("|", "|&"):
                piped = f"| {rest[0].split()[0]}" if rest else "|"
                yield "exit-status-lost", start, {"text": piped, "fix": "set -o pipefail above"}
            elif then == "||" and rest and _gives_up(rest):
                yield "exit-status-lost", start, {"text": f"|| {rest[0]}", "fix": "leave it out, or end with: || exit 1"}
        elif re.match(r"if\s+(?!!)", command) and _is_training(re.sub(r"^if\s+", "", command)):
            last, tested = at, True
    yield from _of_background(script, background, looped)
    yield from _of_the_end(script, calls, last, tested)


def _gives_up(rest: list[str]) -> bool:
    """Whether what stands behind ``||`` ends with 0."""
    return not _HANDLED.search(_without_text(rest)) and re.match(r"(?:\{ )?(?:true|:|echo|printf)\b", rest[0]) is not None


def _without_text(commands: list[str]) -> str:
    """The commands without those that only print."""
    return "\n".join(one for one in commands if not re.match(r"(?:(?:then|else|do)\s+)?(?:echo|printf)\b", one))


def _of_background(script: Script, background: list[int], looped: bool) -> Iterator[Hit]:
    """Trainings in the background for which nothing waits, or a ``wait`` that returns 0."""
    waits = re.findall(r"(?m)(?:^|[;&|]|\bdo\b|\bthen\b)\s*wait\b([^\n;&|]*)", script.body)
    if background and not waits and not re.search(r"\bfg\b|\bkill -0\b|\btrap\b", script.body):
        yield "exit-status-lost", background[-1], {"text": "& without wait", "fix": 'child=$!; wait "$child"'}
    elif len(background) == 1 and not looped and waits and not any(word.strip() for word in waits):
        words = {"text": "& and a bare wait, which returns 0", "fix": 'child=$!; wait "$child"'}
        yield "exit-status-lost", background[0], words


_ERREXIT = re.compile(r"(?m)^\s*set\s+(?:-\w+\s+)*(?:-\w*e\w*|-o\s+errexit)|^#!\S*sh\s+-\w*e")
_ON_EXIT = re.compile(r"""(?m)^\s*trap\s+(?:(?P<quote>["'])(?P<text>.*?)(?P=quote)|(?P<name>\w+))\s+[^\n]*\b(?:EXIT|ERR|0)\b""")


def _of_the_end(script: Script, calls: list[tuple[int, str, str]], trained: int, tested: bool) -> Iterator[Hit]:
    """A last command, or a trap at the end, that gives the script a status of its own. ``tested``: the training stands in an
    ``if``, which takes its status."""
    for trap in _ON_EXIT.finditer(script.body):
        named = re.search(rf"(?ms)^\s*(?:function\s+)?{trap['name']}\s*(?:\(\s*\))?\s*\{{(.*?)\}}", script.body)
        if re.search(r"\bexit\s+0\b", trap["text"] or (named[1] if named and trap["name"] else "")):
            line = script.body.count("\n", 0, trap.start()) + 1 + trap[0].count("\n", 0, len(trap[0]) - len(trap[0].lstrip()))
            yield "exit-status-lost", line, {"text": "the trap ends with exit 0", "fix": 'status=$? first, and: exit "$status"'}
    behind = [command for _, command, _ in calls[trained + 1 :]]
    if trained < 0 or not behind or (_ERREXIT.search(script.raw) and not tested) or _HANDLED.search(_without_text(behind)):
        return
    if _AFTER.search(behind[-1]):
        fix = "set -e above, or end with the status of the training"
        yield (
            "exit-status-lost",
            calls[trained][0],
            {"text": f"{behind[-1].split()[0]} behind it ends the script with 0", "fix": fix},
        )


# --- environment -----------------------------------------------------------------------------------------------------------

_READ = re.compile(
    r"(?:NCCL|WANDB|HF|TORCH|PYTORCH|TRANSFORMERS|UCX|FI|GLOO|TRITON|VLLM|TORCHINDUCTOR)_\w+|(?:OMP|MKL)_NUM_THREADS|"
    r"MASTER_(?:ADDR|PORT)|WORLD_SIZE|CUDA_(?:DEVICE|LAUNCH|CACHE)\w+|TOKENIZERS_PARALLELISM"
)
"""Names that programs read from their environment, and no shell."""
_ALONE = re.compile(r"""^\s*([A-Za-z_]\w*)=(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\([^\n]*\)|[^\s;&|()]*)\s*;?\s*$""", re.DOTALL)


def _environment(script: Script) -> Iterator[Hit]:
    """Variables that the program does not get: not exported, or kept back by --export."""
    body = script.body
    starts = [(line, text) for line, text in script.commands if _is_training(text)]
    if not starts or re.search(r"(?m)^\s*set\s+(?:-\w*a\w*|-o\s+allexport)", body):
        return
    tasks = " ".join(text for _, text in _task_texts(script))
    for start, raw in script.lines:
        if not (match := _ALONE.match(raw)):
            continue
        name = match[1]
        if re.search(rf"\b(?:export|declare\s+-\w*x\w*|typeset\s+-\w*x\w*)\b[^\n;&|]*\b{name}\b|--export=\S*\b{name}\b", body):
            continue
        asked = rf"\$\{{?{name}\b"
        of_task = re.search(asked, tasks) and not re.search(rf"(?:^|[\s;'\"]){name}=", tasks)
        unread = _READ.fullmatch(name) and not re.search(asked, body)
        if of_task or unread:
            yield "not-exported", start, {"name": name}
    yield from _kept_back(script, starts)


def _kept_back(script: Script, starts: list[tuple[int, str]]) -> Iterator[Hit]:
    """``--export`` without ALL: what the script itself exports does not reach the tasks."""
    exported = re.findall(r"(?m)^\s*export\s+([A-Za-z_]\w*)=", script.body)
    of_job = "export" in script.directives
    undone = re.search(r"unset\s+SLURM_EXPORT_ENV|SLURM_EXPORT_ENV=[\"']?ALL", script.body)
    changed = ["PATH"] if re.search(r"(?m)^\s*(?:module|ml)\s+(?:load\s+)?\w|\bactivate\b", script.body) else []
    exported = [*exported, *changed]
    for line, text in [(line, text) for line, text in starts if SRUN.search(text)]:
        own = re.search(r"--export[= ](\S+)", text)
        at, given = (line, own[1]) if own else (script.directives["export"].line, script.value("export")) if of_job else (0, "")
        if not given or "$" in given or (own is None and undone) or "all" in given.lower().split(","):
            continue
        kept = [name for name in exported if name not in re.findall(r"\w+", given)]
        if kept:
            yield "export-without-all", at, {"text": f"--export={given}", "name": kept[0]}
            if own is None:
                return


# --- containers and limits -------------------------------------------------------------------------------------------------

_CONTAINER = re.compile(
    r"(?:^|[\s/])(?:(?P<sif>apptainer|singularity)\s+(?:-\S+\s+)*(?:exec|run)|(?P<oci>docker|podman)\s+(?:-\S+\s+)*run)\s(?P<rest>.*)"
)
_WITH_GPUS = re.compile(
    r"--(?:nv|nvccli|rocm|gpus|runtime[= ]nvidia|device[= ]\S*(?:nvidia|kfd)|privileged)\b|"
    r"NVIDIA_VISIBLE_DEVICES(?!=[\"']?(?:void|none)\b)|--hooks-dir|--security-opt[= ]\S*nvidia"
)
_PROGRAM = pattern_of(
    r"(?:^|\s)(?:<TRAINER>|(?:\S*/)?python[\d.]*\s+(?:-\S+\s+)*\S+(?=\s|$)|(?:\S*/)?(?:ba)?sh\s+(?:-\w*c\s|\S+\.sh\b))"
)
_VALUELESS = re.compile(
    r"-(?:-(?:rm|cleanenv|containall|contain|no-home|writable-tmpfs|writable|fakeroot|init|compat|pid|ipc|interactive|tty)|"
    r"[eciCdtu]|it|ti)$"
)
"""Options of containers that take no value."""


_AMD = re.compile(r"(?i)\bROCM|\bROCR_|\bHIP_|\bMIOPEN_|:mi\d{3}|singularity-\w+-bindings|\bhsn\b")
"""AMD's GPUs are devices of the node, which the container sees without a flag; its image holds their libraries."""


def _may_hold_options(words: list[str]) -> bool:
    """Whether a variable stands among the options: what is in it is not known. The last word is the image."""
    for before, word in zip(["", *words], words[:-1], strict=False):
        if re.match(r"[\"']?[$@]", word) and (not before.startswith("-") or "=" in before or _VALUELESS.match(before)):
            return True
    return False


def _containers(script: Script) -> Iterator[Hit]:
    """Containers that are started without the GPUs that the job has."""
    asks = gpus_of(script) or any("gpu" in one.name or "gpu" in one.value for one in script.options)
    if not asks or re.search(r"\b(?:APPTAINER|SINGULARITY)(?:ENV)?_(?:NV|NVCCLI|ROCM)=", script.raw):
        return
    if _AMD.search(script.raw):
        return
    found, others = [], False
    for line, text in script.commands:
        match = _CONTAINER.search(text)
        program = _PROGRAM.search(match["rest"]) if match else None
        if match is None:
            continue
        options = match["rest"][: program.start()] if program else match["rest"]
        front = match[0][: match[0].index(match["rest"])]
        if _WITH_GPUS.search(front + options) or _may_hold_options(options.split()) or _elsewhere(match, options):
            others = True
        elif program or re.fullmatch(r"\S+\.sif|docker://\S+", options):
            flag = "--nv" if match["sif"] else "--gpus all" if match["oci"] == "docker" else "--device nvidia.com/gpu=all"
            found.append((line, program[0] if program else "", {"runtime": match["sif"] or match["oci"], "flag": flag}))
    for line, called, words in found:
        if not others or pattern_of("(?:^|[\\s/])<TRAINER>").search(called):
            yield "container-without-gpus", line, words


def _elsewhere(match: re.Match[str], options: str) -> bool:
    """Whether the image is a name for a running container, or one of no interest here."""
    return not options.strip() or match["rest"].startswith("--help")


def _minutes(script: Script) -> Iterator[Hit]:
    """A time limit that reads like hours: 48 or 48:00, and not 45 or 60."""
    limit = script.value("time")
    hours = re.fullmatch(r"(\d{1,3})(:00)?", limit)
    whole = int(hours[1]) if hours else 0
    reads = whole in (24, 36, 48, 72, 96, 168) if hours and hours[2] else 1 < whole < 200 and whole % 5
    if reads:
        words = {"value": limit, "minutes": whole, "fixed": f"{whole:02d}:00:00"}
        yield "time-in-minutes", script.directives["time"].line, words


READERS: tuple[Callable[[Script], Iterator[Hit]], ...] = (
    _processes, _tasks, _meeting, _statuses, _environment, _containers, _minutes,
)  # fmt: skip
