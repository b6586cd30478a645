# The init of one machine of the test cluster: the first process of its own PID, UTS, IPC and mount namespaces.
# Usage: unshare … bash machine.sh HOSTNAME HOSTS LOG ADDRESS COMMAND…   (ADDRESS "-": share the host's network)
#
# A handshake comes first, so that nothing can run that is not on record: the machine prints its line of /proc,
# which is still the host's and so gives the pid that the host sees, and its start time; tests/cluster/machines.py
# writes them down and only then says go. If the caller dies before that, the read sees the end of the file and
# the machine ends too. As process 1, bash also reaps the orphans that Slurm's step daemons are by design.
set -eu
hostname=$1 hosts=$2 log=$3 address=$4
shift 4

read -r line </proc/self/stat
printf '%s\n' "$line"
read -r _go
exec </dev/null >>"$log" 2>&1

mount -t proc proc /proc            # ps and kill see this machine's processes only
mount -t tmpfs tmpfs /dev/shm       # shared memory is a node's own: equal pids on two nodes must not meet there
mount --bind "$hosts" /etc/hosts    # n1…n4 have addresses here, and the host's file is not touched
hostname "$hostname"
if [ "$address" != - ]; then
    ip link set lo up
    ip address add "$address" dev eth0
    ip link set eth0 up
fi
"$@" &
wait "$!"                           # the daemon's end is the machine's end
