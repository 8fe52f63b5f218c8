"""A kernel lowered to CUDA for Hopper; neither a GPU nor nvcc is needed."""

import tilelang

from fusescout.device import Device

HOPPER = Device("cuda", "H200", "sm_90a", 132)


def lowered(kernel):
    """TileLang's artifact: `.kernel_source` is the CUDA text, `.device_mod` what it asks of the device."""
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(kernel.pass_configs)), target:
        return tilelang.lower(kernel.func, target=target)
