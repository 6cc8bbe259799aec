"""Tokenizers of several kinds, made here, and copies of a model whose tokens have other ids."""

import json
import random
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Once upon a time, there was a little girl named Lily. She liked to play outside in the park.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total\n",
    "The naïve café owner said: “Das ist schön!” – 東京は大きい。 Привет, мир! 🙂🙃",
    "   leading blanks,\ttabs and  double  blanks\n\n",
]


def byte_level(size=700, special=("<|end|>", "<|user|>"), texts=TEXTS):
    """Byte-pair encoding of bytes, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0])


def sentence_piece(size=500, begins=True, texts=TEXTS):
    """Byte-pair encoding of characters with byte fallback, as Llama 2's; texts get a blank at their start."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "\u2581")
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=[]))
    content = json.loads(learned.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256))]
    vocab = {token: number for number, token in enumerate([*first, *content["vocab"]])}
    merges = [tuple(each) for each in content["merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(each, normalized=False) for each in first[:3]])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")  # noqa: S106


def unigram(size=300, texts=TEXTS):
    """SentencePiece's other kind, with byte fallback."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<unk>", "</s>", *(f"<0x{each:02X}>" for each in range(256))]
    trainer = trainers.UnigramTrainer(
        vocab_size=size + len(specials),
        special_tokens=specials,
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    content = json.loads(made.to_str())
    content["model"]["byte_fallback"] = True
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )


def renumbered(source, folder, *, missing=0.0, seed=1, exchanged=()):
    """A copy of a model whose tokens have other ids, and a share of the ordinary ones other texts that no token has.

    With two ids in `exchanged` these are exchanged, and all others stay.
    """
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    draw = random.Random(seed)
    order = list(range(len(vocab)))
    if exchanged:
        first, second = exchanged
        order[first], order[second] = second, first
    else:
        draw.shuffle(order)  # the token with the old id i has the new one order[i]
    plain = sorted(piece for piece in vocab if not piece.startswith("<"))
    gone = set(draw.sample(plain, round(missing * len(plain))))
    name = {piece: f"\u2603{number}" if piece in gone else piece for number, piece in enumerate(vocab)}
    content["model"]["vocab"] = {name[piece]: order[number] for piece, number in vocab.items()}
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if not gone & {*pair, "".join(pair)}]
    for each in content["added_tokens"]:
        each["id"] = order[each["id"]]
    for each in content["post_processor"]["special_tokens"].values():
        each["ids"] = [order[number] for number in each["ids"]]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        if tensor in weights:
            moved = torch.empty_like(weights[tensor])
            moved[torch.tensor(order)] = weights[tensor]
            weights[tensor] = moved
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        found = json.loads((folder / file).read_text(encoding="utf-8"))
        for key in [key for key in found if key.endswith("_token_id") and found[key] is not None]:
            ids = found[key] if isinstance(found[key], list) else [found[key]]
            moved_ids = [order[number] for number in ids]
            found[key] = moved_ids if isinstance(found[key], list) else moved_ids[0]
        (folder / file).write_text(json.dumps(found), encoding="utf-8")
    return folder


def renamed(source, folder, token):
    """A copy of a model in whose tokenizer a token has another text, with the same id."""
    shutil.copytree(source, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["\u2603"] = vocab.pop(token)
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if token not in {*pair, "".join(pair)}]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def padded(source, folder, more=64, row=None):
    """A copy of a model with rows for tokens that its tokenizer does not have: of zeros, or twice that of a token."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for tensor in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        found = weights[tensor]
        beyond = found.new_zeros(1, found.shape[1]) if row is None else 2 * found[row : row + 1]
        weights[tensor] = torch.cat([found, beyond.expand(more, -1)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + more}), encoding="utf-8")
    return folder


def added(source, folder, row):
    """A copy of a model with a token more, whose logit is twice that of another token."""
    padded(source, folder, 1, row)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    token = {"id": len(content["model"]["vocab"]), "content": "<|more|>", "special": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append(token)
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder
