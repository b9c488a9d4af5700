"""torch.compile support: the losses as one custom operator, `torch.ops.fmicl.loss`.

torch.compile can't trace the kernels of the losses. It sees an operator instead, of which it knows the shapes of the
results, so that fullgraph=True and CUDA graphs work. The operator evaluates a loss as without torch.compile, together
with its gradient in all tensors that want one; the backward pass multiplies that by the incoming gradient.

Settings that aren't tensors are registered while torch.compile traces, under a name that is a constant of its graph.

Import this module only while torch.compile traces: it loads the compiler, which takes a second.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from fmicl.divergences import Divergence
from fmicl.losses.similarities import Similarity
from fmicl.utils.learnable import leaf_tensors
from fmicl.utils.live_objects import find_object

_TENSOR, _OBJECT, _CONSTANT = "tensor", "object", "constant"
_VALUES = {"fmicl_terms": 2}  # tensors that a function of fmicl.functional returns, if not one

Argument = tuple[int | str, str, Any]
"""Position or name, kind and value of an argument."""


class _Call(NamedTuple):
    """A function of `fmicl.functional` with its arguments; tensors are missing."""

    function: str
    arguments: tuple[Argument, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from fmicl.losses import functional

        given = iter(tensors)
        values = {key: next(given) if kind == _TENSOR else value for key, kind, value in self.arguments}
        positional = [values[key] for key in sorted(key for key in values if isinstance(key, int))]
        named = {key: value for key, value in values.items() if isinstance(key, str)}
        found = getattr(functional, self.function)(*positional, **named)
        return (found,) if isinstance(found, Tensor) else tuple(found)


_CALLS: dict[str, _Call] = {}
_NAMES: dict[Any, str] = {}


def call_operator(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
    """A function of `fmicl.functional` as the operator: its results.

    None if an argument depends on parameters of its own (a learned divergence) or was made by the compiled code.
    """
    tensors: list[Tensor] = []
    described: list[Argument] = []
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in named:  # tuples of types, as torch 2.8 can't trace a union
        if isinstance(value, Tensor):
            tensors.append(value)
            described.append((key, _TENSOR, ""))
        elif value is None or isinstance(value, (bool, str)):
            described.append((key, _CONSTANT, value))
        elif isinstance(value, (int, float)):
            described.append((key, _CONSTANT, guard_scalar(value)))  # torch.compile may trace numbers as variables
        else:
            described.append((key, _OBJECT, id(value)))
    name = _register(function, tuple(described))
    if not name:
        return None
    gradient = torch.is_grad_enabled()
    wanted = [gradient and value.requires_grad for value in tensors]
    return list(torch.ops.fmicl.loss(tensors, name, wanted)[: _VALUES.get(function, 1)])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _register(function: str, described: tuple[Argument, ...]) -> str:
    """The name of a call; empty if it can't be an operator."""
    arguments: list[Argument] = []
    for key, kind, value in described:
        if kind == _OBJECT:
            value = find_object(value)
            if value is None or _is_learned(value):
                return ""
        arguments.append((key, kind, value))
    name = _NAMES.setdefault((function, described), f"{function}:{len(_NAMES)}")
    _CALLS[name] = _Call(function, tuple(arguments))
    return name


def _is_learned(value: Any) -> bool:
    """Whether an object depends on tensors, which would have to be inputs of the operator."""
    if isinstance(value, Similarity):
        return any(isinstance(field, Tensor) for field in vars(value).values())
    if isinstance(value, Divergence):
        if any(isinstance(field, Tensor) for field in vars(value).values()):
            return True
        return bool(leaf_tensors(lambda r: value.score(r) + value.penalty(r), torch.zeros(1)))
    return False


@torch.library.custom_op("fmicl::loss", mutates_args=())
def _loss(tensors: list[Tensor], name: str, wanted: list[bool]) -> list[Tensor]:
    """The results of a call, and then the gradient of each in every tensor that wants one."""
    dtype = _result_type(tensors)
    with _autograd(any(wanted)):
        inputs = [value.detach().requires_grad_(needed) for value, needed in zip(tensors, wanted, strict=True)]
        results = _CALLS[name](inputs)
        leaves = [value for value in inputs if value.requires_grad]
        gradients: list[Tensor] = []
        for k, result in enumerate(results):
            if not leaves:
                break
            if not result.requires_grad:
                gradients += [torch.zeros_like(leaf) for leaf in leaves]
                continue
            last = k == len(results) - 1
            gradients += torch.autograd.grad(result, leaves, retain_graph=not last, materialize_grads=True)
    return [*(result.detach().to(dtype) for result in results), *map(_alone, gradients)]


def _alone(gradient: Tensor) -> Tensor:
    """A contiguous tensor that shares its memory with no other, as results of an operator must."""
    whole = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
    return gradient if whole else gradient.clone(memory_format=torch.contiguous_format)


def _result_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type of a loss of these tensors, of which the first two are the views."""
    return functools.reduce(torch.promote_types, (value.dtype for value in tensors[:2]), torch.float32)


@_loss.register_fake
def _(tensors: list[Tensor], name: str, wanted: list[bool]) -> list[Tensor]:
    number = _VALUES.get(name.split(":")[0], 1)
    leaves = [value for value, needed in zip(tensors, wanted, strict=True) if needed]
    results = [tensors[0].new_empty((), dtype=_result_type(tensors)) for _ in range(number)]
    return [*results, *(leaf.new_empty(leaf.shape) for _ in range(number) for leaf in leaves)]


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, name, ctx.wanted = inputs
    ctx.number = _VALUES.get(name.split(":")[0], 1)
    ctx.save_for_backward(*output[ctx.number :])


def _scale_gradients(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None, None]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a loss within torch.compile is differentiable once, but create_graph=True asks for a gradient that is "
            "differentiable too: take kernel='reference', or call the loss outside of the compiled function"
        )
    number, saved = ctx.number, ctx.saved_tensors
    leaves = len(saved) // number
    sums = []
    for i in range(leaves):
        total = grads[0] * saved[i]
        for k in range(1, number):
            total = total + grads[k] * saved[k * leaves + i]
        sums.append(total)
    found = iter(sums)
    return [next(found) if needed else None for needed in ctx.wanted], None, None


_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _default_dispatch() -> tuple[Any, Any]:
    """Which of the dispatcher's keys a new thread includes and excludes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            lambda: (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        ).result()


_DISPATCH = _default_dispatch()


@contextlib.contextmanager
def _autograd(on: bool) -> Iterator[None]:
    """Autograd (if on) and torch.func within an operator, from which torch's dispatcher excludes them."""
    with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.set_grad_enabled(on):
        yield
