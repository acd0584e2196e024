#!/usr/bin/env bash
# A Slurm cluster of this one machine, for tests: slurm_node.sh start DIR, slurm_node.sh stop DIR. Needs root and Debian's
# packages slurm-wlm and munge. Clients use it with SLURM_CONF=DIR/slurm.conf. All files and process ids are in DIR.
set -euo pipefail
action=$1 dir=$2

if [ "$action" = stop ]; then
    for daemon in slurmd slurmctld munged; do
        [ -s "$dir/$daemon.pid" ] && kill "$(cat "$dir/$daemon.pid")" || true
    done
    exit
fi

mkdir -p "$dir/state" "$dir/spool"
chmod 755 "$dir"
dd if=/dev/urandom of="$dir/munge.key" bs=1 count=1024 status=none
chmod 600 "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"

cat > "$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=5
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=4000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$dir/slurm.conf
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF"
for _ in $(seq 60); do
    sinfo --noheader --format=%T 2> "$dir/sinfo.log" | grep -q idle && exit
    sleep 0.5
done
echo "the node is not idle after 30 s: see $dir/*.log" >&2
exit 1
