"""Trainings under a Trainer of transformers, or by accelerate, several in one launch: what each raised and left."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.read import open_dump
from tests.integrations.in_turn import in_turn


def trainings(rank: int, world_size: int, directory: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What came of each training of `JOBS`, by its name."""
    logging.disable(logging.WARNING)
    return in_turn(JOBS, rank, world_size, directory, names)


def train(
    kind: str = "InOrder",
    *,
    guard: dict[str, Any] | None = None,
    callbacks: tuple[Any, ...] = (),
    resume: str | None = None,
    plain: bool = False,
    **own: Any,
) -> dict[str, Any]:
    """One ``trainer.train`` in the working directory, and what is to be known of it afterwards."""
    from tests.integrations import transformers_toy as toy

    trainer = toy.tiny_trainer(getattr(toy, kind), **own)
    watcher = _weights_before_steps()
    for each in (watcher, *callbacks):
        trainer.add_callback(each)
    if not plain:
        from ddp_nanguard.integrations.transformers import guard_trainer

        guard_trainer(trainer, **(guard or {}))
    return ending(trainer, watcher, resume)


def ending(trainer: Any, watcher: Any, resume: str | None = None) -> dict[str, Any]:
    """Train, and tell of it."""
    error: BaseException | None = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (NonFiniteError, ArithmeticError) as raised:
        error = raised
    model = trainer.model
    changed = [name for name in ("compute_loss", "training_step", "_save_checkpoint") if name in vars(trainer)]
    return {
        "error": str(error).splitlines() if error is not None else None,
        "weights_are_those_before": _digest(model) == watcher.before,
        "weights": _digest(model),
        "bad": [name for name, each in model.state_dict().items() if not torch.isfinite(each).all()],
        "global_step": trainer.state.global_step,
        "log": [{k: v for k, v in row.items() if "loss" in k or "norm" in k} for row in trainer.state.log_history],
        "left": [*changed, *(["backward"] if "backward" in vars(trainer.accelerator) else [])],
        **(of_dump(error) if isinstance(error, NonFiniteError) else {}),
    }


def of_dump(error: NonFiniteError) -> dict[str, Any]:
    """The origin's batches in the dump of an error."""
    path = error.report.dump_path
    if path is None:
        return {}
    dump, rank = open_dump([path]), error.report.origin_rank
    assert rank is not None
    return {"dump": path, "parts": dump.ranks, "batches": [m.batch for m in dump.window(rank)]}


def _digest(model: torch.nn.Module) -> bytes:
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def _weights_before_steps() -> Any:
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        before = b""

        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.before = _digest(model)

    return Watcher()


# -- the trainings -----------------------------------------------------------------------------------------------------


def _clean_and_bare() -> dict[str, Any]:
    """Two trainings in one place, one after the other, so that not even a path in a checkpoint differs."""
    both = {}
    for name, plain in (("bare", True), ("guarded", False)):
        saves = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
        both[name] = train(is_bad=False, plain=plain, **saves)
        _apart(name)
    return both


def _apart(name: str) -> None:
    """Rank 0 puts what is there out of the way of the next training."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        kept = Path(f"of-{name}")
        kept.mkdir()
        shutil.move("saved", kept / "saved")
    torch.distributed.barrier()


def _bad_update(event: str, **saves: Any) -> dict[str, Any]:
    """Rank 0's weights, after four steps, are as a bad update would leave them; ``event``: when the trainer tells."""
    from transformers import TrainerCallback

    class Spoiler(TrainerCallback): ...

    def spoil(self: Any, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 4 and torch.distributed.get_rank() == 0:
            with torch.no_grad():
                model.transformer.ln_f.bias[3] = float("nan")

    setattr(Spoiler, event, spoil)
    return train(is_bad=False, callbacks=(Spoiler(),), **saves)


def _best() -> dict[str, Any]:
    """Saved where the evaluation was better than before, as it is after each of the first steps."""
    best = {"save_strategy": "best", "save_only_model": True, "metric_for_best_model": "loss"}
    return _bad_update("on_evaluate", eval_strategy="steps", eval_steps=1, **best)


def _resumed() -> dict[str, Any]:
    train(is_bad=False, save_strategy="steps", save_steps=2, max_steps=2, num_train_epochs=1)
    return train(resume="saved/checkpoint-2")


def _twice() -> dict[str, Any]:
    """A training that is stopped and caught; then the same trainer again."""
    from ddp_nanguard.integrations.transformers import guard_trainer
    from tests.integrations import transformers_toy as toy

    trainer, watcher = toy.tiny_trainer(), _weights_before_steps()
    trainer.add_callback(watcher)
    guard_trainer(trainer)
    first = ending(trainer, watcher)
    trainer.train_dataset = toy.Answers(is_bad=False)
    return {"first": first, "second": ending(trainer, watcher)}


def _own_check() -> dict[str, Any]:
    """A training whose own loss raises, and that is caught; then the same trainer again."""
    from ddp_nanguard.integrations.transformers import guard_trainer
    from tests.integrations import transformers_toy as toy

    trainer, watcher = toy.tiny_trainer(loss=toy.checked_mean), _weights_before_steps()
    trainer.add_callback(watcher)
    guard_trainer(trainer)
    first = ending(trainer, watcher)
    trainer.train_dataset = toy.Answers(is_bad=False)
    return {"first": first, "second": ending(trainer, watcher)}


def _out_of_memory() -> dict[str, Any]:
    """Each rank runs out of memory with two samples, and trains with one."""
    from tests.integrations import transformers_toy as toy

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        if len(labels) > 1:
            raise RuntimeError("CUDA out of memory.")
        return toy.masked_mean(outputs, labels)

    return train(loss=loss, per_device_train_batch_size=2, auto_find_batch_size=True)


def _accelerated(accumulate: int = 2, **options: Any) -> dict[str, Any]:
    """A loop of its own by accelerate: accumulation, clipping and a schedule."""
    from accelerate import Accelerator

    from ddp_nanguard.integrations.accelerate import watch_accelerator
    from tests.integrations import transformers_toy as toy

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = toy.tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(toy.Answers(), batch_size=1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    guard = NanGuard(model, optimizer, scaler=accelerator.scaler)
    watched = watch_accelerator(guard, accelerator)
    saved, error, before = [], None, b""
    try:
        for batch in guard.steps(loader):
            before = before if accelerator.sync_gradients is False else _digest(model)
            with accelerator.accumulate(model):
                loss = toy.masked_mean(guard(input_ids=batch["input_ids"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                guard.check(checkpoint=f"saved/{guard.step}")
                accelerator.save_state(f"saved/{guard.step}")
                saved.append(guard.step)
    except NonFiniteError as raised:
        error = raised
    watched.undo()
    return {
        "error": str(error).splitlines() if error is not None else None,
        "weights_are_those_before": _digest(model) == before,
        "saved": saved,
        "left": "backward" in vars(accelerator),
        **(of_dump(error) if error is not None else {}),
    }


def _scaled() -> dict[str, Any]:
    """A GradScaler, as accelerate has it with ``fp16``: step 1 overflows, the loss of step 3 is NaN."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from ddp_nanguard.integrations.accelerate import watch_accelerator

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 1)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # it gives none on a CPU
    optimizer: Any = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=accelerator.scaler)
    skipped = []
    with NanGuard(model, optimizer, scaler=accelerator.scaler, dump_dir=None, on_fault="skip") as guard:
        watch_accelerator(guard, accelerator)
        for step in range(5):
            weight = torch.tensor(float(step != 3))
            x = torch.ones(2, 3) * (3e36 if step == 1 else 1.0)
            accelerator.backward(guard(x).sum() * weight / weight)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    return {
        "skipped": skipped,
        "scale": accelerator.scaler.get_scale(),
        "is_finite": all(each.isfinite().all() for each in model.parameters()),
    }


EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


def _misused() -> dict[str, Any]:
    from ddp_nanguard.integrations.transformers import NanGuardCallback

    try:
        NanGuardCallback()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


JOBS = {
    "misused": _misused,
    "stopped": lambda: train(eval_strategy="steps", eval_steps=2),
    "accumulated": lambda: train(gradient_accumulation_steps=2),
    "own tokens": lambda: train(loss=None, average_tokens_across_devices=False),
    "label smoothing": lambda: train(loss=None, label_smoothing_factor=0.1, average_tokens_across_devices=False),
    "bf16": lambda: train(bf16=True),
    "own loss": lambda: train("OwnLoss"),
    "own step": lambda: train("OwnStep"),
    "underflow_overflow": lambda: train(debug="underflow_overflow"),
    "skipped": lambda: train(guard={"on_fault": "skip"}),
    "clean": _clean_and_bare,
    "bad update": lambda: _bad_update("on_step_end", **EACH_STEP),
    "best": _best,
    "twice": _twice,
    "out of memory": _out_of_memory,
    "resumed": _resumed,
    "accelerate": _accelerated,
    "one process": train,
    "own check": _own_check,
    "scaled": _scaled,
}
ALONE = ("one process", "own check", "scaled")
ON_TWO_RANKS = ("misused", "stopped", "own loss", "own step", "clean", "bad update", "accelerate")
MORE = tuple(name for name in JOBS if name not in (*ALONE, *ON_TWO_RANKS))
"""On two ranks, and too long for each run of the suite."""
