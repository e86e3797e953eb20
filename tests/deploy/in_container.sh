#!/usr/bin/env bash
# Runs as root in a freshly booted Debian that has nothing of mkernel but /root/old and /root/new: what an administrator does with
# the packages, step by step. The first step that fails ends it.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
exec 2>&1
what=
trap 'status=$?; [ $status = 0 ] || { echo "FAILED: $what"; journalctl -u mkerneld -u mkerneld.socket --no-pager -n 30 || true; tail -n 5 /tmp/*.log || true; }' EXIT
step() { what=$*; echo "   $*"; }
until_ok() {  # <tenths of a second> <command>...
  local left=$1
  shift
  until "$@" >/dev/null 2>&1; do
    left=$((left - 1))
    [ $left -gt 0 ] || { echo "never: $*"; return 1; }
    sleep 0.1
  done
}
# `set -e` does not see a negated command.
fails() { if "$@"; then echo "should have failed: $*"; return 1; fi; }
says() { journalctl -u mkerneld --no-pager -o cat --since "@$since" | grep -qF "$1"; }
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
logged_after() {  # <milliseconds since 1970> <pattern>: how many later the daemon first said so
  journalctl -u mkerneld --no-pager -o short-unix --since "@$(($1 / 1000))" |
    awk -v begin="$1" -v pattern="$2" '$0 ~ pattern && $1 * 1000 > begin && !seen { seen = 1; printf "%d", $1 * 1000 - begin }'
}
main_pid() { systemctl show -p MainPID --value mkerneld; }
bench() { mkbench gemm-ar --join /run/mkernel/mkerneld.sock /run/second/c.sock --local 1 --m 128 --n 128 --k 128 --warmup 1 "$@"; }
since=$(date +%s)

step "installs; the service is up, under its own user, with its client socket held by systemd"
dpkg -i /root/old/*.deb >/tmp/dpkg.log
until_ok 100 systemctl is-active --quiet mkerneld
systemctl is-enabled --quiet mkerneld mkerneld.socket
[ "$(ps -o user= -p "$(main_pid)")" = mkernel ]
mkctl status | grep -q '^node 0: ok'
systemctl status mkerneld | grep -q 'Status: "node 0: 0 sessions of 0 jobs'
[ "$(stat -c '%U %a' /run/mkernel/mkerneld.sock)" = "mkernel 666" ]
ss=$(systemctl show -p ActiveState --value mkerneld.socket); [ "$ss" = active ]
if (ulimit -l unlimited) 2>/dev/null; then grep -q 'Max locked memory *unlimited' "/proc/$(main_pid)/limits"; fi
grep -q '^Seccomp:.*2' "/proc/$(main_pid)/status"
grep -q '^CapEff:.*0000000000000000' "/proc/$(main_pid)/status"

step "is configured with a second node, reloads what it can, refuses the rest"
cat >/etc/mkernel/mkerneld.toml <<'END'
node_id = 0
listen = "127.0.0.1:7171"
[[peer]]
id = 1
address = "127.0.0.1:7172"
[metrics]
listen = "127.0.0.1:9464"
[limits]
drain = "0s"
END
mkerneld --config /etc/mkernel/mkerneld.toml --check-config >/tmp/check.log
systemctl restart mkerneld
mkdir -p /run/second
chown mkernel /run/second
systemd-run -q --unit=second -p User=mkernel mkerneld --node-id 1 --listen 127.0.0.1:7172 --socket /run/second/c.sock --peer 0=127.0.0.1:7171
until_ok 100 sh -c 'mkctl status | grep -q "^node 0: ok"'
sed -i 's/drain = .*/drain = "0s"\n[log]\nlevel = "debug"/' /etc/mkernel/mkerneld.toml
systemctl reload mkerneld
until_ok 50 says 'the configuration is reloaded: log.level "info" -> "debug"'
sed -i 's/^node_id = 0/node_id = 5/' /etc/mkernel/mkerneld.toml
systemctl reload mkerneld
until_ok 50 says 'these changes need a restart of mkerneld: node_id 0 -> 5'
sed -i 's/^node_id = 5/node_id = 0/' /etc/mkernel/mkerneld.toml
systemctl reload mkerneld

step "runs a job over two nodes, every element checked, as an ordinary user"
useradd -m tester
su tester -c "$(declare -f bench); bench --iters 3 --verify all" >/tmp/job.log
userdel -r tester 2>/dev/null

step "drains: new jobs are refused, the running one ends undisturbed; resumes"
bench --iters 20000 --modes fused --verify none >/tmp/long.log & job=$!
until_ok 200 sh -c 'mkctl session list | grep -q up'
fails mkctl drain --timeout 0s >/tmp/drain.log
# On this node alone: a rank on the other one would wait for it for a while.
fails mkbench gemm-ar --join /run/mkernel/mkerneld.sock --nodes 1 --local 1 --m 128 --n 128 --k 128 --iters 1 >/tmp/refused.log 2>&1
grep -q 'drained for maintenance' /tmp/refused.log
kill -0 $job
mkctl drain --timeout 300s | grep -q '^drained'
wait $job
mkctl resume
bench --iters 1 --verify all >/tmp/job.log

step "upgrades while a job runs: the job gets its error, new ones work, the edited configuration is kept"
sum=$(sha256sum /etc/mkernel/mkerneld.toml)
bench --iters 100000 --verify none >/tmp/long.log 2>&1 & job=$!
until_ok 200 sh -c 'mkctl session list | grep -q up'
old=$(main_pid)
# As the page says: apt leaves a package alone whose version it has.
apt-get install -y -o Dpkg::Options::=--force-confold /root/new/*.deb >/tmp/dpkg.log
for program in mkerneld mkctl; do [ "$($program --version)-1" = "$(dpkg-query -W -f '${Version}' mkerneld)" ]; done
mkctl version | grep -qF "$(mkctl --version)"
fails wait $job
grep -qE 'shutting down|daemon|drain' /tmp/long.log
[ "$(main_pid)" != "$old" ]
[ "$sum" = "$(sha256sum /etc/mkernel/mkerneld.toml)" ]
until_ok 100 sh -c 'mkctl status | grep -q "^node 0: ok"'
bench --iters 1 --verify all >/tmp/job.log

step "restarts under load, with the drain time of the default: an error within a second, the next rank taken in in under two"
sed -i '/^drain = /d' /etc/mkernel/mkerneld.toml
systemctl reload mkerneld
until_ok 50 says 'limits.drain "0s" -> '
for round in 1 2 3; do
  (fails bench --iters 100000 --verify none >/tmp/long.log 2>&1 && milliseconds >/tmp/ended.part && mv /tmp/ended.part /tmp/ended) & job=$!
  until_ok 200 sh -c 'mkctl session list | grep -q up'
  begin=$(milliseconds)
  systemctl restart mkerneld & restart=$!
  for _ in $(seq 1000); do
    [ ! -e /tmp/ended ] || break
    sleep 0.01
  done
  # Like a launcher that tries again and again: refused while the old daemon stops, then let wait for the new one.
  until_ok 50 bench --iters 1 --verify all
  wait $job
  wait $restart
  attached=$(logged_after "$begin" "rank 0 .* attached to job")
  up=$(logged_after "$begin" "job '.*' is up")
  gone=$(($(cat /tmp/ended) - begin))
  rm /tmp/ended
  echo "      round $round: the job had ended after $gone ms; the next one's rank was taken in after $attached ms, all of it was up after $up ms"
  grep -qE 'shutting down|daemon' /tmp/long.log
  [ "$gone" -lt 1000 ]
  [ "$attached" -lt 2000 ]
done
until_ok 100 sh -c 'mkctl status | grep -q "^node 0: ok"'

step "is killed: it is back, and whoever attaches meanwhile waits instead of failing"
old=$(main_pid)
kill -KILL "$old"
bench --iters 1 --verify all >/tmp/job.log
[ "$(main_pid)" != "$old" ]

step "hangs: the watchdog kills it"
mkdir -p /run/systemd/system/mkerneld.service.d
printf '[Service]\nWatchdogSec=2\nTimeoutAbortSec=1\nLimitCORE=0\n' >/run/systemd/system/mkerneld.service.d/quick.conf
systemctl daemon-reload
systemctl restart mkerneld
sleep 5
old=$(main_pid)
[ "$(systemctl show -p NRestarts --value mkerneld)" = 0 ]
kill -STOP "$old"
until_ok 200 sh -c "[ \$(systemctl show -p MainPID --value mkerneld) != $old ] && systemctl is-active --quiet mkerneld"
rm -r /run/systemd/system/mkerneld.service.d
systemctl daemon-reload

step "gives its admin socket to a group: members change things, other users do not"
cp /etc/mkernel/mkerneld.toml /tmp/good.toml
groupadd operators
useradd -m -G operators operator
useradd -m tester
mkdir -p /etc/systemd/system/mkerneld.service.d
printf '[Service]\nSupplementaryGroups=operators\n' >/etc/systemd/system/mkerneld.service.d/site.conf
printf '[admin]\ngroup = "operators"\n' >>/etc/mkernel/mkerneld.toml
systemctl daemon-reload
systemctl restart mkerneld
until_ok 100 mkctl ready
[ "$(stat -c '%U %G %a' /run/mkernel-admin/mkerneld.sock)" = "mkernel operators 660" ]
su operator -c 'mkctl resume' >/tmp/resume.log
fails su tester -c 'mkctl resume' >/tmp/resume.log 2>&1
rm -r /etc/systemd/system/mkerneld.service.d
cp /tmp/good.toml /etc/mkernel/mkerneld.toml
systemctl daemon-reload
systemctl restart mkerneld
for user in operator tester; do userdel -r $user 2>/dev/null; done
groupdel operators
until_ok 100 mkctl ready

step "waits for a NIC: a restart and an upgrade return all the same, and a reload takes the corrected file"
cp /etc/mkernel/mkerneld.toml /tmp/good.toml
printf '[fabric]\nname = "verbs"\n[fabric.verbs]\ndevices = ["none"]\n' >>/etc/mkernel/mkerneld.toml
timeout 60 systemctl restart mkerneld
timeout 60 apt-get install -y --reinstall -o Dpkg::Options::=--force-confold /root/new/mkerneld_*.deb >/tmp/dpkg.log
systemctl is-active --quiet mkerneld
systemctl status mkerneld | grep -q 'Status: "waiting: '
fails mkctl ready 2>/tmp/ready.log
grep -q none /tmp/ready.log
cp /tmp/good.toml /etc/mkernel/mkerneld.toml
timeout 60 systemctl reload mkerneld
until_ok 100 mkctl ready

step "comes to whoever knocks: stopped, its socket starts it"
systemctl stop mkerneld 2>/dev/null
systemctl is-active --quiet mkerneld.socket
bench --iters 1 --verify all >/tmp/job.log || bench --iters 1 --verify all >/tmp/job.log
systemctl is-active --quiet mkerneld

step "man pages and documents are there"
for page in man8/mkerneld.8 man5/mkerneld.toml.5 man1/mkctl.1 man1/mkrun.1 man1/mkbench.1 man3/libmkclient.3; do
  [ -s "/usr/share/man/$page.gz" ] || [ -s "/usr/share/man/$page" ]
done

step "is removed: stopped, the configuration stays; purged: nothing stays"
systemctl stop second
dpkg -r mkernel-tools mkerneld libmkclient-dev libmkclient1 >/tmp/dpkg.log
fails systemctl is-active --quiet mkerneld
fails systemctl is-active --quiet mkerneld.socket
fails pgrep mkerneld
[ -e /etc/mkernel/mkerneld.toml ]
dpkg -P mkerneld libmkclient1 >/tmp/dpkg.log
for path in /etc/mkernel /run/mkernel /run/mkernel-admin; do fails test -e $path; done
fails getent passwd mkernel
fails getent group mkernel
units=$(systemctl list-unit-files --no-legend 'mkerneld*' || true)
[ -z "$units" ] || { echo "$units"; false; }
rm -rf /root/old /root/new
