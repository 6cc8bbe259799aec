"""Tokenizers of GGUF files without transformers."""

import re
from itertools import pairwise

import pytest

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

import transformers
from tokenizers import Tokenizer, models, trainers

from draftproof.backends.loading.gguf_tokenizer import read_tokenizer
from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile

CORPUS = [
    "Once upon a time, there was a cat.  It liked 12345 words; it's naïve and über-long.",
    "def f(x):\n    return {'a': [x, -1e9]}\n\nprint(f(3))\tdone",
    "the the the there their other another brother in the hall",
]
TEXTS = [
    *CORPUS,
    " leading and  double   blanks \n",
    "trailing ",
    "",
    " ",
    "東京 🙂\u200d is not in the vocabulary",
    "<s>the</s> <|user|>there<|user|>",
    "\r\n\r\n x\u00a0y",
]
CHAT = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{{ eos_token }}"


def scored(folder, **options):
    """A file with SentencePiece's tokens and scores, from merges that a text has."""
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS], trainer)
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in learned)]
    tokens.append("<|user|>")
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learned), 4]
    scores = [0.0] * 259 + [-float(number) for number in range(len(learned))] + [0.0]
    return written(folder, "llama", tokens, kinds, scores=scores, **options)


def written(folder, model, tokens, kinds, *, scores=None, merges=None, pre=None, prefix=True, bos=True):
    path = folder / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre(pre)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    writer.add_add_space_prefix(prefix)
    writer.add_chat_template(CHAT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refuse():
    raise AssertionError("transformers' tokenizer was loaded")


def joined(text, tokens, scores, *, prefix):
    """Ids by llama.cpp's rule: of neighbours that are a token together, those with the best score are joined first."""
    vocab, found = {token: number for number, token in enumerate(tokens)}, []
    for piece in re.split(r"(<s>|</s>|<unk>|<\|user\|>)", text):
        if piece in tokens[:3] or piece == tokens[-1]:
            found.append(vocab[piece])
            continue
        symbols = list((" " * (prefix and piece != "") + piece).replace(" ", "\u2581"))
        while pairs := [
            (-scores[vocab[left + right]], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in vocab
        ]:
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            found += [vocab[symbol]] if symbol in vocab else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_tokens_with_scores(prefix, bos, tmp_path):
    path = scored(tmp_path, prefix=prefix, bos=bos)
    file = GGUFFile(path)
    tokens, scores = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.scores").tolist()
    ours = read_tokenizer(file, refuse)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert len(ours) == len(theirs) == len(tokens)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    for text in TEXTS:
        ids = joined(text, tokens, scores, prefix=prefix)
        assert ours(text, add_special_tokens=False)["input_ids"] == ids, text
        plain = text.replace("<s>", "").replace("</s>", "")
        shown = ours.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert shown.replace(" ", "") == plain.replace(" ", ""), "a space may stand behind a special token"
    assert (ours("the cat")["input_ids"][0] == 1) == bos
    assert any(len(token) > 3 for token in ours.backend_tokenizer.encode(CORPUS[2]).tokens), "something was joined"


def test_the_chat_template_is_the_files(tmp_path):
    ours = read_tokenizer(GGUFFile(scored(tmp_path)), refuse)
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "<|user|>Hi</s>"


def test_a_kind_that_is_not_known_is_left_to_transformers(tmp_path):
    path = written(tmp_path, "bert", ["<unk>", "<s>", "</s>"], [2, 3, 3], scores=[0.0] * 3)
    assert read_tokenizer(GGUFFile(path), refuse) is None


def test_merges_without_their_tokens_are_refused(tmp_path):
    path = written(tmp_path, "gpt2", ["<unk>", "<s>", "</s>", "a"], [2, 3, 3, 1], merges=["a b"], pre="llama-bpe")
    with pytest.raises(UserError, match=r"cannot make the tokenizer of .*x\.gguf.*out of vocabulary"):
        read_tokenizer(GGUFFile(path), refuse)
