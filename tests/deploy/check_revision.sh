#!/usr/bin/env bash
# check_revision.sh <repository>: which version a source says that it is (deploy/cmake/revision.cmake), for every way to come by one.
# In repositories of its own: versions rise with each commit as dpkg and pip order them, changed files count, a tag has the number
# alone; an archive that git made says the same as the checkout; a copy without git, and one within another repository, have the date
# of their newest file.
set -euo pipefail
source_root=$(cd "$1" && pwd)
for tool in git dpkg; do command -v $tool >/dev/null || { echo "$tool is missing"; exit 77; }; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@t GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@t GIT_CONFIG_GLOBAL=/dev/null TZ=Asia/Kolkata

number=$(sed -n 's/^project(mkernel VERSION \([0-9.]*\).*/\1/p' "$source_root/CMakeLists.txt")
version() { (cd / && cmake "${@:2}" -P "$1/deploy/cmake/revision.cmake"); }  # <source> <option>...
is() { [ "$1" = "$2" ] || { echo "is $1, and should be $2"; exit 1; }; }
# <older> <newer>
rises() {
  dpkg --compare-versions "$1-1" lt "$2-1" || { echo "for dpkg $2 is not newer than $1"; exit 1; }
  python3 - "$1" "$2" <<'PYTHON'
import sys
try:
    from packaging.version import Version
except ImportError:
    try:
        from pip._vendor.packaging.version import Version
    except ImportError:
        sys.exit(0)
older, newer = map(Version, sys.argv[1:3])
assert older < newer and [str(older), str(newer)] == sys.argv[1:3], (older, newer)
PYTHON
}
commit() {  # <seconds since 1970>
  GIT_AUTHOR_DATE="$1 +0000" GIT_COMMITTER_DATE="$1 +0000" git -C "$work/tree" commit -q --allow-empty -a -m "$1"
}
hash() { git -C "$work/tree" rev-parse HEAD | cut -c1-12; }

mkdir -p "$work/tree/deploy/cmake" "$work/tree/daemon"
cp "$source_root/CMakeLists.txt" "$source_root/.gitattributes" "$work/tree/"
cp "$source_root"/deploy/cmake/{revision.cmake,archive.txt} "$work/tree/deploy/cmake/"
echo 1 >"$work/tree/daemon/file.cc"
touch -d @1700000000 "$work/tree/CMakeLists.txt" "$work/tree"/deploy/cmake/* "$work/tree/daemon/file.cc"

# Without git: the newest file, wherever in the source; a build folder is no part of it.
plain=$(version "$work/tree")
is "$plain" "$number+20231114221320.files"
touch -d @1700000007 "$work/tree/daemon/file.cc"
is "$(version "$work/tree")" "$number+20231114221327.files"
mkdir "$work/tree/build"
echo >"$work/tree/build/file"
is "$(version "$work/tree")" "$number+20231114221327.files"
rm -r "$work/tree/build"
rises "$number" "$plain"

git -C "$work/tree" init -q
is "$(version "$work/tree")" "$number+20231114221327.files"  # no commit yet
git -C "$work/tree" add .
commit 1700000010
first=$(version "$work/tree")
is "$first" "$number+20231114221330.g$(hash)"
rises "$plain" "$first"
commit 1700003611
second=$(version "$work/tree")
is "$second" "$number+20231114231331.g$(hash)"
rises "$first" "$second"

# Changed files: newer than their commit, also where their clock is behind.
echo 2 >"$work/tree/daemon/file.cc"
touch -d @1700003630 "$work/tree/daemon/file.cc"
is "$(version "$work/tree")" "$number+20231114231350.g$(hash).dirty"
rises "$second" "$(version "$work/tree")"
touch -d @1600000000 "$work/tree/daemon/file.cc"
rises "$second" "$(version "$work/tree")"
rm "$work/tree/daemon/file.cc"
rises "$second" "$(version "$work/tree")"
git -C "$work/tree" checkout -q -- daemon
is "$(version "$work/tree")" "$second"

# An archive, and one within another repository.
archive() {
  rm -rf "$work/outer"
  mkdir -p "$work/outer/archive"
  git -C "$work/outer" init -q
  git -C "$work/outer" commit -q --allow-empty -m other
  git -C "$work/tree" archive HEAD | tar -x -C "$work/outer/archive"
}
archive
is "$(version "$work/outer/archive")" "$second"
cp "$work/tree/deploy/cmake/archive.txt" "$work/outer/archive/deploy/cmake/"  # as a copy of the files has it
touch -d @1700009999 "$work/outer/archive/CMakeLists.txt"
find "$work/outer/archive" -type f ! -name CMakeLists.txt -exec touch -d @1700000000 {} +
is "$(version "$work/outer/archive")" "$number+20231115005959.files"

# A release, by git and as an archive; the tag of another version is none of this one.
git -C "$work/tree" tag v9.9.9
is "$(version "$work/tree")" "$second"
git -C "$work/tree" tag "v$number"
is "$(version "$work/tree")" "$number"
archive
is "$(version "$work/outer/archive")" "$number"
commit 1700007777
rises "$number" "$(version "$work/tree")"
rises "$second" "$(version "$work/tree")"

# As it is told, and written only when it has changed.
is "$(version "$work/tree" -DMK_REVISION=OFF)" "$number"
is "$(version "$work/tree" -DMK_REVISION=20240101.mine)" "$number+20240101.mine"
for same in "$number" "$second"; do is "$(version "$work/tree" "-DMK_REVISION=$same")" "$same"; done
for bad in 'a b' 9.9.9+1 A '' -; do
  if version "$work/tree" "-DMK_REVISION=$bad" 2>/dev/null; then echo "'$bad' is taken"; exit 1; fi
done
version "$work/tree" "-DMK_HEADER=$work/mk_version.h" "-DMK_TEXT=$work/version.txt"
is "$(cat "$work/version.txt")" "$(version "$work/tree")"
is "$(cat "$work/mk_version.h")" "#define MK_VERSION \"$(version "$work/tree")\""
touch -d @1700000000 "$work/mk_version.h"
version "$work/tree" "-DMK_HEADER=$work/mk_version.h"
is "$(stat -c %Y "$work/mk_version.h")" 1700000000
echo "revision: all well"
