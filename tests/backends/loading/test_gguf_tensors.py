"""What metadata of GGUF files say of a model of any architecture: the tokens that end a text are llama.cpp's."""

import pytest

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_roles import end_tokens

CONTROL, NORMAL = 3, 1
DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# tokens of a file, ids that metadata name, and what llama.cpp (wheel xllamacpp 2026.10) prints as its EOG tokens
CASES = {
    "gpt-oss": ("<|return|> <|end|> <|call|> <|channel|>", {"eos": 0}, "<|return|> <|call|>"),
    "gpt-oss, whatever metadata name": ("<|return|> <|end|> <|call|>", {"eos": 1}, "<|return|> <|call|>"),
    "Solar": ("<|calls|> <|end|> <|flush|> x", {}, "<|calls|> <|flush|>"),
    "Phi-3": ("<|endoftext|> <|end|> <|user|>", {"eos": 0}, "<|endoftext|> <|end|>"),
    "no call": ("<|return|> <|end|>", {}, "<|return|> <|end|>"),
    "Gemma 4": ("<eos> </s> <turn|> <|tool_response>", {"eos": 0}, "<eos> <turn|> <|tool_response>"),
    "Gemma 3": ("<eos> </s> <end_of_turn>", {"eos": 0}, "<eos> </s> <end_of_turn>"),
    "Llama 3": ("<|end_of_text|> <|eom_id|> <|eot_id|> x", {"eos": 3}, "<|end_of_text|> <|eom_id|> <|eot_id|> x"),
    "Qwen coder": (
        "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|> <|fim_middle|>",
        {"eos": 1},
        "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|>",
    ),
    "filling that metadata name": (
        "x y <|fim_pad|> <|fim_repo|>",
        {"eos": 0, "fim_pad": 1, "fim_sep": 0},
        "x y <|fim_repo|>",
    ),
    "Granite": ("<|end_of_text|> <fim_pad> <reponame>", {"eos": 0}, "<|end_of_text|> <fim_pad> <reponame>"),
    "Kimi": ("[EOS] [EOT] [PAD]", {}, "[EOS] [EOT] [PAD]"),
    "DeepSeek": (f"{DEEPSEEK} <EOT> _<EOT>", {}, f"{DEEPSEEK} <EOT> _<EOT>"),
    "others": ("<end_of_utterance> <s> <|endofprompt|> [e~[", {}, "<end_of_utterance> [e~["),
    "what metadata name": ("x y z", {"eos": 0, "eot": 1, "eom": 2}, "x y z"),
}


@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
@pytest.mark.parametrize("name", CASES)
def test_tokens_that_end_a_text_are_those_of_llama_cpp(name, kind, tmp_path):
    texts, named, expected = CASES[name]
    tokens = texts.split()
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [kind] * len(tokens))
    for key, number in named.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = end_tokens(GGUFFile(tmp_path / "x.gguf"))
    assert {tokens[number] for number in found} == set(expected.split())
    assert len(set(found)) == len(found)
