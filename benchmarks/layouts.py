"""The chunk layouts beside planes-first NHD, each with as many bytes as such a model has.

Shapes: NB blocks, BS token slots, NH heads, HS elements; see `contexts/formats.py`. Bytes per token
are Llama-3-8B's (8 heads of 128 in 32 layers), or DeepSeek-V3's for latent caches.
"""

from __future__ import annotations

from benchmarks.models import BLOCK_TOKENS, Layer, Model
from lmcache_worker.wire import EngineGroup

CHUNKS = 4
MANY_CHUNKS = 16
"""Of chunks that are a few MiB."""

_NB, _BS, _NH, _HS = 160, BLOCK_TOKENS, 8, 128
_MANY_BLOCKS = 544
_LAYERS = 32
_MLA_LAYERS, _MLA_WIDTH, _INDEX_BYTES = 61, 576, 132

_HALVES = (tuple(range(0, _LAYERS, 2)), tuple(range(1, _LAYERS, 2)))


def _alike(name: str, hint: str, *shape: int, layers: int = _LAYERS, block_axis: int = 0) -> Model:
    return Model(name, (Layer(shape, block_axis),) * layers, _NB, hint)


def _two(name: str, one: Layer, other: Layer, *groups: EngineGroup, pairs: int = 16) -> Model:
    return Model(name, (one, other) * pairs, _NB, groups=groups)


def _planes(heads: int, slots: int = _BS) -> Layer:
    return Layer((2, _NB, slots, heads, _HS), block_axis=1)


LAYOUTS: dict[str, tuple[str, Model]] = {
    "planes-hnd": (
        "[2, NB, NH, BS, HS]",
        _alike("planes-hnd", "HND", 2, _NB, _NH, _BS, _HS, block_axis=1),
    ),
    "inner-nhd": ("[NB, 2, BS, NH, HS]", _alike("inner-nhd", "NHD", _NB, 2, _BS, _NH, _HS)),
    "inner-hnd": ("[NB, 2, NH, BS, HS]", _alike("inner-hnd", "HND", _NB, 2, _NH, _BS, _HS)),
    "fused-nhd": ("[NB, BS, NH, 2·HS]", _alike("fused-nhd", "NHD", _NB, _BS, _NH, 2 * _HS)),
    "fused-hnd": ("[NB, NH, BS, 2·HS]", _alike("fused-hnd", "HND", _NB, _NH, _BS, 2 * _HS)),
    "mla": (
        "[NB, BS, 576], MLA",
        _alike("mla", "NHD", _NB, _BS, _MLA_WIDTH, layers=_MLA_LAYERS),
    ),
    "mla-index": (
        "MLA with its sparse-attention index, uint8 [NB, BS, 132]",
        _two(
            "mla-index",
            Layer((_NB, _BS, _MLA_WIDTH)),
            Layer((_NB, _BS, _INDEX_BYTES), dtype="uint8"),
            EngineGroup(0, range(0, 2 * _MLA_LAYERS, 2), _BS),
            EngineGroup(0, range(1, 2 * _MLA_LAYERS, 2), _BS),
            pairs=_MLA_LAYERS,
        ),
    ),
    "compressed": (
        "MLA, compressed: 4 slots for 16 tokens",
        Model(
            "compressed",
            (Layer((_MANY_BLOCKS, 4, _MLA_WIDTH)),) * _MLA_LAYERS,
            _MANY_BLOCKS,
            groups=(EngineGroup(0, range(_MLA_LAYERS), _BS),),
        ),
    ),
    "kernel-groups": (
        "layers of 8 and of 4 heads in one engine group",
        _two(
            "kernel-groups",
            _planes(_NH),
            _planes(_NH // 2),
            EngineGroup(0, _HALVES[0], _BS),
            EngineGroup(0, _HALVES[1], _BS),
        ),
    ),
    "block-sizes": (
        "engine groups with blocks of 16 and of 32 tokens",
        _two(
            "block-sizes",
            _planes(_NH),
            _planes(_NH, 2 * _BS),
            EngineGroup(0, _HALVES[0], _BS),
            EngineGroup(1, _HALVES[1], 2 * _BS),
        ),
    ),
    "window": (
        "every other layer with a sliding window of 128 tokens",
        _two(
            "window",
            _planes(_NH),
            _planes(_NH),
            EngineGroup(0, _HALVES[0], _BS),
            EngineGroup(1, _HALVES[1], _BS, sw_size_tokens=128),
        ),
    ),
}
"""By the key of its rows: what the table calls it, and the model. Planes-first NHD has rows of its
own."""
