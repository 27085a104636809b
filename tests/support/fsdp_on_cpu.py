"""Real FSDP2 over gloo: accelerate sets FSDP beside types of GPU only, and is plain DDP on a CPU otherwise.

A rank script calls `make_fsdp_real()` before its first `Accelerator`; `fsdp_on_cpu.py MODULE [ARGS]` does so and runs
a module, as `accelerate launch fsdp_on_cpu.py grpo_ext.train --config ...`.
"""

import os
import runpy
import sys
from functools import wraps

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor


def make_fsdp_real() -> None:
    """Where the launch configuration says FSDP, let accelerate take two CPU processes for two GPUs'."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    CPUOffloadPolicy.__init__.__defaults__ = (False,)  # pinned memory is a GPU's
    plain = AcceleratorState.__init__

    @wraps(plain)
    def started(self, *args, cpu=False, **kwargs):
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plain(self, *args, cpu=cpu, **kwargs)

    AcceleratorState.__init__ = started


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether this process holds its own piece of each parameter, and no more."""
    return all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())


if __name__ == "__main__":
    make_fsdp_real()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
