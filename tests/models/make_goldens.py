"""Writes tests/models/goldens: tiny random models as transformers saves them, and the logits that it computes.

    python tests/models/make_goldens.py

Made with torch 2.13.0 (CPU) and transformers 5.24.0, which only this script needs. Each folder holds config.json,
model.safetensors (bfloat16) and logits.npy (float32 [T, V], of the tokens that `tokens` gives). The sequence is three
times as long as the context before it was stretched, so that scaled rotary embeddings show.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "goldens"
LENGTH, VOCAB = 48, 40
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=3,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
KINDS: dict[str, tuple[str, dict]] = {  # name -> (model_type, fields that differ)
    "qwen3": ("qwen3", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3_yarn": ("qwen3", dict(rope_parameters=YARN)),
    "qwen3_yarn_mscale": (
        "qwen3",
        dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=4.0, beta_slow=0.5, truncate=False)),
    ),
    "qwen3_bias_yarn": ("qwen3", dict(attention_bias=True, rope_parameters=YARN)),
    "llama": ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "llama3": ("llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama_linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "qwen2": ("qwen2", dict(head_dim=None, hidden_size=32, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "mistral": ("mistral", dict(sliding_window=None, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
}


def tokens() -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCAB, LENGTH)


def make(name: str) -> None:
    """One folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = KINDS[name]
    fields = {key: value for key, value in (SIZES | changes).items() if value is not None or key != "head_dim"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), attn_implementation="eager")
    torch.manual_seed(sorted(KINDS).index(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.2 * noise if "norm" in key else 0.3 * noise)
        model.to(torch.bfloat16).save_pretrained(FOLDER / name)
        # Read again: .to() also rounds the rotary frequencies, which a model that is loaded has in float32.
        model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32, attn_implementation="eager")
        logits = model.eval()(torch.tensor(tokens())[None]).logits[0]
    np.save(FOLDER / name / "logits.npy", logits.numpy().astype(np.float32))
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for each in KINDS:
        make(each)
