"""The decoder again in plain numpy: one sequence, loops over layers and heads, float64."""

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x_TH, theta):
    """Complex form of RoPE: pair (i, i + H/2) turns by position * theta^(-2i/H)."""
    length, width = x_TH.shape
    half = width // 2
    z = x_TH[:, :half] + 1j * x_TH[:, half:]
    z = z * np.exp(1j * np.outer(np.arange(length), theta ** (-2.0 * np.arange(half) / width)))
    return np.concatenate([z.real, z.imag], axis=1)


def attention(q_TNH, k_TKH, v_TKH):
    """Causal attention of one sequence, a head and a query at a time."""
    length, heads, width = q_TNH.shape
    group = heads // k_TKH.shape[1]
    out = np.zeros_like(q_TNH)
    for head in range(heads):
        for t in range(length):
            scores = k_TKH[: t + 1, head // group] @ q_TNH[t, head] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v_TKH[: t + 1, head // group] / weights.sum()
    return out


def forward(params, config, tokens):
    """Logits [T, V] of one sequence."""
    c = config
    p = params
    f64 = lambda x: np.asarray(x, np.float64)  # noqa: E731
    x = f64(p["embedding"])[np.asarray(tokens)]
    for i in range(c.layers):
        layer = p[f"layer_{i}"]
        y = rms_norm(x, f64(layer["attn_norm"]["scale"]), c.norm_eps)
        q, k, v = (np.einsum("td,dnh->tnh", y, f64(layer["attn"][name])) for name in "qkv")
        if c.qk_norm:
            q = rms_norm(q, f64(layer["attn"]["q_norm"]["scale"]), c.norm_eps)
            k = rms_norm(k, f64(layer["attn"]["k_norm"]["scale"]), c.norm_eps)
        q = np.stack([rotate(q[:, n], c.rope_theta) for n in range(c.heads)], axis=1)
        k = np.stack([rotate(k[:, n], c.rope_theta) for n in range(c.kv_heads)], axis=1)
        x = x + np.einsum("tnh,nhd->td", attention(q, k, v), f64(layer["attn"]["o"]))
        y = rms_norm(x, f64(layer["mlp_norm"]["scale"]), c.norm_eps)
        gate, up = y @ f64(layer["mlp"]["gate"]), y @ f64(layer["mlp"]["up"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ f64(layer["mlp"]["down"])
    x = rms_norm(x, f64(p["final_norm"]["scale"]), c.norm_eps)
    return x @ (f64(p["head"]) if not c.tied else f64(p["embedding"]).T)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def random_params(shapes, seed=0):
    """Parameters like `shapes` (a tree of things with a shape), without compiling anything; norms near 1."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        x = rng.normal(size=shape).astype(np.float32)
        return 1 + 0.2 * x if len(shape) == 1 else 0.3 * x

    def walk(tree):
        return {k: walk(v) for k, v in sorted(tree.items())} if isinstance(tree, dict) else leaf(tree.shape)

    return walk(shapes)
