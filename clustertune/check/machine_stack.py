"""The ranks' Python and the environment that a place hands down to them. Python 3.8, standard library."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.machine import Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, WARN, Seen, rule
from clustertune.host.credentials import has_login
from clustertune.host.gpus import gpu_links

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


@rule("user-site", MACHINE)
def user_site(m: Machine) -> Iterator[Seen]:
    """Nothing of the stack is taken from the user's own folder.

    Looks at: packages of ~/.local in front of the installed ones
    Why: another version than the pinned one is imported, on some machines only; in a container too that has the home folder
    Fix: export PYTHONNOUSERSITE=1 (jobs of clustertune have it), and pip uninstall them; apptainer exec --no-home
    See: https://github.com/princeton-ddss/blackfish/issues/366
    """
    f = m.facts
    if not f.executable:
        return
    home = f.user_site.rstrip("/")
    local = sorted(p.name for p in f.packages if home and (p.location == home or "/.local/lib/python" in p.location))
    if local:
        yield Seen(FAIL if m.in_container else WARN, f"from {home or '~/.local'}: {', '.join(local)}")
    else:
        yield Seen(PASS, "not looked at" if f.user_site_used is False else "nothing of the stack in it")


@rule("python-path", MACHINE)
def paths(m: Machine) -> Iterator[Seen]:
    """Neither variable is set.

    Looks at: PYTHONPATH and PYTHONHOME
    Why: packages from there come before all others: what runs is not what was pinned
    See: https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH
    """
    lines = [f"{name}={m.environ(name)}" for name in ("PYTHONHOME", "PYTHONPATH") if m.environ(name)]
    if lines:
        home = bool(m.environ("PYTHONHOME"))
        status = FAIL if home and m.in_container else WARN
        yield Seen(status, "; ".join(lines), "unset them (module unload python, conda deactivate, .bashrc)")
    else:
        yield Seen(PASS, "not set")


@rule("scattered-packages", MACHINE)
def scattered(m: Machine) -> Iterator[Seen]:
    """The packages of the stack lie in one folder; in a container in the image.

    Looks at: all packages of the stack in one place
    Why: packages of two installations do not fit each other: imports fail, or old code runs
    Fix: make the environment again, with all of them: make setup
    See: https://github.com/apptainer/singularity/issues/5592
    """
    f = m.facts
    core = [p for p in f.packages if p.name in ("torch", "transformers", "accelerate", "trl", "peft", "datasets")]
    folders = sorted({p.location for p in core if "/.local/lib/python" not in p.location})
    if len(folders) > 1:
        text = "; ".join(f"{folder}: {', '.join(p.name for p in core if p.location == folder)}" for folder in folders)
        yield Seen(WARN, text)
    elif folders:
        yield Seen(PASS, folders[0])


@rule("nccl-twice", MACHINE)
def nccl_twice(m: Machine) -> Iterator[Seen]:
    """One package of NCCL is installed.

    Looks at: one NCCL package
    Why: packages for two CUDA versions write to the same folder: the older library may be the one that is left
    Fix: pip uninstall both, then install torch again
    See: https://github.com/rwth-i6/returnn/issues/1802
    """
    nccl = sorted(f"{p.name} {p.version}" for p in m.facts.packages if p.name.startswith("nvidia-nccl-cu"))
    if len(nccl) > 1:
        yield Seen(WARN, ", ".join(nccl))
    elif nccl:
        yield Seen(PASS, nccl[0])


@rule("library-path", MACHINE)
def libraries(m: Machine) -> Iterator[Seen]:
    """LD_LIBRARY_PATH puts nothing in front of torch's libraries.

    Looks at: libraries in LD_LIBRARY_PATH that torch brings itself
    Why: the loader takes these first: 'undefined symbol', or another NCCL than on the other nodes
    See: https://github.com/rwth-i6/returnn/issues/1802
    """
    f = m.facts
    bad = [path for path in f.libraries if re.search(r"/lib(nccl|cudart|cudnn|cublas|cublasLt|nvrtc|stdc\+\+)\.so", path)]
    stub = [path for path in f.libraries if "/stubs/libcuda.so" in path]
    if stub:
        fix = "take the folder 'stubs' out of LD_LIBRARY_PATH: it is for linking only"
        yield Seen(FAIL if m.computes else WARN, stub[0], fix)
    if bad:
        fix = "take their folders out of LD_LIBRARY_PATH for jobs (module unload cuda nccl): torch brings its own"
        yield Seen(WARN, ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else ""), fix)
    if not bad and not stub:
        yield Seen(PASS, "none")


@rule("preload", MACHINE)
def preload(m: Machine) -> Iterator[Seen]:
    """Nothing is preloaded.

    Looks at: LD_PRELOAD
    Why: a library that is put in front of all others changes allocation or system calls in every rank
    Fix: unset LD_PRELOAD for jobs
    See: https://man7.org/linux/man-pages/man8/ld.so.8.html
    """
    preload = m.environ("LD_PRELOAD")
    if preload:
        yield Seen(WARN, preload)
    else:
        yield Seen(PASS, "not set")


@rule("nccl-settings", MACHINE)
def nccl(m: Machine) -> Iterator[Seen]:
    """Only the cluster file steers NCCL, not the environment or a file of NCCL's.

    Looks at: settings of NCCL left behind
    Why: a setting from an old search for a fault keeps fast paths off, in this shell and in every job of it
    Fix: unset them, or remove the lines from the file; what is needed stands in the cluster file, with its reason
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    settings = {name: (m.environ(name), "") for name in SLOW if m.environ(name)}
    for name, text in m.facts.nccl_conf.items():
        value, _, origin = text.partition(" (")
        if name in SLOW and name not in settings:
            settings[name] = (value, f", in {origin.rstrip(')')}")
    bad = []
    environment = m.section("network").get("environment") or {}
    wanted = "ethernet" if m.section("network").get("kind") == "ethernet" else ""
    for name, (value, origin) in sorted(settings.items()):
        least, meaning = SLOW[name]
        if str(environment.get(name, "")) == value:
            continue
        if (least and value != least) or (name == "NCCL_IB_DISABLE" and wanted):
            continue
        bad.append(f"{name}={value}{origin}: {meaning}")
    if bad:
        stops = "NCCL_ALGO" in settings and only_all_reduce(settings["NCCL_ALGO"][0])
        through_host = "NCCL_P2P_DISABLE" in settings and settings["NCCL_P2P_DISABLE"][0] == "1"
        nvlink = any(link.startswith("NV") for link in gpu_links(m.facts.topology).values())
        yield Seen(FAIL if stops or (through_host and nvlink) else WARN, "; ".join(bad))
    else:
        yield Seen(PASS, "none")


@rule("debug-settings", MACHINE)
def debugging(m: Machine) -> Iterator[Seen]:
    """Nothing is set that slows every step.

    Looks at: settings that are for the search of faults
    Why: each kernel waits for the one before, or every collective is checked: a training of a fraction of its speed
    Fix: unset them
    See: https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications
    """
    bad = [
        f"{name}={m.environ(name)}" for name, values in DEBUGGING.items() if m.environ(name).upper() in map(str.upper, values)
    ]
    if bad:
        yield Seen(WARN, ", ".join(bad))
    else:
        yield Seen(PASS, "none")


@rule("rank-variables", MACHINE)
def rank_variables(m: Machine) -> Iterator[Seen]:
    """No launcher's variables are set where none has started this.

    Looks at: variables of a launcher outside of one
    Why: libraries take the process for a rank, and wait for others that never come
    See: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    found = [f"{name}={m.environ(name)}" for name in names if m.environ(name)]
    if found and "TORCHELASTIC_RUN_ID" not in m.facts.environment:
        yield Seen(WARN, ", ".join(found), f"unset {' '.join(word.partition('=')[0] for word in found)}")
    elif not found:
        yield Seen(PASS, "not set")


@rule("proxy", MACHINE)
def proxies(m: Machine) -> Iterator[Seen]:
    """What goes to this machine and to the nodes goes there directly.

    Looks at: proxies, and what must not go through them
    Why: requests to a server on this machine or on a node (evaluation, Ray) go to the proxy, which refuses them
    See: https://github.com/tenstorrent/tt-xla/issues/3637
    """
    environment = {name.lower(): value for name, value in m.facts.environment.items() if name.lower().endswith("_proxy")}
    proxies = [name for name in ("http_proxy", "https_proxy", "all_proxy") if environment.get(name)]
    direct = [word.strip().lower() for word in environment.get("no_proxy", "").split(",")]
    if not proxies:
        yield Seen(PASS, "none")
        return
    lacking = [] if "*" in direct else [name for name in ("localhost", "127.0.0.1") if name not in direct]
    if lacking:
        fix = f"export no_proxy=localhost,127.0.0.1{',' + ','.join(direct) if direct != [''] else ''} (and the nodes' names)"
        text = f"{', '.join(proxies)} set, no_proxy lacks {' and '.join(lacking)}"
        yield Seen(WARN, text + ("; one holds a login" if any(map(has_login, environment.values())) else ""), fix)
    else:
        yield Seen(PASS, f"{', '.join(proxies)}; local addresses go directly")


@rule("threads", MACHINE)
def threads(m: Machine) -> Iterator[Seen]:
    """OMP_NUM_THREADS is left to the launcher.

    Looks at: OMP_NUM_THREADS as this place finds it
    Why: more threads than cores wait for each other at the end of every loop
    Fix: unset OMP_NUM_THREADS: jobs of clustertune set it from the job's cores
    See: https://github.com/pytorch/pytorch/issues/22260
    """
    value = m.environ("OMP_NUM_THREADS")
    if not value.isdigit() or not m.facts.cpus:
        return
    if int(value) > m.facts.cpus:
        text = f"{value} threads for {m.facts.cpus} CPUs"
        yield Seen(WARN, text)
    else:
        yield Seen(PASS, value)
