"""Functions for ``NanGuard(on_metrics=...)``, one per logger. None of these loggers is needed to import them."""

from .adapters import jsonl, mlflow, tensorboard, wandb

__frame_role__ = "passes on"  # see `hooks.frames`
__all__ = ["jsonl", "mlflow", "tensorboard", "wandb"]
