"""The fields of one config, read as what they must be: a count, a switch, a list of words; refused by name otherwise.

A field that a family needs and the config lacks is an error that names it. Three exceptions, each a rule:

    what a family's class takes when the field is absent, where checkpoints do leave it out (num_key_value_heads of
    early Llamas, tie_word_embeddings of every Gemma): the family's row says so
    null is absent
    the text part of a multimodal config lists only what differs from the defaults of its class (LLaVA, Gemma 3), so
    there, and only there, those defaults count: ``spare``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from narrowcast.errors import CheckpointError

DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Fields that older or other families spell in their own way, each with one meaning: read where ours is absent.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
    "num_experts": ("moe_num_experts",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "moe_topk"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
}
LARGEST = 1 << 40  # no dimension of a model comes near it; a larger number is a slip
LAYERS = 1 << 20  # nor so many layers, which some families count one by one


class Fields:
    """Reads of ``config``, the text part; ``outer`` is the config around it, or the same."""

    def __init__(
        self,
        config: Mapping[str, Any],
        family: str,
        *,
        outer: Mapping[str, Any] | None = None,
        spare: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.family = family
        self.outer = config if outer is None else outer
        self.spare = spare or {}

    def value(self, name: str) -> Any:
        """The field as it stands; None where it is absent or null."""
        for spelling in (name, *SPELLINGS.get(name, ())):
            found = self.config.get(spelling)
            if found is not None:
                return found
        return self.spare.get(name)

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Say which field is wrong, and what the family wants of it."""
        value = self.value(name)
        name = next((other for other in (name, *SPELLINGS.get(name, ())) if other in self.config), name)
        raise CheckpointError(
            f"{name} is {'missing' if value is None else f'not {wanted}'}",
            where=f"config.json {name}",
            got="nothing" if value is None else repr(value)[:60],
            wanted=f"{wanted}, for the family {self.family}",
        )

    def spelled(self, *names: str) -> str:
        """The first of the ``names`` that the config has, the first where it has none: the same field by age."""
        return next((name for name in names if self.has(name)), names[0])

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """A whole number from ``least`` to ``most``; ``default`` where the config has none."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value:
            self.refuse(name, f"a whole number of at least {least}")
        if value > most:
            self.refuse(name, f"a number up to {most:,}")
        return value

    def maybe(self, name: str) -> int | None:
        """A whole number, or None where the config has none."""
        return self.count(name) if self.has(name) else None

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def listed(self, name: str) -> Sequence[Any] | None:
        """A list, or None where the config has none."""
        value = self.value(name)
        if value is not None and not isinstance(value, list | tuple):
            self.refuse(name, "a list")
        return value

    def numbers(self, name: str) -> frozenset[int] | None:
        """A list of layer numbers, or None where the config has none."""
        value = self.listed(name)
        if value is not None and not all(type(item) is int and item >= 0 for item in value):
            self.refuse(name, "a list of layer numbers")
        return None if value is None else frozenset(value)

    def words(self, name: str, layers: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """One of the ``known`` words for each layer, or None where the config has none."""
        value = self.listed(name)
        if value is None:
            return None
        if len(value) != layers or not all(isinstance(word, str) and word in known for word in value):
            self.refuse(name, f"{layers} of the words {', '.join(known)}")
        return tuple(value)

    def divided(self, name: str, value: int, by: int) -> int:
        """``value`` over ``by``, which ``name`` is; refused where it leaves a rest."""
        if value % by:
            self.refuse(name, f"a number that divides {value}")
        return value // by

    def tied(self, default: bool) -> bool:
        """Whether the head is the embedding: the outer config's word, else the text part's, else the class's."""
        if self.outer.get("tie_word_embeddings") is not None:
            return Fields(self.outer, self.family).flag("tie_word_embeddings")
        return self.flag("tie_word_embeddings", default)

    def dtype(self) -> str | None:
        """The dtype in our spelling; None where neither config names one."""
        for name in ("dtype", "torch_dtype"):
            for config in (self.config, self.outer):
                value = config.get(name)
                if value is None:
                    continue
                found = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
                if found is None:
                    Fields(config, self.family).refuse(name, " or ".join(DTYPES))
                return found
        return None
