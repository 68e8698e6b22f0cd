"""Groups as jobs make them: no backend named, backends per type of device, backends under names of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of, rows, run_step, sgd, small_model

BACKENDS = (None, "cpu:gloo", "nccl_like", "cpu:nccl_like,meta:not_a_fake_one")


def _plain_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _each_kind(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    dist.destroy_process_group()
    dist.Backend.register_backend("nccl_like", _plain_gloo, devices=["cpu"])
    dist.Backend.register_backend("not_a_fake_one", _plain_gloo, devices=["meta"])
    found = {}
    for index, backend in enumerate(BACKENDS):
        store = dist.FileStore(f"{directory}/{index}", world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        found[str(backend)] = _stop_in(rank)
        dist.destroy_process_group()
    return found


def _stop_in(rank: int) -> tuple[str | None, str]:
    model = small_model()
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, look_again=False)
    text = ended(lambda: [run_step(guard, optimizer, rows(rank == 1 and step == 1)) for step in range(3)])
    return text, str(guard._context.ranks.device)


def test_the_verdict_goes_where_the_group_can_reduce_it(tmp_path: Any) -> None:
    first, second = run_ranks(_each_kind, timeout_s=40, directory=str(tmp_path))
    assert first == second
    for backend, (text, device) in first.items():
        assert text is not None and "rank 1, step 1" in text, (backend, text)
        assert device == "cpu", backend


def _devices(rank: int, world_size: int) -> list[str]:
    from ddp_nanguard.distributed.group import _verdict_device

    dist.Backend.register_backend("device_only", _plain_gloo, devices=["meta"])
    group = dist.new_group([0], backend="device_only")
    both = dist.new_group([0], backend="cpu:gloo,meta:device_only")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    pairs = [(None, cpu), (None, meta), (group, meta), (both, cpu), (both, meta)]
    return [str(_verdict_device(given, device)) for given, device in pairs]


def test_a_group_is_asked_which_devices_it_serves() -> None:
    """What gloo reduces is on the host anyway; "meta" stands for a device that a backend reduces by itself."""
    (found,) = run_ranks(_devices, world_size=1)
    assert found == ["cpu", "cpu", "meta", "cpu", "meta"]


class _WithoutMemory(dist.ProcessGroup):
    """Its first collective makes the communicator, which fails."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        raise RuntimeError("out of memory while the communicator was made\nmore lines")

    def getBackendName(self) -> str:
        return "without_memory"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name


def _built(rank: int, world_size: int) -> tuple[str | None, int]:
    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _WithoutMemory(rank, size)

    dist.Backend.register_backend("without_memory", make, devices=["cpu"])
    group = dist.new_group([0, 1], backend="without_memory")
    model = torch.nn.Linear(2, 2)
    return ended(lambda: guard_of(model, sgd(model), group=group)), rank


def test_a_group_that_cannot_reduce_ends_the_making_of_the_guard() -> None:
    for text, _ in run_ranks(_built):
        assert text == (
            "RuntimeError: the guard's ranks [0, 1] cannot reduce 16 bytes on cpu (RuntimeError: out of memory while "
            "the communicator was made); give the process group over which the model itself communicates as group="
        )
