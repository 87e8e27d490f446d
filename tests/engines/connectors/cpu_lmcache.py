"""LMCache's connector for engines on a CPU; loaded by `kv_connector_module_path`, in the engines' environment alone.

LMCache 0.5.6 copies KV between vLLM's blocks and its own chunks by code for each accelerator, and has none for CPUs: there it
starts, answers, and never stores or sends anything. This is that code in plain torch, and nothing else is changed.

vLLM hands out each layer as a view of [block, head, token of the block, keys then values]; a chunk is
[keys or values, layer, token, heads x head size]. Engines of one kind alone read what this has written, so how a token's
numbers lie inside a chunk is our own affair: they are only cut in two.
"""

from collections.abc import Sequence
from typing import Any

import lmcache.v1.gpu_connector as lmcache_connectors
import torch
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.memory_management import MemoryFormat
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class CpuConnector(MockGPUConnector):
    """Copies tokens [start, end) of a request from vLLM's blocks to a chunk, and back."""

    def _slots(self, start: int, end: int, given: dict[str, Any]) -> tuple[list[torch.Tensor], Any, Any]:
        layers = given.get("kvcaches") or self.kvcaches
        slots = given["slot_mapping"][start:end].to("cpu", torch.long)
        block_size = layers[0].shape[2]
        return layers, slots // block_size, slots % block_size

    def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        """Fill a chunk."""
        layers, blocks, offsets = self._slots(start, end, given)
        for number, layer in enumerate(layers):
            tokens = layer[blocks, :, offsets].reshape(end - start, 2, -1)
            memory_obj.tensor[:, number].copy_(tokens.transpose(0, 1))
        memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

    def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        """Fill vLLM's blocks from a chunk."""
        layers, blocks, offsets = self._slots(start, end, given)
        for number, layer in enumerate(layers):
            tokens = memory_obj.tensor[:, number].transpose(0, 1)
            layer[blocks, :, offsets] = tokens.reshape(end - start, layer.shape[1], layer.shape[3])

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **given: Any
    ) -> None:
        """Fill chunks."""
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **given)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **given: Any
    ) -> None:
        """Fill vLLM's blocks."""
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **given)

    def get_shape(self, num_tokens: int | None = None) -> torch.Size:
        """The shape of a chunk of so many tokens."""
        return torch.Size([2, self.num_layers, num_tokens, self.kv_shape[3] * self.kv_shape[4]])


_create = lmcache_connectors.CreateGPUConnector


def _create_for_cpu(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
    if engine == EngineType.VLLM:
        return CpuConnector(metadata.kv_shape)
    return _create(config, metadata, engine, layout_hints)


# Whoever imports the name later gets ours; vLLM imports its adapter to LMCache when the connector is made.
lmcache_connectors.CreateGPUConnector = _create_for_cpu


class CpuLMCacheConnector(LMCacheConnectorV1):
    """vLLM's own connector under another name: importing it has put the above in place."""
