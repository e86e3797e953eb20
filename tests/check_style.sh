#!/usr/bin/env bash
# The rules of layout that no compiler knows. Prints every breach; exits 1 when there is one.
set -u
cd "$(dirname "$0")/.."
breaches=0
breach() {
  echo "$1"
  breaches=$((breaches + 1))
}
mapfile -t files < <(git ls-files --cached --others --exclude-standard | sort -u)

# The top level: nothing but these (dot files aside).
allowed=" CMakeLists.txt CMakePresets.json LICENSE README.md client daemon deploy kernels proto shm systemd tests "
for entry in $(printf '%s\n' "${files[@]%%/*}" | sort -u); do
  case $entry in
    .*) ;;
    *) [[ $allowed == *" $entry "* ]] || breach "$entry: not among the top level's entries" ;;
  esac
done

# A README.md in every top-level folder and every folder of code. Exempt: folders that are only an include path, and
# those under a folder of tests/ that mirrors a source folder.
folders=$(printf '%s\n' "${files[@]}" | grep -E '/.*\.(h|c|cc|cu|cuh|proto|py)$' | xargs -r -n1 dirname | sort -u)
for folder in client daemon deploy kernels proto shm systemd tests; do
  [ -d "$folder" ] && folders+=" $folder"
done
for folder in $(printf '%s\n' $folders | sort -u); do
  case $folder in
    */include | */include/* | proto/mkernel | proto/mkernel/*) continue ;;
    tests/*)
      mirrored=${folder#tests/}
      [ -d "${mirrored%%/*}" ] && continue ;;
  esac
  [ -f "$folder/README.md" ] || breach "$folder: no README.md"
done

# Sources: short enough to read, and headers guarded the one way.
for file in "${files[@]}"; do
  [ -f "$file" ] || continue
  case $file in
    *.h | *.cuh)
      [[ $file == client/include/* ]] || grep -q '^#pragma once' "$file" || breach "$file: no #pragma once" ;;
  esac
  case $file in
    *.h | *.c | *.cc | *.cu | *.cuh)
      lines=$(wc -l <"$file")
      [ "$lines" -le 500 ] || breach "$file: $lines lines (500 at most: one job per file)" ;;
  esac
done

# Man pages are ones that scdoc takes.
if command -v scdoc >/dev/null; then
  for page in deploy/man/*.scd; do
    refused=$(scdoc <"$page" 2>&1 >/dev/null) || breach "$page: $refused"
  done
fi

# The documents promise what tests show, and miss nothing that a user may look up.
python3 tests/check_security.py || breaches=$((breaches + 1))
python3 tests/check_docs.py || breaches=$((breaches + 1))

# Documents are plain, and what they name exists. The checks themselves are checked first.
for test in tests/check_docs_test.py tests/check_prose_test.py; do
  python3 "$test" 2>&1 | grep -vE '^(\.+|-+|Ran .*|OK|)$'
  [ "${PIPESTATUS[0]}" = 0 ] || breach "$test: the lines above"
done
python3 tests/check_prose.py || breaches=$((breaches + 1))

[ $breaches = 0 ] || { echo "$breaches breaches"; exit 1; }
