"""Writes a language model of random weights that vLLM serves: one megabyte, made in a second.

It generates printable ASCII and never ends by itself, so `max_tokens` is exactly the length of a response. One byte of text is
one token. Needs the packages numpy, safetensors and tokenizers, which vLLM brings.

    vllm_model.py FOLDER [--seed N] [--context TOKENS]
"""

import argparse
import json
import pathlib

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, WIDTH, FEED_FORWARD, HEADS = 2, 128, 256, 2
CONTROL = ["<pad>", "<end>"]
# Llama's names of a layer's matrices, and how many rows each has.
MATRICES = {
    "self_attn.q_proj": WIDTH,
    "self_attn.k_proj": WIDTH,
    "self_attn.v_proj": WIDTH,
    "self_attn.o_proj": WIDTH,
    "mlp.gate_proj": FEED_FORWARD,
    "mlp.up_proj": FEED_FORWARD,
    "mlp.down_proj": WIDTH,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer():
    """Returns a tokenizer of bytes, with the control tokens first."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(CONTROL + letters)}, merges=[]))
    tokens.add_special_tokens(CONTROL)
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return tokens


def weights(tokens, seed):
    random = numpy.random.default_rng(seed)

    def matrix(rows, columns, scale):
        return (random.standard_normal((rows, columns)) * scale).astype(numpy.float32)

    size = tokens.get_vocab_size()
    tensors = {"model.embed_tokens.weight": matrix(size, WIDTH, 1), "model.norm.weight": numpy.ones(WIDTH, numpy.float32)}
    for layer in range(LAYERS):
        for name, rows in MATRICES.items():
            columns = FEED_FORWARD if name == "mlp.down_proj" else WIDTH
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, columns**-0.5)
        for name in ["input_layernorm", "post_attention_layernorm"]:
            tensors[f"model.layers.{layer}.{name}.weight"] = numpy.ones(WIDTH, numpy.float32)
    # Large, so that no two tokens are almost equally likely: a batch adds up in another order than a request alone.
    output = matrix(size, WIDTH, 4)
    for token in range(size):
        text = tokens.decode([token], skip_special_tokens=True)
        # A token that must not be generated gets 0. The best of all others is above that.
        if not (text.isascii() and text.isprintable() and text):
            output[token] = 0
    tensors["lm_head.weight"] = output
    return tensors


def write(folder, seed, context):
    tokens = tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    save_file(weights(tokens, seed), folder / "model.safetensors", {"format": "pt"})
    pad, end = range(len(CONTROL))
    settings = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": tokens.get_vocab_size(),
            "hidden_size": WIDTH,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": context,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": CONTROL[pad],
            "eos_token": CONTROL[end],
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048, help="tokens of prompt and response together")
    options = parser.parse_args()
    write(options.folder, options.seed, options.context)


if __name__ == "__main__":
    main()
