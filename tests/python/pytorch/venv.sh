#!/usr/bin/env bash
# venv.sh: the virtual environment of the stage `python`, in build/python/venv; made anew when requirements.txt has changed. 7 GB.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=build/python/venv requirements=tests/python/pytorch/requirements.txt
if cmp -s "$requirements" "$folder/requirements.txt"; then
  echo "the environment is there: $folder"
  exit 0
fi
[ -x "$folder/bin/python" ] || /usr/bin/python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"
cp "$requirements" "$folder/requirements.txt"
