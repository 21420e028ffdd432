#!/usr/bin/env bash
# Runs on every node, started by pretrain.sbatch through srun: torchrun for this node's GPUs, and the way of a signal.
#
#   node.sh FLAG_FILE COMMAND...
#
# Slurm announces the time limit with USR1 and preemption with TERM. Both reach the workers as USR1, upon which Megatron
# finishes its step, saves a checkpoint and exits with 0 on all ranks. FLAG_FILE is written to say why the job ended.
set -uo pipefail
flag_file=$1
shift

# torchrun would kill its workers 30 s after a TERM, which is too short to save. A signal that is ignored here stays so
# in torchrun and in its workers, until Megatron takes USR1: Slurm sends a preemption's TERM to every process of a step,
# and no worker may end by it before it has saved. The price: workers do not heed torchrun's own TERM either, so that it
# takes those 30 s to end the others when one of them has failed.
(trap '' USR1 TERM; exec "$@") &
agent=$!

forward() {
  echo "$(hostname): $1 received, asking the workers to save and exit" >&2
  echo "$1" > "$flag_file"
  # The workers are the agent's children; Megatron agrees on the exit among ranks, so one signal would do.
  pkill -USR1 -P "$agent" || true
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# wait returns early, with a status above 128, when a trapped signal arrives; then the agent may still be there.
wait "$agent"
status=$?
while kill -0 "$agent" 2>/dev/null; do
  wait "$agent"
  status=$?
done
exit "$status"
