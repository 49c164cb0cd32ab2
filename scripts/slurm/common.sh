# Sourced by the job files: one run, its ranks as Slurm tasks, and its end.
[ $# -ge 1 ] || { echo "usage: sbatch $0 RUN_DIR [OVERRIDES...]" >&2; exit 2; }
: "${SERVER_PYTHON:?name the Python of the environment with sglang}"
run=$1
shift
export PYTHONSAFEPATH=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export PATH="${SCALERL_BIN:-$PWD/.venv/bin}:$PATH"

# One rank of the trainer: what torchrun would set, from what Slurm does.
export MASTER_PORT=${MASTER_PORT:-29400}
rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec scalerl train "$@"'

# train SRUN_OPTIONS... -- PLACES... -- OVERRIDES...   Places are what a requeued job may find changed.
train() {
  local options=() places=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  while [ "$1" != -- ]; do places+=("$1"); shift; done
  shift
  if [ -f "$run/config.json" ]; then
    set -- --resume "$run" --allow-change "${places[@]}"
  else
    set -- --run-dir "$run" "$@" "${places[@]}"
  fi
  srun --kill-on-bad-exit=1 "${options[@]}" bash -c "$rank" rank "$@" &
  trainer=$!
  # The run ends at a checkpoint; submitted again, or requeued, it goes on from there.
  trap 'kill -TERM $trainer' TERM
  while kill -0 $trainer 2>/dev/null; do
    wait $trainer || true # a signal interrupts it
  done
  wait $trainer
}
