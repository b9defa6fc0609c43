"""Writes a language model of random weights that llama.cpp and Ollama serve: half a megabyte, made in a second.

It answers nonsense in printable ASCII and never ends by itself, so `max_tokens` is exactly the length of an answer.

    make_model.py tiny.gguf [--seed N] [--name NAME]
"""

import argparse

import gguf
import numpy

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS = 2, 64, 128, 4, 2
CONTEXT = 131072
WORDS = ["the", "a", "of", "and", "to", "in", "is", "it", "relay", "token", "model", "worker"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vocabulary():
    """Texts, kinds, and how many of the first are not to be seen in an answer."""
    kind = gguf.TokenType
    space = "\u2581"
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    normal = [space, *map(chr, range(33, 127)), *(space + word for word in WORDS)]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * len(bytes_) + [kind.NORMAL] * len(normal)
    return control + bytes_ + normal, kinds, len(control) + len(bytes_)


def write(path, name, seed):
    random = numpy.random.default_rng(seed)

    def weights(*shape):
        return (random.standard_normal(shape) * 0.3).astype(numpy.float32)

    texts, kinds, hidden = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_vocab_size(len(texts))
    writer.add_token_list([text.encode() for text in texts])
    writer.add_token_scores([-float(index) for index in range(len(texts))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    key_width = WIDTH * KV_HEADS // HEADS
    writer.add_tensor("token_embd.weight", weights(len(texts), WIDTH))
    for layer in range(LAYERS):
        for part, shape in [
            ("attn_q", (WIDTH, WIDTH)),
            ("attn_k", (key_width, WIDTH)),
            ("attn_v", (key_width, WIDTH)),
            ("attn_output", (WIDTH, WIDTH)),
            ("ffn_gate", (FEED_FORWARD, WIDTH)),
            ("ffn_up", (FEED_FORWARD, WIDTH)),
            ("ffn_down", (WIDTH, FEED_FORWARD)),
        ]:
            writer.add_tensor(f"blk.{layer}.{part}.weight", weights(*shape))
        for part in ["attn_norm", "ffn_norm"]:
            writer.add_tensor(f"blk.{layer}.{part}.weight", numpy.ones(WIDTH, numpy.float32))
    writer.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    output = weights(len(texts), WIDTH)
    # What must not be said gets nothing: the others' best is above zero.
    output[:hidden] = 0
    writer.add_tensor("output.weight", output)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="tiny")
    options = parser.parse_args()
    write(options.path, options.name, options.seed)


if __name__ == "__main__":
    main()
