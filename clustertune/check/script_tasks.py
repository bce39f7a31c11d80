"""Rules for tasks: which shell puts their numbers in, how many ranks there are, what each one may use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.script_batch import Batch, Mistake, Srun, Token, is_light, options_in, scanned, whole
from clustertune.check.script_shell import Reference, ShellCommand, Text, walk

_TASK = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def check_expansion(batch: Batch) -> Iterator[Mistake]:
    """``$SLURM_NODEID`` and its like, put in by the batch shell and not by the task."""
    names = _telling(batch)
    if not names:
        return
    exported = {
        word.text for command in batch.everything() if command.name == "export" for word in command.words[1:]
    }  # of `export NAME` without a value
    reaching: dict[tuple[int, str], str] = {}
    tainted = _tainted(batch, names)
    for command in batch.everything():
        if not _reaches_tasks(batch, command):
            for assignment in command.assignments:
                if batch.sruns and (assignment.exported or assignment.name in exported):
                    _note(reaching, _references([assignment.value]), names, {}, f"export {assignment.name}")
            texts = [heredoc.body for heredoc in command.heredocs]
            _note(reaching, _references(texts), names, tainted, "a here-document")
        else:
            _note(reaching, _references(list(command.texts())), names, tainted, command.name or "the command")
    for (line, name), where in sorted(reaching.items()):
        message = f"the batch shell puts ${name} in, once, for {where}: every task gets the value of task 0"
        remedy = f"srun bash -c '... \"${name}\" ...' with single quotes, in which the task's own shell puts it in"
        yield Mistake(line, "expanded-too-early", message, remedy)


def _telling(batch: Batch) -> tuple[str, ...]:
    """The variables that differ between the job's tasks, as far as the header tells how many there are."""
    nodes, each, total = batch.nodes, batch.tasks_per_node, batch.count("ntasks")
    if nodes == 1 and (each == 1 or total == 1):
        return ()
    names = list(_TASK)
    if nodes == 1:
        names.remove("SLURM_NODEID")
    if each == 1 and (batch.header.last("ntasks-per-node") or batch.header.last("ntasks")):
        names.remove("SLURM_LOCALID")
    return tuple(names)


def _references(texts: list[Text]) -> list[Reference]:
    found = [reference for text in texts for reference in text.references]
    inner = [command for text in texts for command in walk(text.inner)]
    return found + [reference for command in inner for text in command.texts() for reference in text.references]


def _tainted(batch: Batch, names: tuple[str, ...]) -> dict[str, list[tuple[int, str]]]:
    """Variables that were given a value with one of ``names`` in it, also by way of others, with the lines where."""
    found: dict[str, list[tuple[int, str]]] = {}
    for _ in range(3):
        for command in batch.everything():
            for assignment in command.assignments:
                for reference in _references([assignment.value, *(assignment.items or [])]):
                    places = [(reference.line, reference.name)] if reference.name in names else found.get(reference.name, [])
                    known = found.setdefault(assignment.name, []) if places else []
                    known += [one for one in places if one not in known]
    return found


def _note(
    reaching: dict[tuple[int, str], str],
    references: list[Reference],
    names: tuple[str, ...],
    tainted: dict[str, list[tuple[int, str]]],
    where: str,
) -> None:
    for reference in references:
        if reference.name in names:
            reaching.setdefault((reference.line, reference.name), where)
        for use in tainted.get(reference.name, []):
            reaching.setdefault(use, where)


def _reaches_tasks(batch: Batch, command: ShellCommand) -> bool:
    srun = next((s for s in batch.sruns if s.command is command), None)
    if srun is not None:
        return srun.options.get("ntasks") != "1" and srun.program not in ("echo", "printf")
    return command.name.rsplit("/", 1)[-1] in _LAUNCHERS


def check_processes(batch: Batch) -> Iterator[Mistake]:
    """A launcher in several tasks of a node, each starting all ranks."""
    for srun in batch.sruns:
        tasks = tasks_per_node(batch, srun)
        if tasks is None or tasks < 2 or srun.launcher is None:
            continue
        for name, value in options_in(srun.payload, _PROCESSES):
            resolved = whole(batch.resolve(value.text, value.line))
            if resolved == 1:
                continue
            started = f"{tasks} x {resolved} = {tasks * resolved}" if resolved else f"{tasks} times as many"
            message = f"{tasks} tasks a node, and in each {srun.launcher} --{name}={value.text}: {started} processes a node"
            line = _task_line(batch)
            remedy = "#SBATCH --ntasks-per-node=1" if line else "srun --ntasks-per-node=1 ..."
            yield Mistake(line or srun.line, "tasks-times-processes", message, remedy)
            break


def _task_line(batch: Batch) -> int | None:
    option = batch.header.last("ntasks-per-node") or batch.header.last("ntasks")
    return option.line if option else None


def tasks_per_node(batch: Batch, srun: Srun) -> int | None:
    """Tasks that one srun starts on each node: its own options, else the header's. None where it cannot be determined."""
    own = srun.options
    if "ntasks-per-node" in own:
        return whole(batch.resolve(own["ntasks-per-node"] or "", srun.line))
    if "ntasks" in own:
        total = whole(own["ntasks"])
        nodes = whole(own["nodes"]) if "nodes" in own else batch.nodes
        return -(-total // nodes) if total and nodes else None
    return batch.tasks_per_node


def check_gpus(batch: Batch) -> Iterator[Mistake]:
    """``--gpus-per-task`` with several tasks on a node."""
    option = batch.header.last("gpus-per-task")
    places = [(option.line, batch.tasks_per_node)] if option and not batch.header.last("gpu-bind") else []
    for srun in batch.sruns:
        if "gpus-per-task" in srun.options and "gpu-bind" not in srun.options:
            places.append((srun.line, tasks_per_node(batch, srun)))
    for line, tasks in places:
        if tasks is not None and tasks > 1:
            message = f"--gpus-per-task with {tasks} tasks a node: each task sees only its own GPU"
            yield Mistake(line, "gpus-per-task", message, "#SBATCH --gpus-per-node=8, and srun --gpu-bind=none")


def check_cpus(batch: Batch) -> Iterator[Mistake]:
    """sbatch's ``--cpus-per-task``, which does not reach srun."""
    requested = batch.count("cpus-per-task")
    if requested is None or requested < 2 or "SRUN_CPUS_PER_TASK" in batch.assigned:
        return
    for srun in batch.sruns:
        bound = srun.options.get("cpu-bind") or ""
        given = {"cpus-per-task", "cpus-per-gpu", "exact"} & set(srun.options)
        if not given and "none" not in bound and not srun.opaque and not is_light(srun):
            message = f"srun does not take --cpus-per-task={requested} from sbatch (Slurm 22.05 and later)"
            yield Mistake(srun.line, "cpus-lost-in-srun", message, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
            return


# --- rendezvous --------------------------------------------------------------------------------------------------------

_HOST_OPTIONS = ("rdzv_endpoint", "master_addr", "main_process_ip")
_PORT_OPTIONS = ("rdzv_endpoint", "master_port", "main_process_port")
_HOST_NAME = re.compile(r"(?:^|_)(?:ADDR|ADDRESS|HOST|IP|ENDPOINT)$|^HEAD_?NODE", re.IGNORECASE)
_PORT_NAME = re.compile(r"(?:MASTER|RDZV|RENDEZVOUS|MAIN_PROCESS)_?PORT$", re.IGNORECASE)
_NODELIST = re.compile(r"\$\{?SLURM_(?:JOB_|STEP_)?NODELIST\}?(?::.*)?")
_LOCAL = ("localhost", "127.0.0.1")
_EPHEMERAL = (32768, 60999)
"""Linux's own net.ipv4.ip_local_port_range."""
_TORCHRUN = ("torchrun", "torch.distributed.run")
_PORT = "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"


def _assignments(batch: Batch, name: re.Pattern[str]) -> Iterator[Token]:
    for command in batch.everything():
        for assignment in command.assignments:
            if name.search(assignment.name) and assignment.items is None:
                yield Token(assignment.value.text, assignment.line)


def check_host(batch: Batch) -> Iterator[Mistake]:
    """The node list in the place of a host, and the fall-back to localhost."""
    if batch.nodes == 1:
        return
    values = [value for _, value in batch.given(*_HOST_OPTIONS)] + list(_assignments(batch, _HOST_NAME))
    lines = set()
    for value in values:
        if _NODELIST.fullmatch(batch.resolve(value.text, value.line)) and value.line not in lines:
            lines.add(value.line)
            remedy = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            yield Mistake(value.line, "nodelist-as-host", f"{value.text} is a list such as node[1-4], no host", remedy)
    fallen = {
        command.line
        for command in batch.everything()
        if command.name == "echo" and command.before == "||" and any(w.text in _LOCAL for w in command.words[1:])
    }
    fallen |= {v.line for v in values if re.search(r":?-(localhost|127\.0\.0\.1)\}", v.text)}
    for line in sorted(fallen):
        message = "falls back to localhost: without the first node's name each node would train alone"
        remedy = "end the job instead: ... || exit 1"
        yield Mistake(line, "localhost-fallback", message, remedy)
    for value in values if batch.nodes else []:
        if value.line not in fallen and batch.resolve(value.text, value.line).partition(":")[0] in _LOCAL:
            message = f"{value.text} is another machine on each of {batch.nodes} nodes: no node finds the others"
            remedy = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            yield Mistake(value.line, "localhost-fallback", message, remedy)


def check_nodes(batch: Batch) -> Iterator[Mistake]:
    """torchrun on several nodes that is not given their number: ``--nnodes`` is 1 without it."""
    for srun in batch.sruns:
        nodes = whole(srun.options.get("nodes") or "") or batch.nodes
        hidden = srun.opaque or "PET_NNODES" in batch.assigned or any(token.text[:1] in "$@" for token in srun.payload)
        if srun.launcher not in _TORCHRUN or hidden or not nodes or nodes < 2 or srun.options.get("ntasks") == "1":
            continue
        given = [batch.resolve(value.text, value.line) for _, value in options_in(srun.payload, ("nnodes",))]
        if given in ([], ["1"], ["1:1"]):
            message = f"torchrun starts on {nodes} nodes, each with --nnodes=1: {nodes} trainings that write the same files"
            remedy = "torchrun --nnodes=$SLURM_NNODES --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT ..."
            yield Mistake(srun.line, "nodes-not-joined", message, remedy)


def check_port(batch: Batch) -> Iterator[Mistake]:
    """A port that another job, or another program, may hold."""
    values = [value for _, value in batch.given(*_PORT_OPTIONS)] + list(_assignments(batch, _PORT_NAME))
    lines = set()
    for value in values:
        port, line = _port_text(batch, value)
        if port is None or line in lines:
            continue
        resolved = batch.resolve(port, value.line).strip("'\"")
        number = whole(resolved)
        if number:
            lines.add(line)
            yield Mistake(line, "fixed-port", f"the port is always {number}", _PORT)
        elif number is None and (between := _port_range(batch, resolved, line)):
            low, high = between
            if high >= _EPHEMERAL[0] and low <= _EPHEMERAL[1]:
                lines.add(line)
                message = f"ports from {low} to {high} lie in the range that the kernel gives to any connection"
                yield Mistake(line, "port-range", f"{message} (32768 to 60999)", _PORT)
            elif low < 1024:
                lines.add(line)
                message = f"ports from {low} to {high}: those below 1024 are root's"
                yield Mistake(line, "port-range", message, _PORT)


def _port_text(batch: Batch, value: Token) -> tuple[str | None, int]:
    """The port in a value, and the line where it was written: a variable's where one holds it."""
    text = value.text
    if re.fullmatch(r"\$\{?\w+\}?", text) and ":" in (whole_text := batch.resolve(text, value.line)):
        text = whole_text
    head, colon, port = text.rpartition(":")
    if colon and not head.endswith("{") and "$((" not in head and not re.search(r"\$\{\w+$", head):
        text = port
    elif not colon and re.search(r"[A-Za-z)]$", text) and "$" not in text[:1]:
        return None, value.line
    named = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", text)
    found = batch.last_assignment(named.group(1), value.line) if named else None
    return text, found[1] if found else value.line


def _port_range(batch: Batch, text: str, line: int) -> tuple[int, int] | None:
    """The ports that an expression can give; None where that cannot be determined."""
    shuffled = re.search(r"shuf\s+-i\s*(\d+)-(\d+)", text)
    if shuffled:
        return int(shuffled.group(1)), int(shuffled.group(2))
    if text in ("$RANDOM", "${RANDOM}"):
        return 0, 32767
    inside = re.fullmatch(r"\$\(\((.*)\)\)", text, re.DOTALL) or re.fullmatch(r"\$\[(.*)\]", text, re.DOTALL)
    if not inside:
        return None
    low = high = 0
    for term in re.sub(r"[\s()]", "", batch.resolve(inside.group(1), line)).split("+"):
        rest = re.fullmatch(r"[^%]+%(\d{1,9})", term)
        if whole(term) is not None:
            low, high = low + int(term), high + int(term)
        elif rest:
            high += int(rest.group(1)) - 1
        elif re.fullmatch(r"\$?\{?RANDOM\}?", term):
            high += 32767
        else:
            return None
    return low, high


@scanned("expanded-too-early", check_expansion)
def expanded_too_early() -> None:
    """A task's number is put in by the task.

    Why: the batch shell, itself task 0 on the first node, puts the value in: every task gets the same one
    See: https://github.com/huggingface/alignment-handbook/blob/main/recipes/launch.slurm
    """


@scanned("tasks-times-processes", check_processes)
def tasks_times_processes() -> None:
    """One launcher runs on each node.

    Why: each task starts a launcher of its own, and each of these all ranks of the node
    See: https://github.com/pytorch/pytorch/issues/137402
    """


@scanned("gpus-per-task", check_gpus)
def gpus_per_task() -> None:
    """Every rank sees all GPUs of its node.

    Why: each task sees only its own GPU: NCCL finds no peer to peer transport, cuda:1 is an invalid device
    See: https://github.com/NVIDIA/nccl/issues/1066
    """


@scanned("cpus-lost-in-srun", check_cpus)
def cpus_lost_in_srun() -> None:
    """Steps have the cores that the job asked for.

    Why: since Slurm 22.05 srun does not take sbatch's --cpus-per-task: the task is bound to one core
    See: https://github.com/Lightning-AI/pytorch-lightning/issues/18650
    """


@scanned("nodelist-as-host", check_host)
def nodelist_as_host() -> None:
    """The rendezvous is at one host.

    Why: the node list is written node[1-4], which is the name of no host
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("nodes-not-joined", check_nodes)
def nodes_not_joined() -> None:
    """torchrun knows the number of nodes.

    Why: without --nnodes it is 1: each node trains alone, without a message
    See: https://docs.pytorch.org/docs/stable/elastic/run.html
    """


@scanned("localhost-fallback", check_host)
def localhost_fallback() -> None:
    """No node of several takes itself for the first.

    Why: where the rendezvous is at localhost each node waits for the others, or trains alone without a message
    See: https://github.com/pytorch/pytorch/issues/73656
    """


@scanned("fixed-port", check_port)
def fixed_port() -> None:
    """Each job has a port of its own.

    Why: two jobs on a node, or a process left over from the last one, take the same port: address already in use
    See: https://github.com/NVIDIA-NeMo/DataDesigner/issues/929
    """


@scanned("port-range", check_port)
def port_range() -> None:
    """No other process takes the port.

    Why: the kernel hands out ports from 32768 on to any connection, and ports below 1024 are root's
    See: https://github.com/NVIDIA/enroot/issues/243
    """
