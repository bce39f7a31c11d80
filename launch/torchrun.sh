#!/usr/bin/env bash
# One call on each node, in any order; all must see the run folder. Resume: the same calls again.
#   launch/torchrun.sh RECIPE --node-rank R --nodes N --master ADDR [--port P] [section.key=value ...] [--tiny] [--run-dir DIR]
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
if [[ ! -x $python ]]; then
    echo "clustertune: $python is missing -> make setup, in $root" >&2
    exit 2
fi
# Relative paths of the caller stay his; a bare recipe name is looked up below recipes/ of the checkout.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m clustertune torchrun-node "$@"
