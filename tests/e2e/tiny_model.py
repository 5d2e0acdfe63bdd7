"""Write a small Llama with random weights into a directory, without any download.

Runs in the stock environment: `python tests/e2e/tiny_model.py DIRECTORY`. One word is one token,
so the length of a prompt is the number of its words.
"""

# mypy: disable-error-code="import-not-found"
# The stock packages are not installed where types are checked.

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LONGEST, SEED = 1024, 4096, 20
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words `t0`, `t1` ... after the special ones."""
    words = [*SPECIAL, *(f"t{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = Fuse()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **names)


def make_model() -> LlamaForCausalLM:
    """Two layers; 1 KiB of KV cache a token in float32."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LONGEST,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
            # With the usual 0.02 the output hardly depends on the prompt, and so not on the KV.
            initializer_range=0.2,
        )
    )


if __name__ == "__main__":
    make_tokenizer().save_pretrained(sys.argv[1])
    make_model().to(torch.float32).save_pretrained(sys.argv[1])
