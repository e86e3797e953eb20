#!/bin/busybox sh
# The first process of the virtual machine that run_vm.sh boots: loads the modules, mounts the host's files (read-only,
# with a scratch layer on top), makes a software RDMA NIC, runs the job, tells its exit status, and powers off.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
stop() {
  echo "guest: $1"
  echo "guest: exit $2"
  sync
  poweroff -f
  sleep 60
}
while read -r module; do
  insmod "$module" || stop "cannot load $module" 125
done </modules/order

mkdir -p /host /scratch /root
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host || stop "cannot mount the host" 125
mount -t tmpfs -o size=60% scratch /scratch
mkdir /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work root /root ||
  stop "cannot lay the scratch layer over the host's files" 125
mkdir /out
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /out || stop "cannot mount the results folder" 125
mkdir -p /root/rdma-out
mount -o bind /out /root/rdma-out
for folder in proc sys dev; do mount -o bind "/$folder" "/root/$folder"; done
mkdir -p /root/dev/shm
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run

ulimit -l unlimited
ulimit -n 65536
export MK_RDMA_VM_INTERFACE=v0 HOME=/ PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# One end of a veth pair carries the NIC; what it sends to itself never leaves the driver.
chroot /root /bin/sh -c 'ip link set lo up && ip link add v0 type veth peer name v1 && ip addr add 10.77.0.1/24 dev v0 &&
  ip link set v0 up && ip link set v1 up && rdma link add rxe0 type rxe netdev v0' ||
  stop "cannot make a software RDMA NIC" 125
echo "guest: up after $(cut -d' ' -f1 /proc/uptime) s"
chroot /root /bin/sh /rdma-out/job
status=$?
stop "the job ended after $(cut -d' ' -f1 /proc/uptime) s" $status
