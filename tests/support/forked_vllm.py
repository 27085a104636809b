"""vLLM's processes on a CPU are forks of the server's, where vLLM starts Python for each of them."""

import os

from vllm.platforms.cpu import CpuPlatform

stock = CpuPlatform.check_and_update_config


def check_and_update_config(config):
    stock(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
