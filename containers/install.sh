#!/usr/bin/env bash
# Runs inside an image that is being built (train.def, reference.def, Dockerfile): the distribution's packages, then every wheel of
# the lock into /usr/local/venv.
#   install.sh PYTHON WHEELS      PYTHON: 3.12; WHEELS: the wheelhouse, with requirements.txt
set -euo pipefail
python=$1
wheels=$2
venv=/usr/local/venv

[ -f "$wheels/requirements.txt" ] || {
    echo "no wheels in $wheels: build with make build-sif or make build-image, which fetch and check them first" >&2
    exit 1
}

# gcc and Python's headers: Triton compiles its launchers at run time. g++: Inductor and DeepSpeed compile C++ at run time. ibverbs:
# without the user-space drivers NCCL falls back to TCP. numactl: torch binds ranks by it.
packages=(gcc g++ libc6-dev "python$python" "python$python-dev" libibverbs1 ibverbs-providers librdmacm1 ca-certificates numactl)
if grep -q '^deepspeed==' "$wheels/requirements.txt"; then
    packages+=(libaio-dev) # DeepSpeed's async_io reads and writes NVMe with it
fi
missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2> /dev/null || true)
    [[ $state == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
    # _apt may not exist in the build's user namespace.
    apt=(apt-get -qq -o APT::Sandbox::User=root)
    "${apt[@]}" update
    DEBIAN_FRONTEND=noninteractive "${apt[@]}" install --yes --no-install-recommends "${missing[@]}" > /dev/null
fi

# Without ensurepip: the pip that installs is the locked one, run from its wheel.
"python$python" -m venv --without-pip "$venv"
PYTHONPATH=$(echo "$wheels"/pip-*.whl) "python$python" -m pip --python "$venv/bin/python" --disable-pip-version-check --no-cache-dir \
    install --quiet --no-index --find-links "$wheels" --no-deps --require-hashes --no-compile --requirement "$wheels/requirements.txt"
# The CUDA compiler, where a layer has it: torch takes the folder above the one of the nvcc on PATH for CUDA_HOME. DeepSpeed links
# async_io with -lcudart and -lcuda. The driver belongs to the node, so an empty library of its name is enough for the linker.
nvcc=$(echo "$venv"/lib/python*/site-packages/nvidia/cu*/bin/nvcc)
if [[ -x $nvcc ]]; then
    printf '#!/bin/sh\nexec %s "$@"\n' "$nvcc" > "$venv/bin/nvcc"
    chmod 0755 "$venv/bin/nvcc"
    ln -s "${nvcc%/bin/nvcc}"/lib/libcudart.so.* "$venv/lib/libcudart.so"
    gcc -shared -Wl,-soname,libcuda.so.1 -x c /dev/null -o "$venv/lib/libcuda.so"
fi

# Each rank would compile the stack again where bytecode may not be written. By all cores, which pip's own way does not use.
# Some packages hold templates that are not Python, which is not a fault of theirs.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" > /dev/null || true

# Lists, caches and logs: they are large, or tell when and where the image was made.
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig /var/log/apt /var/log/*.log "${HOME:-/nonexistent}/.cache"
rm -f /etc/apt/apt.conf.d/99build
