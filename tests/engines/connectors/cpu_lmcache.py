"""LMCache's connector for engines on a CPU; loaded by `kv_connector_module_path`, in the engines' environment alone.

It imports LMCache when it is made and not before: LMCache imports numba, and vLLM, which looks into every module while it puts
its CPU kernels in place, stumbles over one of numba's.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class CpuLMCacheConnector(LMCacheConnectorV1):
    """vLLM's own, after LMCache has got what it lacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import cpu_chunks

        cpu_chunks.supply()
        super().__init__(*args, **kwargs)
