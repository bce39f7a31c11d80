#!/usr/bin/env bash
# Apptainer for a Debian that has none, beside the system: its package of Debian's unstable suite with the C library that it needs,
# unpacked below PREFIX. Installed packages stay as they are, but for the tools that Apptainer calls, which are installed where root runs this.
#   containers/get-apptainer.sh [PREFIX [SUITE]]        default: build/apptainer, where make build-sif looks; sid
# One that was moved with its folder is fixed in place.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${1:-build/apptainer}
suite=${2:-sid}

declare -A package=(
    [patchelf]=patchelf [mksquashfs]=squashfs-tools [squashfuse]=squashfuse [fuse-overlayfs]=fuse-overlayfs
    [newuidmap]=uidmap [fakeroot]=fakeroot [mmdebstrap]=mmdebstrap
)
missing=()
for tool in "${!package[@]}"; do
    command -v "$tool" > /dev/null || missing+=("${package[$tool]}")
done
if ((${#missing[@]})); then
    if ((EUID)); then
        echo "missing: ${missing[*]}; as root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
fi

command -v dpkg-deb > /dev/null || { echo "no Debian here: install apptainer from your distribution or from apptainer.org" >&2; exit 1; }

# place ROOT FINAL: tell the programs below ROOT that they will lie below FINAL.
# RPATH, not RUNPATH: a library's own libraries come from there too. Absolute, because $ORIGIN needs /proc.
place() {
    local loader placed program
    loader=$(find "$1/usr/lib" -name 'ld-linux-*.so.*' | head -n 1)
    placed=$(dirname "${loader/#"$1"/"$2"}")
    for program in "$1/usr/bin/apptainer" "$(find "$1/usr" -path '*apptainer/bin/starter')"; do
        patchelf --set-interpreter "$placed/$(basename "$loader")" --force-rpath --set-rpath "$placed" "$program"
    done
}

final=$(realpath -m "$prefix")
if [[ -e $prefix ]]; then
    if "$prefix/bin/apptainer" --version 2> /dev/null; then exit 0; fi
    if [[ -f $prefix/usr/bin/apptainer && ! -L $prefix/usr/bin/apptainer ]]; then place "$final" "$final"; fi
    if "$prefix/bin/apptainer" --version 2> /dev/null; then exit 0; fi
    echo "$prefix exists and contains no apptainer that starts: remove it" >&2
    exit 1
fi
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$final")/.apptainer.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root" "$work"/{lists/partial,cache/archives/partial,debs}

# shellcheck disable=SC2016 # apt's own format
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 -E '/debian/?$' || echo http://deb.debian.org/debian)
printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
    "$mirror" "$suite" > "$work/one.sources"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/one.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work/debs" && "${apt[@]}" download apptainer libc6 libseccomp2 libsqlite3-0)
for deb in "$work"/debs/*.deb; do dpkg-deb --extract "$deb" "$root"; done

# Apptainer finds its files relative to its own binary once that is not in /usr/bin: etc and var belong there.
for part in etc var; do
    mv "$root/$part" "$root/usr/$part"
    ln -s "../$part" "$root/usr/lib/$part"
done
place "$root" "$final"
mkdir -p "$root/bin"
ln -sf ../usr/bin/apptainer "$root/bin/apptainer"
chmod 755 "$root"
mv "$root" "$final"
"$final/bin/apptainer" --version
