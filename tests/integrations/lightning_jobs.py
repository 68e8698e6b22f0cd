"""Trainings under Lightning, several in one launch: what each raised, and what it left."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.read import open_dump
from tests.integrations.in_turn import in_turn


def fits(rank: int, world_size: int, directory: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What came of each training of `JOBS`, by its name."""
    return in_turn(JOBS, rank, world_size, directory, names)


def fit(
    *,
    is_bad: bool = True,
    guard: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    kind: str = "Toy",
    callbacks: tuple[Any, ...] = (),
    resume: str | None = None,
    plain: bool = False,
    is_fitted_again: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """One ``Trainer.fit`` in the working directory, and what is to be known of it afterwards.

    ``is_fitted_again``: whether there is a clean fit before, and ``Trainer.validate`` between the two.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from ddp_nanguard.integrations.lightning import NanGuardCallback
    from tests.integrations import toy

    pl.seed_everything(1, verbose=False)
    model, watcher = getattr(toy, kind)(**(module or {})), _weights_before_steps()
    own = () if plain else (NanGuardCallback(**(guard or {})),)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        logger=CSVLogger("logs", version="one"),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        callbacks=[watcher, *own, *callbacks],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **{"max_epochs": 1, "limit_val_batches": 0, **options},
    )
    error: BaseException | None = None
    if is_fitted_again:
        trainer.fit(model, toy.Data(is_bad=False))
        trainer.validate(model, toy.Data(), verbose=False)
        trainer.fit_loop.max_epochs = 2
    try:
        trainer.fit(model, toy.Data(is_bad), ckpt_path=resume)
    except NonFiniteError as raised:
        error = raised
    return {
        "error": str(error).splitlines() if error is not None else None,
        "weights": digest(model),
        "weights_before": watcher.before,
        "bad": [name for name, each in model.state_dict().items() if not torch.isfinite(each).all()],
        "global_step": trainer.global_step,
        "num_steps": model.num_steps,
        "kept": model.kept,
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        **(_of_dump(error) if error is not None else {}),
    }


def digest(model: torch.nn.Module) -> str:
    """Of all weights."""
    data = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _weights_before_steps() -> Any:
    import lightning.pytorch as pl

    class Watcher(pl.Callback):
        before = ""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            self.before = digest(module)

    return Watcher()


def _of_dump(error: NonFiniteError) -> dict[str, Any]:
    path = error.report.dump_path
    assert path is not None
    dump, rank = open_dump([path]), error.report.origin_rank
    assert rank is not None
    known = [micro_batch.batch for micro_batch in dump.window(rank) if not micro_batch.is_of_call]
    return {"dump": path, "parts": dump.ranks, "labels": [batch[1].tolist() for batch in known]}


# -- the trainings -----------------------------------------------------------------------------------------------------


def _scaled() -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def _clean_and_bare() -> dict[str, Any]:
    """Two trainings in one place, one after the other, so that not even a path in a checkpoint differs."""
    both = {}
    for name, plain in (("bare", True), ("guarded", False)):
        both[name] = fit(is_bad=False, plain=plain, callbacks=(_every_step(),))
        _apart(name)
    return both


def _apart(name: str) -> None:
    """Rank 0 puts what is there out of the way of the next training."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        kept = Path(f"of-{name}")
        kept.mkdir()
        for each in ("saved", "logs"):
            shutil.move(each, kept / each)
    torch.distributed.barrier()


def _every_step() -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint("saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)


def _bad_update() -> dict[str, Any]:
    """The optimizer of rank 0 writes NaN in its fourth step; each step is saved, and what an exception leaves."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class Spoiler(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    module.head.bias[3] = float("nan")

    return fit(is_bad=False, callbacks=(Spoiler(), _every_step(), OnExceptionCheckpoint("saved", "exception")))


def _twice() -> dict[str, Any]:
    """A fit that is stopped and caught, and another of the same module class in the same process."""
    first = fit()
    return {"first": first, "second": fit(is_bad=False, guard={"dump_dir": None})}


def _resumed() -> dict[str, Any]:
    fit(is_bad=False, callbacks=(_every_step(),))
    return fit(max_epochs=2, resume="saved/step=6.ckpt")


def _fabric() -> dict[str, Any]:
    """A loop of Fabric's, by what ``setup`` returns: outputs in low precision refuse a backward that is not its own.

    Rank 1's fourth batch is empty.
    """
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    guard = NanGuard(model, optimizer)
    batches = [(torch.randn(4, 4), torch.ones(4)) for _ in range(5)]
    if fabric.global_rank == 1:
        batches[3][1].zero_()
    try:
        for batch in guard.steps(batches):
            loss = guard.run(
                lambda called, each: (called(each[0]).float().sum(1) * each[1]).sum() / each[1].sum(), batch
            )
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return {"error": str(error).splitlines()}
    return {"error": None}


def _misspelled() -> dict[str, Any]:
    from ddp_nanguard.integrations.lightning import NanGuardCallback

    try:
        NanGuardCallback(dump_dri="nan_dumps")
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


JOBS = {
    "misspelled": _misspelled,
    "stopped": lambda: fit(val_check_interval=0.5, limit_val_batches=1, num_sanity_val_steps=1),
    "accumulated": lambda: fit(accumulate_grad_batches=2, gradient_clip_val=1.0),
    "manual": lambda: fit(module={"manual": True}),
    "manual, accumulated": lambda: fit(module={"manual": True, "step_every": 2}),
    "drawn": lambda: fit(kind="Drawing"),
    "dict": lambda: fit(module={"returns_dict": True}),
    "skipped": lambda: fit(guard={"on_fault": "skip"}),
    "scaled": lambda: fit(plugins=[_scaled()]),
    "half": lambda: fit(is_bad=False, module={"is_half": True}, plugins=[_scaled()]),
    "again": lambda: fit(is_fitted_again=True),
    "clean": _clean_and_bare,
    "bad update": _bad_update,
    "logged": lambda: fit(is_bad=False, guard={"log_every": 2, "dump_dir": None}),
    "fabric": _fabric,
    "twice": _twice,
    "resumed": _resumed,
}
