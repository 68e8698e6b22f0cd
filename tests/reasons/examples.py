"""Lines that run into each row of the operator table, and into nothing of the kind with numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

T = torch.tensor


@dataclass(frozen=True)
class Example:
    """A line that runs into a row.

    Attributes:
        said: the sentence up to the line, see `Row.said`, with the operator's name.
        operator: of the row, or the name of its node.
        function: the line.
        bad: parameters with which it fails.
        good: near ones, with which it does not fail in this way.
        rest: the end of the sentence, without the remedy.
    """

    said: str
    operator: str
    function: Callable[..., Any]
    bad: tuple[Tensor, ...]
    good: tuple[Tensor, ...]
    rest: str = ""


def at_one(name: str, said: str, function: Any, fine: float, bad: float, good: float) -> Example:
    """A function of one number: the second of two is bad."""
    return Example(said, name, function, (T([fine, bad]),), (T([fine, good]),), ", at index 1")


def at_two(name: str, said: str, function: Any, bad: tuple[float, float], good: tuple[float, float]) -> Example:
    """A function of two numbers: the second pair is bad."""
    pairs = [tuple(T([2.0, number]) for number in pair) for pair in (bad, good)]
    return Example(said, name, function, pairs[0], pairs[1], ", at index 1")


def _matrices(*rows: Any) -> Tensor:
    return T([rows], dtype=torch.float32)


REGULAR, SINGULAR = [[2.0, 1.0], [1.0, 3.0]], [[1.0, 2.0], [2.0, 4.0]]
TRIANGULAR, ZERO_ON_DIAGONAL = [[2.0, 1.0], [0.0, 3.0]], [[2.0, 1.0], [0.0, 0.0]]
ONES = torch.ones(2, 2, 1)
EYE = torch.eye(3)
two = lambda *pair: T(pair)  # noqa: E731


def forward_of_one_number() -> Iterable[Example]:
    for name, function in (("log", torch.log), ("log2", torch.log2), ("log10", torch.log10)):
        yield at_one(name, f"{name} of 0", lambda x, f=function: f(x), 1.0, 0.0, 1e-30)
        yield at_one(name, f"{name} of a negative number", lambda x, f=function: f(x), 1.0, -1e-30, 1e-30)
    yield at_one("log", "log of 0", lambda x: x.clone().log_(), 1.0, 0.0, 1e-30)
    yield at_one("log", "log of 0", lambda x: torch.log(x.detach(), out=torch.empty(2)), 1.0, 0.0, 1e-30)
    each = lambda x: torch._foreach_log([torch.ones(3), x])  # noqa: E731
    yield at_one("log", "log of 0", each, 1.0, 0.0, 1e-30)
    yield at_one("sqrt", "sqrt of a negative number", lambda x: torch._foreach_sqrt([torch.ones(3), x]), 1.0, -1.0, 1.0)
    yield at_one("log1p", "log1p of -1", lambda x: x.log1p(), 1.0, -1.0, -0.99)
    yield at_one("log1p", "log1p below -1", lambda x: x.log1p(), 1.0, -1.01, -0.99)
    yield at_one("sqrt", "sqrt of a negative number", lambda x: x.sqrt(), 1.0, -1e-9, 0.0)
    yield at_one("rsqrt", "rsqrt of 0", lambda x: x.rsqrt(), 1.0, 0.0, 1e-20)
    yield at_one("rsqrt", "rsqrt of a negative number", lambda x: x.rsqrt(), 1.0, -1.0, 1e-20)
    for name, function in (("acos", torch.acos), ("asin", torch.asin)):
        yield at_one(name, f"{name} outside of -1 .. 1", lambda x, f=function: f(x), 0.5, 1.001, 1.0)
    for name, function in (("atanh", torch.atanh), ("erfinv", torch.erfinv)):
        yield at_one(name, f"{name} of 1 or -1", lambda x, f=function: f(x), 0.5, -1.0, 0.99)
        yield at_one(name, f"{name} outside of -1 .. 1", lambda x, f=function: f(x), 0.5, 1.5, 0.99)
    yield at_one("acosh", "acosh below 1", lambda x: x.acosh(), 2.0, 0.9, 1.0)
    for name, said, function in (("logit", "logit", torch.logit), ("special_ndtri", "ndtri", torch.special.ndtri)):
        yield at_one(name, f"{said} of 0 or 1", lambda x, f=function: f(x), 0.5, 1.0, 0.99)
        yield at_one(name, f"{said} outside of 0 .. 1", lambda x, f=function: f(x), 0.5, 1.1, 0.99)
    negative = "special.entr of a negative number"
    yield at_one("special_entr", negative, lambda x: torch.special.entr(x), 0.5, -0.1, 0.1)
    pole = "of 0 or a negative integer"
    yield at_one("lgamma", f"lgamma {pole}", lambda x: x.lgamma(), 2.0, -3.0, -2.5)
    yield at_one("lgamma", f"lgamma {pole}", lambda x: x.lgamma(), 2.0, 0.0, 1e-9)
    yield at_one("digamma", f"digamma {pole}", lambda x: x.digamma(), 2.0, 0.0, 1e-9)
    yield at_one("polygamma", f"polygamma {pole}", lambda x: torch.polygamma(1, x), 2.0, 0.0, 0.5)
    gamma = "mvlgamma at a pole of its gamma functions"
    yield at_one("mvlgamma", gamma, lambda x: torch.mvlgamma(x, 2), 2.0, 0.5, 0.6)
    for name in ("bessel_y0", "bessel_y1", "modified_bessel_k0", "modified_bessel_k1"):
        yield from _bessel(name, getattr(torch.special, name))
    for name in ("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"):
        yield from _bessel(name, getattr(torch.special, name))


def _bessel(name: str, function: Any) -> Iterable[Example]:
    yield at_one(f"special_{name}", f"{name} of 0", lambda x: function(x.detach()), 1.0, 0.0, 0.1)
    yield at_one(f"special_{name}", f"{name} of a negative number", lambda x: function(x.detach()), 1.0, -1.0, 0.1)


def forward_of_two_numbers() -> Iterable[Example]:
    yield at_one("pow", "0 to a negative power", lambda x: x**-2.0, 1.0, 0.0, 1e-9)
    yield at_two("pow", "0 to a negative power", torch.pow, (0.0, -1.0), (0.5, -1.0))
    fraction = "a fractional power of a negative number"
    yield at_two("pow", fraction, torch.pow, (-1.0, 0.5), (-1.0, 2.0))
    yield at_two("xlogy", "xlogy with a logarithm of 0", torch.xlogy, (1.0, 0.0), (1.0, 0.1))
    yield at_two("xlogy", "xlogy with a logarithm of a negative number", torch.xlogy, (1.0, -1.0), (1.0, 0.1))
    xlog1py = torch.special.xlog1py
    yield at_two("special_xlog1py", "xlog1py with a logarithm of 0", xlog1py, (1.0, -1.0), (1.0, -0.9))
    yield at_two("special_xlog1py", "xlog1py with a logarithm of a negative number", xlog1py, (1.0, -2.0), (1.0, -0.9))
    zeta = lambda x, q: torch.special.zeta(x.detach(), q)  # noqa: E731
    yield at_two("special_zeta", "zeta of 1", zeta, (1.0, 2.0), (1.1, 2.0))
    yield at_two("special_zeta", "zeta below 1", zeta, (0.5, 2.0), (1.1, 2.0))
    second = "zeta with a second argument of 0 or a negative integer"
    yield at_two("special_zeta", second, zeta, (3.0, -1.0), (3.0, 0.5))
    for name, function in (("igamma", torch.igamma), ("igammac", torch.igammac)):
        call = lambda a, x, f=function: f(a.detach(), x.detach())  # noqa: E731
        yield at_two(name, f"{name} of a negative number", call, (-1.0, 1.0), (1.0, 1.0))
        yield at_two(name, f"{name} of a negative number", call, (1.0, -1.0), (1.0, 1.0))
        yield at_two(name, f"{name} of (0, 0)", call, (0.0, 0.0), (1.0, 0.0))
    added = lambda a, b: torch.addcdiv(torch.ones(2), a, b)  # noqa: E731
    yield at_two("addcdiv", "addcdiv divides 0 by 0", added, (0.0, 0.0), (0.0, 1.0))
    yield at_two("addcdiv", "addcdiv divides by 0", added, (1.0, 0.0), (1.0, 1e-9))
    each = lambda a, b: torch._foreach_addcdiv([torch.ones(1), torch.ones(2)], [b[:1], a], [a[:1], b])  # noqa: E731
    yield at_two("addcdiv", "addcdiv divides by 0", each, (1.0, 0.0), (1.0, 1e-9))


def reductions_layers_and_losses() -> Iterable[Example]:
    empty, one = (torch.ones(0, 3),), (torch.ones(1, 3),)
    shape = ", of a tensor of shape (0, 3)"
    yield Example("mean over nothing", "mean", lambda x: x.mean(), empty, one, shape)
    yield Example("median over nothing", "median", lambda x: x.median(), empty, one, shape)
    for name, loss in (("mse_loss", F.mse_loss), ("smooth_l1_loss", F.smooth_l1_loss), ("huber_loss", F.huber_loss),
                       ("binary_cross_entropy", F.binary_cross_entropy),
                       ("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits),
                       ("soft_margin_loss", F.soft_margin_loss)):  # fmt: skip
        call = lambda x, f=loss: f(x, torch.ones_like(x))  # noqa: E731
        yield Example(f"{name} over nothing", name, call, empty, one, shape)
    call = lambda x: torch.segment_reduce(x, "mean", lengths=T([2, 0, 1]))  # noqa: E731
    said = "segment_reduce over an empty segment"
    yield Example(said, "segment_reduce", call, (torch.ones(3),), (), ": segment 1")
    call = lambda x: torch.segment_reduce(x, "max", offsets=T([0, 2, 2, 3]))  # noqa: E731
    yield Example(said, "segment_reduce", call, (torch.ones(3),), (), ": segment 1")
    yield Example("no CTC alignment exists", "_ctc_loss", ctc, (T([[1.0, 1.0]]).expand(3, 2).clone(),),
                  (torch.ones(5, 2),), ": sample 1 needs 5 frames for 3 labels and has 3")  # fmt: skip
    rows = (T([[1.0, 2.0], [3.0, 3.0]]),)
    near = (T([[1.0, 2.0], [3.0, 3.5]]),)
    equal = "normalization of values that are all equal, with an eps of 0"
    yield Example(equal, "native_layer_norm", lambda x: F.layer_norm(x, (2,), eps=0.0), rows, near, ": row 1")
    yield Example(equal, "native_layer_norm", lambda x: F.layer_norm(x, (2,), eps=1e-60), rows, near, ": row 1")
    yield Example(equal, "native_group_norm", lambda x: F.group_norm(x, 1, eps=0.0), rows, near, ": row 1")
    variance = "batch normalization by a running variance that is not above 0"
    norm = lambda x, v: F.batch_norm(x, torch.zeros(2), v.detach(), eps=0.0)  # noqa: E731
    given = torch.ones(3, 2)
    yield Example(
        variance, "native_batch_norm", norm, (given, two(1.0, 0.0)), (given, two(1.0, 1e-5)), ": channel 1, such as 0"
    )
    weight = lambda v: torch._weight_norm(v, torch.ones(2, 1), 0)  # noqa: E731
    zero = "weight norm of a weight whose norm is 0"
    yield Example(zero, "_weight_norm_interface", weight, (T([[1.0, 2.0], [0.0, 0.0]]),), near, ": row 1")
    yield Example(zero, "_weight_norm_interface", weight, (T([[1.0, 2.0], [1e-30, 0.0]]),), near, ": row 1")


def ctc(x: Tensor) -> Tensor:
    scores = x[:, None].expand(-1, 2, -1).log_softmax(-1)
    return F.ctc_loss(scores, T([[1, 0, 0], [1, 1, 1]]), (len(x),) * 2, (1, 3))


def matrices() -> Iterable[Example]:
    bad, good = (T([REGULAR, SINGULAR]),), (T([REGULAR, REGULAR]),)
    no_inverse = "a singular matrix has no inverse"
    determinant = "log of the determinant of a singular matrix"
    yield Example(determinant, "_linalg_slogdet", lambda a: torch.linalg.slogdet(a)[1], bad, good, ": matrix 1")
    yield Example(determinant, "_linalg_slogdet", torch.logdet, (T(SINGULAR),), (T(REGULAR),))
    yield Example(no_inverse, "linalg_inv_ex", lambda a: torch.linalg.inv_ex(a)[0], bad, good, ": matrix 1")
    yield Example(no_inverse, "_linalg_solve_ex", lambda a: torch.linalg.solve_ex(a, ONES)[0], bad, good, ": matrix 1")
    bad, good = (T([TRIANGULAR, ZERO_ON_DIAGONAL]),), (T([TRIANGULAR, TRIANGULAR]),)
    zero, rest = "a triangular matrix with 0 on its diagonal has no inverse", ": its diagonal is 0 at 1 of matrix 1"
    solve = lambda a: torch.linalg.solve_triangular(a, ONES, upper=True)  # noqa: E731
    yield Example(zero, "linalg_solve_triangular", solve, bad, good, rest)
    yield Example(zero, "triangular_solve", lambda a: torch.triangular_solve(ONES, a)[0], bad, good, rest)
    yield Example(zero, "cholesky_solve", lambda a: torch.cholesky_solve(ONES, a, upper=True), bad, good, rest)
    pivots = T([[1, 2], [1, 2]], dtype=torch.int32)
    lu = lambda a: torch.linalg.lu_solve(a, pivots, ONES)  # noqa: E731
    yield Example(no_inverse, "linalg_lu_solve", lu, bad, good, rest)


def derivatives_of_functions() -> Iterable[Example]:
    infinite = "the derivative of {} at {} is infinite"
    for name, said, function, fine, bad, good in (
        ("Sqrt", infinite.format("sqrt", "0"), torch.sqrt, 1.0, 0.0, 1e-9),
        ("Acos", infinite.format("acos", "1 or -1"), torch.acos, 0.5, 1.0, 0.99),
        ("Asin", infinite.format("asin", "1 or -1"), torch.asin, 0.5, -1.0, 0.99),
        ("Acosh", infinite.format("acosh", "1"), torch.acosh, 2.0, 1.0, 1.1),
        ("Pow", "the derivative of a power below 1 at 0 is infinite", lambda x: x**0.5, 1.0, 0.0, 1e-9),
    ):
        yield at_one(name, said, lambda x, f=function: f(x), fine, bad, good)
    # the value itself is infinite there, and a clamp has hidden it: 0 times infinity, or 0/0
    for name, said, function, fine, bad, good in (
        ("Log", infinite.format("log", "0"), torch.log, 1.0, 0.0, 1e-30),
        ("Log2", infinite.format("log2", "0"), torch.log2, 1.0, 0.0, 1e-30),
        ("Log10", infinite.format("log10", "0"), torch.log10, 1.0, 0.0, 1e-30),
        ("Log1P", infinite.format("log1p", "-1"), torch.log1p, 1.0, -1.0, -0.99),
        ("Atanh", infinite.format("atanh", "1 or -1"), torch.atanh, 0.5, 1.0, 0.99),
    ):
        yield at_one(name, said, lambda x, f=function: f(x).clamp(-50, 50), fine, bad, good)
    yield at_two(
        "Div",
        "the derivative of a division by 0 is infinite",
        lambda a, b: (a / b).clamp(-50, 50),
        (1.0, 0.0),
        (1.0, 0.1),
    )
    power = lambda x: x ** T([2.0, 0.5])  # noqa: E731
    said = "the derivative of a power below 1 at 0 is infinite"
    yield Example(said, "Pow", power, (two(3.0, 0.0),), (two(3.0, 0.1),), ", at index 1")
    negative = "the derivative of a power by its exponent has no value for a negative base"
    yield at_two("Pow", negative, torch.pow, (-1.0, 2.0), (1.0, 2.0))
    yield at_two("Atan2", "the derivative of atan2 at (0, 0) does not exist", torch.atan2, (0.0, 0.0), (0.0, 1.0))
    yield at_two("Hypot", "the derivative of hypot at (0, 0) does not exist", torch.hypot, (0.0, 0.0), (0.0, 1.0))
    log = "the derivative of xlogy with a logarithm of 0 does not exist"
    yield at_two("Xlogy", log, torch.xlogy, (0.0, 0.0), (0.0, 1.0))
    entr = "the derivative of special.entr at 0 is infinite"
    yield at_one("SpecialEntr", entr, lambda x: torch.special.entr(x), 0.5, 0.0, 0.1)
    gamma = "the derivative of {} at 0 or a negative integer does not exist"
    yield at_one("Lgamma", gamma.format("lgamma"), lambda x: x.lgamma().clamp(-50, 50), 2.0, -1.0, -0.5)
    yield at_one("Digamma", gamma.format("digamma"), lambda x: x.digamma().clamp(-50, 50), 2.0, 0.0, 0.5)
    yield at_one("Polygamma", gamma.format("polygamma"), lambda x: torch.polygamma(1, x).clamp(-50, 50), 2.0, 0.0, 0.5)
    target = "the derivative of binary_cross_entropy by its target is infinite at a probability of 0 or 1"
    yield at_two(
        "BinaryCrossEntropy",
        target,
        lambda x, y: F.binary_cross_entropy(x / 4, y / 4, reduction="none"),
        (4.0, 1.0),
        (3.0, 1.0),
    )
    added = lambda a, b: torch.addcdiv(torch.ones(2), a, b).clamp(-50, 50)  # noqa: E731
    yield at_two("Addcdiv", "the derivative of addcdiv divides by 0", added, (1.0, 0.0), (1.0, 0.1))


def derivatives_of_decompositions() -> Iterable[Example]:
    symmetric, equal = T([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 4.0]]), EYE * T([2.0, 3.0, 3.0])
    pair = (torch.stack([symmetric, equal]),)
    apart = (torch.stack([symmetric, symmetric]),)
    said = "the derivative of eigenvectors does not exist at equal eigenvalues"
    rest = ": eigenvalues 1 and 2 of matrix 1"
    yield Example(said, "LinalgEigh", lambda a: torch.linalg.eigh(a)[1][..., 0].abs(), pair, apart, rest)
    yield Example(said, "LinalgEig", lambda a: torch.linalg.eig(a)[1].abs(), pair, apart, rest)
    said = "the derivative of eigenvectors overflows at nearly equal eigenvalues"
    near = (symmetric * 1e-40, symmetric)
    call = lambda a: (torch.linalg.eigh(a)[1] * torch.arange(9.0).reshape(3, 3)).sum()  # noqa: E731
    yield Example(said, "LinalgEigh", call, near[:1], near[1:], ": eigenvalues 0 and 1 differ by 1e-40")
    call = lambda a: (torch.linalg.eig(a)[1].abs() ** 2 * torch.arange(9.0).reshape(3, 3)).sum()  # noqa: E731
    yield Example(said, "LinalgEig", call, near[:1], near[1:], ": eigenvalues 0 and 1 differ by 1e-40")
    said = "the derivative of singular vectors does not exist at equal singular values (compared by their squares)"
    rest = ": singular values 0 and 1 of matrix 1"
    svd = lambda a: torch.linalg.svd(a)[0] @ torch.linalg.svd(a)[2]  # noqa: E731
    yield Example(said, "LinalgSvd", svd, pair, apart, rest)
    said = "the derivative of singular vectors does not exist at a singular value of 0"
    thin = lambda a: torch.linalg.svd(a, full_matrices=False)[0]  # noqa: E731
    wide = T([[[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    yield Example(said, "LinalgSvd", thin, (wide,), (wide[:1].expand(2, -1, -1).clone(),), ": matrix 1")
    said = "the derivative of qr does not exist for columns that depend on each other"
    qr = lambda a: torch.linalg.qr(a)[0] * T([[1.0, 2.0], [3.0, 5.0]])  # noqa: E731
    rest = ": its diagonal is 0 at 1 of matrix 1"
    columns = (T([REGULAR, [[1.0, 0.0], [0.0, 0.0]]]),)
    yield Example(said, "LinalgQr", qr, columns, (T([REGULAR, REGULAR]),), rest)
    said = "the derivative of lu does not exist for a singular matrix"
    factor = lambda a: torch.linalg.lu_factor_ex(a)[0] * T([[1.0, 2.0], [3.0, 5.0]])  # noqa: E731
    yield Example(said, "LinalgLuFactorEx", factor, (T([REGULAR, SINGULAR]),), (T([REGULAR, REGULAR]),), rest)
    parts = lambda a: torch.linalg.lu(a)[1] * T([[1.0, 2.0], [3.0, 5.0]])  # noqa: E731
    yield Example(said, "LinalgLu", parts, (T([REGULAR, SINGULAR]),), (T([REGULAR, REGULAR]),), rest)
    said = "the derivative of cholesky does not exist for a singular matrix"
    root = lambda a: torch.linalg.cholesky_ex(a)[0]  # noqa: E731
    yield Example(said, "LinalgCholeskyEx", root, (T([REGULAR, SINGULAR]),), (T([REGULAR, REGULAR]),), rest)


def asked_by_rules() -> Iterable[Example]:
    """Of the rows without a test of their own: the rule of their kind asks more than one call's values."""
    divisor = ": the divisor, p1, is 0 at index 1"
    pairs = (two(1.0, 3.0), two(2.0, 0.0)), (two(1.0, 3.0), two(2.0, 0.5))
    for name in ("div", "true_divide", "divide", "remainder", "fmod"):
        function = getattr(torch, name)
        call = lambda a, b, f=function: f(a, b.detach())  # noqa: E731
        yield Example("x/0", name, call, *pairs, divisor)
    yield Example("x/0", "floor_divide", lambda a, b: a.detach().floor_divide(b.detach()) + a * 0, *pairs, divisor)
    yield Example("x/0", "reciprocal", lambda a: a.reciprocal(), (two(1.0, 0.0),), (two(1.0, 0.5),),
                  ": the divisor, p0, is 0 at index 1")  # fmt: skip
    yield Example(
        "0/0", "div", lambda a: a / a.detach(), (two(1.0, 0.0),), (two(1.0, 0.5),), ": the divisor, p0, is 0 at index 1"
    )
    yield Example("0/0", "div", lambda a: a / a.detach().sum(0), (torch.zeros(3),), (torch.ones(3),),
                  ": the divisor, a sum over dim 0, is 0")  # fmt: skip
    for number in (lambda a: a / 0.0, lambda a: a % 0.0):
        yield Example("x/0", "div", number, (two(1.0, 3.0),), (), ": the divisor is 0")
    each = lambda a: torch._foreach_div([torch.ones(1), a], [a[:1], a.detach()])  # noqa: E731
    yield Example("0/0", "div", each, (two(1.0, 0.0),), (two(1.0, 0.5),), ": the divisor, p0, is 0 at index 1")
    yield Example("0 times infinity", "mul", lambda a: a.detach() * math.inf + a, (two(1.0, 0.0),), (two(1.0, 0.5),))
    for name in ("var", "std", "var_mean", "std_mean"):
        function = getattr(torch, name)
        call = lambda a, f=function: f(a, 0)  # noqa: E731
        yield Example(f"{name} over 1 value", name, call, (torch.ones(1, 3),), (T([[1.0], [2.0]]),))
    scores, ignored, weights = torch.ones(2, 3), T([-100, -100]), T([1.0, 0.0, 1.0])
    loss = lambda x: F.cross_entropy(x, ignored)  # noqa: E731
    yield Example("all labels are ignored", "nll_loss_forward", loss, (scores,), (), ": the mean is over nothing")
    loss = lambda x: F.cross_entropy(x[..., None, None], ignored[:, None, None])  # noqa: E731
    yield Example("all labels are ignored", "nll_loss2d_forward", loss, (scores,), (), ": the mean is over nothing")
    loss = lambda x: F.cross_entropy(x, T([1, 1]), weights)  # noqa: E731
    said = "every label of the batch has weight 0"
    yield Example(said, "nll_loss_forward", loss, (scores,), (), ": the mean is over nothing")
    loss = lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64))  # noqa: E731
    yield Example("the batch has no labels", "nll_loss_forward", loss, (scores[:0],), (scores,))
    for name, softmax in (("_softmax", torch.softmax), ("_log_softmax", torch.log_softmax)):
        masked = lambda x, m, f=softmax: f(x.masked_fill(m > 0, -math.inf), -1)  # noqa: E731
        said = "every score of a softmax row is -inf"
        rows = T([[0.0, 1.0], [1.0, 1.0]]), T([[0.0, 1.0], [1.0, 0.0]])
        yield Example(said, name, masked, (ONES[..., 0], rows[0]), (ONES[..., 0], rows[1]), ": row 1")
    soft = lambda x, y: F.cross_entropy(x.masked_fill(T([[False, True]]), -math.inf), y.detach())  # noqa: E731
    given = (ONES[..., 0], T([[1.0, 0.0], [1.0, 0.0]]))
    yield Example("0 times infinity", "mul", soft, given, (ONES[..., 0], T([[0.5, 0.5], [0.5, 0.5]])))
    trap = lambda x: torch.where(x > 0, x.sqrt(), x)  # noqa: E731
    said = "the `where` trap: `x.sqrt()`"
    yield Example(said, "Sqrt", trap, (two(1.0, 0.0),), (two(1.0, 0.5),))
    yield from overflows()


def overflows() -> Iterable[Example]:
    for name, function, bad, good in (
        ("exp", torch.exp, 89.0, 88.0), ("exp2", torch.exp2, 128.0, 127.0), ("expm1", torch.expm1, 89.0, 88.0),
        ("sinh", torch.sinh, 90.0, 88.0), ("cosh", torch.cosh, 90.0, 88.0), ("pow", lambda x: x**3, 1e13, 1e12),
        ("mul", lambda x: x * 1e20, 1e19, 1e18), ("div", lambda x: x / 1e-20, 1e19, 1e18),
        ("add", lambda x: x + x, 3e38, 1e38), ("sub", lambda x: x - (-3e38), 3e38, -3e38),
        ("sum", lambda x: torch.cat([x, x]).sum(), 3e38, 1e38),
        ("cumsum", lambda x: torch.cat([x, x]).cumsum(0), 3e38, 1e37),
        ("prod", lambda x: torch.cat([x, x]).prod(), 1e20, 1e18),
        ("cumprod", lambda x: torch.cat([x, x]).cumprod(0), 1e20, 1e18), ("lgamma", torch.lgamma, 1e37, 1e30),
        ("i0", torch.i0, 100.0, 80.0), ("special_i1", torch.special.i1, 100.0, 80.0),
        ("ldexp", lambda x: torch.ldexp(x, T(100)), 1e9, 1e7), ("hypot", lambda x: torch.hypot(x, x), 3e38, 1e38),
        ("dot", lambda x: x.dot(x), 1e20, 1e18), ("addcmul", lambda x: torch.addcmul(x, x, x), 1e20, 1e18),
        ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, 4), 1e13, 1e8),
    ):  # fmt: skip
        whole = name in {"sum", "prod", "dot", "linalg_vector_norm"}
        place = "" if whole else ", at index 3" if name in {"cumsum", "cumprod"} else ", at index 1"
        yield Example(
            "float32 overflow",
            name,
            function,
            (two(2.0, bad),),
            (two(2.0, good),),
            f"{place}: it stays finite in float64",
        )
    said, exponential = "float32 overflow", torch.linalg.matrix_exp
    yield Example(said, "linalg_matrix_exp", exponential, (torch.full((1, 1), 90.0),), (torch.full((1, 1), 80.0),))
    large, small = (torch.full((2, 2), 300.0),), (torch.full((2, 2), 30.0),)
    for name, function in (
        ("mm", lambda x: x.half() @ x.half()), ("bmm", lambda x: x.half()[None] @ x.half()[None]),
        ("mv", lambda x: x.half() @ x.half()[0]), ("addmm", lambda x: F.linear(x.half(), x.half(), x.half()[0])),
        ("baddbmm", lambda x: torch.baddbmm(x.half()[None], x.half()[None], x.half()[None])),
        ("addmv", lambda x: torch.addmv(x.half()[0], x.half(), x.half()[0])), ("square", lambda x: x.half().square()),
        ("_to_copy", lambda x: (x * 300).half()), ("copy", lambda x: torch.zeros(2, 2).half().copy_(x * 300)),
        ("convolution", lambda x: F.conv1d(x.half()[None], x.half()[None])),
    ):  # fmt: skip
        yield Example("float16 overflow", name, function, large, small, ": it stays finite in float32")


EXAMPLES = [
    *asked_by_rules(),
    *forward_of_one_number(), *forward_of_two_numbers(), *reductions_layers_and_losses(), *matrices(),
    *derivatives_of_functions(), *derivatives_of_decompositions(),
]  # fmt: skip

ZEROS = torch.zeros(3)
MASKED = torch.full((1, 1, 2, 2), -math.inf)
FINITE: list[Any] = [
    ("norm", lambda x: x.norm(), ZEROS),
    ("norm of order 3", lambda x: x.norm(3), ZEROS),
    ("norm of order 1.5", lambda x: x.norm(1.5), ZEROS),
    ("norm of order 0.5", lambda x: torch.linalg.vector_norm(x, 0.5), ZEROS),
    ("matrix norm", lambda x: torch.linalg.matrix_norm(x[None]), ZEROS),
    ("std", lambda x: x.std(), ZEROS),
    ("std_mean", lambda x: torch.std_mean(x), ZEROS),
    ("dist", lambda x: torch.dist(x, x.detach()), ZEROS),
    ("cdist", lambda x: torch.cdist(x[None], x[None].detach()), ZEROS),
    ("pdist", lambda x: torch.pdist(x[:, None]), ZEROS),
    ("sinc", torch.sinc, ZEROS),
    ("copysign", lambda x: torch.copysign(x, x.detach()), ZEROS),
    ("prod", lambda x: x.prod(), ZEROS),
    ("cumprod", lambda x: x.cumprod(0), ZEROS),
    ("abs of a complex number", lambda x: torch.complex(x, x).abs(), ZEROS),
    ("angle of a complex number", lambda x: torch.complex(x, x).angle(), ZEROS),
    ("sgn of a complex number", lambda x: torch.complex(x, x).sgn(), ZEROS),
    ("attention", lambda x: F.scaled_dot_product_attention(x, x, x, MASKED), torch.ones(1, 1, 2, 4)),
    ("binary_cross_entropy", lambda x: F.binary_cross_entropy(x, 1 - x.detach()), T([0.0, 1.0])),
    ("normalize", lambda x: F.normalize(x, dim=0), ZEROS),
    ("cosine_similarity", lambda x: F.cosine_similarity(x, x.detach(), dim=0), ZEROS),
]
"""Name, line and parameters of what looks singular and is not."""
