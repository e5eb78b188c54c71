"""How long a step of generation or training takes on an accelerator: a roofline over data sheets.

Nothing here is fitted to a result of the paper. What is not on a data sheet is a share of a peak that published systems
attain, named below with its source, and the same for every scheduler.
"""

import dataclasses
from typing import Protocol

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name
from venusrl.models.config import ModelConfig

BYTES = 2  # of a weight or a KV element, bfloat16

# Shares of the data sheet's peaks that are attained.
MEMORY_SHARE = 0.85  # STREAM-like kernels on H100: 0.85 to 0.93 of 3.35 TB/s
PREFILL_SHARE = 0.60  # dense products in bfloat16 on H100: 0.6 to 0.75 (FlashAttention-3, arXiv 2407.08608)
TRAIN_SHARE = 0.40  # Megatron-LM's README reports up to 0.47 of H100's peak
KV_MEMORY_SHARE = 0.88  # of device memory for weights and KV: SGLang's mem_fraction_static on 80 GB devices
ALLREDUCE_S = 10e-6  # latency of one small all-reduce over NVLink; two a layer under tensor parallelism


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Attributes:
    flops: dense bfloat16 peak, FLOP/s.
    bandwidth: of device memory, bytes/s.
    memory: of the device, bytes.
    link: of the network, one device's share in one direction, bytes/s.
    host: to and from host memory, one direction, bytes/s.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    host: float


# NVIDIA's data sheets (H100 SXM5; H800 has its compute and memory), with one 400 Gb/s adapter a device; PCIe 5.0 x16.
ACCELERATORS = {
    "h100": Accelerator(flops=989e12, bandwidth=3.35e12, memory=80e9, link=50e9, host=64e9),
    "h800": Accelerator(flops=989e12, bandwidth=3.35e12, memory=80e9, link=50e9, host=64e9),
}


def accelerator(name: str) -> Accelerator:
    """Raises:
    ConfigError: no such accelerator.
    """
    check_name("accelerator", name, ACCELERATORS)
    return ACCELERATORS[name]


class EngineCost(Protocol):
    """Seconds of generation steps. The simulated worker asks for nothing else, so a measured cost can stand in.

    Attributes:
      kv_tokens: tokens of KV that the worker holds.
    """

    kv_tokens: int

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        """One step: a token for each of `requests`, which read `kv_tokens` of KV together."""
        ...

    def prefill_s(self, chunks: list[tuple[int, int]]) -> float:
        """Prefill of (new, cached) tokens of some requests, in one pass."""
        ...

    def transfer_s(self, tokens: int) -> float:
        """KV of `tokens` to another worker."""
        ...

    def host_s(self, tokens: int) -> float:
        """KV of `tokens` from host memory."""
        ...


class Roofline:
    """A worker of `tensor` devices."""

    def __init__(self, model: ModelConfig, device: Accelerator, tensor: int):
        self.params = model.num_params
        weights = self.params * BYTES
        self._kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * BYTES  # of a token
        self.kv_tokens = int((device.memory * KV_MEMORY_SHARE * tensor - weights) / self._kv_bytes)
        if self.kv_tokens < 1:
            raise ConfigError(
                f"tensor={tensor}: {weights / 1e9:.0f} GB of weights leave no KV on devices of "
                f"{device.memory / 1e9:.0f} GB; take more a worker"
            )
        bandwidth = device.bandwidth * MEMORY_SHARE * tensor
        self._weights_s = weights / bandwidth
        self._kv_s = self._kv_bytes / bandwidth
        flops = device.flops * PREFILL_SHARE * tensor
        self._token_s = 2 * self.params / flops
        self._pair_s = 4 * model.layers * model.heads * model.head_dim / flops  # one query on one key
        self._fixed_s = 2 * model.layers * ALLREDUCE_S if tensor > 1 else 0.0
        self._link = device.link * tensor
        self._host = device.host * MEMORY_SHARE * tensor

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        memory = self._weights_s + self._kv_s * kv_tokens
        compute = self._token_s * requests
        return (memory if memory > compute else compute) + self._fixed_s

    def prefill_s(self, chunks: list[tuple[int, int]]) -> float:
        compute = 0.0
        for new, cached in chunks:
            compute += self._token_s * new + self._pair_s * new * (cached + new / 2)
        return max(compute, self._weights_s) + self._fixed_s

    def transfer_s(self, tokens: int) -> float:
        return tokens * self._kv_bytes / self._link

    def host_s(self, tokens: int) -> float:
        return tokens * self._kv_bytes / self._host


@dataclasses.dataclass(frozen=True)
class TrainerCost:
    """A trainer of `devices` that recomputes logprobs once and takes one step on the batch."""

    model: ModelConfig
    device: Accelerator
    devices: int

    def step_s(self, lengths: list[int]) -> float:
        """Seconds for trajectories of these lengths, in tokens: 8 FLOP a parameter and token (forward, forward and
        backward), four times a forward's attention."""
        m = self.model
        pair = 4 * m.layers * m.heads * m.head_dim
        flops = sum(8 * m.num_params * n + 4 * pair * n * n / 2 for n in lengths)
        return flops / (self.devices * self.device.flops * TRAIN_SHARE)

    def publish_s(self, tensor: int) -> float:
        """Seconds until every worker has new weights, broadcast shard by shard."""
        return self.model.num_params * BYTES / tensor / self.device.link


@dataclasses.dataclass(frozen=True)
class Measured:
    """A cost measured on a live worker. Attributes:
    kv_tokens: tokens of KV that it holds.
    decode: (requests, seconds of a step) at some batch sizes, ascending; linear in between, constant outside.
    prefill_fixed_s, prefill_token_s: of a pass, and of each of its tokens.
    """

    kv_tokens: int
    decode: tuple[tuple[int, float], ...]
    prefill_fixed_s: float
    prefill_token_s: float

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        del kv_tokens
        (low, low_s), *rest = self.decode
        for high, high_s in rest:
            if requests < high:
                share = max(0.0, (requests - low) / (high - low))
                return low_s + share * (high_s - low_s)
            low, low_s = high, high_s
        return low_s

    def prefill_s(self, chunks: list[tuple[int, int]]) -> float:
        return self.prefill_fixed_s + self.prefill_token_s * sum(new for new, _ in chunks)

    def transfer_s(self, tokens: int) -> float:
        return self.prefill_s([(tokens, 0)])  # as if it were computed again

    def host_s(self, tokens: int) -> float:
        return self.transfer_s(tokens)
