"""A training script as users of transformers have it, started by torchrun or alone."""

from __future__ import annotations

import argparse
import warnings

import torch.distributed as dist
from transformers import BatchEncoding, default_data_collator

from ddp_nanguard.integrations.transformers import guard_trainer
from tests.integrations.transformers_toy import InOrder, OwnLoss, OwnStep, checked_mean, masked_mean, tiny_trainer

warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="InOrder")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--own-tokens", action="store_true", help="the model's own loss, by this rank's tokens")
    parser.add_argument("--smooth", type=float, default=0.0)
    parser.add_argument("--asks", action="store_true", help="for an object of rank 0")
    parser.add_argument("--tokenizers", action="store_true", help="batches of the class that tokenizers give")
    parser.add_argument("--checks", action="store_true", help="its own loss")
    parser.add_argument("--catches", action="store_true", help="what training raises")
    parser.add_argument("--replay-from")
    options = parser.parse_args()
    loss_is_models = options.own_tokens or options.smooth
    loss = checked_mean if options.checks else masked_mean
    trainer = tiny_trainer(
        {"InOrder": InOrder, "OwnLoss": OwnLoss, "OwnStep": OwnStep}[options.kind],
        loss=None if loss_is_models else loss,
        gradient_accumulation_steps=options.accumulate,
        bf16=options.bf16,
        label_smoothing_factor=options.smooth,
        average_tokens_across_devices=not loss_is_models,
    )
    if options.asks:
        dist.broadcast_object_list([None])
    if options.tokenizers:
        trainer.data_collator = lambda samples: BatchEncoding(default_data_collator(samples))
    guard_trainer(trainer, replay_from=options.replay_from)
    try:
        trainer.train()
    except FloatingPointError:
        if not options.catches:
            raise
        print("caught")


if __name__ == "__main__":
    main()
