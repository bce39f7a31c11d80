#!/bin/bash
# Stands on the PATH of a rootless Apptainer in the place of the program that mounts an image (squashfuse_ll, squashfuse,
# fuse-overlayfs: links below this folder), and becomes that program with the signals ignored that Slurm and a terminal send to
# every process. Without: a preemption ends the mount, and the ranks cannot read a file of the image any more while they save.
# libfuse installs its handlers only over the default (set_one_signal_handler); SIGKILL and an unmount still end it.
set -euo pipefail
set -o noglob
name=${0##*/}
folder=${0%/*}
IFS=:
# Apptainer gives its helpers a PATH of its own, or none.
for place in ${PATH-} /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin; do
    if [ -n "$place" ] && [ -x "$place/$name" ] && ! [ "$place/$name" -ef "$folder/$name" ]; then
        trap '' HUP INT TERM USR1 USR2
        exec "$place/$name" "$@"
    fi
done
echo "error: no $name on this machine" >&2
exit 127
