"""The training loops that drawn shapes stand for; run on two ranks, many in a row."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from tests.properties.loop_shapes import (
    BLOCKS,
    SHARDED,
    STEPS,
    LoopFault,
    Shape,
    drops_rest,
    num_batches,
    num_trained,
    victim,
)
from tests.training import digests

WIDTH, ROWS, WORDS = 6, 4, 8
NAN = float("nan")


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, spoils: Tensor) -> Tensor:
        ctx.save_for_backward(spoils)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (spoils,) = ctx.saved_tensors
        return gradients[0] / torch.where(spoils, 0.0, 1.0) * torch.where(spoils, 0.0, 1.0), None


class Block(nn.Module):
    """A layer without children; codes of the batch say whether it spoils its output (its index) or gradient (+ 10)."""

    def __init__(self, index: int, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        values = F.linear(values, self.weight, self.bias).tanh()
        values = _SpoilGradient.apply(values, (codes == self.index + 10).any())  # type: ignore[no-untyped-call]
        divisor = torch.where((codes == self.index).any(), 0.0, 1.0)
        return values * divisor / divisor


class LoopNet(nn.Module):
    """An embedding, three blocks, a norm, a head; with a target it returns its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=shape.sparse)
        self.blocks = nn.ModuleList([Block(index) for index in range(BLOCKS)])
        if shape.tied:
            self.blocks[BLOCKS - 1] = Block(BLOCKS - 1, self.blocks[0].weight)  # type: ignore[arg-type]
        if shape.frozen:
            self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH) if shape.norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor], codes: Tensor, target: Tensor | None = None) -> Any:
        values = batch["values"] + self.embedding(batch["words"])
        for block in self.blocks:
            values = block(values, codes)
        output = self.head(self.norm(values))
        return output if target is None else (output, loss_of(output, target, codes))


def loss_of(output: Tensor, target: Tensor, codes: Tensor) -> Tensor:
    divisor = torch.where((codes == 30).any(), 0.0, 1.0)
    return (output - target).square().mean() * divisor / divisor


def _codes(shape: Shape, rank: int, step: int, micro_batch: int, call: int) -> Tensor:
    fault, code = shape.fault, -1
    if fault is not None and (fault.rank, fault.step, fault.micro_batch) == (rank, step, micro_batch):
        place = fault.place
        if place == "loss":  # of both calls, whose losses are added
            code = 30 if call == fault.call else -1
        elif place in ("forward", "grad") and call == fault.call:
            code = fault.block + (10 if place == "grad" else 0)
    return torch.tensor([code])


def _batches(shape: Shape, rank: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank + 1)
    for item in range(num_batches(shape, rank)):
        step, micro_batch = divmod(item, shape.accumulation)
        values = torch.randn(ROWS, WIDTH, generator=generator)
        fault = shape.fault
        at = (rank, step, micro_batch)
        if fault is not None and fault.rank == rank:
            is_input = fault.place == "input" and (fault.rank, fault.step, fault.micro_batch) == at
            if is_input or (fault.place == "unused" and item == num_trained(shape)):
                values[1, 2] = NAN
        yield {
            "values": values,
            "words": torch.randint(0, WORDS, (ROWS,), generator=generator),
            "target": torch.randn(ROWS, 1, generator=generator),
            "codes": [_codes(shape, rank, step, micro_batch, call) for call in (1, 2)],
        }


class Train:
    """One run of one shape on this rank.

    Args:
        shape: of the loop.
        rank: this one.
        guarded: whether a guard is there.
    """

    def __init__(self, shape: Shape, rank: int, guarded: bool) -> None:
        self.shape, self.rank = shape, rank
        torch.manual_seed(0)
        net = LoopNet(shape)
        self.net = net
        self.ignored = _ignored(net, shape)
        self.model: Any = _wrapped(net, shape, self.ignored)
        self.ema = copy.deepcopy(net) if shape.ema != "none" and shape.wrapper not in SHARDED else None
        self.critic = nn.Linear(1, 1)
        self.optimizers = self._optimizers()
        scaler = ShardedGradScaler if shape.wrapper == "fsdp1" else torch.amp.GradScaler
        self.scaler = scaler("cpu", init_scale=4.0) if shape.scaler else None
        self.guard: Any = None
        if guarded:
            verdict = "deferred" if shape.deferred else "sync"
            self.guard = NanGuard(
                self.model, self.optimizers, scaler=self.scaler, dump_dir=None, verdict=verdict, timeout_s=10
            )
            if self.ema is not None and shape.ema == "registered":
                self.guard.register(ema=self.ema)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        shape = self.shape
        head = list(self.net.head.parameters()) if shape.optimizers == 2 else []
        rest = [p for p in self.net.parameters() if p.requires_grad and all(p is not other for other in head)]
        plain, options = _optimizer(shape)
        moving = type("Moving", (_Moving, plain), {})
        kind = moving if shape.fault is not None and shape.fault.place == "moved" else plain
        found = [kind(self._apart(rest), **options)]
        return [*found, plain(self._apart(head), **options)] if head else found

    def _apart(self, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Groups of parameters: no fused or clipping operation takes DTensors and others at once."""
        sharded = [p for p in parameters if all(p is not other for other in self.ignored)]
        others = [p for p in parameters if any(p is other for other in self.ignored)]
        return [{"params": group} for group in (sharded, others) if group]

    def run(self) -> dict[str, Any]:
        """What came of it: the report, or digests of the end."""
        try:
            with self._surroundings():
                self._steps(self._items())
            if self.guard is not None:
                self.guard.close()
        except NonFiniteError as error:
            self._leave()
            return {"text": str(error), "report": error.report.to_dict(), "finite": self._is_finite()}
        except Exception as error:
            self._leave()
            if self.shape.ends == "join" and isinstance(error, ValueError):
                return {"text": str(error), "is_refused": True}
            raise RuntimeError(f"{self.shape}") from error
        if self.shape.wrapper == "fsdp2":  # an evaluation leaves the root's parameters whole
            self.model.reshard()
        return {"end": digests(self.net, self.optimizers[0]), "finite": self._is_finite()}

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        shape = self.shape
        with contextlib.ExitStack() as stack:
            if shape.anomaly != "off":
                stack.enter_context(warnings.catch_warnings(action="ignore"))  # "only for debugging"
                stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=shape.anomaly == "raises"))
            if shape.ends == "join":
                stack.enter_context(Join([self.model]))
            yield

    def _items(self) -> Iterator[dict[str, Any]]:
        shape, items = self.shape, _batches(self.shape, self.rank)
        if self.guard is not None and shape.loader:
            items = iter(self.guard.steps(items))
        if shape.ends != "smallest":
            return items
        return itertools.islice(items, _smallest(num_batches(shape, self.rank)))

    def _leave(self) -> None:
        if self.guard is not None:
            with contextlib.suppress(Exception):
                self.guard.close()

    def _is_finite(self) -> bool:
        return all(bool(_local(p).isfinite().all()) for p in self.net.parameters())

    def _steps(self, items: Iterator[dict[str, Any]]) -> None:
        shape = self.shape
        for step in range(STEPS + 1):
            self.step = step
            self._before()
            num = self._accumulate(items)
            if num == 0 or (num < shape.accumulation and drops_rest(shape)):
                return
            self._between(step)
            self._update(step)
            if shape.evaluates:
                self._evaluate()
            if self.ema is not None:
                self._follow()

    def _accumulate(self, items: Iterator[dict[str, Any]]) -> int:
        """How many micro-batches there were for this step."""
        for micro_batch in range(self.shape.accumulation):
            batch = next(items, None)
            if self.shape.ends == "flag" and not _smallest(int(batch is not None)):
                batch = None
            if batch is None:
                return micro_batch
            with self._sync(micro_batch == self.shape.accumulation - 1):
                self._backward(batch)
        return self.shape.accumulation

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def _before(self) -> None:
        fault = self._fault("weight")
        with torch.no_grad():
            if fault is not None:
                _spoil(self._victim())
            if self._fault("buffer") is not None:
                self.net.norm.running_var[1] = NAN  # type: ignore[index, operator]
        if self._fault("lr", any_rank=True) is not None:
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = NAN
        if self.shape.zero:
            self._zero()

    def _victim(self) -> Any:
        return getattr(self.net.blocks[0], victim(self.shape))

    def _fault(self, place: str, any_rank: bool = False) -> LoopFault | None:
        fault = self.shape.fault
        if fault is None or fault.place != place or fault.step != self.step:
            return None
        return fault if any_rank or fault.rank == self.rank else None

    @contextlib.contextmanager
    def _sync(self, is_last: bool) -> Iterator[None]:
        if not self.shape.no_sync or is_last:
            if self.shape.no_sync and self.shape.wrapper == "fsdp2":
                self.model.set_requires_gradient_sync(True)
            yield
        elif self.shape.wrapper in ("ddp", "fsdp1"):
            with self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            yield

    def _backward(self, batch: dict[str, Any]) -> None:
        shape = self.shape
        if shape.critic:
            self._train_critic(batch)
        if shape.entry == "run" and self.guard is not None:
            loss = self.guard.run(self._loss, batch)
        else:
            loss = self._loss(self.guard if shape.entry == "guard" and self.guard is not None else self.model, batch)
            if shape.watched and self.guard is not None:
                self.guard.watch(loss=loss)
        loss = loss / shape.accumulation
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        losses = []
        for call in range(2 if self.shape.second_call else 1):
            data, codes = {"values": batch["values"] * (1.0 - call / 4), "words": batch["words"]}, batch["codes"][call]
            if self.shape.loss_in_model:
                losses.append(model(data, codes, batch["target"])[1])
            else:
                losses.append(loss_of(model(data, codes), batch["target"], codes))
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def _train_critic(self, batch: dict[str, Any]) -> None:
        self.critic.zero_grad()
        data = {"values": batch["values"] * 0.5, "words": batch["words"]}
        output = self.model(data, torch.tensor([-1])).detach()  # a call of the model whose graph nobody uses
        self.critic(output.nan_to_num()).square().mean().backward()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter -= 0.01 * parameter.grad

    def _between(self, step: int) -> None:
        shape, scaler = self.shape, self.scaler
        parameters = [p for p in self.net.parameters() if p.grad is not None]
        if scaler is not None and (shape.clip != "none" or shape.surgery != "none"):
            for optimizer in self._now(step):
                scaler.unscale_(optimizer)
        for parameter in parameters if shape.wrapper == "plain" else self.ignored:
            if parameter.requires_grad:
                _average(parameter)
        with torch.no_grad():
            self._operate(parameters)
            if self._fault("code") is not None:
                _spoil(self._victim().grad)
        self._clip()

    def _operate(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            match self.shape.surgery:
                case "scale":
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]
                case "replace":
                    parameter.grad = parameter.grad * 0.5  # type: ignore[operator]
                case "data":
                    parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]

    def _clip(self) -> None:
        match self.shape.clip:
            case "guard" if self.guard is not None:
                self.guard.clip_grad_norm_(1.0)
            case "torch" | "guard" if self.shape.wrapper == "fsdp1":
                self.model.clip_grad_norm_(1.0)
            case "torch" | "guard":
                for group in self._apart(list(self.model.parameters())):
                    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            case "value":
                for group in self._apart(list(self.model.parameters())):
                    torch.nn.utils.clip_grad_value_(group["params"], 1.0)

    def _now(self, step: int) -> list[torch.optim.Optimizer]:
        return [each for index, each in enumerate(self.optimizers) if index == 0 or step % 2 == 0]

    def _update(self, step: int) -> None:
        for optimizer in self._now(step):
            if isinstance(optimizer, _Moving):
                optimizer.spoils = self._fault("moved") is not None
                optimizer.victim = self._victim()
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if not self.shape.zero:
            self._zero()

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            values = torch.zeros(ROWS, WIDTH)
            self.model({"values": values, "words": torch.zeros(ROWS, dtype=torch.int64)}, torch.tensor([-1]))
        self.model.train()

    def _follow(self) -> None:
        assert self.ema is not None
        with torch.no_grad():
            for mine, other in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(other, 0.1)


class _Moving:
    """An optimizer whose step makes a weight bad when it is told to."""

    spoils = False
    victim: Any = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)  # type: ignore[misc]
        if self.spoils:
            with torch.no_grad():
                _spoil(self.victim)
        return result


def _ignored(net: LoopNet, shape: Shape) -> list[nn.Parameter]:
    match shape.ignored:
        case "head":
            return list(net.head.parameters())
        case "bias":
            return [net.blocks[0].bias]  # type: ignore[list-item]
    return []


def _wrapped(net: LoopNet, shape: Shape, ignored: list[nn.Parameter]) -> Any:
    match shape.wrapper:
        case "ddp":
            return DistributedDataParallel(net)
        case "fsdp1":
            options = {"use_orig_params": True, "device_id": torch.device("cpu"), "ignored_states": ignored}
            net.blocks = nn.ModuleList([FullyShardedDataParallel(block, **options) for block in net.blocks])
            return FullyShardedDataParallel(net, **options)
        case "fsdp2":
            for block in net.blocks:
                fully_shard(block, ignored_params=set(ignored))
            return fully_shard(net, ignored_params=set(ignored))
    return net


def _smallest(number: int) -> int:
    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def _optimizer(shape: Shape) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if shape.deferred:
        return torch.optim.AdamW, {"lr": 0.05, "fused": True}
    return torch.optim.SGD, {"lr": 0.05} if shape.sparse else {"lr": 0.05, "momentum": 0.9}


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _spoil(tensor: Any) -> None:
    local = _local(tensor)
    if local.numel():
        local.view(-1)[0] = NAN


def _average(parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = parameter.grad = gradient.to_dense()
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def _guarded(shape: Shape, rank: int) -> dict[str, Any]:
    """What came of it, and what was logged as an error."""
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp_nanguard")
    logger.addHandler(handler)
    try:
        return {**Train(shape, rank, guarded=True).run(), "told": told}
    finally:
        logger.removeHandler(handler)


def run_shapes(rank: int, world_size: int, shapes: list[Shape]) -> list[dict[str, Any]]:
    """A body for ranks: what came of each shape, guarded."""
    return [_guarded(shape, rank) for shape in shapes]


def run_clean(rank: int, world_size: int, shapes: list[Shape]) -> list[tuple[Any, Any]]:
    """A body for ranks: what came of each shape, unguarded and guarded."""
    return [(Train(shape, rank, guarded=False).run(), _guarded(shape, rank)) for shape in shapes]
