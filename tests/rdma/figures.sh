#!/usr/bin/env bash
# The verbs fabric against perftest's ib_write_bw, in turns, in the virtual machine of run_vm.sh: RC writes of the same
# size with as many outstanding. Writes /rdma-out/verbs_rxe.json.
#
#   bash tests/rdma/run_vm.sh --out FOLDER -- bash tests/rdma/figures.sh BUILD_FOLDER [ROUNDS]
set -u
build=$1 rounds=${2:-21} bytes=65536 count=400 window=16
perftest() {
  ib_write_bw -F -d rxe0 -x 1 -s $bytes -n $count -t $window >/tmp/server.log 2>&1 &
  local server=$! result=
  for _ in $(seq 50); do
    result=$(ib_write_bw -F -d rxe0 -x 1 -s $bytes -n $count -t $window 10.77.0.1 2>/dev/null | awk -v s=$bytes '$1 == s { print $4 }')
    [ -z "$result" ] || break
    sleep 0.2
  done
  wait $server
  echo "$result"
}
ours() { "$build/tests/bench/verbs_benchmark" --bytes $bytes --count $count --window $window --arrival "$1"; }
for round in $(seq "$rounds"); do
  echo "$(perftest) $(ours flag) $(ours immediate)"
  echo "figures: round $round" >&2
done >/tmp/rounds
python3 - $bytes $count $window <<'END'
import json, platform, statistics, sys
rounds = [list(map(float, line.split())) for line in open('/tmp/rounds')]
names = ['ib_write_bw', 'verbs_flag', 'verbs_immediate']
report = {'bytes': int(sys.argv[1]), 'writes': int(sys.argv[2]), 'outstanding': int(sys.argv[3]), 'unit': 'MiB/s',
          'kernel': platform.release(), 'machine': 'QEMU TCG, 2 CPUs, rxe over veth'}
for i, name in enumerate(names):
    values = [r[i] for r in rounds]
    report[name] = {'median': statistics.median(values), 'values': values}
for name in names[1:]:
    i = names.index(name)
    report['ratio_' + name] = {'of_medians': round(report[name]['median'] / report['ib_write_bw']['median'], 3),
                               'median_of_pairs': round(statistics.median(r[i] / r[0] for r in rounds), 3)}
json.dump(report, open('/rdma-out/verbs_rxe.json', 'w'), indent=1)
print(json.dumps(report, indent=1))
END
