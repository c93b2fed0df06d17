"""A tiny byte-level BPE tokenizer, the kind that GGUF files hold."""

from tiny_models import CHATML
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(split: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes, three merges, ChatML markers and `<tool>`, which is no special token; `split` cuts a text into words."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate([*tokens, "Ġt", "he", "Ġthe"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    words = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, whole]) if words else whole
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer
