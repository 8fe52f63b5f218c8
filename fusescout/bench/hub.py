"""Models of the suite that `transformers` has: its own modelling code with random weights, no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]


def _ids(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _image(batch: int, side: int) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def gpt2(
    batch: int, length: int, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257
) -> Built:
    """GPT-2 124M with its language-model head."""
    from transformers import GPT2Config
    from transformers import GPT2LMHeadModel

    config = GPT2Config(
        use_cache=False, n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), {"input_ids": _ids(batch, length, vocabulary)}


def bert(
    batch: int, length: int, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522
) -> Built:
    """BERT-base without padding."""
    from transformers import BertConfig
    from transformers import BertModel

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        vocab_size=vocabulary,
    )  # fmt: skip
    ids = _ids(batch, length, vocabulary)
    return BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def t5_encoder(
    batch: int, length: int, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 32128
) -> Built:
    """The encoder of T5-base."""
    from transformers import T5Config
    from transformers import T5EncoderModel

    config = T5Config(
        num_layers=layers, d_model=width, num_heads=heads, d_kv=width // heads, d_ff=4 * width, vocab_size=vocabulary,
        use_cache=False,
    )  # fmt: skip
    return T5EncoderModel(config), {"input_ids": _ids(batch, length, vocabulary)}


def llama(
    batch: int, length: int, layers: int = 4, width: int = 2048, heads: int = 32, hidden: int = 8192,
    vocabulary: int = 32000,
) -> Built:  # fmt: skip
    """Some layers of a Llama of the 1B class, with its head, over a whole prompt."""
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM

    config = LlamaConfig(
        use_cache=False, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, vocab_size=vocabulary, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": _ids(batch, length, vocabulary)}


def mixtral_block(batch: int, length: int, width: int = 2048, hidden: int = 7168) -> Built:
    """One sparse mixture of eight experts, two for each token, of half of Mixtral's width."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=width, intermediate_size=hidden)
    config._experts_implementation = "grouped_mm"  # what a whole model of transformers chooses by itself
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():  # transformers initialises whole models only
        nn.init.normal_(parameter, std=width**-0.5)
    states = torch.randn(batch, length, width, generator=torch.Generator().manual_seed(0))
    return block, {"hidden_states": states}


def vit(batch: int, side: int = 224, layers: int = 12, width: int = 768, heads: int = 12) -> Built:
    """ViT-B/16."""
    from transformers import ViTConfig
    from transformers import ViTForImageClassification

    config = ViTConfig(
        image_size=side, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": _image(batch, side)}


def convnext(batch: int, side: int = 224, depth: int = 3) -> Built:
    """ConvNeXt-T; `depth` is that of the first stage."""
    from transformers import ConvNextConfig
    from transformers import ConvNextForImageClassification

    config = ConvNextConfig(depths=[depth, depth, 3 * depth, depth], num_labels=1000)
    return ConvNextForImageClassification(config), {"pixel_values": _image(batch, side)}


def resnet(batch: int, side: int = 224) -> Built:
    """ResNet-50, with statistics as if it were trained."""
    from transformers import ResNetConfig
    from transformers import ResNetForImageClassification

    return _trained(ResNetForImageClassification(ResNetConfig(num_labels=1000))), {"pixel_values": _image(batch, side)}


def efficientnet(batch: int, side: int = 224) -> Built:
    """EfficientNet-B0."""
    from transformers import EfficientNetConfig
    from transformers import EfficientNetForImageClassification

    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=side, hidden_dim=1280, dropout_rate=0.2,
        num_labels=1000,
    )  # fmt: skip
    return _trained(EfficientNetForImageClassification(config)), {"pixel_values": _image(batch, side)}


def swin(batch: int, side: int = 224, depth: int = 6) -> Built:
    """Swin-T; `depth` is that of the third stage."""
    from transformers import SwinConfig
    from transformers import SwinForImageClassification

    config = SwinConfig(image_size=side, depths=[2, 2, depth, 2], num_labels=1000)
    return SwinForImageClassification(config), {"pixel_values": _image(batch, side)}


def whisper_encoder(batch: int, layers: int = 6, width: int = 512, heads: int = 8, frames: int = 3000) -> Built:
    """The encoder of Whisper base over 30 s of sound."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        encoder_layers=layers, d_model=width, encoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
    )  # fmt: skip
    sound = torch.randn(batch, config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
    return WhisperEncoder(config), {"input_features": sound}


def _trained(model: nn.Module) -> nn.Module:
    """Random batch-norm statistics near those of real data, so that activations keep their size over the depth."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0.0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return model
