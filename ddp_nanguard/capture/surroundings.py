"""What a call of the model depends on beside arguments, weights and random states: settings of torch, and modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

_training = attrgetter("training")

SETTINGS = (
    "deterministic algorithms",
    "cudnn.deterministic",
    "cudnn.benchmark",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "default dtype",
    "number of threads",
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """As they were when a call began; plain data of the host.

    Attributes:
        settings: values of `SETTINGS`.
        modes: ``training`` of each module.
    """

    settings: tuple[object, ...]
    modes: list[bool]

    def different(self, now: Surroundings) -> list[str]:
        """What is another by ``now``, in words."""
        pairs = zip(SETTINGS, self.settings, now.settings, strict=True)
        found = [f"{name} ({one} then, {other} now)" for name, one, other in pairs if one != other]
        return found + (["training modes of modules"] if self.modes != now.modes else [])


def surroundings(modules: Sequence[nn.Module]) -> Surroundings:
    """Those of this moment. Host sync: none."""
    backend = torch._C
    settings = (
        torch.are_deterministic_algorithms_enabled(),
        backend._get_cudnn_deterministic(),
        backend._get_cudnn_benchmark(),
        # never the settings from before these: they raise where both kinds were used
        backend._get_fp32_precision_getter("cuda", "matmul"),
        backend._get_fp32_precision_getter("cuda", "conv"),
        backend._get_fp32_precision_getter("cuda", "rnn"),
        backend._get_fp32_precision_getter("mkldnn", "matmul"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )
    return Surroundings(settings, list(map(_training, modules)))
