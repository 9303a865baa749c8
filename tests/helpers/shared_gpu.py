"""Variables with which ranks of one GPU meet by NCCL; for tests and ``one_gpu.py``.

A value has the rank put in. Imports nothing, since a process sets them before torch.
"""

from __future__ import annotations

from collections.abc import Mapping

# NCCL takes ranks of one host on one device for a mistake; of several hosts not.
NCCL: Mapping[str, str] = {
    "NCCL_HOSTID": "fxpar-{rank}",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}
# Symmetric memory asks for a device for each rank otherwise.
OVERLAPPING: Mapping[str, str] = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
