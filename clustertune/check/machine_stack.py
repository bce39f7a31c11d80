"""The ranks' Python and the environment that a place hands down to them. Python 3.8, standard library."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, WARN, Seen, either, listed
from clustertune.host.credentials import has_login
from clustertune.host.gpus import has_nvlink

SLOW = {
    "NCCL_P2P_DISABLE": ("1", "traffic between GPUs of a node goes through host memory"),
    "NCCL_SHM_DISABLE": ("1", "traffic between GPUs of a node goes through the network"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand and RoCE are not used"),
    "NCCL_NET_GDR_LEVEL": ("0", "adapters do not reach GPU memory"),
    "NCCL_ALGO": ("", "one algorithm for all sizes; with FSDP's all-gather Tree does not exist"),
    "NCCL_PROTO": ("", "one protocol for all sizes"),
    "NCCL_MAX_NCHANNELS": ("", "fewer channels than NCCL would take"),
    "NCCL_BUFFSIZE": ("", "buffers of another size than NCCL would take"),
    "NCCL_NTHREADS": ("", "threads of another number than NCCL would take"),
    "NCCL_CHECKS_DISABLE": ("1", "NCCL does not check its arguments"),
    "NCCL_LAUNCH_MODE": ("", "another way of starting kernels"),
}
"""Settings that steer away from what NCCL finds out by itself: the value that does (empty: any), and what it does.

Not NCCL_CUMEM_ENABLE=0, which vLLM always sets, nor NCCL_TOPO_FILE, which machines of clouds need."""
NO_GATHER = ("tree", "collnetchain", "nvlstree")
"""Algorithms that only an all-reduce has (https://github.com/NVIDIA/nccl/issues/1473)."""

DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("INFO", "TRACE"),
    "TORCH_SHOW_CPP_STACKTRACES": (),
    "TORCH_USE_CUDA_DSA": ("1",),
    "CUDA_DEVICE_MAX_CONNECTIONS": (),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCHDYNAMO_DISABLE": (),
    "TORCH_COMPILE_DEBUG": ("1",),
    "TORCH_LOGS": (),
    "NCCL_DESYNC_DEBUG": (),
    "PYTHONMALLOC": ("debug",),
    "PYTHONDEVMODE": ("1",),
}
"""Variables that slow every step, or fill the log, where they have one of these values; without values they are not looked at.
INFO writes megabytes for each rank and start, TRACE slows every call (NCCL's guide)."""


def only_all_reduce(value: str) -> bool:
    """Whether NCCL_ALGO leaves all_gather and reduce_scatter, which FSDP needs, without an algorithm."""
    algorithms = {word.strip().lower() for word in value.lstrip("^").split(",")}
    return algorithms <= set(NO_GATHER) and not value.startswith("^")


def user_site(m: Machine) -> Iterator[Seen]:
    """Nothing of the stack is taken from the user's own folder.

    Looks at: packages of ~/.local in front of the installed ones
    Why: another version than the pinned one is imported, on some machines only; in a container too that has the home folder
    Fix: export PYTHONNOUSERSITE=1 (jobs of clustertune have it), and pip uninstall them; apptainer exec --no-home
    See: https://github.com/princeton-ddss/blackfish/issues/366
    """
    f = m.facts
    home = f.user_site.rstrip("/")
    local = sorted(p.name for p in f.packages if home and (p.location == home or "/.local/lib/python" in p.location))
    found = f"from {home or '~/.local'}: {', '.join(local)}" if local else ""
    good = "Python does not use it" if f.user_site_used is False else "nothing of the stack in it"
    if f.executable:
        yield from either(FAIL if m.in_container else WARN, found, good)


def python_path(m: Machine) -> Iterator[Seen]:
    """Neither variable is set.

    Looks at: PYTHONPATH and PYTHONHOME
    Why: packages from there come before all others: what runs is not what was pinned
    See: https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH
    """
    lines = [f"{name}={m.environ(name)}" for name in ("PYTHONHOME", "PYTHONPATH") if m.environ(name)]
    status = FAIL if m.environ("PYTHONHOME") and m.in_container else WARN
    yield from either(status, "; ".join(lines), "not set", "unset them (module unload python, conda deactivate, .bashrc)")


def scattered_packages(m: Machine) -> Iterator[Seen]:
    """The packages of the stack lie in one folder; in a container in the image.

    Looks at: all packages of the stack in one place
    Why: packages of two installations do not fit each other: imports fail, or old code runs
    Fix: make the environment again, with all of them: make setup
    See: https://github.com/apptainer/singularity/issues/5592
    """
    core = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")
    found: dict[str, list[str]] = {}
    for package in m.facts.packages:
        if package.name in core and "/.local/lib/python" not in package.location:
            found.setdefault(package.location, []).append(package.name)
    text = "; ".join(f"{folder}: {', '.join(names)}" for folder, names in sorted(found.items()))
    yield from either(WARN, text if len(found) > 1 else "", next(iter(found), ""))


def nccl_twice(m: Machine) -> Iterator[Seen]:
    """One package of NCCL is installed.

    Looks at: one NCCL package
    Why: packages for two CUDA versions write to the same folder: the older library may be the one that is left
    Fix: pip uninstall both, then install torch again
    See: https://github.com/rwth-i6/returnn/issues/1802
    """
    nccl = sorted(f"{p.name} {p.version}" for p in m.facts.packages if p.name.startswith("nvidia-nccl-cu"))
    yield from either(WARN, ", ".join(nccl) if len(nccl) > 1 else "", "".join(nccl[:1]))


def library_path(m: Machine) -> Iterator[Seen]:
    """LD_LIBRARY_PATH puts nothing in front of torch's libraries.

    Looks at: libraries in LD_LIBRARY_PATH that torch brings itself
    Why: the loader takes these first: 'undefined symbol', or another NCCL than on the other nodes
    See: https://github.com/rwth-i6/returnn/issues/1802
    """
    found = m.facts.libraries
    bad = [path for path in found if re.search(r"/lib(nccl|cudart|cudnn|cublas|cublasLt|nvrtc|stdc\+\+)\.so", path)]
    stub = next((path for path in found if "/stubs/libcuda.so" in path), "")
    if stub:
        fix = "take the folder 'stubs' out of LD_LIBRARY_PATH: it is for linking only"
        yield Seen(FAIL if m.computes else WARN, stub, fix)
    fix = "take their folders out of LD_LIBRARY_PATH for jobs (module unload cuda nccl): torch brings its own"
    yield from either(WARN, listed(bad, 6), "" if stub else "none", fix)


def preload(m: Machine) -> Iterator[Seen]:
    """Nothing is preloaded.

    Looks at: LD_PRELOAD
    Why: a library that is put in front of all others changes allocation or system calls in every rank
    Fix: unset LD_PRELOAD for jobs
    See: https://man7.org/linux/man-pages/man8/ld.so.8.html
    """
    yield from either(WARN, m.environ("LD_PRELOAD"), "not set")


def nccl_settings(m: Machine) -> Iterator[Seen]:
    """Only the cluster file steers NCCL, not the environment or a file of NCCL's.

    Looks at: settings of NCCL left behind
    Why: a setting left over from debugging keeps fast paths off, in this shell and in every job of it
    Fix: unset them, or remove the lines from the file; what is needed stands in the cluster file, with its reason
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    settings = {name: (m.environ(name), "") for name in SLOW if m.environ(name)}
    for name, text in m.facts.nccl_conf.items():
        value, _, origin = text.partition(" (")
        if name in SLOW:
            settings.setdefault(name, (value, f", in {origin.rstrip(')')}"))
    network, bad = m.section("network"), []
    environment = network.get("environment") or {}
    for name, (value, origin) in sorted(settings.items()):
        least, meaning = SLOW[name]
        meant = str(environment.get(name, "")) == value or (name == "NCCL_IB_DISABLE" and network.get("kind") == "ethernet")
        if not meant and least in ("", value):
            bad.append(f"{name}={value}{origin}: {meaning}")
    stops = "NCCL_ALGO" in settings and only_all_reduce(settings["NCCL_ALGO"][0])
    through_host = settings.get("NCCL_P2P_DISABLE", ("",))[0] == "1"
    nvlink = has_nvlink(m.facts.topology)
    yield from either(FAIL if stops or (through_host and nvlink) else WARN, "; ".join(bad), "none")


def debug_settings(m: Machine) -> Iterator[Seen]:
    """Nothing is set that slows every step.

    Looks at: settings that are meant for debugging
    Why: each kernel waits for the one before, or every collective is checked: training runs at a fraction of its speed
    Fix: unset them
    See: https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications
    """
    given = [(name, m.environ(name), values) for name, values in DEBUGGING.items()]
    bad = [f"{name}={value}" for name, value, values in given if value.upper() in map(str.upper, values)]
    yield from either(WARN, ", ".join(bad), "none")


def rank_variables(m: Machine) -> Iterator[Seen]:
    """No launcher's variables are set where none has started this.

    Looks at: variables of a launcher outside of one
    Why: libraries take the process for a rank, and wait for others that never come
    See: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    found = [name for name in names if m.environ(name)]
    if not found or "TORCHELASTIC_RUN_ID" not in m.facts.environment:
        values = ", ".join(f"{name}={m.environ(name)}" for name in found)
        yield from either(WARN, values, "not set", f"unset {' '.join(found)}")


def proxy(m: Machine) -> Iterator[Seen]:
    """What goes to this machine and to the nodes goes there directly.

    Looks at: proxies, and what must not go through them
    Why: requests to a server on this machine or on a node (evaluation, Ray) go to the proxy, which refuses them
    See: https://github.com/tenstorrent/tt-xla/issues/3637
    """
    environment = {name.lower(): value for name, value in m.facts.environment.items() if name.lower().endswith("_proxy")}
    proxies = ", ".join(name for name in ("http_proxy", "https_proxy", "all_proxy") if environment.get(name))
    direct = [word.strip().lower() for word in environment.get("no_proxy", "").split(",")]
    lacking = [] if "*" in direct else [name for name in ("localhost", "127.0.0.1") if name not in direct]
    text = f"{proxies} set, no_proxy lacks {' and '.join(lacking)}" if proxies and lacking else ""
    text += "; one holds a login" if text and any(map(has_login, environment.values())) else ""
    fix = f"export no_proxy=localhost,127.0.0.1{',' + ','.join(direct) if direct != [''] else ''} (and the nodes' names)"
    yield from either(WARN, text, f"{proxies}; local addresses go directly" if proxies else "none", fix)


def threads(m: Machine) -> Iterator[Seen]:
    """OMP_NUM_THREADS is left to the launcher.

    Looks at: OMP_NUM_THREADS as it is set where the check runs
    Why: more threads than cores wait for each other at the end of every loop
    Fix: unset OMP_NUM_THREADS: jobs of clustertune set it from the job's cores
    See: https://github.com/pytorch/pytorch/issues/22260
    """
    value, cpus = m.environ("OMP_NUM_THREADS"), m.facts.cpus
    if value.isdigit() and cpus:
        yield from either(WARN, f"{value} threads for {cpus} CPUs" if int(value) > cpus else "", value)
