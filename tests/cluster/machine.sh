# The init of one machine of the test cluster: the first process in new PID, UTS, IPC and mount namespaces.
# Usage: unshare … bash machine.sh HOSTNAME HOSTS LOG ADDRESS COMMAND…   (ADDRESS "-": share the host's network)
#
# A handshake ensures that nothing runs without a record. First, the machine prints its line of /proc/self/stat. /proc is
# still that of the host here, so the line has the PID on the host and the start time. tests/cluster/machines.py records
# both and then writes "go". If the caller dies before that, `read` reaches the end of its input and the machine exits.
# As process 1, bash also reaps orphans, such as Slurm's step daemons.
set -eu
hostname=$1 hosts=$2 log=$3 address=$4
shift 4

read -r line </proc/self/stat
printf '%s\n' "$line"
read -r _go
exec </dev/null >>"$log" 2>&1

mount -t proc proc /proc            # ps and kill see this machine's processes only
mount -t tmpfs tmpfs /dev/shm       # own shared memory for each node, because PIDs on two nodes can be equal
mount --bind "$hosts" /etc/hosts    # addresses of n1…n4, without changing the file of the host
hostname "$hostname"
if [ "$address" != - ]; then
    ip link set lo up
    ip address add "$address" dev eth0
    ip link set eth0 up
fi
# The machine ends when the daemon ends. But slurmd 22.05.8 sometimes crashes with SIGSEGV or SIGABRT (corrupted heap)
# when several steps start at the same time. It is then started again, as a service manager would do. Its running steps
# are not affected.
code=139
while [ "$code" = 139 ] || [ "$code" = 134 ]; do
    "$@" &
    code=0
    wait "$!" || code=$?
done
