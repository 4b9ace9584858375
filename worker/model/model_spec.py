"""What the rest of the worker may know about a loaded model: shapes, limits, names. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One attention layer's K/V shape. `window` is how many positions a row sees, itself included; None: all.

    `value_in_key`: a value is the first `value_dim` numbers of its key, as in latent attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    value_in_key: bool = False

    def elements_per_token(self) -> int:
        """Numbers stored for one position: the keys and, where they are apart, the values of every KV head."""
        return self.num_kv_heads * (self.key_dim + (0 if self.value_in_key else self.value_dim))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A loaded model in numbers. `dtype` and `kv_dtype` are torch's names without the prefix ("bfloat16").

    `weight_dtype` is "int8" where weights were rounded to 8 bits, else "": they are what `dtype` says.
    `weights_bytes` is what they take in memory, `int8_bytes` of that what holds them in 8 bits, besides.
    """

    name: str
    layers: tuple[LayerGeometry, ...]
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    dtype: str
    kv_dtype: str
    device: str
    weights_bytes: int = 0
    weight_dtype: str = ""
    int8_bytes: int = 0

    @property
    def weights_read_bytes(self) -> int:
        """What a step of one row reads of them."""
        return self.int8_bytes or self.weights_bytes

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the widest layer; layers may differ, see `layers`."""
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Key size of the widest layer; layers may differ, see `layers`."""
        return max(layer.key_dim for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer: how many positions a row sees, or None for all."""
        return tuple(layer.window for layer in self.layers)
