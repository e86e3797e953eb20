#!/usr/bin/env bash
# Checks the Promela models with spin: every model holds, every mutant of it fails, and fails of what its list says.
#
#   bash tests/model/run.sh [WORD]     only cases whose file or name contains WORD
#
# The cases are in models.txt beside the models. "safety": assertions, and no end but the allowed ones. "progress": also no
# infinite run without progress, whatever is scheduled. Each case is bounded in memory and time (MK_MODEL_MEMORY_MIB, default
# 2048; MK_MODEL_TIMEOUT_S, default 120). A search cut short by a bound is a failure, not a pass. To see how a case fails:
# the last lines of its output say where its files are; `spin -t -p model.pml` there prints the steps.
# Ends with "N passed, N failed"; exits 1 when anything failed, 77 when spin or a C compiler is missing.
set -u
cd "$(dirname "$0")/../.."
root=$PWD
word=${1:-}
memory_mib=${MK_MODEL_MEMORY_MIB:-2048}
timeout_s=${MK_MODEL_TIMEOUT_S:-120}
for tool in spin cc; do
  command -v $tool >/dev/null || { echo "no $tool: models are not checked (bash deploy/install-deps.sh --test)"; exit 77; }
done
work=$(mktemp -d "${TMPDIR:-/tmp}/mk-model.XXXXXX")

# check <model> <-O level> <kind> <defines>...: prints the verifier's verdict, "pass" or its first error.
check() {
  local model=$1 optimise=$2 kind=$3 search verdict
  shift 3
  cp "$root/$model" model.pml
  case $kind in
    safety) search=(-DSAFETY) ;;
    progress) search=(-DNP) ;;
    *) echo "no such check: $kind"; return ;;
  esac
  spin -a "$@" model.pml >spin.log 2>&1 || { echo "spin: $(tail -n 1 spin.log)"; return; }
  cc "$optimise" -w "${search[@]}" -DMEMLIM="$memory_mib" -o pan pan.c >cc.log 2>&1 || { echo "cc: $(tail -n 1 cc.log)"; return; }
  # Unreached code is not reported (-n): mutants have it.
  local arguments=(-n -m1000000 -w20)
  [ "$kind" = safety ] || arguments+=(-l)
  timeout "$timeout_s" ./pan "${arguments[@]}" >pan.log 2>&1
  local code=$?
  if [ $code = 124 ]; then
    echo "not done after $timeout_s s"
  elif verdict=$(sed -n 's/^pan:1: //p' pan.log) && [ -n "$verdict" ]; then
    echo "$verdict"
  elif grep -q -E 'Search not completed|max search depth too small|out of memory|reached -DMEMLIM' pan.log; then
    echo "the search was cut short: $(grep -E -m1 'depth too small|memory|MEMLIM' pan.log)"
  elif grep -q 'errors: 0' pan.log; then
    echo pass
  else
    echo "no verdict: $(tail -n 1 pan.log)"
  fi
}

# judge <folder> <file> <name> <rest of the line>: checks one case; a line says what came of it.
judge() {
  local folder=$1 file=$2 name=$3 rest=$4 place=$work/${2%.pml}-$3 began=$SECONDS expected verdict how optimise
  expected=$(sed 's/ *:.*//' <<<"$rest")
  read -r -a how <<<"${rest#*:}"
  mkdir -p "$place"
  # A mutant fails soon: compiling its verifier takes longer than running it.
  optimise=-O0
  [ "$expected" != pass ] || optimise=-O1
  verdict=$(cd "$place" && check "$folder/$file" $optimise "${how[@]}")
  if { [ "$expected" = pass ] && [ "$verdict" = pass ]; } || { [ "$expected" != pass ] && [[ $verdict == "$expected"* ]]; }; then
    echo "passed  ${file%.pml} $name ($(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' "$place/pan.log") states, $((SECONDS - began)) s)"
    rm -rf "$place"
  else
    echo "FAILED  ${file%.pml} $name: expected '$expected', got '$verdict' ($place)"
  fi
}

# As many at a time as there are processors; a case is one thread.
started=$SECONDS
cases=0
while IFS= read -r list; do
  while read -r file name rest; do
    case $file in '' | \#*) continue ;; esac
    [[ "$file $name" == *"$word"* ]] || continue
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    judge "$(dirname "$list")" "$file" "$name" "$rest" >"$work/verdict-$cases" &
    cases=$((cases + 1))
  done <"$list"
done < <(git ls-files --cached --others --exclude-standard '*models/models.txt' | sort)
wait
for ((i = 0; i < cases; ++i)); do cat "$work/verdict-$i"; done | tee "$work/verdicts"
passed=$(grep -c '^passed' "$work/verdicts")
# Whatever did not pass failed, also a case that ended without a word.
failed=$((cases - passed))
rm -f "$work"/verdict*
rmdir "$work" 2>/dev/null
echo "$((SECONDS - started)) s"
[ $((passed + failed)) != 0 ] || { echo "no model matches '$word'"; exit 1; }
echo "$passed passed, $failed failed"
[ $failed = 0 ]
