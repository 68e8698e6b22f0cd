"""Each takes the user's own logger and returns a function that hands it the guard's numbers.

They leave the state of a trainer alone: no step counter of a logger is moved that the trainer counts by.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ddp_nanguard.dump.files import append_json
from ddp_nanguard.hooks.callbacks import OnMetrics


def tensorboard(writer: Any) -> OnMetrics:
    """Scalars of a ``SummaryWriter``.

    Args:
        writer: anything with ``add_scalar(name, value, step)``.
    """

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run: Any, step_metric: str = "trainer/global_step") -> OnMetrics:
    """One row of a W&B run, placed by the trainer's own step metric.

    ``run.log(step=...)`` is never given a step: W&B drops rows whose step is smaller than that of the last one, those
    of the trainer included.

    Args:
        run: what ``wandb.init`` returned.
        step_metric: that of Lightning; transformers has ``train/global_step``.
    """

    def log(step: int, metrics: dict[str, float]) -> None:
        run.log({**metrics, step_metric: step})

    return log


def mlflow(client: Any, run_id: str | None = None) -> OnMetrics:
    """Metrics of an MLflow run; characters that MLflow refuses in names become underscores.

    Args:
        client: the module ``mlflow``, or anything with ``log_metrics(metrics, step=...)``.
        run_id: of the run; default the active one.
    """
    of_run = {} if run_id is None else {"run_id": run_id}

    def log(step: int, metrics: dict[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        client.log_metrics(named, step=step, **of_run)

    return log


def jsonl(path: str | os.PathLike[str]) -> OnMetrics:
    """One line of strict JSON per logged step, with ``step`` first; numbers that are not finite are texts.

    Args:
        path: of the file, which is appended to.
    """

    def log(step: int, metrics: dict[str, float]) -> None:
        append_json(Path(path), {"step": step, **metrics})

    return log
