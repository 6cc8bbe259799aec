"""How the lean forward reads a family's decoder layers: what it can see in the modules, and tries on small inputs.

No family is known here by its name. A module is read if all its parts are known ones: root mean square norms at known
places, linear layers, one gated feed-forward part, attention with rotary angles. What a part computes is found by
running it, what differs between layers by watching one pass. `backends.hf.probe` then compares whole passes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from draftproof.backends.cache.windows import watching
from draftproof.backends.hf.truncate import shallow
from draftproof.backends.lean.rotary import Rotary, order_of
from draftproof.backends.model_info import input_device, relative_error

# angles that do not depend on the sequence's length
ROPES = ("default", "linear", "llama3", "yarn", "proportional")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_BEFORE, _BETWEEN = "input_layernorm", "post_attention_layernorm"
_NORMS: tuple[tuple[str | None, ...], ...] = (  # before attention, after it, before the feed-forward part, after it
    (_BEFORE, None, _BETWEEN, None),
    (_BEFORE, _BETWEEN, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, _BETWEEN, None, "post_feedforward_layernorm"),
    (_BEFORE, "post_self_attn_layernorm", _BETWEEN, "post_mlp_layernorm"),
    (_BEFORE, "post_norm1", _BETWEEN, "post_norm2"),
)
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_CALLED = {"apply_rotary_pos_emb", "eager_attention_forward"}  # functions of its file that an attention may call
_OTHER = ("s_aux", "position_bias", "cache", "head_mask")  # arguments of attention that change what it computes
_NOTHING = (nn.Dropout, nn.Identity)  # modules that do nothing when a model is not trained


class UnreadError(Exception):
    """Why a model has no lean forward, or native code cannot read a part of it.

    Whatever reads models or files raises it at what is not known, so docstrings only mention it if that says more.
    """


@dataclass(frozen=True)
class Experts:
    """How the experts of a layer divide the work."""

    count: int  # of those that a router chooses from
    chosen: int  # of a token
    whole: bool = True  # whether the shares of a token's experts add up to 1
    factor: float = 1.0  # of the shares
    sigmoid: bool = False  # whether a score is the sigmoid of a logit; else softmax makes them of all logits
    least: float = 0.0  # added to the sum of a token's scores where its shares add up to 1
    shared: bool = False  # whether there is one more, for all tokens
    weighed: bool = False  # whether that one has a share, too


@dataclass(frozen=True)
class Traits:
    """What differs between the families that the lean forward reads; by default those of Llama."""

    # names of a layer's norms before attention, after it, before the feed-forward part and after it
    norms: tuple[str | None, ...] = _NORMS[0]
    offset: float = 0.0  # added to the weights of every norm
    # qkv, gate_up: names of the linear layers that are one product here
    qkv: tuple[str, ...] = _QKV[0]
    gate_up: tuple[str, ...] = _GATE_UP[0]
    turned: tuple[str, ...] = ()  # names of the norms of queries and keys, if there are
    whole: bool = False  # whether these are over all heads together
    activation: str = "silu"  # of the gates, a name of ACTIVATIONS, or "clamped" (`native.operations`)
    experts: Experts | None = None  # of the feed-forward part, where it is a mixture of them
    sinks: bool = False  # whether attention has a score without a value for each head
    embedding: float = 1.0  # factor of the embedding module
    entering: float = 1.0  # factor of what it gives to the layers
    residual: float = 1.0  # factor of what a part adds to the hidden states
    divisor: float = 1.0  # of the logits
    # logit_cap, cap: soft limit of the logits, and of attention scores (cap tanh(x / cap)); 0 for none
    logit_cap: float = 0.0
    cap: float = 0.0
    # of each head's numbers in queries and keys (`rotary`); empty where it is the family's own
    order: tuple[int, ...] = ()
    # frequencies and factor of each kind of rotary embedding; () until the model was watched
    angles: tuple[tuple[tuple[float, ...], float], ...] = ()
    angles_of: tuple[int, ...] = ()  # the kind of each layer, as an index of `angles`
    # of a text that is longer than so many tokens; () where they are the same (`hf.longrope`)
    long_angles: tuple[tuple[tuple[float, ...], float], ...] = ()
    length: int = 0

    @property
    def linear(self) -> dict[str, tuple[str, ...]]:
        """Names of the linear layers of each part of a layer."""
        made = {"self_attn": (*self.qkv, "o_proj")}
        if self.experts is not None:
            made["mlp"] = ("gate", "shared_expert_gate") if self.experts.weighed else ("gate",)
        return made | dict.fromkeys(self.gated, (*self.gate_up, "down_proj"))

    @property
    def gated(self) -> tuple[str, ...]:
        """Names of the feed-forward parts of a layer."""
        if self.experts is None:
            return ("mlp",)
        return ("mlp.experts", "mlp.shared_expert") if self.experts.shared else ("mlp.experts",)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Traits:
        """From its fields as JSON has them."""
        return cls(**{name: _tuples(value) for name, value in row.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


LLAMA = Traits()


def is_stock(kind: type) -> bool:
    """Whether a class is one of transformers' models or activations, or of torch's layers."""
    return kind.__module__.startswith(("transformers.models.", "transformers.activations", "torch.nn.modules."))


def is_hooked(module: Any) -> bool:
    """Whether something hangs on a module, but for what transformers itself collects hidden states with."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]  # noqa: SLF001 - have no public name
    kinds = {str(getattr(hook, "__module__", "")) for hook in hooks}
    return "forward" in vars(module) or bool(kinds - {"transformers.utils.output_capturing"})


def eps_of(norm: Any) -> float:
    """The number that a norm adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


# --- what modules show ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def seen_traits(model: Any) -> Traits:
    """What a model's modules show; angles are left out."""
    if not type(model).__name__.endswith("ForCausalLM") or not is_stock(type(model)):
        raise UnreadError(f"{type(model).__name__} is not one of transformers' causal models")
    inner = _children(model, "the model", "model", "lm_head")["model"]
    parts = _children(inner, "its model", "embed_tokens", "layers", "norm", "rotary_emb")
    _require(model.lm_head, "lm_head", nn.Linear)
    layers = list(parts["layers"].children()) if isinstance(parts["layers"], nn.ModuleList) else []
    if not layers or len(layers) != model.config.num_hidden_layers:
        raise UnreadError("its config names another number of layers than it has")
    _refuse_shared(model)
    signature = _signature(layers[0])
    if any(_signature(layer) != signature for layer in layers):
        raise UnreadError("its layers differ from one another")
    first = layers[0]
    norms = _layer_norms(first)
    attention, mlp = first.self_attn, first.mlp
    qkv, turned = _attention_parts(attention)
    gate_up, activation = _mlp_parts(mlp)
    whole = _check_heads(attention, qkv, turned)
    used = [inner.norm, *(getattr(first, name) for name in norms if name), *(getattr(attention, n) for n in turned)]
    offsets = {offset_of(norm) for norm in used}
    if len(offsets) > 1:
        raise UnreadError("its norms differ from one another")
    return Traits(
        norms=norms,
        offset=offsets.pop(),
        qkv=qkv,
        gate_up=gate_up,
        turned=turned,
        whole=whole,
        activation=activation,
        embedding=_embedding_factor(inner.embed_tokens),
        entering=float(getattr(inner, "embedding_multiplier", 1.0)),
        residual=float(getattr(first, "residual_multiplier", 1.0)),
        order=order_in_heads(attention, inner.rotary_emb),
    )


def _children(module: Any, what: str, *names: str) -> dict[str, Any]:
    """The children of a module that count, which must have these names."""
    found = {name: child for name, child in module.named_children() if not isinstance(child, _NOTHING)}
    if set(found) != set(names) or module._parameters:  # noqa: SLF001 - its own, without its children's
        strange = sorted({*found, *module._parameters} ^ set(names))  # noqa: SLF001
        raise UnreadError(f"{what} has other parts than are known here ({', '.join(strange)})")
    return found


def _require(module: Any, name: str, kind: type) -> None:
    if type(module) is not kind:
        raise UnreadError(f"its {name} is a {type(module).__name__}, not a {kind.__name__}")


def _refuse_shared(model: nn.Module) -> None:
    """Refuse a module that is used in several places: its weights would be moved twice."""
    places = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    activations = {id(module) for module in model.modules() if not list(module.parameters())}
    counted = [place for place in places if place not in activations]
    if len(set(counted)) < len(counted):
        raise UnreadError("a part of it is used in several layers")


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    kinds = tuple((name, type(module)) for name, module in layer.named_modules())
    shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    return kinds, shapes, getattr(layer, "residual_multiplier", None)


def _layer_norms(layer: Any) -> tuple[str | None, ...]:
    names = {name for name, child in layer.named_children() if not isinstance(child, _NOTHING)}
    for norms in _NORMS:
        if names == {"self_attn", "mlp", *filter(None, norms)}:
            _refuse_functions(layer, set())
            _children(layer, "its layer", *names)
            return norms
    raise UnreadError(f"its layers have parts that are not known together here ({', '.join(sorted(names))})")


def _attention_parts(attention: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = {name for name, child in attention.named_children() if not isinstance(child, _NOTHING)}
    qkv = next((each for each in _QKV if set(each) <= names), _QKV[0])
    turned = ("q_norm", "k_norm") if "q_norm" in names else ()
    _children(attention, "its attention", *qkv, "o_proj", *turned)
    for name in (*qkv, "o_proj"):
        _require(getattr(attention, name), f"self_attn.{name}", nn.Linear)
    _refuse_functions(attention, _CALLED)
    return qkv, turned


def _refuse_functions(module: nn.Module, known: set[str]) -> None:
    """Refuse a module whose code calls functions of transformers' model files that are not known here."""
    code = inspect.unwrap(type(module).forward)
    names = code.__globals__ if isinstance(code, FunctionType) else {}
    for name in code.__code__.co_names:
        called = names.get(name)
        if (
            isinstance(called, FunctionType)
            and called.__module__.startswith("transformers.models.")
            and name not in known
        ):
            raise UnreadError(f"its {type(module).__name__} calls {name}, which is not known here")


def _check_heads(attention: Any, qkv: tuple[str, ...], turned: tuple[str, ...]) -> bool:
    """Whether norms of queries and keys are over all heads; refuses sizes that do not fit."""
    config, dim = attention.config, getattr(attention, "head_dim", None)
    if not isinstance(dim, int) or not isinstance(getattr(attention, "scaling", None), float | int):
        raise UnreadError("its attention names no size of its heads, or no scale")
    heads, keys = int(config.num_attention_heads), int(config.num_key_value_heads)
    outs = sum(getattr(attention, name).out_features for name in qkv)
    if outs != (heads + 2 * keys) * dim or attention.o_proj.in_features != heads * dim:
        raise UnreadError("the sizes of its attention are not those of its heads")
    sizes = [tuple(getattr(attention, name).weight.shape) for name in turned]
    if sizes in ([], [(dim,), (dim,)]):
        return False
    if sizes != [(heads * dim,), (keys * dim,)]:
        raise UnreadError("the norms of its queries and keys have other sizes than a head or all heads")
    return True


def _mlp_parts(mlp: Any) -> tuple[tuple[str, ...], str]:
    """Names of the gates' linear layers, and their activation."""
    named = {name for name, child in mlp.named_children() if not isinstance(child, _NOTHING)}
    gate_up = next((each for each in _GATE_UP if set(each) <= named), _GATE_UP[0])
    act = next((name for name in ("act_fn", "activation_fn") if hasattr(mlp, name)), "act_fn")
    _children(mlp, "its feed-forward part", *gate_up, "down_proj", *({act} & named))
    for name in (*gate_up, "down_proj"):
        _require(getattr(mlp, name), f"mlp.{name}", nn.Linear)
    _refuse_functions(mlp, set())
    activation = activation_of(getattr(mlp, act, None))
    x = _noise((2, mlp.down_proj.out_features), mlp.down_proj.weight)
    gate, up = torch.cat([getattr(mlp, name)(x) for name in gate_up], -1).chunk(2, -1)
    if not _close(mlp(x), mlp.down_proj(ACTIVATIONS[activation](gate) * up)):
        raise UnreadError("its feed-forward part computes something else than gates of linear layers")
    return gate_up, activation


def activation_of(act: Any) -> str:
    """The name of an activation in ACTIVATIONS."""
    at = torch.linspace(-6, 6, 97, dtype=torch.float64)
    for name, function in ACTIVATIONS.items():
        if callable(act) and torch.allclose(act(at), function(at), rtol=1e-6, atol=1e-9):
            return name
    raise UnreadError(f"its activation is {type(act).__name__}, not one of {', '.join(ACTIVATIONS)}")


def offset_of(norm: Any) -> float:
    """What a norm adds to its weights; refuses one that is no root mean square norm."""
    if not is_stock(type(norm)) or set(norm._parameters) != {"weight"} or list(norm.children()):  # noqa: SLF001
        raise UnreadError(f"its {type(norm).__name__} is not a norm with weights only")
    if not (hasattr(norm, "variance_epsilon") or isinstance(getattr(norm, "eps", None), float)):
        raise UnreadError(f"its {type(norm).__name__} names no epsilon")
    # Where weights are small, 1 + w and w differ most; inputs are so small that epsilon counts.
    x = _noise((3, len(norm.weight)), norm.weight) * eps_of(norm) ** 0.5
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + eps_of(norm)).rsqrt()
    made, weight = norm(x), norm.weight.double()
    # Where weights are hundreds, as in Gemma 3, both are as close as bfloat16 tells; the nearer one is right, by what
    # differs as a share of each weight.
    offset = min((0.0, 1.0), key=lambda each: ((made.double() - unit * (weight + each)) / (weight.abs() + 1)).norm())
    if _close(made, unit * (weight + offset)):
        return offset
    raise UnreadError(f"its {type(norm).__name__} computes something else than a root mean square norm")


def _embedding_factor(embedding: Any) -> float:
    if not isinstance(embedding, nn.Embedding) or list(embedding.children()):
        raise UnreadError(f"its embedding is a {type(embedding).__name__}")
    scale = getattr(embedding, "embed_scale", 1.0)
    factor = float(scale.to(embedding.weight.dtype)) if isinstance(scale, Tensor) else float(scale)
    ids = torch.arange(min(64, len(embedding.weight)), device=embedding.weight.device)
    if not _close(embedding(ids), embedding.weight[ids] * factor):
        raise UnreadError(f"its {type(embedding).__name__} computes something else than rows by a factor")
    return factor


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal up to rounding: that of the first one's dtype, and of float32 inside of modules."""
    step = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
    return relative_error(found, expected) <= 8 * step


# --- rotary angles --------------------------------------------------------------------------------------------------


def kinds_of_rotary(rotary: Any) -> dict[str, str]:
    """The types of a rotary embedding by kind of layer; one without a name where all layers have it."""
    kind = getattr(rotary, "rope_type", None)
    return dict(kind) if isinstance(kind, dict) else {"": str(kind)}


def frequencies_of(rotary: Any, kind: str) -> tuple[Tensor, float]:
    """The frequencies of a rotary embedding for a kind of layers, and the factor of its angles."""
    before = f"{kind}_" if kind else ""
    found = getattr(rotary, f"{before}inv_freq", None), getattr(rotary, f"{before}attention_scaling", None)
    if not isinstance(found[0], Tensor) or found[1] is None:
        raise UnreadError("its rotary embedding keeps its frequencies elsewhere")
    return found[0].float(), float(found[1])


def order_in_heads(attention: Any, rotary: Any, only: str | None = None) -> tuple[int, ...]:
    """The order of a head's numbers, in the layers of one kind or in all."""
    dim, turn = attention.head_dim, _turning(attention)
    widths = set()
    for kind, name in kinds_of_rotary(rotary).items():
        if only not in (None, kind):
            continue
        if name not in ROPES:
            raise UnreadError(f"its rotary embedding is {name}, not one of {', '.join(ROPES)}")
        frequencies, scale = frequencies_of(rotary, kind)
        widths.add(2 * frequencies.numel())
        positions = torch.arange(3, device=frequencies.device).unsqueeze(0)
        like = frequencies.new_zeros(1)
        found = rotary(like, positions, *([kind] if kind else []))
        expected = Rotary(frequencies, scale)(like, position_ids=positions)
        if not all(a.shape == b.shape and _close(a, b) for a, b in zip(found, expected, strict=True)):
            raise UnreadError("its rotary embedding computes other angles than its frequencies say")
        if 2 * frequencies.numel() < dim and scale != 1.0:
            raise UnreadError("its rotary embedding turns and scales only a part of each head")
    if turn is None or len(widths) != 1:
        raise UnreadError("its queries and keys are turned in another way than by apply_rotary_pos_emb")
    try:
        order = order_of(turn, dim, widths.pop())
    except Exception as cause:  # whatever another function may raise when it is tried
        raise UnreadError(f"its rotary angles do not fit its heads ({cause})") from cause
    if order is None:
        raise UnreadError("its apply_rotary_pos_emb does not turn pairs of numbers by their angle")
    return () if order == tuple(range(dim)) else order


def _turning(attention: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function that turns queries and keys; where a family turns them one by one, one that calls it for both."""
    found: Callable[..., Any] | None = inspect.unwrap(type(attention).forward).__globals__.get("apply_rotary_pos_emb")
    if found is None or "q" in (taken := list(inspect.signature(found).parameters)) or taken[1:3] != ["cos", "sin"]:
        return found

    def both(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return found(queries, cos, sin), found(keys, cos, sin)

    return both


# --- what a pass shows ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def traits_of(model: Any) -> Traits:
    """All that the lean forward needs to know of a model besides its weights, some of it from a pass of two tokens."""
    seen = seen_traits(model)
    attention = model.model.layers[0].self_attn
    watched = _Watch(model, attention)
    rotary, dim = model.model.rotary_emb, attention.head_dim
    kinds = list(kinds_of_rotary(rotary))
    found = [padded_frequencies(*frequencies_of(rotary, kind), dim) for kind in kinds]
    layers = getattr(model.config, "layer_types", None) or [""] * len(watched.turned)
    angles_of = [kinds.index(kind) if kind in kinds else 0 for kind in layers]
    if not all(watched.turned):
        angles_of = [kind if turns else len(found) for kind, turns in zip(angles_of, watched.turned, strict=True)]
        found.append(((0.0,) * (dim // 2), 1.0))  # angles of 0: nothing is turned
    used = sorted(set(angles_of))
    return replace(
        seen,
        cap=watched.cap,
        divisor=watched.divisor,
        logit_cap=watched.logit_cap,
        angles=tuple(found[kind] for kind in used),
        angles_of=tuple(used.index(kind) for kind in angles_of),
    )


def padded_frequencies(frequencies: Tensor, scale: float, dim: int) -> tuple[tuple[float, ...], float]:
    """The same with zeros for the numbers of a head that are not turned."""
    return (*frequencies.tolist(), *[0.0] * (dim // 2 - frequencies.numel())), scale


class _Constant(nn.Module):
    """A layer that gives the same numbers for all inputs."""

    def __init__(self, made: Tensor) -> None:
        super().__init__()
        self.made = made

    def forward(self, _: Tensor) -> Tensor:
        return self.made


class _Watch:
    """What a model does in a pass over two tokens.

    Attributes:
        divisor, logit_cap: what the output layer's results go through.
    """

    def __init__(self, model: Any, attention: Any) -> None:
        module = sys.modules.get(inspect.unwrap(type(attention).forward).__module__)
        self._layer = -1
        self._calls = 0
        self._scale = float(attention.scaling)
        self._turned: set[int] = set()
        self._caps: set[float] = set()
        # What follows the output layer is found by giving it other numbers, large enough for a soft limit to show.
        shown = model.lm_head.weight.new_empty((1, 2, model.lm_head.out_features))
        shown.copy_(torch.linspace(-200, 200, shown.numel()).view(shown.shape))
        total = len(model.model.layers)
        functions = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
        if functions is None or not hasattr(module, "apply_rotary_pos_emb"):
            raise UnreadError("its attention is not transformers' usual one")
        calls = (module, "apply_rotary_pos_emb", self._turn), (functions, "get_interface", self._attention)
        with watching(calls), ExitStack() as stack:
            for layer in model.model.layers:
                stack.callback(layer.register_forward_pre_hook(self._enter).remove)
            twin = shallow(model)
            twin.lm_head = _Constant(shown)
            ids = torch.zeros((1, 2), dtype=torch.int64, device=input_device(model))
            logits = twin(input_ids=ids, use_cache=False).logits
        if self._layer != total - 1 or self._calls != total or len(self._caps) != 1:
            raise UnreadError("its layers do not attend once each, one after another, all in the same way")
        # whether each layer turns its queries and keys
        self.turned = [number in self._turned for number in range(total)]
        self.cap = self._caps.pop()  # soft limit of scores; 0 for none
        self.divisor, self.logit_cap = _output(shown, logits, model.config)

    def _enter(self, *_: Any) -> None:
        self._layer += 1

    def _turn(self, made: Any, *_: Any, **__: Any) -> Any:
        self._turned.add(self._layer)
        return made

    def _attention(self, right: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """The function that computes attention, watched."""

        def attend(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            self._caps.add(float(kwargs.get("softcap") or 0.0))
            if kwargs.get("scaling") != self._scale or any(kwargs.get(name) is not None for name in _OTHER):
                raise UnreadError(f"its attention is told more than is known here ({', '.join(kwargs)})")
            return right(*args, **kwargs)

        return attend


def _output(shown: Tensor, logits: Tensor, config: Any) -> tuple[float, float]:
    """The divisor and the soft limit by which an output layer's results become logits."""
    x = shown.double()
    for value in _said_of_logits(config):
        if _close(logits, x / value):
            return value, 0.0
        if _close(logits, value * (x / value).tanh()):
            return 1.0, value
    raise UnreadError("its logits are another function of its output layer's results than a factor or a soft limit")


def _said_of_logits(config: Any) -> Iterator[float]:
    """1, and what a config says of logits: families use the same name for a factor and for a divisor."""
    yield 1.0
    for name, value in vars(config).items():
        if "logit" in name and isinstance(value, int | float) and value:
            yield float(value)
            yield 1.0 / value
