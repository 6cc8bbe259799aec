"""Prediction layers that a checkpoint has of its own (MTP), as transformers reads them for its assisted generation.

Those of a GGUF file are filled in by what read the model (`HFBackend.prediction`).

A layer joins the embedding of a token with the state before it, and runs one decoder layer of the model's own class on
that (DeepSeek-V3, arXiv 2412.19437). Embedding and output layer are the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import CacheView, SlotCache
from draftproof.backends.heads.base import HeadBackend, HeadNet, States
from draftproof.backends.heads.published import mtp_qwen
from draftproof.backends.heads.published.steps import StepsBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import natively
from draftproof.backends.hf.truncate import shallow
from draftproof.backends.model_info import cache_name, quantization_method, relative_error
from draftproof.errors import UserError, reason

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_LAYERS = "num_mtp_layers"  # the field of transformers' configs


class MtpNet(HeadNet):
    """One prediction layer."""

    def __init__(self, mtp: Any, number: int, target: SlotBackend) -> None:
        self._mtp = mtp
        self._number = number
        self.width = target.capabilities.hidden
        self._dtype = target.dtype
        self.embed = mtp.embed_tokens
        self.logits = mtp._project_to_logits  # noqa: SLF001 - has no public name
        kinds = getattr(mtp.config, "layer_types", None)
        self._cache_name = cache_name(mtp.layers[number]) or ""
        self._kind = None if kinds is None else kinds[number]
        self._window = mtp.config.sliding_window if self._kind == "sliding_attention" else None

    @override
    def __call__(self, states: States, embedded: States, layout: Layout, cache: SlotCache) -> States:
        mtp, positions = self._mtp, layout.positions + self._number + 1
        turned = None
        if mtp.rotary_emb is not None:
            which = {"layer_type": self._kind} if mtp.has_per_layer_rope else {}
            turned = mtp.rotary_emb(embedded, position_ids=positions, **which)
        made: Tensor = mtp.layers[self._number](
            embedded,
            states,
            position_embeddings=turned,
            attention_mask=layout.mask(self._window, self._dtype),
            position_ids=positions,
            **{self._cache_name: CacheView(cache, layout.plan)},
        )
        return mtp.shared_post_norm(made) if mtp.use_shared_post_norm else made


def mtp_backend(target: SlotBackend) -> HeadBackend | StepsBackend:
    """The prediction layers of a model as its draft model.

    One layer drafts any number of tokens, with its own states in place of the model's from the second on. Several
    layers draft one token each.

    Raises:
        UserError: the model has no such layers, they cannot be read here, or the logits are not transformers' own.
    """
    name = f"prediction layers of {target.name}"
    layers = checked_layers(_load(target), target, name)
    if len(layers) > 1:
        return StepsBackend(target, layers, name)
    layers[0].name = name
    return layers[0]


def checked_layers(mtp: Any, target: SlotBackend, name: str) -> list[HeadBackend]:
    """The layers of a model of transformers as heads over a target; the first is compared with its own pass."""
    kinds = set(getattr(mtp.config, "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"the {name} are of kinds {', '.join(sorted(kinds))}: expected full_attention and sliding_attention"
        )
    native = mtp_qwen.native_net(mtp, target)
    read = mtp if native is not None else natively(mtp)
    nets: list[HeadNet] = [MtpNet(read, number, target) for number in range(len(mtp.layers))]
    nets = nets if native is None else [native]
    layers = [HeadBackend(target, net, f"{name}, number {number}", back=0) for number, net in enumerate(nets)]
    _check(layers[0], mtp, target, name)
    return layers


def has_prediction_layers(target: SlotBackend) -> bool:
    """Whether the files of a target's checkpoint are here and have such layers, as far as can be told unread."""
    if not isinstance(target, HFBackend) or not target.capabilities.hidden:
        return False
    if target.prediction is not None:
        return target.prediction.found
    if target.config.model_type in mtp_qwen.TYPES:
        return mtp_qwen.has_layer(target.model)
    count = getattr(target.model.config.get_text_config(), _LAYERS, None)
    return bool(count) and mtp_qwen.is_here(target.model)


def _load(target: SlotBackend) -> Any:
    from transformers.modeling_layers import MtpModel

    if not isinstance(target, HFBackend):
        raise _none(target)
    if target.prediction is not None:
        return target.prediction.read(target.model)
    model, own = target.model, target.config.model_type in mtp_qwen.TYPES
    if own:
        model = mtp_qwen.described(model, target.name)
    count = getattr(model.config.get_text_config(), _LAYERS, None)
    if not count:
        raise _none(target)
    try:
        made = MtpModel.from_pretrained(_as_loaded(model), device_map={"": target.device})
    except Exception as cause:
        raise UserError(
            f"drafter mtp: the prediction layers of {target.name} cannot be read ({reason(cause)}): expected "
            f"{count}; a checkpoint without their weights drafts with another drafter"
        ) from cause
    if own:
        mtp_qwen.refuse_left(made, model, target.name)
    return made.requires_grad_(requires_grad=False).train(mode=False)


def _as_loaded(model: Any) -> Any:
    """The model with the conversions by which transformers has read its weights, where it has forgotten them.

    The weights of its layers are read by the same ones. From 5.24 on, it drops them from a model whose quantized
    weights were made whole while it was loaded, and a layer would then be read without its scales.
    """
    if getattr(model, "_weight_conversions", None) is not None or quantization_method(model) is not None:
        return model
    from transformers import PretrainedConfig

    stated = PretrainedConfig.get_config_dict(model.config.name_or_path)[0].get("quantization_config")
    if stated is None:
        return model
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    asked: Any = AutoQuantizationConfig.from_dict(stated)
    asked.dequantize = True
    quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=True)
    twin = shallow(model)
    twin._weight_conversions = get_model_conversion_mapping(twin, hf_quantizer=quantizer)  # noqa: SLF001
    return twin


def _none(target: SlotBackend) -> UserError:
    return UserError(
        f"drafter mtp: {target.name} has no prediction layers of its own that are read here ({_LAYERS} in its config, "
        "as DeepSeek-V3, GLM-4.5 and Mellum have them; or, as Qwen3-Next and Qwen3.5 have them, tensors mtp.*, and "
        "nextn.* in .gguf files); legal are such a target, mtp:HEAD with a head in the layout of speculators, and "
        "every other drafter"
    )


@torch.inference_mode()
def _check(layer: HeadBackend, mtp: Any, target: SlotBackend, name: str) -> None:
    """Compare the first layer with transformers' own pass over some tokens."""
    tokens = torch.linspace(1, target.vocab_size - 1, 7).long().tolist()
    owner, session = target.open(), None
    try:
        target.forward([Feed(owner, tokens[:-1])])
        session = layer.follow(owner)
        logits = layer.forward([Feed(session, tokens[1:])])[0].logits[-1]
        found = session.states
        states = owner.states
        assert states is not None, "recorded from now on"
        assert found is not None, "recorded by the pass"
        ids = torch.tensor([tokens[1:]], device=target.device)
        places = torch.arange(1, len(tokens), device=target.device).unsqueeze(0)
        from transformers.cache_utils import MtpCache

        cache = MtpCache(config=mtp.config)
        out = mtp.forward_layer(0, states.unsqueeze(0).to(target.dtype), places, cache, input_ids=ids)
        pairs = ((found, out[0]), (logits, layer.net.logits(out[:, -1])[0]))
        error = max(relative_error(*pair) for pair in pairs)
    finally:
        owner.close()
        if session is not None:
            session.close()
    rounded = isinstance(target, HFBackend) and target.rounds_inputs  # last digits can become the next step of 8 bits
    if not error < _TOLERANCE[torch.bfloat16 if rounded else target.dtype]:
        raise UserError(
            f"drafter mtp: the logits of the {name} differ from transformers' own by {error:.2g} here, so they cannot "
            "draft: use another drafter"
        )
