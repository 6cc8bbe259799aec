"""A pretended CUDA device: tensors that lie on the CPU and say "cuda:0", and the rules that a device has.

An operation on tensors of both places is refused, as on a device. Copies between the places and reads of a number on
the host are counted, since the host waits for the device there, and so are the operations that a device would launch.
Arithmetic is the CPU's, so nothing here says how fast or how exact a device is.
"""

import contextlib
import functools
import sys
from collections import Counter

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_READS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "numpy", "__int__", "__float__", "__bool__", "__index__", "__complex__")
}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_aten = torch.ops.aten
# Between the places these are legal; indices on the host are copied to the device.
_ACROSS = {_aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
# Their results have a size that only the device knows.
_SIZED_BY_VALUES = {_aten.nonzero.default, _aten.masked_select.default, _aten.equal.default, _aten.is_nonzero.default}
_WHOLE = {_aten.scaled_dot_product_attention.default, _aten.linear.default, _aten.rms_norm.default}
_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh"}


class OnDevice(torch.Tensor):
    """A tensor that says it lies on the device; `held` are its numbers."""

    @staticmethod
    def __new__(cls, held):
        held = _held(held)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CPU,  # for torch's own code in C++, which would look for a driver
            requires_grad=False,
        )

    def __init__(self, held):
        self.held = _held(held)

    @property
    def device(self):
        return CUDA

    @property
    def is_cuda(self):
        return True

    @property
    def is_cpu(self):
        return False

    def __repr__(self):
        return f"OnDevice({self.held})"

    def __deepcopy__(self, memo):
        return OnDevice(self.held.clone())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, dict(kwargs or {}))


class Counts:
    """What was counted since the start, or since `clear`.

    Attributes:
        launches: operations that a device would launch, by name.
        waits: copies between the places and reads on the host that wait for the device, by what asked for them.
        sends: copies to the device that wait for nothing.
    """

    def __init__(self):
        self.launches, self.waits, self.sends = Counter(), Counter(), 0

    def clear(self):
        self.launches.clear()
        self.waits.clear()
        self.sends = 0


COUNTS = Counts()


@functools.cache
def _decomposes(func):
    """Whether an operation is made of others, which are then run one by one."""
    return (
        func not in _WHOLE
        and func._can_decompose()
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


@functools.cache
def _launched(func):
    """The name of what a device launches; None for views and for memory alone."""
    name = func.overloadpacket.__name__
    return None if func.is_view or name in _NO_LAUNCH else name


@functools.cache
def _written(func):
    """The places of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [place for place, spec in arguments if spec.alias_info is not None and spec.alias_info.is_write]


def _run(func, args, kwargs):  # noqa: C901 - one rule after the other
    """One operation with some argument on the device."""
    if _decomposes(func):
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    foreign = [leaf for leaf in _tensors((args, kwargs)) if not isinstance(leaf, OnDevice) and leaf.dim()]
    if foreign:
        if func not in _ACROSS:
            raise RuntimeError(f"{func} got tensors of cuda:0 and of the cpu, of shape {tuple(foreign[0].shape)}")
        COUNTS.waits[str(func)] += 1
    places = _tensors(args[1]) if func in _ACROSS and func is not _aten.copy_.default else []
    if func in _SIZED_BY_VALUES or any(each.dtype == torch.bool for each in places):
        COUNTS.waits[str(func)] += 1
    asked = kwargs.get("device")
    to_host = asked is not None and torch.device(asked).type == "cpu"
    if asked is not None:
        kwargs["device"] = CPU
    if (name := _launched(func)) is not None:
        COUNTS.launches[name] += 1
    if to_host:
        COUNTS.waits[str(func)] += 1
    found = func(*_mapped(_held, args), **_mapped(_held, kwargs))
    if to_host or isinstance(found, bool):
        return found
    if func is _aten.copy_.default and not isinstance(args[0], OnDevice):
        return args[0]  # from the device to the host
    if isinstance(found, torch.Tensor) and (written := [args[place] for place in _written(func) if place < len(args)]):
        return written[0]
    return _mapped(_wrapped, found)


def _tensors(x):
    """The tensors in arguments."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, tuple | list):
        return []
    return [leaf for each in x for leaf in _tensors(each)]


def _mapped(function, x):
    """What a function makes of arguments or results, each by itself: torch's own tree_map took a third of the time."""
    if isinstance(x, tuple | list):
        return (tuple if isinstance(x, tuple) else list)(_mapped(function, each) for each in x)
    return {name: _mapped(function, each) for name, each in x.items()} if isinstance(x, dict) else function(x)


def _held(x):
    return x.held if isinstance(x, OnDevice) else x


def _wrapped(x):
    return OnDevice(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) else x


def _place(x):
    """The type of device that an argument names; None where it names none."""
    if isinstance(x, torch.device):
        return x.type
    return torch.device(x).type if isinstance(x, str) and x.partition(":")[0] in ("cpu", "cuda") else None


class _Pretended(TorchFunctionMode):
    """Takes over what names a device, before torch looks for one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: C901, PLR0911 - one case after the other
        kwargs = dict(kwargs or {})
        if func in _READS and isinstance(args[0], OnDevice):
            COUNTS.waits[func.__name__] += 1
            return func(args[0].held, *args[1:], **kwargs)
        if func is torch.Tensor.data_ptr and isinstance(args[0], OnDevice):
            return args[0].held.data_ptr()
        if func is torch.Tensor.cpu and isinstance(args[0], OnDevice):
            COUNTS.waits["cpu"] += 1
            return args[0].held.clone()
        if func in _FROM_HOST and kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            made.is_pinned_here = True
            return made
        if func is torch.Tensor.to:
            return _moved(args, kwargs)
        if func in _INDEXED and isinstance(args[0], OnDevice):
            args = (args[0], _indices(args[1]), *args[2:])
        where = _place(kwargs["device"]) if kwargs.get("device") is not None else None
        if where != "cuda":
            return func(*args, **kwargs)
        if func in _FROM_HOST and isinstance(args[0], OnDevice):
            kwargs.pop("device")
            return torch.Tensor.to(args[0], **kwargs) if kwargs.get("dtype") else args[0]
        if func in _FROM_HOST:
            COUNTS.waits[func.__name__] += 1
        elif func is not torch.empty:
            COUNTS.launches[func.__name__] += 1
        made = func(*_mapped(_held, args), **{**_mapped(_held, kwargs), "device": CPU})
        return _mapped(_wrapped, made)


def _indices(index):
    """Lists among indices go to the device."""
    if isinstance(index, list):
        COUNTS.waits["index by a list"] += 1
        return OnDevice(torch.tensor(index))
    return tuple(_indices(each) for each in index) if isinstance(index, tuple) else index


def _moved(args, kwargs):
    """Tensor.to."""
    tensor, *rest = args
    places = [_place(x) for x in (*rest, kwargs.get("device"))]
    like = next((x for x in rest if isinstance(x, torch.Tensor)), None)
    where = next((place for place in places if place), None) or (like.device.type if like is not None else None)
    dtype = next((x for x in (*rest, kwargs.get("dtype")) if isinstance(x, torch.dtype)), None)
    dtype = like.dtype if like is not None and dtype is None else dtype
    mine = tensor.held if isinstance(tensor, OnDevice) else tensor
    stays = where is None or where == tensor.device.type
    if stays and isinstance(tensor, OnDevice):
        return tensor if dtype in (None, mine.dtype) else tensor.type(dtype)
    if stays:
        return tensor if dtype in (None, mine.dtype) else tensor.type(dtype)
    if where == "cuda" and kwargs.get("non_blocking") and getattr(tensor, "is_pinned_here", False):
        COUNTS.sends += 1
    else:
        COUNTS.waits["to"] += 1
    made = mine.clone() if dtype in (None, mine.dtype) else mine.type(dtype)
    return OnDevice(made) if where == "cuda" else made


def place(model):
    """Put a model's weights and buffers on the device; tied weights stay tied."""
    known = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in known:
                    known[id(weight)] = (weight, nn.Parameter(OnDevice(weight.detach()), requires_grad=False))
                module._parameters[name] = known[id(weight)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model


@contextlib.contextmanager
def pretended(monkeypatch):
    """Within this, "cuda" is the pretended device; without Triton's kernels, which need a real one."""
    plain = nn.Module.to
    monkeypatch.setenv("DRAFTPROOF_TRITON", "0")

    def to(self, *args, **kwargs):
        if any(_place(x) == "cuda" for x in (*args, kwargs.get("device"))):
            return place(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(transformers.PreTrainedModel, "to", to)  # it has one of its own
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    COUNTS.clear()
    with _Pretended():
        yield COUNTS
    if (weights := sys.modules.get("draftproof.triton.weights")) is not None:
        weights.why_not.cache_clear()  # a kernel does not run on the pretended device, and may run on a real one
