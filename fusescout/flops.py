"""What an ATen operator must do at least: its FLOPs, the bytes it has to move, and the kind of operator it is.

The numbers are floors, made from shapes alone: each distinct input is read once, each result written once, and what
only relabels memory is free. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fusescout.ir import Node
from fusescout.ir import Op
from fusescout.ir import Out
from fusescout.ir import Ref
from fusescout.ir import TensorSpec

_NAMES = {
    "gemm": (
        "linear addmm mm bmm matmul baddbmm addbmm mv addmv dot vdot inner outer addr einsum bilinear "
        "_addmm_activation _scaled_mm _scaled_mm_v2 _int_mm _grouped_mm scaled_mm"
    ),
    "conv": (
        "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "cudnn_convolution mkldnn_convolution miopen_convolution"
    ),
    "rnn": "lstm gru rnn_tanh rnn_relu",
    "attention": (
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward "
        "_native_multi_head_attention"
    ),
    "norm": (
        "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm instance_norm "
        "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_batch_norm_impl_index cudnn_batch_norm local_response_norm"
    ),
    "softmax": "softmax _softmax log_softmax _log_softmax _safe_softmax masked_softmax _masked_softmax",
    "reduction": (
        "mean sum nansum nanmean amax amin aminmax max min var var_mean std std_mean prod all any argmax argmin "
        "norm linalg_vector_norm logsumexp count_nonzero median nanmedian mse_loss l1_loss smooth_l1_loss "
        "huber_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss nll_loss_nd nll_loss2d "
        "nll_loss_forward cross_entropy_loss kl_div max_pool1d max_pool2d max_pool3d max_pool2d_with_indices "
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "_adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d cosine_similarity pairwise_distance trace"
    ),
    "pointwise": (
        "add sub rsub subtract mul multiply div divide true_divide floor_divide remainder fmod pow square sqrt "
        "rsqrt reciprocal neg negative abs absolute sign sgn exp exp2 expm1 log log2 log10 log1p logaddexp "
        "logaddexp2 sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid "
        "logit log_sigmoid relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardsigmoid hardswish "
        "hardshrink softshrink tanhshrink softplus softsign threshold prelu _prelu_kernel rrelu glu eq ne lt le "
        "gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor logical_not "
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ "
        "__xor__ __lshift__ __rshift__ where clamp clamp_min clamp_max clip maximum minimum fmax fmin isnan isinf "
        "isfinite isposinf isneginf nan_to_num ceil floor round trunc frac lerp addcmul addcdiv masked_fill "
        "copysign hypot heaviside deg2rad rad2deg digamma lgamma sinc xlogy float_power dropout feature_dropout "
        "alpha_dropout _to_copy to type_as float half bfloat16 double int long bool tril triu "
        "fake_quantize_per_tensor_affine positive angle signbit nextafter ldexp frexp gcd lcm i0 igamma igammac "
        "polygamma mvlgamma conj_physical gelu_backward silu_backward tanh_backward sigmoid_backward "
        "threshold_backward logit_backward native_dropout_backward"
    ),
    "view": (
        "view reshape _unsafe_view view_as reshape_as flatten unflatten transpose swapaxes swapdims permute "
        "movedim moveaxis t numpy_T mT adjoint expand expand_as broadcast_to unsqueeze squeeze slice select "
        "narrow split split_with_sizes chunk tensor_split unbind unfold as_strided diagonal detach alias "
        "lift_fresh view_as_real view_as_complex real imag getitem identity sym_size sym_stride sym_numel _conj "
        "conj _neg_view resolve_conj resolve_neg _assert_tensor_metadata _shape_as_tensor lift ravel hsplit "
        "vsplit dsplit"
    ),
    "copy": "clone contiguous copy lift_fresh_copy new_tensor",
    "random": (
        "rand randn randint rand_like randn_like randint_like randperm bernoulli multinomial normal uniform "
        "random exponential native_dropout"
    ),
}
_CLASS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_PER_ELEMENT = {"norm": 8.0, "softmax": 5.0, "reduction": 1.0}
_RESHAPES = frozenset({"reshape", "reshape_as", "flatten", "unflatten", "ravel"})
_LOOKUPS = frozenset(
    {"embedding", "gather", "index_select", "index", "take", "take_along_dim", "index_put", "scatter", "scatter_add"}
)
_ALIASING = frozenset({"contiguous", "to", "float", "half", "bfloat16", "double", "int", "long", "bool", "type_as"})
"""Operators that hand back their input when it already is what they were asked for."""
_FACTORY_NAMES = (
    "zeros ones full empty arange linspace zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
    "new_empty scalar_tensor eye fill zero"
)
_FACTORIES = frozenset(_FACTORY_NAMES.split())


class Cost(NamedTuple):
    """A floor for one execution: floating-point operations, and bytes that must be read or written."""

    flops: float
    bytes: float


def op_name(target: str) -> str:
    """The plain operator name: "add" for "aten.add_.Tensor", "getitem" for "operator.getitem"."""
    parts = target.split(".")
    name = parts[1] if len(parts) >= 3 else parts[-1]
    if name.startswith("__i") and name.endswith("__"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@functools.cache
def op_class(target: str) -> str:
    """Which kind of operator an overload is.

    Returns:
        "gemm", "conv", "rnn", "attention", "pointwise", "reduction", "norm", "softmax", "view", "copy", "random" or
        "other".
    """
    if target.split(".")[0] not in ("aten", "prims", "operator", "_operator", "builtins", "getitem"):
        return "other"
    overload = target.split(".")[2] if target.count(".") >= 2 else ""
    name = op_name(target)
    if name in ("max", "min") and overload == "other":
        return "pointwise"
    if name.startswith("special_"):
        return _CLASS.get(name.removeprefix("special_"), "pointwise")
    return _CLASS.get(name, "other")


def cost(op: Node | Op, specs: Sequence[Out]) -> Cost:
    """FLOPs and bytes of one execution of an operator, at least.

    Args:
        op: the operator.
        specs: what each of `op.inputs` is, in that order.
    """
    kind, name = op_class(op.target), op_name(op.target)
    of: dict[str | int, Out] = dict(zip(op.inputs, specs, strict=True))
    tensors = [s for out in specs for s in _tensors(out)]
    written = _tensors(op.out)
    out_numel = float(sum(s.numel for s in written))
    first = _tensor(op.args[0], of) if op.args else None
    if _is_free(op, kind, name, first, written):
        return Cost(0.0, 0.0)
    nbytes = float(sum(s.nbytes for s in (*tensors, *written)))
    if kind in ("view", "copy"):
        return Cost(0.0, float(2 * sum(s.nbytes for s in written)))
    if name in _LOOKUPS:
        indices = sum(s.nbytes for s in tensors if s.dtype in ("int64", "int32", "bool"))
        return Cost(0.0, float(2 * sum(s.nbytes for s in written) + indices))
    if name in _FACTORIES or (kind == "random" and name != "native_dropout"):
        return Cost(0.0, float(sum(s.nbytes for s in written)))
    if kind == "gemm":
        return Cost(_gemm_flops(op, name, of, out_numel), nbytes)
    if kind == "conv":
        return Cost(_conv_flops(op, name, of, out_numel), nbytes)
    if kind == "rnn":
        return Cost(_recurrent_flops(op, of), nbytes)
    if kind == "attention":
        return Cost(_attention_flops(op, of), nbytes)
    if kind == "pointwise":
        return Cost(out_numel, nbytes)
    read = float(max((s.numel for s in tensors), default=0))
    return Cost(_PER_ELEMENT.get(kind, 0.0) * read, nbytes)


def is_viewable(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Whether a tensor can take another shape without being copied (the rule `Tensor.view` follows)."""
    if spec.numel == 0 or spec.is_contiguous:
        return True
    target = list(shape)
    chunk, needed = 1, 1
    base = spec.stride[-1]
    for d in range(len(spec.shape) - 1, -1, -1):
        chunk *= spec.shape[d]
        ends = d == 0 or (spec.shape[d - 1] != 1 and spec.stride[d - 1] != chunk * base)
        if not ends:
            continue
        while target and (needed < chunk or target[-1] == 1):
            needed *= target.pop()
        if needed != chunk:
            return False
        if d > 0:
            chunk, needed, base = 1, 1, spec.stride[d - 1]
    return not target


def _is_free(op: Node | Op, kind: str, name: str, first: TensorSpec | None, written: list[TensorSpec]) -> bool:
    if kind == "view":
        if name in _RESHAPES and first is not None and written:
            return is_viewable(first, written[0].shape)
        return True
    if name in _ALIASING and first is not None and written:
        return _same(first, written[0]) and not _asks_copy(op)
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return len(op.args) > 2 and op.args[2] is False
    return False


def _same(a: TensorSpec, b: TensorSpec) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.stride == b.stride


def _asks_copy(op: Node | Op) -> bool:
    return bool(dict(op.kwargs).get("copy", False))


def _tensors(out: Out) -> list[TensorSpec]:
    if isinstance(out, TensorSpec):
        return [out]
    return [s for s in out if s is not None] if out else []


def _tensor(arg: object, of: dict[str | int, Out]) -> TensorSpec | None:
    out = of.get(arg.to) if isinstance(arg, Ref) else None
    return out if isinstance(out, TensorSpec) else None


def _operand(op: Node | Op, index: int, of: dict[str | int, Out]) -> TensorSpec | None:
    return _tensor(op.args[index], of) if index < len(op.args) else None


def _gemm_flops(op: Node | Op, name: str, of: dict[str | int, Out], out_numel: float) -> float:
    if name == "einsum":
        return _einsum_flops(op, of)
    left = _operand(op, 1 if name.startswith(("add", "badd", "_addmm")) else 0, of)
    inner = 1 if left is None or not left.shape or name in ("outer", "addr") else left.shape[-1]
    if name == "addbmm" and left is not None:
        inner *= left.shape[0]
    flops = 2.0 * out_numel * inner
    biased = {"linear": 2, "_scaled_mm": 4, "_scaled_mm_v2": 8}.get(name)
    adds = name.startswith(("add", "badd", "_addmm")) or (biased is not None and _operand(op, biased, of) is not None)
    return flops + out_numel if adds else flops


def _einsum_flops(op: Node | Op, of: dict[str | int, Out]) -> float:
    equation = op.args[0] if op.args else None
    operands = op.args[1] if len(op.args) > 1 else None
    if not isinstance(equation, str) or not isinstance(operands, tuple) or "." in equation:
        return 0.0
    sizes: dict[str, int] = {}
    for term, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=False):
        spec = _tensor(operand, of)
        sizes |= dict(zip(term, spec.shape, strict=False)) if spec else {}
    return 2.0 * math.prod(sizes.values()) if sizes else 0.0


def _conv_flops(op: Node | Op, name: str, of: dict[str | int, Out], out_numel: float) -> float:
    image, weight = _operand(op, 0, of), _operand(op, 1, of)
    if image is None or weight is None:
        return 0.0
    transposed = "transpose" in name or (name.endswith("convolution") and len(op.args) > 6 and op.args[6] is True)
    flops = 2.0 * (image.numel if transposed else out_numel) * math.prod(weight.shape[1:])
    return flops + out_numel if _operand(op, 2, of) is not None else flops


def _recurrent_flops(op: Node | Op, of: dict[str | int, Out]) -> float:
    """Each weight matrix is applied to every step of every sequence."""
    data = _operand(op, 0, of)
    weights = [s for arg in op.args[1:] if isinstance(arg, tuple) for a in arg if (s := _tensor(a, of)) is not None]
    if data is None or not data.shape:
        return 0.0
    return 2.0 * sum(s.numel for s in weights if len(s.shape) == 2) * (data.numel // max(data.shape[-1], 1))


def _attention_flops(op: Node | Op, of: dict[str | int, Out]) -> float:
    query, key, value = (_operand(op, i, of) for i in range(3))
    if query is None or key is None or value is None or len(query.shape) < 2:
        return 0.0
    rows = query.numel // max(query.shape[-1], 1)
    flops = 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    causal = dict(op.kwargs).get("is_causal", op.args[5] if len(op.args) > 5 else False)
    return flops / 2 if causal is True else flops
