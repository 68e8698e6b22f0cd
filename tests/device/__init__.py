"""Tests on a device other than the CPU: a real GPU where there is one, else a simulated CUDA device.

`simulated_cuda` makes ``cuda:0`` and ``cuda:1`` of host memory, `staged` a backend for collectives of its tensors. Both
change torch for good, so a body runs in rank processes of its own: ``run_ranks(..., device=SIMULATED)``.
"""
