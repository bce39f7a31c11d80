#!/usr/bin/env bash
# Runs on every node, in front of the container: launch/inside.sh apptainer|singularity exec OPTION... IMAGE COMMAND...
# What differs from node to node is decided here: which variables there are to pass in, which devices there are to show.
# The environment of this machine stays outside but for the names below. Tokens are not among them: the first rank reads .env itself.
set -euo pipefail

# Which node this is and which GPUs it may use, and what the user set for caches and language.
passed=(
    SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_JOB_PARTITION SLURM_JOB_GPUS SLURM_RESTART_COUNT
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_STEP_ID SLURM_STEP_GPUS SLURM_STEP_NODELIST SLURM_NODEID SLURM_PROCID SLURM_LOCALID
    SLURM_NNODES SLURM_NTASKS SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_MEM_PER_NODE SLURMD_NODENAME
    CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL USER LOGNAME LANG LC_ALL TMPDIR
    HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE XDG_CACHE_HOME NLTK_DATA HF_TOKEN_PATH HF_HUB_OFFLINE WANDB_MODE
)
# What the runtime itself needs out here. Its own settings by environment (APPTAINER_BIND, APPTAINERENV_X) are not among it:
# they would show the container more than the command line says.
needed=(PATH HOME USER LOGNAME TMPDIR XDG_RUNTIME_DIR LD_LIBRARY_PATH APPTAINER_CACHEDIR APPTAINER_TMPDIR SINGULARITY_CACHEDIR SINGULARITY_TMPDIR)
# Shown where the node has them: --containall gives an empty /dev, with a /dev/shm of half the node's memory.
present=(/dev/infiniband /dev/gdrdrv /dev/nvidia-caps-imex-channels)

if (($# < 3)) || [[ $2 != exec ]]; then
    echo "usage: launch/inside.sh apptainer|singularity exec OPTION... IMAGE COMMAND..." >&2
    exit 2
fi
runtime=$1
shift 2
# The Hub's cache is below the home folder, which stays outside. A cache may be on a disk of each node.
if [[ -z ${HF_HOME-} && -n ${HOME-} ]]; then
    HF_HOME=$HOME/.cache/huggingface
fi
for path in "${HF_HOME-}" "${HF_HUB_CACHE-}" "${HUGGINGFACE_HUB_CACHE-}" "${HF_DATASETS_CACHE-}" "${XDG_CACHE_HOME-}"; do
    [[ -z $path ]] || mkdir -p "$path" 2> /dev/null || true
done
options=() missing=()
declare -A seen=()
while [[ ${1-} == --* ]]; do
    options+=("$1")
    case $1 in
        --bind)
            [[ -e ${2%%:*} ]] || missing+=("${2%%:*}")
            seen[$2]=1
            options+=("$2")
            shift
            ;;
        --pwd | --env)
            options+=("$2")
            shift
            ;;
    esac
    shift
done
[[ -e ${1-} ]] || missing+=("the image ${1-}")
if ((${#missing[@]})); then
    for path in "${missing[@]}"; do
        echo "error: $(uname -n) has no $path, which the container needs -> put it where all nodes see it, or fix container in the cluster file" >&2
    done
    exit 2
fi
command -v "$runtime" > /dev/null || {
    echo "error: $(uname -n) has no $runtime -> install it on every node, or fix container.runtime in the cluster file" >&2
    exit 2
}

IFS=: read -ra corpora <<< "${NLTK_DATA-}"
for path in "${present[@]}" "${HF_HOME-}" "${HF_HUB_CACHE-}" "${HUGGINGFACE_HUB_CACHE-}" "${HF_DATASETS_CACHE-}" \
    "${XDG_CACHE_HOME-}" "${HF_TOKEN_PATH-}" "${corpora[@]}" "${TMPDIR-}"; do
    if [[ $path == /* && -e $path && $path != *[:,]* && -z ${seen[$path]-} ]]; then
        options+=(--bind "$path")
        seen[$path]=1
    fi
done

# What mounts the image must outlive the signals that Slurm sends to every process of a step: launch/fuse/keep.sh. Only in the
# place of what is there: Apptainer unpacks the image where it finds no squashfuse.
folder=$(cd "$(dirname "$0")" && pwd)/fuse
for name in squashfuse_ll squashfuse fuse-overlayfs; do
    if command -v "$name" > /dev/null; then
        PATH=$folder/$name:$PATH
    fi
done

environment=()
for name in "${needed[@]}"; do
    [[ -z ${!name+set} ]] || environment+=("$name=${!name}")
done
for name in "${passed[@]}"; do
    [[ -n ${!name+set} ]] || continue
    environment+=("APPTAINERENV_$name=${!name}")
    # SingularityCE knows this name only; Apptainer, also where it is called singularity, would warn of it.
    [[ ${runtime##*/} == apptainer ]] || environment+=("SINGULARITYENV_$name=${!name}")
done
exec env -i "${environment[@]}" "$runtime" exec "${options[@]}" "$@"
