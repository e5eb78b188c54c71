"""ChatML rendered incrementally: the ids of turn k+1 always start with the ids of turn k.

A whole-history template re-renders what the model wrote (it strips, it re-tokenises); this one only ever appends.
`check_template` holds it against a model's own Jinja template.
"""

from collections.abc import Sequence

from jinja2.sandbox import ImmutableSandboxedEnvironment

from venusrl.core.errors import ConfigError
from venusrl.models.tokenizer import IM_END, IM_START, Tokenizer

Message = dict[str, str]  # {"role": ..., "content": ...}


class ChatFormat:
    """Turns messages into token ids for one trajectory."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n")
        self.stop_tokens: tuple[int, ...] = (tokenizer.im_end, tokenizer.end_of_text)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the opening messages and the header of the assistant's first turn."""
        ids: list[int] = []
        for message in messages:
            ids += self._message(message["role"], message["content"])
        return ids + self._header()

    def observation(self, text: str, last_token: int, role: str = "user") -> list[int]:
        """Ids that follow a generated turn: its close, the observation, and the next header.

        Args:
          text: what the environment answered.
          last_token: last generated token. Where it is not the end of the message (cut by length, or another stop
            token), the end is supplied here, as an observation: the policy did not choose it.
        """
        return self.continuation([{"role": role, "content": text}], last_token)

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """As `observation`, for several messages."""
        close = [] if last_token == self._tokenizer.im_end else [self._tokenizer.im_end]
        return close + self._newline + self.prompt(messages)

    def reply(self, ids: Sequence[int]) -> str:
        """Text of a generated turn, without control tokens."""
        return self._tokenizer.decode(ids)

    def check_template(self, template: str) -> None:
        """Compares with a model's Jinja chat template, which is run as what it is: code of whoever made the file.

        Raises:
          ConfigError: the template fails, or would render another text; names both.
        """
        messages = [
            {"role": "system", "content": "S s"},
            {"role": "user", "content": "U\nu"},
            {"role": "assistant", "content": "A a"},
            {"role": "user", "content": "O"},
        ]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            theirs = environment.from_string(template).render(messages=messages, add_generation_prompt=True)
        except Exception as error:  # whatever a stranger's code raises
            raise ConfigError(f"the model's chat template fails ({error}); use a model that speaks ChatML") from error
        ours = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages) + f"{IM_START}assistant\n"
        if theirs != ours:
            raise ConfigError(
                f"the model's chat template is not ChatML: it gives {theirs!r}, we render {ours!r}; "
                "use a model that speaks ChatML"
            )

    def _message(self, role: str, content: str) -> list[int]:
        # Role and content in one piece: leading white space of the content may merge with the header's newline.
        body = self._tokenizer.encode(f"{role}\n{content}")
        return [self._tokenizer.im_start, *body, self._tokenizer.im_end, *self._newline]

    def _header(self) -> list[int]:
        return [self._tokenizer.im_start, *self._tokenizer.encode("assistant\n")]
