"""Logprobs and entropies of given tokens, a chunk of time at a time: [B, T, V] never exists."""

import jax
import jax.numpy as jnp

LOWEST = -1e30  # of a logit, below the largest


def token_logprobs(
    hidden_BTD: jax.Array, head_DV: jax.Array, tokens_BT: jax.Array, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Logprob of each token given the tokens before it, and the entropy of that distribution.

    Args:
      hidden_BTD: final hidden states.
      head_DV: the head in float32; it is cast to the type of `hidden` for each chunk, so that its gradient is summed
        in float32 (0.0013 relative error against 0.0050 for a bfloat16 sum).
      tokens_BT: the sequence that gave `hidden`.
      temperature: logits are divided by it, as the engine does.
      chunk: positions of one step; logits of B x chunk x V exist at a time, forward and backward.

    Returns:
      (logprobs_BT, entropies_BT) in float32; column t speaks of token t, column 0 is 0.
    """
    batch, length, _ = hidden_BTD.shape
    steps = -(-(length - 1) // chunk)
    padding = steps * chunk - (length - 1)

    def chunks(x, fill):  # [B, T-1, ...] -> [steps, B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, steps, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(hidden, targets):
        logits = jnp.einsum("bcd,dv->bcv", hidden, head_DV.astype(hidden.dtype), preferred_element_type=jnp.float32)
        # As in the engine's sampling: the largest is taken off before the division, so that a small temperature loses
        # nothing. LOWEST keeps what overflows a number: its probability is 0, and 0 times -inf would be none.
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        logits = jnp.maximum((logits - largest) / temperature, LOWEST)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        entropy = log_z - (jax.nn.softmax(logits, axis=-1) * logits).sum(-1)
        return chosen - log_z, entropy

    hidden_chunks, target_chunks = chunks(hidden_BTD[:, :-1], 0), chunks(tokens_BT[:, 1:], 0)
    if steps == 1:
        outputs = tuple(x[None] for x in one(hidden_chunks[0], target_chunks[0]))
    else:
        _, outputs = jax.lax.scan(lambda carry, xs: (carry, one(*xs)), None, (hidden_chunks, target_chunks))

    def whole(x):  # [steps, B, chunk] -> [B, T]
        flat = jnp.moveaxis(x, 0, 1).reshape(batch, steps * chunk)[:, : length - 1]
        return jnp.pad(flat, ((0, 0), (1, 0)))

    return whole(outputs[0]), whole(outputs[1])
