#!/usr/bin/env bash
# Wheels and sdists of the four distributions, with their checksums. Two builds of one commit give equal wheels.
#     bash scripts/wheels.sh [FOLDER]                  default dist
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv dev
folder=${1:-dist}
mkdir -p "$folder"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} # the time that archives give their files
export SOURCE_DATE_EPOCH
for project in runtime kernels serve .; do
    "$PYTHON" -m build --no-isolation --outdir "$folder" "$project" >/dev/null
done
cd "$folder"
sha256sum ./*.whl ./*.tar.gz >SHA256SUMS
cat SHA256SUMS
