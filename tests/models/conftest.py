"""A tokenizer and a model small enough to compile in a second."""

import pytest

from venusrl.models.config import ModelConfig
from venusrl.models.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "user\nassistant\nsystem\n  indented\n\n\n  text 1234",
    "def add(a, b):\n    return a + b\n",
    "<|im_end|> is spelled here, <|im_start|>user too",
] * 3


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train(TEXTS, 400)


@pytest.fixture(scope="session")
def config():
    return ModelConfig(64, 32, 2, 4, 2, 8, 48, rope_theta=1e4, max_length=128)
