"""An OpenAI-compatible server that captures what it generates, token by token: the model behind an agent harness."""
