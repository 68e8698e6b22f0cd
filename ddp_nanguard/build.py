"""From the arguments of `NanGuard` to a `GuardContext`: all ranks agree that theirs fit, then the parts are made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .capture.record import PreviousStep
from .capture.window import AccumulationWindow
from .config import is_switched_off
from .context import GuardContext, guarded
from .distributed.group import RankGroup
from .hooks.callbacks import OnEvent, OnMetrics, callback
from .inject.injector import environment_option, spec_from_environment
from .probes.backward import BackwardProbe
from .probes.compiled_calls import expand_compiled
from .probes.forward import ForwardProbe
from .probes.gradient import GradientProbe
from .probes.layers import watched_layers
from .probes.slots import SlotBuffer
from .probes.state import StateProbe
from .report.types import Phase
from .validate import ValidatedArgs, require_fitting_group, validate_args
from .wrappers import GradientWatch, Wrapper
from .wrappers.grad_scaler import WatchedScaler

_log = logging.getLogger(__name__)


def build_context(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    scaler: object,
    replay: str | None,
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
    *,
    answers_alone: bool = False,
    on_event: OnEvent | None = None,
    on_metrics: OnMetrics | None = None,
) -> GuardContext:
    """Validate the arguments of `NanGuard`, compare them with those of the other ranks, and build the parts.

    Args:
        model: what the training loop calls.
        optimizer: one, or several.
        scaler: a GradScaler, or None.
        replay: ``module:function`` of the recipe, or None.
        group: the ranks that step together; None is the world.
        options: those given in code.
        answers_alone: in the replay of one rank: the guard itself has no peers, whatever process group there is.
        on_event: function of the user's, which may differ between ranks.
        on_metrics: likewise.

    Raises:
        ValueError: on every rank if anything does not fit on any rank; for a wrong ``group``, on this rank alone.

    Collective: every rank of ``group`` must call it. A gloo group is made, on which problems, options and the fault to
    inject are compared: `RankGroup` tells the all-reduces of each.
    """
    args: ValidatedArgs | None = None
    problem: str | None = None
    given_group: Any = group
    is_off = is_switched_off(options)
    if is_off and (given_group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup | None)):
        group, given_group, answers_alone = None, None, True
    if given_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("option group: this rank is not in it; build the guard only on its ranks")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        problem = f"option group={group!r} is a {type(group).__name__}; give a torch.distributed process group"
        group = None
    if not answers_alone and not is_off:
        require_fitting_group(group, model)
    # from here on a problem is held back until all ranks know of it: raised at once, it would leave the others waiting
    try:
        callbacks = callback("on_event", on_event), callback("on_metrics", on_metrics)
        args = validate_args(model, optimizer, scaler, replay, options) if problem is None else None
        if args is not None and args.config.enabled and on_metrics is not None:
            args.config.require_logging()
    except ValueError as error:
        problem = str(error)
    except Exception as error:
        problem = f"the guard cannot be built: {type(error).__name__}: {error}"
    device = args.wrapper.compute_device() if args is not None else torch.device("cpu")
    ranks = RankGroup(group, args.config.timeout_s if args is not None else 60.0, device, alone=answers_alone)
    # collectives from here on: every rank gets here, with a problem or without
    ranks.require_no_problem(problem)
    assert args is not None
    args = _with_common_directory(args, ranks)
    injection = spec_from_environment(args.wrapper, ranks) if args.config.enabled else None
    ranks.bound_waiting()
    if args.config.enabled:
        ranks.meet()
        guarded.add(args.wrapper.root)
        if ranks.index == 0:
            _warn_of_small_eps(args.optimizers)
    else:
        ranks.close()
    context = compose(args, ranks, replay, device)
    context.injection = injection
    context.on_event, context.on_metrics = callbacks
    return context


def _with_common_directory(args: ValidatedArgs, ranks: RankGroup) -> ValidatedArgs:
    """The arguments with rank 0's ``dump_dir``, once all other options are known to be equal.

    Raises:
        ValueError: on every rank, where another option differs.

    Collective: those of `RankGroup.require_equal_options`.
    """
    options = {**args.config.to_dict(), **environment_option()}
    directory = ranks.require_equal_options(options, text_of_first="dump_dir")
    if directory is None:
        return args
    if ranks.index == 0 and args.config.enabled:
        _log.warning(
            "option dump_dir differs between ranks: %r, that of rank %d, is taken for all", directory, ranks.rank
        )
    return replace(args, config=replace(args.config, dump_dir=directory))


def compose(args: ValidatedArgs, ranks: RankGroup, recipe: str | None, device: torch.device) -> GuardContext:
    """The parts of a guard, none of which is on the model yet.

    Args:
        args: validated.
        ranks: that step together.
        recipe: its name, None without one.
        device: of the model.

    Collective: none.
    """
    config, wrapper = args.config, args.wrapper
    parameters = wrapper.named_parameters()
    modules = wrapper.named_modules()
    named_buffers = _buffer_reader(wrapper)
    # a deferred verdict cannot be confirmed: by the time it is read, the gradients are the next step's
    slots = SlotBuffer(config.history, exact=config.verdict == "deferred", device=device)
    slots.expand_compiled = expand_compiled
    backward = BackwardProbe(slots, probes_activations=Phase.BACKWARD in config.watched)
    # what modules carry hooks for is told in the phases forward and backward only
    layers = "none" if config.watched.isdisjoint((Phase.FORWARD, Phase.BACKWARD)) else config.layers
    forward = ForwardProbe(
        modules, slots, backward, config.skip_types, watched_layers(layers, modules), config.root == "step"
    )
    # a scaler looks at what its optimizer holds, so a bad gradient of any other parameter is never skipped by it
    held = {id(p) for optimizer in args.optimizers for group in optimizer.param_groups for p in group["params"]}
    left_out = {shard.name for name, p in parameters if id(p) not in held for shard in wrapper.shards("", name, p, p)}
    gradient = GradientProbe(
        parameters,
        slots,
        backward,
        wrapper.local,
        config.is_ignored,
        frozenset(left_out),
        wrapper.pending_gradient_bytes(),
    )
    watches_gradients = config.enabled and not config.watched.isdisjoint((Phase.BACKWARD, Phase.REDUCE))
    return GuardContext(
        config=config,
        ranks=ranks,
        wrapper=wrapper,
        optimizers=args.optimizers,
        slots=slots,
        backward=backward,
        forward=forward,
        gradient=gradient,
        local_gradients=_without_hooks(wrapper, gradient, not forward.watched.layers) if watches_gradients else None,
        state=StateProbe(slots, parameters, named_buffers, args.optimizers, wrapper.local, config.is_ignored),
        window=AccumulationWindow(
            device, config.copy_batch, config.hold_batches, [p for _, p in parameters], [m for _, m in modules]
        ),
        previous=PreviousStep() if config.keep_previous else None,
        scaler=WatchedScaler(args.scaler) if args.scaler is not None else None,
        recipe=recipe,
        recipe_directory=args.recipe_directory,
        device=device,
        module_names=frozenset(name for name, _ in modules),
        named_buffers=named_buffers,
    )


def _warn_of_small_eps(optimizers: list[torch.optim.Optimizer]) -> None:
    """Warn of an ``eps`` that is 0 in a parameter's dtype: the update divides 0 by 0 where the gradient is zero."""
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            eps = group.get("eps")
            half = [p for p in group["params"] if p.dtype in (torch.float16, torch.bfloat16)]
            if isinstance(eps, float) and half and float(torch.tensor(eps, dtype=half[0].dtype, device="cpu")) == 0.0:
                _log.warning(
                    "optimizer %s, group %d: eps=%g is 0 in %s, so that a zero gradient makes NaN weights; raise eps",
                    type(optimizer).__name__,
                    index,
                    eps,
                    half[0].dtype,
                )


def _without_hooks(wrapper: Wrapper, gradient: GradientProbe, only_parameters: bool) -> GradientWatch:
    # hooks go on at the first forward in grad mode, together with those of the modules
    watch = wrapper.watch_local_gradients(gradient.probe_local)
    watch.remove_hooks()
    gradient.queue = watch.queue if only_parameters else None
    return watch


def _buffer_reader(wrapper: Wrapper) -> Callable[[], list[tuple[str, Tensor]]]:
    """A function that gives name and buffer of the model without walking the module tree in each call.

    It asks the owning module each time, since a buffer may be replaced or removed between two calls.
    """
    modules = dict(wrapper.named_modules())
    owners = [(name, modules[wrapper.owner_of(name)], name.rpartition(".")[2]) for name, _ in wrapper.named_buffers()]

    def read() -> list[tuple[str, Tensor]]:
        return list(_present_buffers(owners))

    return read


def _present_buffers(owners: list[tuple[str, nn.Module, str]]) -> Iterator[tuple[str, Tensor]]:
    for name, module, attribute in owners:
        buffer = module._buffers.get(attribute)
        if buffer is not None:
            yield name, buffer
