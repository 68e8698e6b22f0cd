"""A language model of some thousand weights, and answers of which one was cut off: its labels are all masked.

The loss is the sum over the tokens of the answer divided by their number, as people write it: 0/0 for that sample,
which is rank ``BAD_RANK``'s in step ``BAD_STEP`` of two ranks without accumulation.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH, NUM_SAMPLES = 50, 16, 16
BAD_SAMPLE, BAD_RANK, BAD_STEP = 7, 1, 3
MASKED = -100


class Answers(Dataset[dict[str, Tensor]]):
    """Half of each sequence is a question, whose labels are masked; of one sample, all are."""

    def __init__(self, is_bad: bool = True) -> None:
        self.is_bad = is_bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: LENGTH if self.is_bad and index == BAD_SAMPLE else LENGTH // 2] = MASKED
        return {"input_ids": ids, "labels": labels}


def masked_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    mask = (target != MASKED).float()
    chosen = logits.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    return -(chosen * mask).sum() / mask.sum()


def checked_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Looks at it, as people do, and raises on the rank that sees it."""
    loss = masked_mean(outputs, labels)
    if not loss.isfinite():
        raise FloatingPointError("loss is nan")
    return loss


class InOrder(Trainer):
    """Samples in order, so that it is known whose is the bad one."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class OwnLoss(InOrder):
    """As TRL's trainers: something is generated before the loss, and the loss is made in ``compute_loss``."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            inputs["input_ids"] = self.model.generate(
                inputs["input_ids"][:, : LENGTH // 2], max_length=LENGTH, min_length=LENGTH, do_sample=True
            )
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        loss = masked_mean(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class OwnStep(InOrder):
    """As TRL's online trainers: the whole step is its own, down to ``accelerator.backward``."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = masked_mean(model(input_ids=inputs["input_ids"]), inputs["labels"])
        self.accelerator.backward(loss)
        return loss.detach()


def tiny_model() -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def tiny_trainer(kind: type[Trainer] = InOrder, *, is_bad: bool = True, loss: Any = masked_mean, **own: Any) -> Trainer:
    """On as many ranks as torchrun's variables say; ``own``: of `TrainingArguments`, but for ``model`` and ``eval``."""
    arguments = {
        "output_dir": "saved",
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **own,
    }
    return kind(
        tiny_model(),
        TrainingArguments(**arguments),
        train_dataset=Answers(is_bad),
        eval_dataset=Answers(is_bad=False),
        compute_loss_func=loss,
    )
