"""Runs decode steps of a compact decoder in compiled code: what steps of few rows, one a sequence, go through.

Reads the compact decoder's packed weights where they lie and owns buffers only. Takes a model only if every part of
it is of a kind that the compiled step knows; says which steps it takes. Never used in strict mode. Equal to the
compact decoder up to rounding: sums and residuals are float32 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from worker.model.compact_decoder import CompactDecoder, CompactLayer, Norm
from worker.model.compiled.int8_machine import INT8_ROWS_MAX, MULTIPLIES_INT8
from worker.model.compiled.int8_panels import round_and_pack
from worker.model.compiled.kernels import GELU, GELU_TANH, SILU
from worker.model.compiled.machine import LANES, PANEL
from worker.model.compiled.step import Decoder, Room, Rows, Team, decode
from worker.model.compiled.team import FEW_ROWS, ThreadTeam
from worker.model.forward_batch import ForwardBatch
from worker.model.kv_storage import KVStorage
from worker.model.linear import PANEL_INPUTS, Linear, PackedLinear
from worker.model.rms_norm import RmsNorm, WholeNorm, unnormed

ROWS_MAX = 32
# Beyond so many positions in all, torch reads what sequences have in common faster: once for all of them.
POSITIONS_MAX = 64 * 1024
ACTIVATION_CODES = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu": GELU}
POSITIONS_GROWTH = 1024     # room for scores grows by so many positions


class NotCompiled(Exception):
    """Why a decoder, or a storage, is left to torch."""


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise NotCompiled(why)


def _panels(product: Linear, num_out: int, num_in: int) -> int:
    if not isinstance(product, PackedLinear) or product.panels is None or product.shape != (num_out, num_in):
        raise NotCompiled("a weight lies otherwise than expected")
    return product.panels


def _norm_of(norm: Norm | None, size: int) -> tuple[np.ndarray, float]:
    """Weight and eps; of a norm that is not there, nothing that is read."""
    if isinstance(norm, WholeNorm):
        norm = norm.norm
    if norm is None or norm is unnormed:
        return np.zeros(size, dtype=np.float32), 0.0
    if not isinstance(norm, RmsNorm) or norm.eps is None or len(norm.weight) != size:
        raise NotCompiled("a norm is of another kind")
    return norm.weight.float().numpy(), norm.eps


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def mixed(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def product_sizes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each of a layer's products, in the step's order."""
        heads = self.num_heads * self.head_dim
        return ((self.mixed, self.hidden), (self.hidden, heads), (self.inner, self.hidden),
                (self.inner, self.hidden), (self.hidden, self.inner))


class _Int8Weights:
    """A decoder's weights in 8 bits."""

    def __init__(self, decoder: Decoder, shape: _Shape) -> None:
        self._packed: list[torch.Tensor] = []
        self._products = np.array([[self._pack(int(address), padded(num_out) // PANEL, num_in)
                                    for address, (num_out, num_in) in zip(row, shape.product_sizes, strict=True)]
                                   for row in decoder.products])
        self._head = self._pack(decoder.head, decoder.head_panels, shape.hidden)

    def _pack(self, address: int, num_panels: int, num_in: int) -> int:
        self._packed.append(packed := round_and_pack(address, num_panels, num_in))
        return packed.data_ptr()

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._packed)

    def read_by(self, decoder: Decoder) -> Decoder:
        return decoder._replace(products=self._products, head=self._head, is_int8=True)


def _shape_of(compact: CompactDecoder) -> _Shape:
    layer = compact.layers[0]
    part = layer.attention
    if not isinstance(layer.down, PackedLinear):
        raise NotCompiled("its weights are not packed")
    hidden, inner = layer.down.shape
    shape = _Shape(hidden, inner, part.num_heads, part.num_kv_heads, part.head_dim)
    _need(not any(size % PANEL_INPUTS for size in (shape.hidden, shape.inner, shape.head_dim)),
          "its sizes are no multiples of 32")
    for layer in compact.layers:
        part = layer.attention
        _need((part.num_heads, part.num_kv_heads, part.head_dim) == (shape.num_heads, shape.num_kv_heads,
                                                                     shape.head_dim), "its layers differ in size")
        _need((layer.after_attention is None) == (layer.after_mlp is None)
              == (compact.layers[0].after_mlp is None), "its layers differ in their norms")
        _need(type(part.query_norm) is type(part.key_norm)
              is type(compact.layers[0].attention.key_norm), "its layers differ in their norms")
        _need((layer.before_attention is unnormed) == (layer.before_mlp is unnormed)
              == (compact.layers[0].before_mlp is unnormed), "its layers differ in their norms")
        others = (layer.attention_out, layer.gate, layer.up, layer.down)
        _need(not any(isinstance(each, PackedLinear) and each.bias is not None for each in others),
              "a product has a bias")
    return shape


def _take_layer(layer: CompactLayer, shape: _Shape) -> list[int]:
    """Addresses, in the step's order."""
    products = (layer.attention.qkv, layer.attention_out, layer.gate, layer.up, layer.down)
    return [_panels(product, *size) for product, size in zip(products, shape.product_sizes, strict=True)]


def _biases(compact: CompactDecoder, width: int) -> np.ndarray:
    given = [layer.attention.qkv.bias for layer in compact.layers if isinstance(layer.attention.qkv, PackedLinear)]
    if all(bias is None for bias in given):
        return np.zeros((0, 0), dtype=np.float32)
    biases = np.zeros((len(given), width), dtype=np.float32)
    for row, bias in zip(biases, given, strict=True):
        _need(bias is not None, "only some layers have biases")
        assert bias is not None
        row[:len(bias)] = bias.float().numpy()
    return biases


def padded(size: int) -> int:
    return -(-size // PANEL) * PANEL


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


class CompiledDecoder:
    """`logits` for what `takes` says yes to. One step at a time. NotCompiled for a decoder it does not know."""

    def __init__(self, compact: CompactDecoder, *, num_threads: int, is_int8: bool = False) -> None:
        """`is_int8`: `compact`'s weights are rounded to 8 bits, held so besides, and read so for as many rows as
        reading is what takes the time."""
        self.compact = compact
        self.shape = shape = _shape_of(compact)
        if not isinstance(compact.head, PackedLinear) or compact.head.bias is not None:
            raise NotCompiled("its head is of another kind")
        self.vocab_size = compact.head.shape[0]
        self._head_panels = padded(self.vocab_size) // PANEL
        self._fixed = _take(compact, shape)
        if is_int8:
            _need(MULTIPLIES_INT8, "this CPU has no AVX512-VBMI, which weights in 8 bits are read with")
        self._int8 = _Int8Weights(self._fixed, shape) if is_int8 else None
        self.team = ThreadTeam(num_threads)
        self._decoder: tuple[KVStorage, Decoder] | None = None
        self._rooms: dict[int, Room] = {}
        self._positions = 0

    @property
    def int8_bytes(self) -> int:
        """Held besides the compact decoder's weights."""
        return self._int8.num_bytes if self._int8 is not None else 0

    def takes(self, batch: ForwardBatch, storage: KVStorage) -> bool:
        """Few sequences, each with one row, whose logits alone are wanted."""
        sequences = batch.sequences
        if len(sequences) > ROWS_MAX or not self.reads(storage):
            return False
        if len(sequences) > 1 and sum(rows.start for rows in sequences) >= POSITIONS_MAX:
            return False
        return all(
            len(rows.token_ids) == 1 and rows.wants_logits and rows.num_scored == 0 and not rows.pools
            and rows.adapter is None for rows in sequences)

    def reads(self, storage: KVStorage) -> bool:
        """Head by head in bf16, blocks of whole registers of keys."""
        return (storage.head_major and storage.block_size % LANES == 0
                and all(store.dtype == torch.bfloat16 and store.device.type == "cpu" for store in storage.keys))

    def logits(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """float32 [sequences, vocab], after every layer's K/V were written."""
        num_rows = len(batch.sequences)
        decoder = self.decoder_over(storage)
        logits = torch.empty(num_rows, self._head_panels * PANEL)
        rows = self._rows(batch, storage, logits)
        room = self._room(num_rows, rows.tables.shape[1] * storage.block_size)
        if self._int8 is not None and num_rows <= INT8_ROWS_MAX:
            decoder = self._int8.read_by(decoder)
        team = Team(*self.team.for_step(FEW_ROWS))
        self.team.run(partial(_decode, team, decoder, (rows, room)), FEW_ROWS)
        return logits[:, :self.vocab_size]

    def _rows(self, batch: ForwardBatch, storage: KVStorage, logits: torch.Tensor) -> Rows:
        sequences, size = batch.sequences, storage.block_size
        starts = [rows.start for rows in sequences]
        hidden = self.compact.embedded(torch.tensor([rows.token_ids[0] for rows in sequences])).float()
        at = torch.tensor([starts])
        turns = torch.stack([torch.stack(rope(hidden, at)) for rope in self.compact.ropes])[:, :, 0]
        tables = np.zeros((len(sequences), max(starts) // size + 1), dtype=np.int64)
        for table, rows in zip(tables, sequences, strict=True):
            blocks = rows.block_table[:rows.start // size + 1]
            table[:len(blocks)] = blocks
        slots = [rows.block_table[rows.start // size] * size + rows.start % size
                 if rows.write_from <= rows.start else -1 for rows in sequences]
        return Rows(hidden.numpy(), np.array(starts), np.array(slots), tables, turns.contiguous().numpy(),
                    logits.numpy())

    def decoder_over(self, storage: KVStorage) -> Decoder:
        if self._decoder is None or self._decoder[0] is not storage:
            caches = np.array([[each.data_ptr() for each in pair] for pair in storage.slots_by_head])
            head_bytes = (storage.num_blocks + 1) * storage.block_size * self.shape.head_dim * 2
            fixed = self._fixed._replace(caches=caches, block_size=storage.block_size, head_bytes=head_bytes)
            self._decoder = storage, fixed
        return self._decoder[1]

    def _room(self, num_rows: int, positions: int) -> Room:
        """Buffers for so many rows; all are made anew when a longer context comes along."""
        if positions > self._positions:
            self._positions = -(-positions // POSITIONS_GROWTH) * POSITIONS_GROWTH
            self._rooms.clear()
        room = self._rooms.get(num_rows)
        if room is None:
            shape, size, heads = self.shape, self.team.size, self.shape.num_heads * self.shape.head_dim
            room = self._rooms[num_rows] = Room(
                mixed=zeros(num_rows, padded(shape.mixed)), attended=zeros(num_rows, heads, dtype=np.uint16),
                added=zeros(num_rows, padded(shape.hidden)), gated=zeros(num_rows, shape.inner, dtype=np.uint16),
                residual=zeros(size, num_rows, shape.hidden),
                normed=zeros(size, num_rows, shape.hidden, dtype=np.uint16),
                panels=zeros(size, 2, num_rows, PANEL), turned=zeros(size, shape.head_dim, dtype=np.uint16),
                scores=zeros(size, self._positions), weights=zeros(size, self._positions, dtype=np.uint16),
                sums=zeros(size, shape.head_dim))
        return room


def _decode(team: Team, decoder: Decoder, work: tuple[Rows, Room], thread: int) -> None:
    decode(thread, team, decoder, work)


def _take(compact: CompactDecoder, shape: _Shape) -> Decoder:
    """Everything but where the KV lies."""
    layers, first = compact.layers, compact.layers[0]
    norms, eps = zeros(len(layers) + 1, 4, shape.hidden), zeros(len(layers) + 1, 6)
    is_whole = isinstance(first.attention.query_norm, WholeNorm)
    normed_at_once = (shape.num_heads, shape.num_kv_heads) if is_whole else (1, 1)
    head_norms = zeros(len(layers), 2, normed_at_once[0] * shape.head_dim)
    for index, layer in enumerate(layers):
        of_rows = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
        for which, norm in enumerate(of_rows):
            norms[index, which], eps[index, which] = _norm_of(norm, shape.hidden)
        for which, norm in enumerate((layer.attention.query_norm, layer.attention.key_norm)):
            size = normed_at_once[which] * shape.head_dim
            head_norms[index, which, :size], eps[index, 4 + which] = _norm_of(norm, size)
    norms[-1, 0], eps[-1, 0] = _norm_of(compact.final_norm, shape.hidden)
    _need(all(layer.activation in ACTIVATION_CODES for layer in layers), "its activation is of another kind")
    assert isinstance(compact.head, PackedLinear)
    return Decoder(
        products=np.array([_take_layer(layer, shape) for layer in layers]), caches=zeros(0, 2, dtype=np.int64),
        norms=norms, head_norms=head_norms, eps=eps, biases=_biases(compact, padded(shape.mixed)),
        ropes=np.array([layer.attention.rope for layer in layers]),
        windows=np.array([layer.attention.window or 0 for layer in layers]),
        numbers=np.array([[layer.attention.scaling, layer.attention.softcap or 0.0, layer.residual_multiplier]
                          for layer in layers], dtype=np.float32),
        head=_panels(compact.head, compact.head.shape[0], shape.hidden),
        head_panels=padded(compact.head.shape[0]) // PANEL,
        logits_factor=np.float32(1.0 / compact.logits_scaling),
        logits_softcap=np.float32(compact.logits_softcap or 0.0), num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, inner=shape.inner,
        activation=ACTIVATION_CODES[first.activation], norms_heads=isinstance(first.attention.query_norm, RmsNorm),
        norms_whole=is_whole, norms_inputs=first.before_mlp is not unnormed, norms_added=first.after_mlp is not None,
        block_size=0, head_bytes=0, is_int8=False)
