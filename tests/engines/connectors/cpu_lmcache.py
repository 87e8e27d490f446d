"""LMCache's connector for engines on a CPU; loaded by `kv_connector_module_path`, only in the
engines' environment.

It imports LMCache in its constructor and not before: LMCache imports numba, and vLLM inspects every
module while it installs its CPU kernels, and fails on one of numba's modules.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class CpuLMCacheConnector(LMCacheConnectorV1):
    """vLLM's own connector, with the code that LMCache lacks on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import cpu_chunks

        cpu_chunks.supply()
        super().__init__(*args, **kwargs)
