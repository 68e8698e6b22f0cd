"""Random states: every stream comes back bit for bit, and none fails silently."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from ddp_nanguard.capture.rng import capture, other_devices, restore


def draws(generators=()):
    values = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]
    return values + [draw_from(generator) for generator in generators]


def draw_from(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random()) if not isinstance(generator, np.random.RandomState) else float(generator.rand())


def test_all_streams_come_back():
    random.gauss(0, 1), np.random.randn()  # leaves a second normal in both caches
    state = capture()
    first = draws()
    assert restore(state) == []
    assert draws() == first


def test_state_is_not_changed_by_later_draws():
    state = capture()
    before = dataclasses.replace(
        state, torch=state.torch.clone(), numpy={**state.numpy, "state": dict(state.numpy["state"])}
    )
    key = before.numpy["state"]["key"].copy()
    np.random.rand(10_000), torch.rand(10_000)
    assert torch.equal(state.torch, before.torch)
    assert np.array_equal(state.numpy["state"]["key"], key)


def test_what_was_drawn_in_between_is_in_the_next_state():
    steps = (
        random.random,
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: random.seed(3),
    )
    for step in (*steps, np.random.rand, np.random.randn, np.random.randn, lambda: np.random.seed(3), lambda: None):
        step()
        state = capture()
        assert state.python == random.getstate()
        legacy = np.random.get_state(legacy=False)
        assert str(state.numpy) == str(legacy) and np.array_equal(state.numpy["state"]["key"], legacy["state"]["key"])


def test_capturing_draws_nothing():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    capture(torch.device("cpu"))
    assert draws() == expected


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator(),
        np.random.default_rng(3),
        np.random.Generator(np.random.MT19937(3)),
        np.random.RandomState(3),
        random.Random(3),
    ],
    ids=["torch", "numpy", "numpy-mt", "numpy-legacy", "python"],
)
def test_registered_generator(generator):
    state = capture(generators={"gen": generator})
    first = [draw_from(generator) for _ in range(3)]
    assert restore(state, {"gen": generator}) == []
    assert [draw_from(generator) for _ in range(3)] == first


def test_missing_generator_is_named_and_others_are_restored():
    state = capture(generators={"gen": torch.Generator()})
    first = draws()
    assert restore(state) == ["generator gen: no generator of this name is registered"]
    assert draws() == first


def test_state_of_another_device_is_named():
    state = dataclasses.replace(capture(), device=torch.zeros(16, dtype=torch.uint8), device_type="cuda")
    assert restore(state) == ["cuda: recorded on cuda, replayed on no accelerator"]
    assert restore(state, device=torch.device("cpu")) == ["cuda: recorded on cuda, replayed on device cpu"]


def test_unusable_state_is_named():
    state = dataclasses.replace(capture(), torch=torch.zeros(3, dtype=torch.uint8), numpy={"bit_generator": "PCG64"})
    failures = restore(state)
    assert [failure.split(":")[0] for failure in failures] == ["numpy", "torch"]


def test_float_cast_state_is_restored():
    """A state that went through a dtype or device map comes back as bytes."""
    state = capture()
    first = draws()
    assert restore(dataclasses.replace(state, torch=state.torch.float())) == []
    assert draws() == first


def test_unknown_generator_is_refused():
    with pytest.raises(ValueError, match="type int cannot be recorded; give a"):
        capture(generators={"gen": 3})


def test_numpys_state_is_read_anew_whenever_it_has_changed() -> None:
    """Drawing two normal numbers moves the generator once: the second comes from a reserve beside it."""
    np.random.seed(0)
    np.random.randn()
    before = np.random.get_state()
    draws = [
        lambda: None,
        lambda: np.random.rand(),
        lambda: np.random.randn(),
        lambda: np.random.randn(),
        lambda: np.random.seed(0),
        lambda: np.random.randn(),
        lambda: np.random.seed(0),
        lambda: np.random.randn(2),
        lambda: np.random.set_state(before),
        lambda: np.random.shuffle([1, 2, 3]),
    ]
    for draw in draws * 3:
        draw()
        for _ in range(2):
            kept, true = capture().numpy, np.random.get_state(legacy=False)
            assert (kept["has_gauss"], kept["gauss"]) == (true["has_gauss"], true["gauss"])
            assert kept["state"]["pos"] == true["state"]["pos"]
            assert (kept["state"]["key"] == true["state"]["key"]).all()


def test_state_of_a_further_accelerator_that_is_not_here_is_named() -> None:
    state = dataclasses.replace(capture(), others={"cuda:7": torch.zeros(16, dtype=torch.uint8)})
    assert restore(state) == ["cuda:7: recorded on cuda:7, which this machine does not have"]


def test_a_step_on_the_cpu_draws_from_no_accelerator() -> None:
    weights = [torch.zeros(1), torch.zeros(1, device="meta")]
    assert other_devices(torch.device("cpu"), weights) == ()
