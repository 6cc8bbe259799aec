"""Tokenizers of GGUF files: as llama.cpp reads them, without transformers and as one of its own."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from draftproof.backends.loading.tokenization import load_tokenizer, read_tokenizer
from draftproof.engine.prompts import PromptReader
from draftproof.errors import UserError
from draftproof.finish import TextDecoder
from draftproof.models import download
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_tokenizer import FileTokenizer, read_file_tokenizer
from support.gguf_files import write_model
from support.helpers import random_model

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
TOOLS = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
CHAT = TOOLS + "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{{ eos_token }}"


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


def written(
    folder, model, tokens, kinds, *, scores=None, merges=None, pre=None, prefix=True, bos=True, chat=CHAT, **more
):
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
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(bos)
    writer.add_add_space_prefix(prefix)
    writer.add_chat_template(chat)
    for key, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(folder, *, lines=True, **options):
    """A file as Gemma 4's are: merges of characters, some of them over line ends, and tokens of bytes."""
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    corpus = [*CORPUS, "\n\n\n", "\n\n"] * 2
    trained.train_from_iterator([text.replace(" ", "\u2581") for text in corpus], trainer)
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    merges = [merge for merge in merges if lines or "\n" not in merge]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in learned)]
    tokens.append("<|user|>")
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learned), 4]
    return written(folder, "gemma4", tokens, kinds, merges=merges, prefix=False, **options)


@pytest.fixture
def alone(monkeypatch):
    """Transformers' tokenizer may not be made."""

    def refuse(_):
        raise AssertionError("transformers' tokenizer was made")

    monkeypatch.setattr(FileTokenizer, "for_transformers", refuse)


def joined_ids(symbols, vocab, rank):
    """Ids after neighbours that have a rank were joined, those with the least one first; bytes of what is no token."""
    while pairs := [(found, at) for at, pair in enumerate(pairwise(symbols)) if (found := rank(*pair)) is not None]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [each for one in symbols for each in ([vocab[one]] if one in vocab else [3 + byte for byte in one.encode()])]


def joined(text, tokens, scores, *, prefix):
    """Ids by llama.cpp's rule: of neighbours that are a token together, those with the best score are joined first."""
    vocab, found = {token: number for number, token in enumerate(tokens)}, []
    for piece in re.split(r"(<s>|</s>|<unk>|<\|user\|>)", text):
        if piece in tokens[:3] or piece == tokens[-1]:
            found.append(vocab[piece])
            continue
        symbols = list((" " * (prefix and piece != "") + piece).replace(" ", "\u2581"))
        found += joined_ids(symbols, vocab, lambda one, two: -scores[vocab[one + two]] if one + two in vocab else None)
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_tokens_with_scores(prefix, bos, tmp_path):
    path = scored(tmp_path, prefix=prefix, bos=bos)
    file = GGUFFile(path)
    tokens, scores = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.scores").tolist()
    ours = read_tokenizer(file)
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


def by_merges(text, tokens, merges):
    """Ids by llama.cpp's rule for Gemma 4: merges by rank in lines, and in line ends unless these are a token."""
    vocab, ranks, found = {token: number for number, token in enumerate(tokens)}, {}, []
    for rank, merge in enumerate(merges):
        ranks[tuple(merge.split(" ", 1))] = rank
    for piece in re.split(r"(<s>|</s>|<unk>|<\|user\|>|\n+)", text.replace(" ", "\u2581")):
        if piece in tokens[:3] or piece == tokens[-1] or (piece.strip("\n") == "" and piece in vocab):
            found.append(vocab[piece])
            continue
        found += joined_ids(list(piece), vocab, lambda *pair: ranks.get(pair))
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("lines", [True, False])
def test_tokens_of_gemma_4(lines, tmp_path):
    file = GGUFFile(merged(tmp_path, lines=lines))
    tokens, merges = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.merges")
    assert any("\n" in merge for merge in merges) == lines
    assert "\n\n" in tokens
    ours = read_tokenizer(file)
    for text in [*TEXTS, "a\n\nb\n\n\nc", "\n\n\n", "x\n \n  y"]:
        ids = by_merges(text, tokens, merges)
        assert ours(text, add_special_tokens=False)["input_ids"] == ids, text
        plain = text.replace("<s>", "").replace("</s>", "")
        assert ours.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == plain
    assert ours("the cat")["input_ids"][0] == 1


@pytest.mark.usefixtures("alone")
def test_the_chat_template_is_the_files(tmp_path):
    ours = read_tokenizer(GGUFFile(scored(tmp_path)))
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "<|user|>Hi</s>"


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv"])
def test_a_kind_that_is_not_known_is_an_error_that_names_it(kind, tmp_path):
    path = written(tmp_path, kind, ["<unk>", "<s>", "</s>"], [2, 3, 3], scores=[0.0] * 3)
    for load in (lambda: read_tokenizer(GGUFFile(path)), lambda: load_tokenizer(str(path))):
        with pytest.raises(UserError, match=rf"x\.gguf has the tokenizer '{kind}' .*: expected gemma4, gpt2, llama"):
            load()


def test_a_file_without_a_tokenizer_is_an_error(tmp_path):
    path = written(tmp_path, "llama", ["<unk>", "<s>", "</s>"], [2, 3, 3], scores=[0.0] * 3)
    file = GGUFFile(path)
    del file.metadata["tokenizer.ggml.scores"]
    with pytest.raises(UserError, match=r"tokenizer 'llama' without tokenizer\.ggml\.scores"):
        read_tokenizer(file)
    del file.metadata["tokenizer.ggml.model"]
    with pytest.raises(UserError, match="has no tokenizer"):
        read_tokenizer(file)


def test_a_token_that_stands_there_twice_is_an_error(tmp_path):
    path = written(tmp_path, "llama", ["<unk>", "<s>", "</s>", "a", "a"], [2, 3, 3, 1, 1], scores=[0.0] * 5)
    with pytest.raises(UserError, match="expected different tokens, got 'a' 2 times"):
        read_tokenizer(GGUFFile(path))


def test_merges_without_their_tokens_are_refused(tmp_path):
    path = written(tmp_path, "gpt2", ["<unk>", "<s>", "</s>", "a"], [2, 3, 3, 1], merges=["a b"], pre="llama-bpe")
    with pytest.raises(UserError, match=r"cannot make the tokenizer of .*x\.gguf.*out of vocabulary"):
        read_tokenizer(GGUFFile(path))


# --- transformers' own ------------------------------------------------------------------------------------------------

BYTES = sorted(ByteLevel.alphabet())
WORDS = {
    "tokens": [*BYTES, "th", "the", "<unk>", "<s>", "</s>", "<|user|>"],
    "kinds": [1] * (len(BYTES) + 2) + [2, 3, 3, 4],
    "merges": ["t h", "th e"],
}
KINDS = {
    "scored": scored,
    "merged": merged,
    "byte-level": lambda folder, **more: written(folder, "gpt2", **WORDS, pre="qwen2", **more),
}


def tokens_of(tokenizer, text, *, special):
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [True, False])
def test_transformers_gets_the_same_tokenizer(kind, ends, tmp_path):
    path = KINDS[kind](tmp_path, bos=ends, add_eos_token=ends)
    ours, theirs = read_tokenizer(GGUFFile(path)), load_tokenizer(str(path))
    assert isinstance(theirs, transformers.PreTrainedTokenizerBase)
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    begins = ends or kind == "merged"  # as llama.cpp has it, whatever such a file says
    for text in TEXTS:
        ids = tokens_of(ours, text, special=False)
        whole = [ours.bos_token_id] * begins + ids + [ours.eos_token_id] * ends
        assert tokens_of(theirs, text, special=False) == ids
        assert tokens_of(theirs, text, special=True) == tokens_of(ours, text, special=True) == whole
        for skip in (True, False):
            shown = ours.decode(whole, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert shown == theirs.decode(whole, skip_special_tokens=skip)


def test_a_chat_with_tools_is_rendered_by_that(tmp_path):
    ours = read_tokenizer(GGUFFile(scored(tmp_path)))
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    options = {"add_generation_prompt": True, "tokenize": False}
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, **options) == "<|user|>Hi</s>"
    assert ours.apply_chat_template(chat, tools=[tool], **options) == "add<|user|>Hi</s>"


def test_a_word_that_is_named_for_padding_stays_a_word(tmp_path):
    path = written(tmp_path, "gpt2", **WORDS, pre="qwen2", padding_token_id=BYTES.index("!"))
    for tokenizer in (read_tokenizer(GGUFFile(path)), load_tokenizer(str(path))):
        ids = tokens_of(tokenizer, "the!", special=False)
        assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == "the!"


def test_an_id_that_there_is_not_is_an_error(tmp_path):
    path = written(tmp_path, "gpt2", **WORDS, pre="qwen2", padding_token_id=100000)
    for load in (lambda: read_tokenizer(GGUFFile(path)), lambda: load_tokenizer(str(path))):
        with pytest.raises(UserError, match=r"padding_token_id: expected a token below \d+, got 100000"):
            load()


def test_a_converted_file_keeps_its_tokenizer(tmp_path):
    """In a directory, as `draftproof models pull` makes one."""
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    size = len(WORDS["tokens"])
    model = random_model(transformers.LlamaConfig(vocab_size=size, max_position_embeddings=128, **config), seed=1)
    metadata = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS["tokens"],
        "tokenizer.ggml.token_type": WORDS["kinds"],
        "tokenizer.ggml.merges": WORDS["merges"],
        "tokenizer.ggml.eos_token_id": size - 2,
    }
    path = tmp_path / "x.gguf"
    write_model(path, model, "llama", metadata, kinds=(None,))
    download._convert(path, tmp_path / "out")
    kept, right = load_tokenizer(str(tmp_path / "out")), read_tokenizer(GGUFFile(path))
    for text in TEXTS:
        assert tokens_of(kept, text, special=True) == tokens_of(right, text, special=True)
    assert (kept.eos_token_id, kept.model_max_length) == (size - 2, 128)


# --- what llama.cpp makes of small vocabularies -----------------------------------------------------------------------

# Which build of llama.cpp made them is in the file ("made_by"). To make them anew:
# python scripts/freeze_tokenizers.py tests/models/llama_cpp_tokens.json
FROZEN = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text(encoding="utf-8"))["vocabularies"]


def frozen_file(folder, name):
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    for key, value in FROZEN[name]["metadata"].items():
        kinds = {list: writer.add_array, bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}
        kinds[type(value)](key if "." in key else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(folder / "x.gguf")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", FROZEN)
def test_texts_get_the_tokens_of_llama_cpp(name, tmp_path):
    ours = read_tokenizer(frozen_file(tmp_path, name))
    for text, ids in FROZEN[name]["tokens"]:
        assert tokens_of(ours, text, special=False) == ids, text
    for text, ids in FROZEN[name]["with_ends"]:
        assert tokens_of(ours, text, special=True) == ids, text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", FROZEN)
def test_token_ids_get_the_text_of_llama_cpp(name, tmp_path):
    file = frozen_file(tmp_path, name)
    ours, prefixed = read_tokenizer(file), read_file_tokenizer(file).rules.prefixed
    for ids, *texts in FROZEN[name]["texts"]:
        for skip, text in zip((False, True), texts, strict=True):
            right = text.removeprefix(" ") if prefixed else text
            assert ours.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == right, ids
            decoder = TextDecoder(ours, skip_special_tokens=skip)
            assert "".join(decoder.push(each) for each in ids) + decoder.flush() == right, ids


@pytest.mark.parametrize("name", FROZEN)
def test_the_form_of_transformers_has_the_same(name, tmp_path):
    """Its library alone has others: see the next test."""
    theirs = read_file_tokenizer(frozen_file(tmp_path, name)).for_transformers()
    assert isinstance(theirs, transformers.PreTrainedTokenizerBase)
    pairs = FROZEN[name]["tokens"]
    for text, ids in pairs:
        assert tokens_of(theirs, text, special=False) == theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.tokenize(text) == theirs.convert_ids_to_tokens(ids)
    for text, ids in FROZEN[name]["with_ends"]:
        assert tokens_of(theirs, text, special=True) == ids, text
    texts = [text for text, _ in pairs]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == [ids for _, ids in pairs]
    for ids, *shown in FROZEN[name]["texts"]:
        for skip, right in zip((False, True), shown, strict=True):
            text = right.removeprefix(" ") if theirs._rules.prefixed else right
            assert theirs.decode(ids, skip_special_tokens=skip) == text
            assert theirs.batch_decode([ids, ids], skip_special_tokens=skip) == [text, text]


@pytest.mark.parametrize("name", FROZEN)
def test_the_library_alone_has_others(name, tmp_path):
    """The strings and rows show a tokenizer that has no rules of its own."""
    library = read_file_tokenizer(frozen_file(tmp_path, name)).tokenizer
    found = [library.encode(text, add_special_tokens=False).ids for text, _ in FROZEN[name]["tokens"]]
    differ = [ids != right for ids, (_, right) in zip(found, FROZEN[name]["tokens"], strict=True)]
    shown = [library.decode(ids, skip_special_tokens=False) for ids, *_ in FROZEN[name]["texts"]]
    others = [text != right for text, (_, right, _) in zip(shown, FROZEN[name]["texts"], strict=True)]
    assert any(differ)
    assert any(others)


@pytest.mark.parametrize("name", [name for name in FROZEN if 4 in FROZEN[name]["metadata"]["token_type"]])
def test_tokens_that_are_taken_for_ordinary_ones_show(name, tmp_path):
    """A mistake made on purpose: tokens that users defined are ordinary ones."""
    file = frozen_file(tmp_path, name)
    types = file.get("tokenizer.ggml.token_type")
    file.metadata["tokenizer.ggml.token_type"] = [1 if each == 4 else each for each in types]
    ours = read_tokenizer(file)
    assert any(tokens_of(ours, text, special=False) != ids for text, ids in FROZEN[name]["tokens"])


@pytest.mark.parametrize("template", ["<|user|>{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_chat_begins_with_bos_once_where_texts_do(template, bos, tmp_path):
    """llama.cpp adds BOS to a chat as to a text, and drops that of the template before."""
    ours = read_tokenizer(GGUFFile(scored(tmp_path, bos=bos, chat=template)))
    text, ids = PromptReader(ours, "x").read([{"role": "user", "content": "the cat"}])
    written_bos = template.startswith("{{ bos")
    assert text.startswith("<s>") == written_bos
    assert ids.count(1) == (bos or written_bos)
    assert ids[0] == 1 or not (bos or written_bos)


# --- what transformers may ask beyond the tokens of a text ------------------------------------------------------------

RULED = next(name for name in FROZEN if FROZEN[name]["metadata"].get("model", "gpt2") == "gpt2")


def ruled(folder):
    """A tokenizer of transformers whose tokens its library does not find alone."""
    made = read_file_tokenizer(frozen_file(folder, RULED)).for_transformers()
    assert made._rules.wholes is not None
    return made


def test_a_batch_is_padded_and_cut_as_by_transformers(tmp_path):
    tokenizer = ruled(tmp_path)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    whole = tokenizer(["a b c d", "a"])
    sizes = [len(row) for row in whole["input_ids"]]
    assert sizes[0] > sizes[1] >= 1
    found = tokenizer(["a b c d", "a"], padding=True, return_tensors="pt", padding_side="left")
    assert found["input_ids"].shape == found["attention_mask"].shape == (2, sizes[0])
    assert found["attention_mask"].sum(1).tolist() == sizes
    assert found["input_ids"][1, -sizes[1] :].tolist() == whole["input_ids"][1]
    short = tokenizer("a b c d", truncation=True, max_length=3, return_length=True)
    assert short["input_ids"] == whole["input_ids"][0][:3]
    assert short["length"] == 3
    tokenizer.truncation_side = "left"
    begin, *_, third, last = whole["input_ids"][0]
    assert begin == tokenizer.bos_token_id
    assert tokenizer("a b c d", truncation=True, max_length=3)["input_ids"] == [begin, third, last]


@pytest.mark.parametrize("asked", [
    {"return_offsets_mapping": True}, {"text_pair": "b"}, {"return_overflowing_tokens": True},
])  # fmt: skip
def test_what_only_the_library_can_say_is_an_error(asked, tmp_path):
    with pytest.raises(UserError, match=rf"expected texts alone, got {next(iter(asked))} \(take the tokenizer of"):
        ruled(tmp_path)("a", **asked)


def test_rules_that_cannot_be_saved_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"rules that transformers cannot save: expected .* \(take that of the model's"):
        ruled(tmp_path).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
