"""The operator table: in which ways an operator makes a non-finite number of finite ones, and what is said of it.

Forward rows are looked up by what an operator does (`Event.base`), backward rows by the autograd node that ran, since a
derivative is a formula of elementary operators. A row without a test is asked by the rule of its kind, which needs more
than one call's values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from . import calls
from .calls import DIVISIONS, Test, every, is_pole, singular, within
from .facts import is_zero


class Direction(enum.StrEnum):
    """Whether the operator's value or its derivative is not finite."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Row:
    """One way in which an operator makes a non-finite number of finite ones.

    Attributes:
        operators: what they do, as in `Event.base`; for `Direction.BACKWARD` names of autograd nodes, without
            ``Backward`` and what follows it.
        direction: of the row.
        said: the sentence up to the line of code; ``{name}`` is the operator.
        test: gives the end of the sentence where the row holds; None where the rule of its kind is asked.
        kind: of the reason.
        remedy: the usual one, "" where there is none.
    """

    operators: tuple[str, ...]
    direction: Direction
    said: str
    test: Test | None
    kind: str = "edge of domain"
    remedy: str = ""


@dataclass(frozen=True)
class LeftOut:
    """Operators without a row, and why.

    Attributes:
        operators: names, or a group of them.
        why: in one sentence.
    """

    operators: str
    why: str


FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
LOGARITHMS = ("log", "log2", "log10")
SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
VARIANCES = ("var", "std", "var_mean", "std_mean")
ELEMENTWISE_LOSSES = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)  # fmt: skip
GROWS = (
    "exp", "exp2", "expm1", "sinh", "cosh", "pow", "square", "mul", "div", "add", "sub", "addcmul", "addcdiv", "ldexp",
    "hypot", "sum", "mean", "cumsum", "prod", "cumprod", "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot",
    "convolution", "linalg_vector_norm", "linalg_matrix_exp", "i0", "special_i1",
    "special_modified_bessel_i0", "special_modified_bessel_i1", "special_erfcx", "_to_copy", "copy",
)  # fmt: skip
EPS_UNDER_ROOT = "an eps under the root keeps it finite"
NEEDS_EPS = "give it an eps"
_BESSEL = ("special_bessel_y0", "special_bessel_y1", "special_modified_bessel_k0", "special_modified_bessel_k1")
_BESSEL_SCALED = ("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1")

ROWS: tuple[Row, ...] = (
    # -- functions of one number, forward ------------------------------------------------------------------------------
    Row(LOGARITHMS, FORWARD, "{name} of 0", every(self=is_zero)),
    Row(LOGARITHMS, FORWARD, "{name} of a negative number", every(self=lambda x: x < 0)),
    Row(("log1p",), FORWARD, "log1p of -1", every(self=lambda x: x == -1)),
    Row(("log1p",), FORWARD, "log1p below -1", every(self=lambda x: x < -1)),
    Row(("sqrt",), FORWARD, "sqrt of a negative number", every(self=lambda x: x < 0)),
    Row(("rsqrt",), FORWARD, "rsqrt of 0", every(self=is_zero), remedy=EPS_UNDER_ROOT),
    Row(("rsqrt",), FORWARD, "rsqrt of a negative number", every(self=lambda x: x < 0)),
    Row(("acos", "asin"), FORWARD, "{name} outside of -1 .. 1", every(self=lambda x: x.abs() > 1)),
    Row(("atanh", "erfinv"), FORWARD, "{name} of 1 or -1", every(self=lambda x: x.abs() == 1)),
    Row(("atanh", "erfinv"), FORWARD, "{name} outside of -1 .. 1", every(self=lambda x: x.abs() > 1)),
    Row(("acosh",), FORWARD, "acosh below 1", every(self=lambda x: x < 1)),
    Row(("logit", "special_ndtri"), FORWARD, "{name} of 0 or 1", every(self=lambda x: (x == 0) | (x == 1))),
    Row(("logit", "special_ndtri"), FORWARD, "{name} outside of 0 .. 1", every(self=lambda x: (x < 0) | (x > 1))),
    Row(("special_entr",), FORWARD, "special.entr of a negative number", every(self=lambda x: x < 0)),
    Row(("lgamma", "digamma", "polygamma"), FORWARD, "{name} of 0 or a negative integer", every(self=is_pole)),
    Row(("mvlgamma",), FORWARD, "mvlgamma at a pole of its gamma functions", calls.pole_of_mvlgamma),
    Row(_BESSEL, FORWARD, "{name} of 0", every(self=is_zero)),
    Row(_BESSEL, FORWARD, "{name} of a negative number", every(self=lambda x: x < 0)),
    Row(_BESSEL_SCALED, FORWARD, "{name} of 0", every(x=is_zero)),
    Row(_BESSEL_SCALED, FORWARD, "{name} of a negative number", every(x=lambda x: x < 0)),
    # -- functions of two numbers, forward -----------------------------------------------------------------------------
    Row(("pow",), FORWARD, "0 to a negative power", calls.zero_to_a_negative_power),
    Row(("pow",), FORWARD, "a fractional power of a negative number", calls.fractional_power_of_a_negative),
    Row(("xlogy",), FORWARD, "xlogy with a logarithm of 0", every(self=lambda x: x != 0, other=is_zero)),
    Row(("xlogy",), FORWARD, "xlogy with a logarithm of a negative number", every(other=lambda x: x < 0)),
    Row(("special_xlog1py",), FORWARD, "xlog1py with a logarithm of 0",
        every(self=lambda x: x != 0, other=lambda x: x == -1)),
    Row(("special_xlog1py",), FORWARD, "xlog1py with a logarithm of a negative number", every(other=lambda x: x < -1)),
    Row(("special_zeta",), FORWARD, "zeta of 1", every(self=lambda x: x == 1)),
    Row(("special_zeta",), FORWARD, "zeta below 1", every(self=lambda x: x < 1)),
    Row(("special_zeta",), FORWARD, "zeta with a second argument of 0 or a negative integer", every(other=is_pole)),
    Row(("igamma", "igammac"), FORWARD, "{name} of a negative number", every(self=lambda x: x < 0)),
    Row(("igamma", "igammac"), FORWARD, "{name} of a negative number", every(other=lambda x: x < 0)),
    Row(("igamma", "igammac"), FORWARD, "{name} of (0, 0)", every(self=is_zero, other=is_zero)),
    Row(("addcdiv",), FORWARD, "addcdiv divides 0 by 0", every(tensor1=is_zero, tensor2=is_zero),
        "division by zero", NEEDS_EPS),
    Row(("addcdiv",), FORWARD, "addcdiv divides by 0", every(tensor1=lambda x: x != 0, tensor2=is_zero),
        "division by zero", NEEDS_EPS),
    Row(DIVISIONS, FORWARD, "x/0, 0/0", None, "division by zero"),
    Row(("mul",), FORWARD, "0 times infinity", None, "0*inf"),
    # -- reductions, forward -------------------------------------------------------------------------------------------
    Row(("mean", "median", *ELEMENTWISE_LOSSES), FORWARD, "{name} over nothing", calls.is_empty, "empty reduction"),
    Row(VARIANCES, FORWARD, "{name} over 1 value", None, "empty reduction"),
    Row(("nll_loss_forward", "nll_loss2d_forward"), FORWARD, "all labels are ignored", None, "empty reduction"),
    Row(("segment_reduce",), FORWARD, "segment_reduce over an empty segment", calls.empty_segment, "empty reduction",
        "give it an initial value"),
    Row(SOFTMAX, FORWARD, "every score of a softmax row is -inf", None, "masked row"),
    # -- losses and layers, forward ------------------------------------------------------------------------------------
    Row(("_ctc_loss", "_cudnn_ctc_loss"), FORWARD, "no CTC alignment exists", calls.cannot_align,
        remedy="give it longer inputs or zero_infinity=True"),
    Row(("native_layer_norm", "native_group_norm"), FORWARD,
        "normalization of values that are all equal, with an eps of 0", calls.constant_row, "division by zero",
        NEEDS_EPS),
    Row(("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), FORWARD,
        "batch normalization by a running variance that is not above 0", calls.no_variance),
    Row(("_weight_norm_interface",), FORWARD, "weight norm of a weight whose norm is 0", calls.zero_weight,
        "division by zero"),
    # -- matrices, forward ---------------------------------------------------------------------------------------------
    Row(("_linalg_slogdet",), FORWARD, "log of the determinant of a singular matrix",
        calls.singular_matrix),
    Row(("linalg_inv_ex", "_linalg_solve_ex"), FORWARD, "a singular matrix has no inverse", calls.singular_matrix),
    Row(("linalg_solve_triangular",), FORWARD, "a triangular matrix with 0 on its diagonal has no inverse",
        calls.zero_on_diagonal("self")),
    Row(("triangular_solve",), FORWARD, "a triangular matrix with 0 on its diagonal has no inverse",
        calls.zero_on_diagonal("A")),
    Row(("linalg_lu_solve",), FORWARD, "a singular matrix has no inverse", calls.zero_on_diagonal("LU")),
    Row(("cholesky_solve",), FORWARD, "a triangular matrix with 0 on its diagonal has no inverse",
        calls.zero_on_diagonal("input2")),
    # -- overflow ------------------------------------------------------------------------------------------------------
    Row(GROWS, FORWARD, "overflow", None, "overflow"),
    # -- derivatives of functions --------------------------------------------------------------------------------------
    Row(("Sqrt",), BACKWARD, "the derivative of sqrt at 0 is infinite", singular, remedy=EPS_UNDER_ROOT),
    Row(("Log",), BACKWARD, "the derivative of log at 0 is infinite", singular),
    Row(("Log2",), BACKWARD, "the derivative of log2 at 0 is infinite", singular),
    Row(("Log10",), BACKWARD, "the derivative of log10 at 0 is infinite", singular),
    Row(("Log1P",), BACKWARD, "the derivative of log1p at -1 is infinite", singular),
    Row(("Pow",), BACKWARD, "the derivative of a power below 1 at 0 is infinite", singular),
    Row(("Pow",), BACKWARD, "the derivative of a power by its exponent has no value for a negative base",
        within("log", every(self=lambda x: x < 0))),
    Row(("Acos",), BACKWARD, "the derivative of acos at 1 or -1 is infinite", singular),
    Row(("Asin",), BACKWARD, "the derivative of asin at 1 or -1 is infinite", singular),
    Row(("Atanh",), BACKWARD, "the derivative of atanh at 1 or -1 is infinite", singular),
    Row(("Acosh",), BACKWARD, "the derivative of acosh at 1 is infinite", singular),
    Row(("Div",), BACKWARD, "the derivative of a division by 0 is infinite", singular),
    Row(("Atan2",), BACKWARD, "the derivative of atan2 at (0, 0) does not exist", singular),
    Row(("Hypot",), BACKWARD, "the derivative of hypot at (0, 0) does not exist", singular),
    Row(("Xlogy",), BACKWARD, "the derivative of xlogy with a logarithm of 0 does not exist", singular),
    Row(("SpecialEntr",), BACKWARD, "the derivative of special.entr at 0 is infinite",
        within("log", every(self=is_zero))),
    Row(("Lgamma",), BACKWARD, "the derivative of lgamma at 0 or a negative integer does not exist",
        within("digamma", every(self=is_pole))),
    Row(("Digamma", "Polygamma"), BACKWARD, "the derivative of {name} at 0 or a negative integer does not exist",
        within("polygamma", every(self=is_pole))),
    Row(("Addcdiv",), BACKWARD, "the derivative of addcdiv divides by 0", singular, remedy=NEEDS_EPS),
    Row(("BinaryCrossEntropy",), BACKWARD,
        "the derivative of binary_cross_entropy by its target is infinite at a probability of 0 or 1",
        within("logit", every(self=lambda x: (x == 0) | (x == 1)))),
    # -- derivatives of decompositions ---------------------------------------------------------------------------------
    Row(("LinalgEigh", "LinalgEig"), BACKWARD, "the derivative of eigenvectors does not exist at equal eigenvalues",
        calls.equal_values("eigenvalues"), remedy="a small diagonal of distinct numbers breaks the tie"),
    Row(("LinalgEigh", "LinalgEig"), BACKWARD, "the derivative of eigenvectors overflows at nearly equal eigenvalues",
        calls.nearly_equal_values("eigenvalues"), remedy="a small diagonal of distinct numbers sets them apart"),
    Row(("LinalgSvd",), BACKWARD, "the derivative of singular vectors does not exist at equal singular values "
        "(compared by their squares)", calls.equal_values("singular values"), remedy="a little noise breaks the tie"),
    Row(("LinalgSvd",), BACKWARD, "the derivative of singular vectors does not exist at a singular value of 0",
        calls.zero_value),
    Row(("LinalgQr",), BACKWARD, "the derivative of qr does not exist for columns that depend on each other",
        within("linalg_solve_triangular", calls.zero_on_diagonal("self"))),
    Row(("LinalgLu", "LinalgLuFactorEx"), BACKWARD, "the derivative of lu does not exist for a singular matrix",
        within("linalg_solve_triangular", calls.zero_on_diagonal("self"))),
    Row(("LinalgCholeskyEx",), BACKWARD, "the derivative of cholesky does not exist for a singular matrix",
        within("linalg_solve_triangular", calls.zero_on_diagonal("self"))),
)  # fmt: skip

LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("cuDNN and MIOpen: ctc_loss, batch_norm, rnn", "the rows name them; no test runs them without a device"),
    LeftOut("rsqrt, reciprocal, exp, tan, backward", "it uses the value, infinite before: the forward row speaks"),
    LeftOut("norm, std, std_mean, dist, cdist, pdist, sinc, copysign, backward at 0", "torch masks it, sends 0"),
    LeftOut("prod, cumprod, backward with zeros", "torch takes another formula there, which is finite"),
    LeftOut("angle, sgn, abs of complex numbers, backward at 0", "torch sends 0"),
    LeftOut("inv, solve, cholesky, batch_norm of one value, binary_cross_entropy outside of 0 .. 1", "torch raises"),
    LeftOut("scaled_dot_product_attention over a row that is masked whole", "torch gives 0"),
    LeftOut("binary_cross_entropy, backward by its input", "torch clamps the logarithm and the divisor"),
    LeftOut("inv, det, pinv, matrix_exp of nearly singular matrices", "large numbers: the row of overflow speaks"),
    LeftOut("householder_product, ormqr, backward", "the formula divides by numbers that the user does not see"),
    LeftOut("normalization with an eps below 0", "a bad argument, not a value"),
    LeftOut("orthogonal polynomials of torch.special", "overflow only; where float64 overflows, too, it is unknown"),
    LeftOut("views, indexing, copies, comparisons, random numbers, pooling, padding, interpolation",
            "they make no number that was not there, or bounded ones"),
    LeftOut("fused optimizers", "one kernel computes the whole update: only an eps that is 0 in the dtype is told"),
    LeftOut("quantized, sparse and nested operators", "their values are not looked at element by element"),
)  # fmt: skip
