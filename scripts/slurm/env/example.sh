# Settings of one cluster, sourced by pretrain.sbatch on the batch host and by every node. Copy it, and pass the copy
# with DSV_ENV=/path/to/cluster.sh. Nothing here changes a result, only speed and robustness.

# Where Python comes from: a virtual environment with `pip install megatron-dsv[kernels]`, seen by all nodes.
export DSV_VENV="${DSV_VENV:-$HOME/megatron-dsv/.venv}"

# A data set written by `dsv prepare`, and the parent of the run folders, both on a shared file system.
export DSV_DATA="${DSV_DATA:-/shared/latents}"
export DSV_RUNS="${DSV_RUNS:-/shared/runs}"

# The machines, which context parallelism plans for and DRY_RUN=1 predicts: a preset of `dsv plan --cluster` or a YAML
# file of one's own. It goes before a dsv-cp-cluster in a configuration file.
export DSV_CLUSTER="${DSV_CLUSTER:-h800}"

# The network interface of the rendezvous and of NCCL's bootstrap; RDMA traffic takes the HCAs below.
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-bond0}"
export GLOO_SOCKET_IFNAME="$NCCL_SOCKET_IFNAME"

# One HCA per GPU on an 8-GPU node; leave storage adapters out.
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7}"
# RoCE v2 on most H800 clusters; drop it on InfiniBand.
export NCCL_IB_GID_INDEX="${NCCL_IB_GID_INDEX:-3}"
# Retries on a flapping link before the job fails (about a minute).
export NCCL_IB_TIMEOUT=22
export NCCL_IB_RETRY_CNT=10

# Local caches: a shared home would be hit by 128 processes at once.
export TRITON_CACHE_DIR="/tmp/${USER:-$(id -un)}/triton"
export TORCHINDUCTOR_CACHE_DIR="/tmp/${USER:-$(id -un)}/inductor"
