"""What recipes compile at run time finds its compilers in the image: held to what DeepSpeed's builders ask for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

from clustertune.containers import lock, pins
from clustertune.containers import lock as locks

INSTALL = (pins.FOLDER / "install.sh").read_text()
PACKAGES = set(re.findall(r"[\w.+-]+", " ".join(re.findall(r"packages\+?=\((.*?)\)", INSTALL))))


def builder(name: str) -> str:
    """The source of a builder of the installed DeepSpeed."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.origin is not None
    return Path(found.origin).with_name("ops").joinpath("op_builder", f"{name}.py").read_text()


def test_the_image_has_what_async_io_asks_for() -> None:
    """On a GPU DeepSpeed compiles it as a CUDA extension: it asks nvcc for a version, and links aio, cuda and cudart."""
    source = builder("async_io")
    assert re.search(r"class AsyncIOBuilder\((\w+)\)", source)[1] == "CUDAOpBuilder"  # type: ignore[index]
    assert re.search(r'dpkg=\["-l", "([\w-]+)"', source)[1] in PACKAGES  # type: ignore[index]
    linked = set(re.findall(r"'-l(\w+)'", source))
    assert linked == {"aio", "cuda", "cudart"}
    assert {name for name in linked if f"lib{name}.so" in INSTALL} == {"cuda", "cudart"}
    assert set(lock.NVCC) <= set(locks.read(lock.path_of("extra-deepspeed")).entries)


def test_the_image_has_what_cpu_adam_asks_for() -> None:
    """Plain C++ in every image, whatever the accelerator: no compiler of CUDA."""
    assert "class CPUAdamBuilder(CPUOpBuilder)" in builder("cpu/cpu_adam")
    assert {"gcc", "g++"} <= PACKAGES
    for name in ("extra-deepspeed", "train-cpu"):
        assert "ninja" in locks.read(lock.path_of(name)).entries


def test_the_cuda_compiler_is_of_the_cuda_that_torch_was_built_with() -> None:
    """DeepSpeed and torch compare them."""
    layer, below = (locks.read(lock.path_of(name)).entries for name in ("extra-deepspeed", "train"))
    wanted = below["cuda-toolkit"].version.split(".")[:2]
    assert [layer[name].version.split(".")[:2] for name in lock.NVCC] == [wanted] * len(lock.NVCC)


def test_nvcc_is_found_where_torch_looks_for_it(tmp_path: Path) -> None:
    """The part of install.sh, run: torch takes the folder above that of the nvcc on PATH, and links from its lib64."""
    part = INSTALL[INSTALL.index("nvcc=$(echo") : INSTALL.index("# Each rank would compile")]
    home, venv = tmp_path / "venv/lib/python3.12/site-packages/nvidia/cu13", tmp_path / "venv"
    for folder in (home / "bin", home / "lib", venv / "bin"):
        folder.mkdir(parents=True)
    (venv / "lib64").symlink_to("lib")
    (home / "bin/nvcc").write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
    (home / "bin/nvcc").chmod(0o755)
    (home / "lib/libcudart.so.13").write_bytes(b"")
    subprocess.run(["bash", "-euo", "pipefail", "-c", f"venv={venv}\n{part}"], check=True, timeout=60)
    done = subprocess.run([venv / "bin/nvcc", "-V"], capture_output=True, text=True, check=True, timeout=60)
    assert "release 13.0" in done.stdout
    assert (venv / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
    linked = subprocess.run(
        ["gcc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "x.so", f"-L{venv}/lib64", "-Wl,--no-as-needed", "-lcuda"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert linked.returncode == 0, linked.stderr
