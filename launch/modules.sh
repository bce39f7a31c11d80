#!/usr/bin/env bash
# Sourced where a job starts: . launch/modules.sh NAME...
# Loads the environment modules that the cluster file names (slurm.modules), and notes which variables that changed: srun passes
# those on to the other nodes, beside its fixed list. A job's shell is not a login shell, so that `module` has to be looked for.
set -euo pipefail
declare -A before=()
for name in $(compgen -e); do
    before[$name]=${!name}
done
set +eu # files of the site are not written for that
for start in "" "${LMOD_PKG:+$LMOD_PKG/init/bash}" "${MODULESHOME:+$MODULESHOME/init/bash}" /etc/profile.d/{modules,lmod,z00_lmod}.sh \
    /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
    if [[ -r $start ]]; then
        # shellcheck disable=SC1090 # the site's own
        . "$start"
    fi
    if type module > /dev/null 2>&1; then
        break
    fi
done
if ! type module > /dev/null 2>&1; then
    echo "error: $(uname -n) has no module command, and slurm.modules of the cluster file asks for $*" \
        "-> take slurm.modules out of the cluster file, or install environment modules (or Lmod) on the compute nodes" >&2
    exit 2
fi
for name in "$@"; do
    if ! module load "$name"; then
        echo "error: $(uname -n): module load $name failed -> module avail shows what there is; slurm.modules of the cluster file names it" >&2
        exit 2
    fi
done
set -eu
changed=()
for name in $(compgen -e); do
    if [[ ! ${before[$name]+set} || ${before[$name]} != "${!name}" ]]; then
        changed+=("$name")
    fi
done
export CLUSTERTUNE_MODULES="$*" CLUSTERTUNE_MODULE_VARIABLES="${changed[*]}"
unset before changed start name
