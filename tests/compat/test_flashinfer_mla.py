"""FlashInfer's MLA wrapper: latent and rotated parts of one cache, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cases import flashinfer_case, natural, require_close  # noqa: E402

from paged_ops import reference  # noqa: E402
from paged_ops.compat import flashinfer  # noqa: E402
from paged_ops.compat.flashinfer import mla  # noqa: E402
from paged_ops.testing.cases import Case, build  # noqa: E402

DEEPSEEK = (512, 64)
DIMS = [pytest.param((64, 16), id="64+16"), pytest.param(DEEPSEEK, id="512+64")]


def wanted_of(case: Case, latent: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = build(case)
    tensors = inputs.query, inputs.key_cache, inputs.key_cache[..., :latent]
    return reference.paged_attention(
        *tensors,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        causal=case.causal,
        scale=case.applied_scale,
        return_lse=True,
    )


def run(
    case: Case,
    dims: tuple[int, int],
    caches: Any = None,
    *,
    planned: tuple[int, int] | None = None,
    lengths: tuple[int, ...] | None = None,
    use_profiler: bool = False,
    **options: Any,
) -> Any:
    """The wrapper's result; caches: a function from the joined cache to (ckv, kpe)."""
    given, latent = flashinfer_case(case, pair=True), dims[0]
    joined = given.cache[0][:, :, 0]
    ckv, kpe = (caches or (lambda x: (x[..., :latent], x[..., latent:])))(joined)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(given.workspace())
    wrapper.plan(
        given.qo_indptr,
        given.indptr,
        given.indices,
        torch.tensor(lengths or case.seq_lens, dtype=torch.int32),
        case.num_q_heads,
        *(planned or dims),
        case.block_size,
        case.causal,
        case.applied_scale,
        torch.float32,
        torch.float32,
        use_profiler,
    )
    q_nope, q_pe = given.q[..., :latent].contiguous(), given.q[..., latent:].contiguous()
    return wrapper.run(q_nope, q_pe, ckv, kpe, **options)


def case_of(dims: tuple[int, int], **changes: Any) -> Case:
    fields: dict[str, Any] = dict(num_q_heads=4, num_kv_heads=1, head_dim=sum(dims), scale=192**-0.5)
    return Case((40, 17, 1), (1, 5, 1), **{**fields, **changes})


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("separate", [False, True])
def test_values_and_lse(dims: tuple[int, int], causal: bool, separate: bool) -> None:
    case = case_of(dims, causal=causal)
    split = lambda x: (x[..., : dims[0]].clone(), x[..., dims[0] :].clone())  # noqa: E731
    out, lse = run(case, dims, split if separate else None, return_lse=True)
    wanted, wanted_lse = wanted_of(case, dims[0])
    require_close(out, wanted)
    require_close(natural(lse), wanted_lse)
    _, lse_e = run(case, dims, return_lse=True, return_lse_base_on_e=True)
    require_close(lse_e, wanted_lse)


def test_parts_of_one_cache_are_not_copied() -> None:
    whole = torch.arange(2 * 3 * 24.0).view(2, 3, 24)
    view = mla.joined(whole[..., :16], whole[..., 16:])
    assert view.data_ptr() == whole.data_ptr() and torch.equal(view, whole)
    inner = whole[1:, :, 4:20]
    view = mla.joined(inner[..., :8], inner[..., 8:])
    assert view.data_ptr() == inner.data_ptr() and torch.equal(view, inner)


def test_parts_that_only_look_alike_are_copied() -> None:
    """In the wrong order, apart, or from two tensors."""
    whole = torch.arange(2 * 3 * 24.0).view(2, 3, 24)
    for ckv, kpe in (
        (whole[..., 8:16], whole[..., :8]),
        (whole[..., :8], whole[..., 16:]),
        (whole[..., :8], (whole + 100)[..., 8:16]),
        (whole[:1, :, :8], whole[1:, :, 8:16]),
    ):
        assert torch.equal(mla.joined(ckv, kpe), torch.cat([ckv, kpe], dim=-1))


def test_refusals() -> None:
    case = case_of((64, 16))
    with pytest.raises(NotImplementedError, match="^backend"):
        flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1), backend="cutlass")
    with pytest.raises(NotImplementedError, match="^profiler_buffer"):
        run(case, (64, 16), profiler_buffer=torch.empty(1))
    with pytest.raises(NotImplementedError, match="without a plan"):
        run(case, (64, 16), page_table=torch.empty(1))
    with pytest.raises(ValueError, match="^ckv_cache: shape"):
        run(case, (64, 16), lambda x: (x[:, :, None], x))
    with pytest.raises(ValueError, match=r"^q: shape is \[., 4, 80\], planned was \(4, 96\)"):
        run(case, (64, 16), planned=(64, 32))
    with pytest.raises(ValueError, match="^kv_len_arr: holds more"):
        run(case, (64, 16), lengths=(49, 17, 1))
    with pytest.raises(NotImplementedError, match="^use_profiler"):
        run(case, (64, 16), use_profiler=True)
