#!/usr/bin/env bash
# Makes the site of deploy/docs, offline:
#
#   bash deploy/build-docs.sh [FOLDER]     (build/docs by default; begin at html/deploy/docs/index.html)
#
# It takes Debian's Sphinx, MyST, Furo, Doxygen and Breathe: `bash deploy/install-deps.sh --docs`.
set -eu
cd "$(dirname "$0")/.."
for tool in doxygen sphinx-build; do
  command -v $tool >/dev/null || { echo "build-docs: no $tool: bash deploy/install-deps.sh --docs" >&2; exit 77; }
done
# Debian's interpreter, which has Debian's modules.
python=/usr/bin/python3
$python -c "import breathe, furo, myst_parser" 2>/dev/null || {
  echo "build-docs: a module of breathe, furo and myst_parser is missing: bash deploy/install-deps.sh --docs" >&2
  exit 77
}
exec $python deploy/docs/build.py "${1:-build/docs}"
