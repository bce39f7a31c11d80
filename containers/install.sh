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

# gcc and Python's headers: Triton compiles its launchers at run time. ibverbs: without the user-space drivers NCCL falls back to TCP.
missing=()
for package in gcc libc6-dev "python$python" "python$python-dev" libibverbs1 ibverbs-providers librdmacm1 ca-certificates; do
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
# Each rank would compile the stack again where bytecode may not be written. By all cores, which pip's own way does not use.
# Some packages hold templates that are no Python, which is no fault of theirs.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" > /dev/null || true

# Lists, caches and logs: they are large, or tell when and where the image was made.
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig /var/log/apt /var/log/*.log "${HOME:-/nonexistent}/.cache"
rm -f /etc/apt/apt.conf.d/99build
