"""A training script as Lightning's users have it: the Trainer starts its own ranks."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from ddp_nanguard.integrations.lightning import NanGuardCallback
from tests.integrations.toy import Data, Toy

warnings.simplefilter("ignore")


class Checked(Toy):
    """Looks at its own loss, as people do, and raises on the rank that sees it."""

    def balanced(self, *args: Any) -> torch.Tensor:
        loss = super().balanced(*args)
        if not torch.isfinite(loss):
            raise FloatingPointError("loss is not finite")
        return loss


class Sharded(Toy):
    """FSDP2, through ``ModelParallelStrategy``."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--module", default="Toy")
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--detect-anomaly", action="store_true")
    parser.add_argument("--replay-from")
    options = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    strategy: Any = options.strategy
    if options.module == "Sharded":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callbacks: list[Any] = [NanGuardCallback(replay_from=options.replay_from)]
    if options.module == "Checked":
        callbacks.append(OnExceptionCheckpoint("saved", "exception"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=options.module == "Checked",
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        accumulate_grad_batches=options.accumulate,
        detect_anomaly=options.detect_anomaly,
        callbacks=callbacks,
    )
    module = {"Toy": Toy, "Checked": Checked, "Sharded": Sharded}[options.module]
    trainer.fit(module(manual=options.manual), Data())


if __name__ == "__main__":
    main()
