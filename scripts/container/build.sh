#!/usr/bin/env bash
# Builds the images where there is no Docker and no registry of bases: by buildah, as root, each RUN in a chroot. In place
# of the bases stands Debian from its mirror, with Debian's Python, or the one whose prefix SEKO_BASE_PYTHON names. Prints
# a line for each image: its size and its name in the store FOLDER/images.
#     bash scripts/container/build.sh FOLDER [cpu|cuda|cpu:STAGE|cuda:STAGE...]          default: cpu:serve
# Needs Debian's packages buildah and debootstrap. Packages that torch's index does not give come from pip's (PIP_INDEX_URL,
# PIP_FIND_LINKS).
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:?the folder of the store}")
images=("${@:2}")
[ ${#images[@]} -gt 0 ] || images=(cpu:serve)
if [ "$(id -u)" != 0 ]; then
    echo "needs root: debootstrap and a chroot do; you are $(id -un)" >&2
    exit 5
fi
for program in buildah debootstrap; do
    command -v "$program" >/dev/null || { echo "$program is not installed: apt-get install $program" >&2; exit 5; }
done
build() { buildah --root "$folder/images" --runroot "$folder/run" "$@"; }
mkdir -p "$folder"

base=$(sed -n 's/^FROM \(python:[^ ]*\).*/\1/p' scripts/container/Dockerfile.* | sort -u) # one, tests hold
if ! build inspect --type image "$base" >/dev/null 2>&1; then
    system=$folder/base
    rm -rf "$system"
    debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$system" >"$folder/debootstrap.log" ||
        { tail -5 "$folder/debootstrap.log" >&2; exit 5; }
    rm -rf "$system"/var/cache/apt/archives/*.deb "$system"/var/lib/apt/lists/*
    if [ -n "${SEKO_BASE_PYTHON:-}" ]; then
        tar -C "$SEKO_BASE_PYTHON" --exclude=site-packages --exclude=test -c . | tar -C "$system/usr/local" -x
        chroot "$system" ldconfig
    else
        ln -s python3 "$system/usr/bin/python"
    fi
    container=$(build from scratch)
    build add --quiet "$container" "$system" / >/dev/null
    build commit --quiet --rm "$container" "docker.io/library/$base" >/dev/null
    rm -rf "$system"
fi

authorities=/etc/ssl/certs/ca-certificates.crt # this machine's, as some have their own
index=${PIP_INDEX_URL:-$(python3 -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)')}
cat >"$folder/pip.conf" <<END
[global]
cert = $authorities
extra-index-url = $index
find-links = ${PIP_FIND_LINKS:-}
retries = 1
END
given=(--volume "$folder/pip.conf:/etc/pip.conf:ro")
for place in "$authorities" ${PIP_FIND_LINKS:-}; do
    [ ! -e "$place" ] || given+=(--volume "$place:$place:ro")
done
layers=false # several images share what a stage installs, at the price of hashing it
[ ${#images[@]} = 1 ] || layers=true
for image in "${images[@]}"; do
    name=seko-${image/:/-}
    stage=()
    [ "$image" = "${image%:*}" ] || stage=(--target "${image#*:}")
    build build --pull-never --isolation chroot --format docker --layers=$layers "${given[@]}" "${stage[@]}" \
        -f "scripts/container/Dockerfile.${image%:*}" -t "$name" . >"$folder/$name.log" 2>&1 ||
        { tail -20 "$folder/$name.log" >&2; exit 5; }
    build images --noheading --format '{{.Size}}  {{.Name}}' "localhost/$name"
done
