#!/usr/bin/env bash
# Checks the Promela models with spin: every model holds, every mutant of it fails, and fails of what its list says.
#
#   bash tests/model/run.sh [WORD]     only cases whose file or name contains WORD
#
# The cases are in models.txt beside the models; check_model.sh checks one.
set -eu
cd "$(dirname "$0")/../.."
cmake -S tests/stages -B build/stages >/dev/null
exec ctest --test-dir build/stages -L '^model$' -R "${1:-.}" -j "$(nproc)" --output-on-failure --no-tests=error
