"""Copies KV between LMCache's chunks and vLLM's blocks on a CPU. Imported only in the engines'
environment.

LMCache 0.5.6 copies KV between vLLM's blocks and its own chunks with code for each accelerator, and
has none for CPUs: there it starts and answers, but never stores or sends anything. This module is
that code in plain torch; nothing else is changed.

A chunk is [keys or values, layer, token, heads x head size]. vLLM declares each layer as [block,
head, token, 2 x head size], but its CPU attention stores, for each block and head, all keys with
one column per token, and then all values with one row per token (vLLM 0.32.0 on x86-64,
`cpu_attn_reshape_and_cache`). Only this layout separates the last tokens of a block correctly.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lmcache.v1.gpu_connector as lmcache_connectors
import torch
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.memory_management import MemoryFormat


def keys_and_values(layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of one layer: keys as [block, head, head size, token], values as [block, head,
    token, head size].
    """
    blocks, heads, tokens, both = layer.shape
    parts = layer.view(blocks, heads, 2, -1)
    return parts[:, :, 0].unflatten(-1, (both // 2, tokens)), parts[:, :, 1].unflatten(
        -1, (tokens, both // 2)
    )


class CpuConnector(MockGPUConnector):
    """Copies tokens [start, end) of a request from vLLM's blocks to a chunk, and back."""

    def _places(
        self, start: int, end: int, given: dict[str, Any]
    ) -> Iterator[tuple[int, torch.Tensor, Any, Any]]:
        """Yield for each layer: its number, keys or values as [block, head, token, head size], the
        tokens' blocks and offsets.
        """
        layers = given.get("kvcaches") or self.kvcaches
        slots = given["slot_mapping"][start:end].to("cpu", torch.long)
        for number, layer in enumerate(layers):
            keys, values = keys_and_values(layer)
            size = layer.shape[2]
            yield number, keys.transpose(2, 3), slots // size, slots % size
            yield number, values, slots // size, slots % size

    def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        """Fill a chunk."""
        for at, (number, place, blocks, offsets) in enumerate(self._places(start, end, given)):
            memory_obj.tensor[at % 2, number].copy_(place[blocks, :, offsets].flatten(1))
        memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

    def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        """Fill vLLM's blocks from a chunk."""
        for at, (number, place, blocks, offsets) in enumerate(self._places(start, end, given)):
            place[blocks, :, offsets] = memory_obj.tensor[at % 2, number].unflatten(
                -1, (place.shape[1], -1)
            )

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
        """Return the shape of a chunk of `num_tokens` tokens."""
        return torch.Size([2, self.num_layers, num_tokens, self.kv_shape[3] * self.kv_shape[4]])


_create = lmcache_connectors.CreateGPUConnector


def _create_for_cpu(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
    if engine == EngineType.VLLM:
        return CpuConnector(metadata.kv_shape)
    return _create(config, metadata, engine, layout_hints)


def supply() -> None:
    """Replace LMCache's function. LMCache imports the name when it makes an engine, so it gets this
    one.
    """
    lmcache_connectors.CreateGPUConnector = _create_for_cpu
