"""Entry point that vLLM calls in each of its processes once grpo-ext is installed."""

import os
import sys

from grpo_ext.rollout.vllm.gloo import BACKEND


def register() -> None:
    """Offer the weight-transfer engine `gloo`; on a CPU server that is started with it, keep weights in place."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may load its plugins more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "grpo_ext.rollout.vllm.engine", "GlooWeightTransferEngine"
        )
    takes_weights = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    by_file = any(argument.partition("=")[0] == "--config" for argument in sys.argv)  # the file may name the engine
    if takes_weights and (by_file or any(BACKEND in argument for argument in sys.argv)):  # --weight-transfer-config
        keep_weights_in_place()


def keep_weights_in_place() -> None:
    """On a CPU, let linear layers compute with the weights that a push writes.

    By default vLLM copies them into a kernel's own layout after loading and drops the originals. A push then fails
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
