"""FlashInfer's page helpers: lengths, positions of new tokens, writing them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cases import flashinfer_case  # noqa: E402

from paged_ops.compat import flashinfer  # noqa: E402
from paged_ops.testing import arrays  # noqa: E402
from paged_ops.testing.cases import Case, build  # noqa: E402


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_get_seq_lens() -> None:
    lengths = flashinfer.get_seq_lens(int32(0, 3, 4, 4, 6), int32(13, 8, 0, 16), 16)
    assert lengths.tolist() == [45, 8, 0, 32]


def test_positions_of_the_last_tokens() -> None:
    batch, position = flashinfer.get_batch_indices_positions(int32(0, 1, 3, 3, 6), int32(5, 5, 9, 3), 8)
    assert batch.dtype == position.dtype == torch.int32
    assert batch.tolist() == [0, 1, 1, 3, 3, 3, -1, -1]
    assert position.tolist() == [4, 3, 4, 0, 1, 2, -1, -1]


def test_positions_of_no_sequences() -> None:
    batch, position = flashinfer.get_batch_indices_positions(int32(0), int32(), 2)
    assert batch.tolist() == position.tolist() == [-1, -1]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True], ids=["5-D", "pair"])
def test_append_writes_the_new_tokens_and_nothing_else(pair: bool, kv_layout: str) -> None:
    case = Case((20, 16, 0, 3), block_size=5, head_dim=16)
    given, inputs = flashinfer_case(case, kv_layout, pair=pair), build(case)
    counts = [7, 1, 0, 3]
    append_indptr = int32(0, *np.cumsum(counts).tolist())
    lengths = flashinfer.get_seq_lens(given.indptr, given.last_page_len, case.block_size)
    assert lengths.tolist() == list(case.seq_lens)
    batch, position = flashinfer.get_batch_indices_positions(append_indptr, lengths, 13)  # two are padding
    key, value = (torch.randn(13, case.num_kv_heads, case.head_dim) for _ in range(2))
    flashinfer.append_paged_kv_cache(
        key, value, batch, position, given.cache, given.indices, given.indptr, given.last_page_len, kv_layout
    )
    row = 0
    for seq, count in enumerate(counts):
        for place in range(case.seq_lens[seq] - count, case.seq_lens[seq]):
            block = inputs.block_tables[seq, place // case.block_size]
            inputs.key_cache[block, place % case.block_size] = key[row]
            inputs.value_cache[block, place % case.block_size] = value[row]
            row += 1
    for cache, wanted in zip(
        given.cache if pair else given.cache.unbind(1), (inputs.key_cache, inputs.value_cache), strict=True
    ):
        cache = cache.transpose(1, 2) if kv_layout == "HND" else cache
        assert arrays.same_bits(cache.contiguous(), wanted)


def test_append_past_the_pages_is_refused() -> None:
    """Rather than written to the next sequence's page."""
    given = flashinfer_case(Case((5, 5), block_size=5))
    key = torch.zeros(1, 2, 64)
    before = given.cache.clone()
    with pytest.raises(ValueError, match=r"^positions: holds 5"):
        flashinfer.append_paged_kv_cache(key, key, int32(0), int32(5), given.cache, *given_table(given))
    assert arrays.same_bits(given.cache, before)


def given_table(given: object) -> tuple:
    return given.indices, given.indptr, given.last_page_len  # type: ignore[attr-defined]


def test_append_of_nothing() -> None:
    given = flashinfer_case(Case((5,)))
    nothing, none = torch.zeros(0, 2, 64), int32()
    before = given.cache.clone()
    flashinfer.append_paged_kv_cache(nothing, nothing, none, none, given.cache, *given_table(given))
    key = torch.zeros(1, 2, 64)
    flashinfer.append_paged_kv_cache(
        key, key, int32(-1), int32(-1), given.cache, int32(), int32(0, 0), int32(0)
    )
    assert arrays.same_bits(given.cache, before)
