#!/usr/bin/env bash
# Wheels and sdists of the four distributions, with an SBOM of each wheel and checksums, which the SSH key in the file
# SEKO_SIGN_KEY signs. Two builds of one commit give equal wheels.
#     bash scripts/wheels.sh [FOLDER]                  default dist
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv dev
seko_add_serve ""
folder=${1:-dist}
mkdir -p "$folder"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} # the time that archives give their files
export SOURCE_DATE_EPOCH
for project in runtime kernels serve .; do
    "$PYTHON" -m build --no-isolation --outdir "$folder" "$project" >/dev/null
done
"$PYTHON" -m scripts.sbom wheels "$folder"
cd "$folder"
sha256sum ./*.whl ./*.tar.gz ./*.cdx.json >SHA256SUMS
cat SHA256SUMS
if [ -n "${SEKO_SIGN_KEY:-}" ]; then
    ssh-keygen -Y sign -f "$SEKO_SIGN_KEY" -n seko-release SHA256SUMS
fi
