"""Models with recurrent layers, and Gemma 4, in GGUF files, in the file's own numbers on transformers' modules.

A model is built without memory from the metadata. Then its matrices become products of the file's blocks, and its small
tensors floats (`gguf_families` says which).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.backends.heads.published.mtp_qwen import TYPES as PREDICTING
from draftproof.backends.heads.published.mtp_qwen import empty_layer
from draftproof.backends.hf.backend import HFBackend, StoredPrediction
from draftproof.backends.lean.mixture import Mixture, StoredMixture, behind_norm
from draftproof.backends.lean.module_backend import packing, why_unread
from draftproof.backends.lean.traits import LLAMA, Experts, UnreadError
from draftproof.backends.loading.gguf_families import (
    FAMILIES,
    FIRST_PREDICTING,
    PREDICTION,
    ModuleFamily,
    Order,
    TensorSource,
    common_fields,
)
from draftproof.backends.loading.gguf_tensors import FileTensors, experts_of
from draftproof.backends.loading.options import ACTIVATIONS
from draftproof.backends.products.packed_linear import StoredProduct, dense, plain_of, release_pages
from draftproof.backends.products.stored_modules import StoredEmbedding, StoredLinear
from draftproof.errors import UserError, reason
from draftproof.models.gguf_file import GGUFFile, generation_config
from draftproof.native.ggml import StoredMatrix, why_not_joined

_log = logging.getLogger(__name__)
_SAME_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Linear layers of one module that are called with the same inputs, in this order."""


def read_modules(
    file: GGUFFile,
    *,
    name: str,
    dtype: torch.dtype,
    activations: str = ACTIVATIONS[0],
    check: bool = True,
    tick: Callable[[int], object] | None = None,
    backend: str = "auto",
) -> HFBackend:
    """The model in a file, with its own numbers; arguments as of `gguf_model.read_model`.

    `backend` is one of the architecture's, or "auto", which takes the first one that reads the model.
    """
    tensors = FileTensors(file, dtype, dense=activations == "float")
    if check:
        tensors.check()
    tensors.tick = tick
    family = FAMILIES[file.get("general.architecture")]
    loader = _ModuleLoader(tensors, family, dtype)
    model = loader.model
    for key, value in generation_config(file).items():
        setattr(model.generation_config, key, value)
    made = _backend(model, family, backend, few=tensors.bits is not None, name=name, check=check)
    made.facts = replace(made.facts, bits=tensors.bits)
    if family.kind in PREDICTING:
        made.prediction = _prediction(loader, file, name)
    return made


def _backend(model: Any, family: ModuleFamily, asked: str, *, few: bool, name: str, check: bool) -> HFBackend:
    """The backend of a model that has the weights of a file, whether these have few bits or are floats."""
    kind = family.backend
    if asked in ("auto", kind.kind) and kind is not family.modules[0]:
        why, level = why_unread(model), logging.INFO
        if why is None:
            try:
                return kind(model, name=name, check=check, **packing(kind))
            except UserError as cause:
                why, level = str(cause), logging.WARNING  # its layers are known, but not what it makes of them
        if asked != "auto":
            raise UnreadError(f"it has no lean forward: {why}")
        _log.log(level, "%s is read by transformers' own modules, which are slower: %s", name, why)
    family.finish(model.model)
    kind = family.modules[few]
    return kind(model, name=name, check=check, **packing(kind))


def predicts(file: GGUFFile) -> bool:
    """Whether a file has a prediction layer of a kind that is read here, whatever its metadata say."""
    family = FAMILIES.get(file.get("general.architecture"))
    known = family is not None and family.kind in PREDICTING
    return known and any(f"{at}{FIRST_PREDICTING}.weight" in file.tensors for at in file.prediction_layers)


def _prediction(loader: _ModuleLoader, file: GGUFFile, name: str) -> StoredPrediction:
    """The prediction layer of a file, which is read when it is asked for."""

    def read(model: Any) -> Any:
        try:
            return loader.prediction_layer(model)
        except UnreadError as cause:
            raise UserError(
                f"drafter mtp: the prediction layer of {name} cannot be read: {cause}; many files are written without "
                "it, or hold it alone: take one that has it, or another drafter"
            ) from cause

    return StoredPrediction(predicts(file), read)


class _ModuleLoader:
    """A model of transformers with the tensors of a file."""

    def __init__(self, tensors: FileTensors, family: ModuleFamily, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM
        file = tensors.file
        self._tensors = tensors
        self._family = family
        self._dtype = dtype
        self._unread = set(file.tensors)
        fields = {**common_fields(file), **family.fields(file)}
        try:
            config: Any = AutoConfig.for_model(family.kind, **fields)
            with torch.device("meta"):
                model = kind.from_config(config, dtype=dtype, attn_implementation=family.attention())
        except Exception as cause:  # whatever transformers raises for numbers that do not belong together
            raise UnreadError(f"transformers makes no model of its metadata ({reason(cause)})") from cause
        self.model = model.eval()
        self._sources = family.sources(config)
        inner, (last, source) = model.model, family.norm
        if inner.rotary_emb is not None:
            inner.rotary_emb = type(inner.rotary_emb)(config)
        inner.embed_tokens = self._embedding(inner.embed_tokens, "token_embd.weight")
        self._beside(inner, family.beside)
        self._output(tied=config.tie_word_embeddings)
        norm = model.get_submodule(last)
        norm.weight = self._parameter(source, "", norm.weight.shape)
        self._experts = experts_of(file, whole=True) if file.of_architecture("expert_count") else None
        for number, layer in enumerate(inner.layers):
            self._mix(layer, f"blk.{number}.")
            self._layer(layer, f"blk.{number}.")
        self._refuse_left(each for each in self._unread if not each.startswith(file.prediction_layers))

    def prediction_layer(self, model: Any) -> Any:
        """transformers' class of the file's prediction layer, over the model that was made here or a form of it.

        Raises:
            UnreadError: there is none, there are several, or tensors that do not fit.
        """
        file, places = self._tensors.file, self._tensors.file.prediction_layers
        if not predicts(file) or len(places) > 1:
            there = (
                f"{len(places)} layers (nextn_predict_layers)"
                if predicts(file)
                else f"no tensor {FIRST_PREDICTING}.weight"
            )
            raise UnreadError(f"expected one layer behind the others, and the file has {there}")
        (at,), made = places, empty_layer(model)
        (layer,) = made.layers
        inner = {f"mtp_block.{name}": source for name, source in self._family.sources(model.config).items()}
        self._sources = {**PREDICTION, **inner}
        self._mix(layer.mtp_block, at)
        self._layer(layer, at)
        self._refuse_left(each for each in self._unread if each.startswith(at))
        return made.requires_grad_(requires_grad=False).train(mode=False)

    def _refuse_left(self, names: Iterable[str]) -> None:
        left = sorted(each for each in names if not each.endswith(self._family.spare))
        if left:
            raise UnreadError(f"its tensors have too much: {', '.join(left[:3])}")

    def _mix(self, layer: nn.Module, at: str) -> None:
        """Fill the mixture of experts of a layer, if there is one."""
        if self._experts is not None:
            setattr(layer, self._family.mixture, self._mixture(at, self._experts, self._family.activation))
            self._family.route(layer)

    def _embedding(self, module: Any, place: str) -> nn.Module:
        table, factor = self._matrix(place), float(getattr(module, "scalar_embed_scale", 1.0))
        if isinstance(table, StoredMatrix):
            return StoredEmbedding(table, factor)
        plain: nn.Embedding = module
        plain.weight = nn.Parameter(table, requires_grad=False)
        if factor != 1.0:
            module.embed_scale = torch.tensor(factor)
        return plain

    def _beside(self, inner: nn.Module, places: Mapping[str, str]) -> None:
        """Fill the modules beside the layers."""
        for name, module in list(inner.named_children()):
            if name not in places:
                continue
            source = TensorSource((f"{places[name]}.weight",))
            if isinstance(module, nn.Embedding):
                setattr(inner, name, self._embedding(module, *source.places))
            elif isinstance(module, nn.Linear):
                self._linear(inner, {name: self._loaded(name, module, source, "")})
            else:
                module.weight = self._parameter(source, "", module.get_parameter("weight").shape)

    def _output(self, *, tied: bool) -> None:
        embedding = self.model.model.embed_tokens
        if tied and isinstance(embedding, nn.Embedding):
            self.model.lm_head.weight = embedding.weight
            return
        source = TensorSource((f"{'token_embd' if tied else 'output'}.weight",))
        self._linear(self.model, {"lm_head": self._loaded("lm_head", self.model.lm_head, source, "")})

    def _layer(self, layer: nn.Module, at: str) -> None:
        """Fill the modules of a layer, whose tensors have names that begin with `at` in the file."""
        for path, module in list(layer.named_modules()):
            stem = f"{path}." if path else ""
            linear = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
            for names in _groups(linear):
                found = {name: self._loaded(stem + name, linear[name], None, at) for name in names}
                self._linear(module, found)
            if isinstance(module, nn.Linear | StoredMixture):
                continue
            for name, each in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, self._parameter(self._source(stem + name), at, each.shape))
            for name, each in list(module.named_buffers(recurse=False)):
                if stem + name in self._sources:
                    made: Tensor = self._parameter(self._source(stem + name), at, each.shape)
                elif name == "mup_vector":  # factors, which a file has in its weights
                    made = torch.ones(each.shape, dtype=self._dtype)
                else:
                    raise UnreadError(f"its layers have {stem}{name}")
                module.register_buffer(name, made.detach(), persistent=False)

    def _source(self, name: str) -> TensorSource:
        """What a tensor of a layer is in the file."""
        found = self._sources.get(name)
        if found is None:
            stem, _, suffix = name.rpartition(".")
            if stem not in self._sources:
                raise UnreadError(f"its layers have {name}")
            found = f"{self._sources[stem]}.{suffix}"
        return TensorSource((found,)) if isinstance(found, str) else found

    def _loaded(self, name: str, layer: nn.Linear, source: TensorSource | None, at: str) -> _Loaded:
        """The weights of a linear layer; by its name in the layer where no source is given."""
        source = source or self._source(f"{name}.weight")
        alone, rows = len(source.places) == 1, _unless_in_order(source.rows)
        parts = [self._matrix(at + place, rows if alone else None) for place in source.places]
        shape = [sum(len(each) for each in parts), parts[0].shape[-1]]
        if shape != list(layer.weight.shape):
            raise UnreadError(f"its {at}{source.places[0]} is {shape}, not {list(layer.weight.shape)}")
        bias = None if layer.bias is None else self._parameter(self._source(f"{name}.bias"), at, layer.bias.shape)
        return _Loaded(parts, None if alone else rows, _unless_in_order(source.inputs), bias)

    def _linear(self, module: nn.Module, found: Mapping[str, _Loaded]) -> None:
        """Fill linear layers that read the same inputs; those of few bits are one product, as far as they join."""
        few = [name for name, each in found.items() if each.matrices]
        joined = next((count for count in range(len(few), 1, -1) if _join(found[name] for name in few[:count])), 0)
        for names in filter(None, (few[:joined], *([name] for name in few[joined:]))):
            matrices = [matrix for name in names for matrix in found[name].matrices]
            product, start = StoredProduct(matrices, found[names[0]].bias), 0
            for name in names:
                stop = start + sum(len(matrix) for matrix in found[name].matrices)
                setattr(module, name, StoredLinear(product, start, stop, found[name].rows, found[name].inputs))
                start = stop
        for name, each in found.items():
            if not each.matrices:
                layer: Any = module.get_submodule(name)
                layer.weight = nn.Parameter(each.dense(), requires_grad=False)
                layer.bias = each.bias

    def _mixture(self, at: str, experts: Experts, activation: str) -> StoredMixture:
        def linear(name: str) -> SimpleNamespace:
            return SimpleNamespace(weight=self._matrix(f"{at}ffn_{name}.weight"), bias=None)

        def gated(kind: str) -> SimpleNamespace:
            return SimpleNamespace(**{f"{name}_proj": linear(f"{name}_{kind}") for name in (*gate_up, "down")})

        gate_up = ("gate_up",) if f"{at}ffn_gate_up_exps.weight" in self._tensors.file.tensors else ("gate", "up")
        mlp = SimpleNamespace(gate=linear("gate_inp"), experts=gated("exps"))
        if experts.weighed:
            mlp.shared_expert = gated("shexp")
            mlp.shared_expert_gate = linear("gate_inp_shexp")
        traits = replace(
            LLAMA,
            experts=replace(experts, shared=experts.weighed),
            activation=activation,
            gate_up=tuple(f"{name}_proj" for name in gate_up),
        )
        scales = None
        if self._scaled(at, mlp.gate):
            self._take(f"{at}ffn_down_exps.scale")
            scales = self._tensors.floats(f"{at}ffn_down_exps.scale")
        return StoredMixture(Mixture(mlp, traits, torch.empty(0, dtype=self._dtype), scales))

    def _scaled(self, at: str, router: SimpleNamespace) -> bool:
        """Whether a router has scales of its inputs, which are those of experts without the scales of these."""
        scale, norm = f"{at}ffn_gate_inp.scale", f"{at}pre_ffw_norm_2.weight"
        if scale not in self._tensors.file.tensors:
            return False
        self._take(scale)
        own, of_experts = self._tensors.floats(scale), self._tensors.floats(norm)
        router.weight = behind_norm(plain_of(router.weight), own * len(own) ** -0.5, of_experts, self._dtype)
        return True

    def _matrix(self, place: str, rows: Order | None = None) -> StoredMatrix | Tensor:
        """A matrix; where its numbers are floats of the model's dtype, a copy that the model's own modules read."""
        self._take(place)
        made = self._tensors.matrix(place, rows)
        if not isinstance(made, StoredMatrix) or not made.is_plain:
            return made
        copied = made.plain().clone().view(self._tensors.file.tensors[place].shape)
        release_pages([made])
        return copied

    def _parameter(self, source: TensorSource, at: str, shape: torch.Size) -> nn.Parameter:
        """A small tensor; in the file it may have other dimensions."""
        (place,) = source.places
        self._take(at + place)
        made = self._tensors.floats(at + place)
        if made.numel() != math.prod(shape):
            raise UnreadError(f"its {at}{place} is {list(made.shape)}, not {list(shape)}")
        made = made if source.rows is None else made[source.rows]
        made = made if source.change is None else source.change(made)
        return nn.Parameter(made.reshape(shape).to(self._dtype), requires_grad=False)

    def _take(self, place: str) -> None:
        if place not in self._tensors.file.tensors:
            raise UnreadError(f"its tensors lack {place}")
        self._unread.discard(place)


@dataclass(frozen=True)
class _Loaded:
    """The weights of a linear layer."""

    parts: Sequence[StoredMatrix | Tensor]  # matrices, whose outputs follow one another
    rows: Order | None  # which of their outputs each of the layer's is; None where they have the same order
    inputs: Order | None  # which of the layer's inputs each of theirs is; None where they have the same order
    bias: nn.Parameter | None  # if there is one

    @property
    def matrices(self) -> list[StoredMatrix]:
        """The parts, where they can be a product of few bits."""
        found = [each for each in self.parts if isinstance(each, StoredMatrix)]
        return found if len(found) == len(self.parts) and why_not_joined(found) is None else []

    def dense(self) -> Float[Tensor, "out in"]:
        """What the numbers stand for."""
        made = torch.cat([each if isinstance(each, Tensor) else dense(each) for each in self.parts])
        made = made if self.rows is None else made[self.rows]
        return made if self.inputs is None else made[:, self.inputs.argsort()]


def _join(layers: Iterable[_Loaded]) -> bool:
    """Whether linear layers can be one product."""
    every = list(layers)
    matrices = [matrix for each in every for matrix in each.matrices]
    return all(each.bias is None for each in every) and why_not_joined(matrices) is None


def _groups(names: Collection[str]) -> Iterator[Sequence[str]]:
    """Names of linear layers of a module by what they read."""
    groups = [[name for name in group if name in names] for group in _SAME_INPUTS]
    grouped = {name for group in groups for name in group}
    yield from filter(None, groups)
    yield from ([name] for name in names if name not in grouped)


def _unless_in_order(order: Order | None) -> Order | None:
    return None if order is None or torch.equal(order, torch.arange(len(order))) else order
