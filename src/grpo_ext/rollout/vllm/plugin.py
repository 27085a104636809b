"""vLLM's plug-in entry point: what every vLLM process gets once grpo-ext is installed."""

import os

from grpo_ext.rollout.vllm.gloo import BACKEND


def register() -> None:
    """Add the `gloo` weight-transfer engine; on a CPU server that takes new weights, keep weights where they are."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may load its plug-ins more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "grpo_ext.rollout.vllm.engine", "GlooWeightTransferEngine"
        )
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        keep_weights_in_place()


def keep_weights_in_place() -> None:
    """On a CPU, have linear layers read the very weights that a push writes.

    By default vLLM copies them into a kernel's own layout after loading and drops the originals, so that a push fails
    (colocate) or leaves the tied head stale (reload). Without the copies the layers run by torch's own `linear`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    os.environ["VLLM_ZENTORCH_WEIGHT_PREPACK"] = "0"
