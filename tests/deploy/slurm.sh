# Sourced: a Slurm of its own, with two nodes of this machine, in the folder $work. Needs root, for slurmd; no fixed ports.
#
# slurm_start <line for slurm.conf>...: starts munged, slurmctld and two slurmd, node0 and node1.
slurm_missing() {
  [ "$(id -u)" = 0 ] || { echo "not root: slurmd needs it"; return; }
  local program
  for program in slurmctld slurmd munged srun sbatch; do
    PATH=$PATH:/usr/sbin command -v $program >/dev/null || { echo "$program is missing (Debian: slurmctld slurmd slurm-client munge)"; return; }
  done
}

slurm_start() {
  export PATH=$PATH:/usr/sbin SLURM_CONF=$work/slurm.conf
  local host ports
  host=$(hostname -s)
  read -ra ports < <(python3 "$(dirname "${BASH_SOURCE[0]}")/../runner/free_ports.py" 3)
  chmod 755 "$work"
  mkdir -p "$work/state"
  head -c 128 /dev/urandom >"$work/munge.key"
  chmod 600 "$work/munge.key"
  munged --force --socket="$work/munge.sock" --key-file="$work/munge.key" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munge.seed" >"$work/munged.out" 2>&1
  cat >"$work/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$work/munge.sock
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=1
KillWait=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} State=UNKNOWN
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
$(printf '%s\n' "$@")
END
  slurmctld -f "$work/slurm.conf"
  slurmd -f "$work/slurm.conf" -N node0
  slurmd -f "$work/slurm.conf" -N node1
  local _
  for _ in $(seq 150); do
    [ "$(sinfo --noheader --Node --format=%T 2>/dev/null | sort -u)" = idle ] && return
    sleep 0.2
  done
  echo "Slurm does not come up:"
  sinfo || true
  tail -n 10 "$work"/slurmctld.log "$work"/node?.log
  return 1
}

slurm_stop() {
  local name pid
  for name in node0 node1 slurmctld munged; do
    pid=$(cat "$work/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || continue
    local _
    for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null || true
  done
}
