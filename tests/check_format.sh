#!/usr/bin/env bash
# clang-format 14 on every source; `--fix` rewrites instead of reporting.
set -eu
cd "$(dirname "$0")/.."
tool=$(command -v clang-format-14 || command -v clang-format)
mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.c' '*.cc' '*.cu' '*.cuh' | sort -u)
existing=()
for file in "${files[@]}"; do [ -f "$file" ] && existing+=("$file"); done
[ ${#existing[@]} -gt 0 ] || exit 0
if [ "${1:-}" = --fix ]; then
  exec "$tool" -i "${existing[@]}"
fi
"$tool" --dry-run --Werror "${existing[@]}" || {
  echo "Run: bash tests/check_format.sh --fix" >&2
  exit 1
}
echo "${#existing[@]} files formatted"
