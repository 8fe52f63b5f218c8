"""GPT-2, BERT and Llama from `transformers` with random weights: no download, the real modelling code.

fusescout analyze --dtype bf16 examples/hf_models.py:gpt2        the sizes that GPUs are measured at
fusescout analyze examples/hf_models.py:gpt2_small               sizes for a CPU
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig
from transformers import BertModel
from transformers import GPT2Config
from transformers import GPT2LMHeadModel
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

Pair = tuple[torch.nn.Module, dict[str, Any]]


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def gpt2(batch: int = 8, length: int = 1024, **overrides: Any) -> Pair:
    """GPT-2 124M with its language-model head."""
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, **overrides)
    return GPT2LMHeadModel(config), {"input_ids": _ids(batch, length, config.vocab_size)}


def bert(batch: int = 32, length: int = 512, **overrides: Any) -> Pair:
    """BERT-base without padding."""
    torch.manual_seed(0)
    config = BertConfig(**overrides)
    ids = _ids(batch, length, config.vocab_size)
    return BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(batch: int = 2, length: int = 2048, **overrides: Any) -> Pair:
    """Four layers of a Llama of the 1B class."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    config = LlamaConfig(use_cache=False, **(sizes | overrides))
    return LlamaForCausalLM(config), {"input_ids": _ids(batch, length, config.vocab_size)}


def gpt2_small() -> Pair:
    return gpt2(4, 256, n_layer=4, n_embd=256, n_head=4, vocab_size=1024, bos_token_id=0, eos_token_id=0)


def bert_small() -> Pair:
    return bert(
        8, 128, num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=1024
    )


def llama_small() -> Pair:
    return llama(
        4, 256, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def main() -> None:
    for make in (gpt2_small, bert_small, llama_small):
        model, inputs = make()
        with torch.no_grad():
            print(make.__name__, type(model.eval()(**inputs)).__name__)


if __name__ == "__main__":
    main()
