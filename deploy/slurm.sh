#!/bin/bash
# A run of Understudy on several SLURM nodes: Ray's head on the first, workers on all, then the command.
#
#   sbatch --nodes 4 deploy/slurm.sh train grpo /shared/runs/press --policy /shared/vla.safetensors \
#       --engine.parallel ddp --cluster.shard-dir /local/understudy --cluster.rollout.num 128 --cluster.learner.num 16
#   sbatch --nodes 4 deploy/slurm.sh resume /shared/runs/press
#
# The run directory is on a file system that all nodes see; --cluster.shard-dir is on a disk of each node. A job that
# SLURM starts again (--requeue) goes on with the run. Its shards are on the disks of the nodes that it had: ask for the
# same ones (--nodelist), because a run refuses to go on without a shard that it does not find.
#
# UNDERSTUDY  the program, if it is not `understudy`          RAY_PORT  of the head; one for each job by default
# SCRATCH     where Ray keeps its temporary files: a short path on a local disk, /tmp by default

#SBATCH --job-name=understudy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=understudy-%j.log

set -euo pipefail
set -m # else what runs in the background would not hear SIGINT

if [[ $# -lt 2 ]]; then
    echo "usage: sbatch --nodes N $0 train ALGORITHM RUN [options] | resume RUN [options]" >&2
    exit 2
fi
case $1 in
    train) run=${3:?which run? train ALGORITHM RUN} ;;
    *) run=$2 ;;
esac

# A job that Slurm starts again resumes its run, if the run exists, with the same --cluster.* options.
command=("$@")
if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && $1 == train && -e $run/config.json ]]; then
    command=(resume "$run")
    while [[ $# -gt 0 ]]; do
        case $1 in
            --cluster.*)
                command+=("$1")
                [[ $1 == *=* || ${2:---} == --* ]] || { command+=("$2"); shift; }
                ;;
        esac
        shift
    done
fi

export RAY_worker_niceness=0 # Ray starts workers at nice 15, which starves simulators beside anything else
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Other users of these nodes can reach Ray's ports: without the token they could run code as you.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
ulimit -n "$(ulimit -Hn)" # a thousand workers are some thousand sockets

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
scratch=${SCRATCH:-/tmp}/ray-$SLURM_JOB_ID
on_head() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" "$@"; }
ip=$(on_head hostname --ip-address)
[[ $ip != 127.* ]] || ip=$(on_head hostname -I) # its own name is often loopback; then the first interface
ip=${ip%% *}
common=(--temp-dir "$scratch" --num-cpus "${SLURM_CPUS_ON_NODE:-$(nproc)}" --disable-usage-stats --block)

steps=() driver=
# shellcheck disable=SC2329 # called by the traps
finish() {
    trap - EXIT TERM INT
    [[ -n $driver ]] && kill -INT "$driver" 2>/dev/null && wait "$driver" || true
    [[ ${#steps[@]} -gt 0 ]] && kill -TERM "${steps[@]}" 2>/dev/null && wait "${steps[@]}" || true
    srun --overlap --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 rm -rf "$scratch" || true
}
trap finish EXIT
trap 'finish; exit 143' TERM INT # SLURM says so two minutes before the time is up: the driver ends at a checkpoint

echo "Ray on ${#nodes[@]} nodes, head at $ip:$port ($head)"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address "$ip" --port "$port" --include-dashboard=false "${common[@]}" &
steps+=($!)
for attempt in $(seq 60); do
    ray health-check --address "$ip:$port" >/dev/null 2>&1 && break
    kill -0 "${steps[0]}" 2>/dev/null || { echo "Ray's head ended; see above" >&2; exit 1; }
    [[ $attempt -lt 60 ]] || { echo "Ray's head at $ip:$port did not answer; is the port free?" >&2; exit 1; }
    sleep 2
done

others=("${nodes[@]:1}")
if [[ ${#others[@]} -gt 0 ]]; then
    list=$(IFS=,; echo "${others[*]}")
    srun --overlap --nodes="${#others[@]}" --ntasks="${#others[@]}" --ntasks-per-node=1 --nodelist="$list" \
        ray start --address "$ip:$port" "${common[@]}" &
    steps+=($!)
fi

# Nodes that are late join while it runs. In the background, so that bash hears SLURM's signal at once.
"${UNDERSTUDY:-understudy}" "${command[@]}" --cluster "$ip:$port" &
driver=$!
code=0
wait "$driver" || code=$?
driver=
exit "$code"
