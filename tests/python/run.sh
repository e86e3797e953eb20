#!/usr/bin/env bash
# run.sh <python> <results.xml> <pytest argument>...: runs pytest, and skips (77) where it or NumPy is missing.
set -u
python=$1 results=$2
shift 2
"$python" -c 'import numpy, pytest' || { echo "NumPy or pytest is missing (Debian: python3-numpy python3-pytest)"; exit 77; }
exec "$python" -B -m pytest -q -p no:cacheprovider --junitxml "$results" "$@"
