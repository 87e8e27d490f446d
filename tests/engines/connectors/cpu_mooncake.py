"""Mooncake's connector for engines on a CPU; loaded by `kv_connector_module_path`, only in the
engines' environment.

vLLM 0.32.0 asks for the current accelerator and selects it, also where there is none, and both fail
there. Nothing else is changed: Mooncake moves the blocks between the engines' memories by TCP.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
from vllm.platforms import current_platform


def supply() -> None:
    """Make the number of the accelerator 0, and its selection nothing. The sender's threads select
    it, too.
    """
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(lambda cls, device: None)


class CpuMooncakeConnector(MooncakeConnector):
    """vLLM's own connector, without an accelerator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        supply()
        super().__init__(*args, **kwargs)
