"""What is wrong with the tensors of a file, all of it in one message, and the likely cause."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Sequence

from venusrl.core.errors import CheckpointError
from venusrl.models.config import ModelConfig

SHOWN = 8  # names of each kind in a message

# Parts of names that no supported model has -> what such a file is. The first that fits is told.
_SIGNS = (
    (
        ("lora_", ".modules_to_save.", "base_model.model."),
        "these are an adapter's (LoRA); merge it into its model first",
    ),
    (
        (".qweight", ".qzeros", ".scales", "weight_scale", ".absmax", ".quant_"),
        "the weights are quantised; use those that are not",
    ),
    (
        (".experts.", ".shared_expert", "block_sparse_moe", ".mlp.gate.weight"),
        "this is a mixture of experts, which is not supported",
    ),
    (
        ("vision", "visual.", "language_model.", "multi_modal"),
        "this is a model of text and images, which is not supported",
    ),
    (("score.weight", "classifier", "v_head"), "this is a reward or classification model, not a language model"),
    (("transformer.h.", "gpt_neox.", "model.decoder.", "linear_attn", "mixer."), "this is a model of another family"),
    (("qkv_proj", "gate_up_proj"), "this is Phi or another family that stores projections together"),
)

# Parts of names that a wrapper around a module puts before those of the module, at any place.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|base_model\.model|module)\."
)


@dataclasses.dataclass
class Findings:
    """Attributes:
    config: the model that is to be filled.
    seen: names of parameters that were found.
    extra: names that may be there and are no parameters: a tied model's lm_head, rotary_emb.inv_freq.
    unexpected: names that have no place.
    twice: names that were found again.
    misshapen: (name, shape in the file, shape that is needed).
    """

    config: ModelConfig
    seen: set[str] = dataclasses.field(default_factory=set)
    extra: set[str] = dataclasses.field(default_factory=set)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    twice: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[tuple[str, Sequence[int], Sequence[int]]] = dataclasses.field(default_factory=list)

    def check(self, wanted: Collection[str]) -> None:
        """Returns where all is as it should be.

        Raises:
          CheckpointError: what is missing, unexpected, twice and of another shape, and the likely cause.
        """
        missing = [name for name in wanted if name not in self.seen]
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(wanted)} tensors are missing: {_listed(missing)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} have no place in this model: {_listed(self.unexpected)}")
        if self.twice:
            parts.append(f"{_listed(self.twice)} {'is' if len(self.twice) == 1 else 'are'} there twice")
        if self.misshapen:
            shapes = [
                f"{name} has shape {tuple(was)}, the model needs {tuple(need)}" for name, was, need in self.misshapen
            ]
            parts.append(f"{len(self.misshapen)} of another shape: {_listed(shapes)}")
        if parts:
            raise CheckpointError(f"{'; '.join(parts)}. {self._cause(missing, len(wanted))}")

    def _cause(self, missing: list[str], wanted: int) -> str:
        """The likely cause and what to do."""
        extra = self.unexpected
        if wrapped := self._wrapped(missing):
            return wrapped
        for signs, cause in _SIGNS:
            if any(sign in name for name in extra for sign in signs):
                return f"By their names {cause}"
        if self.twice:
            return "Two files hold the same tensors; remove one of them"
        if len(missing) == wanted and any(f"model.{name}" in missing for name in extra):
            return (
                "The names lack 'model.' in front: the model was saved without its head; save the causal language model"
            )
        for sign, what in (("_proj.bias", "biases"), ("q_norm", "norms of queries")):
            if any(sign in name for name in extra):
                return f"The file has {what} and this shape has none: config.json or model.name is of another family"
            if any(sign in name for name in missing) and not any(sign in name for name in self.seen):
                return f"This shape has {what} and the file has none: config.json or model.name is of another family"
        if missing == ["lm_head.weight"] and not extra:
            return (
                "The head is the only one missing: the model is tied; set tie_word_embeddings in its config.json, or "
                "model.name to a tied shape"
            )
        layers = {name.split(".")[2] for name in extra if name.startswith("model.layers.")}
        if layers and not missing and all(layer.isdigit() and int(layer) >= self.config.layers for layer in layers):
            return (
                f"The file has more layers than the {self.config.layers} of this shape; fix model.name or config.json"
            )
        if self.misshapen and not extra:
            return "The weights are of another size than config.json or model.name say; copy the files of one model"
        if extra:
            return "The file is of another model; fix model.name or model.checkpoint"
        return "The file is incomplete: a part of it was not copied, or it is of a smaller model"

    def _wrapped(self, missing: list[str]) -> str:
        """What to say where all that is missing is there under longer names; "" where it is not."""
        lacking = set(missing)
        if not lacking:
            return ""
        ends = {name.split(".", depth)[-1] for name in missing for depth in (0, 1)}  # with and without "model."
        before = Counter(
            name[:start] for name in self.unexpected for start in _starts(name) if start and name[start:] in ends
        )
        for prefix, _ in before.most_common(8):
            if not all(name.startswith(prefix) for name in self.unexpected):
                continue  # beside the model there is something else
            inner = {name.removeprefix(prefix) for name in self.unexpected}
            what = f"Every name has {prefix!r} in front: it is of a wrapper (DataParallel, torch.compile, an adapter's)"
            if lacking <= inner:
                return f"{what}; save the model inside it, or take {prefix!r} off the names"
            bare = not _WRAPPERS.sub("", prefix)  # else it may be the name of a part of another model
            if bare and {name for name in lacking if name.startswith("model.")} <= {f"model.{name}" for name in inner}:
                return (
                    f"{what}, and lacks 'model.' after it: the model was saved without its head; save the causal "
                    "language model inside it"
                )
        found = {part for name in self.unexpected for part in _WRAPPERS.findall(name)}
        if found and lacking <= {_WRAPPERS.sub("", name) for name in self.unexpected}:
            return (
                f"Names have {' and '.join(sorted(repr(part + '.') for part in found))} in them: these are of wrappers "
                "(FSDP, torch.compile) around the model and its layers; save the model inside them"
            )
        return ""


def _starts(name: str) -> list[int]:
    """Where a part of `name` begins."""
    return [0, *(match.end() for match in re.finditer(r"\.", name))]


def _listed(items: list[str]) -> str:
    """The first of them, in one order whatever order a file gives: numbers by their size, layer 9 before layer 10."""
    items = sorted(items, key=lambda name: [part.zfill(20) if part.isdigit() else part for part in name.split(".")])
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
