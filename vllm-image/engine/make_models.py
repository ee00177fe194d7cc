"""Makes target and draft models that show the real dilemma of speculative decoding on a CPU.

Random weights, so nothing is downloaded. In the target only layer 0 steers; the layers after it
are scaled by `eps` and merely nudge the residual stream. The draft model is the target's
embedding, layer 0, final norm and head: cheap, and right as often as the nudges do not matter.
So acceptance follows eps, and drafting costs what drafting costs. Run inside the engine's venv.
"""

import argparse
import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAIRS = {"high": 0.04, "low": 0.10}  # name of the acceptance -> eps
SEED = 20240607
LAYERS = 16
MAX_POSITIONS = 4096
SPECIAL_TOKENS = ("<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, so any prompt has a known length."""
    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def build_config(vocabulary: int, *, layers: int) -> LlamaConfig:
    """Describe the small Llama; head_dim 64 is the least that the CPU attention takes."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def build_target(config: LlamaConfig, *, eps: float) -> LlamaForCausalLM:
    """Build the target: the same random weights for each eps, layers 1.. scaled down by it."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(eps)
            layer.mlp.down_proj.weight.mul_(eps)
    return model


def build_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Build the draft: everything of the target but the layers after the first."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = LlamaForCausalLM(config)
    model.load_state_dict({name: target.state_dict()[name] for name in model.state_dict()})
    return model


def main() -> None:
    """Write every pair below the folder given: NAME/target and NAME/draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokenizer = build_tokenizer()
    for name, eps in PAIRS.items():
        target = build_target(build_config(len(tokenizer), layers=LAYERS), eps=eps)
        for role, model in (("target", target), ("draft", build_draft(target))):
            model.save_pretrained(folder / name / role)
            tokenizer.save_pretrained(folder / name / role)
            print(f"{name}/{role}: {model.num_parameters() / 1e6:.1f} M parameters", flush=True)


if __name__ == "__main__":
    main()
