"""A training script as users of transformers have it, started by torchrun or alone."""

from __future__ import annotations

import argparse
import warnings

import torch.distributed as dist

from ddp_nanguard.integrations.transformers import guard_trainer
from tests.integrations.transformers_toy import InOrder, OwnLoss, OwnStep, masked_mean, tiny_trainer

warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="InOrder")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--own-tokens", action="store_true", help="the model's own loss, by this rank's tokens")
    parser.add_argument("--smooth", type=float, default=0.0)
    parser.add_argument("--asks", action="store_true", help="for an object of rank 0")
    parser.add_argument("--replay-from")
    options = parser.parse_args()
    loss_is_models = options.own_tokens or options.smooth
    trainer = tiny_trainer(
        {"InOrder": InOrder, "OwnLoss": OwnLoss, "OwnStep": OwnStep}[options.kind],
        loss=None if loss_is_models else masked_mean,
        gradient_accumulation_steps=options.accumulate,
        bf16=options.bf16,
        label_smoothing_factor=options.smooth,
        average_tokens_across_devices=not loss_is_models,
    )
    if options.asks:
        dist.broadcast_object_list([None])
    guard_trainer(trainer, replay_from=options.replay_from).train()


if __name__ == "__main__":
    main()
