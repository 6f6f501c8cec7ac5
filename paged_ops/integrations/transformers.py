"""``attn_implementation="paged_ops"`` for the models of Hugging Face transformers.

::

    import paged_ops.integrations.transformers  # registers the name
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="paged_ops")

The keys and values of a layer's cache, ``[batch, num_kv_heads, kv_len, head_dim]`` as transformers keeps
them, are read where they lie: a batch entry is a page of ``kv_len`` tokens, or, where padding makes sequences
start at different keys, every token is a page. KV heads are not repeated. There is no backward: run under
``torch.no_grad()``, as ``generate`` does.

A query that is padding gives 0 or what its sequence's keys give, and nobody uses it; eager attention averages
keys there. Not supported: packed sequences, position biases, dropout, attention weights as a result, and the
continuous batching of transformers, which takes names of its own list only and gathers each sequence's keys
before any attention function sees them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

import paged_ops
from paged_ops.integrations import _spans
from paged_ops.integrations._spans import Spans

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(
        "paged_ops.integrations.transformers: needs a version of transformers whose masks take q_offset, as "
        f"those of 5.24 do; this is {transformers.__version__}"
    )

NAME = "paged_ops"

# Where a mask keeps what it says. One that has lost it on its way, or never had it, is read again.
_SPANS = "_paged_ops_spans"


def _attention_op(*tensors: torch.Tensor, **options: Any) -> Any:
    """``paged_attention`` with the options that are not None."""
    options = {name: value for name, value in options.items() if value is not None}
    return paged_ops.paged_attention(*tensors, **options)


def paged_ops_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **options: Any,
) -> torch.Tensor:
    """What transformers calls once per forward pass and kind of layer to make a mask.

    A bool mask ``[batch, 1, q_length, kv_length]``, as models and ``generate`` hand them around, which brings
    its :class:`Spans` along as an attribute. ``NotImplementedError`` for masks that the ops cannot follow.

    attention_mask: bool ``[batch, tokens]``, False is padding; q_offset and kv_offset: numbers, or tensors of
    one. The arguments are those of all its mask functions.
    """
    options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    assert mask is not None
    end = q_offset - kv_offset + q_length
    if attention_mask is None and mask_function is causal_mask_function:  # known without reading
        spans = _spans.of_shape(batch_size, end, causal=True, device=mask.device)
    else:
        spans = _spans.of_mask(mask[:, 0], end)
    setattr(mask, _SPANS, spans)
    return mask


def paged_ops_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention.

    query ``[batch, num_q_heads, q_len, head_dim]``, key and value ``[batch, num_kv_heads, kv_len, .]``;
    attention_mask from :func:`paged_ops_mask`, a ready 4-D mask, or None: causal if the module is; s_aux:
    sinks ``[num_q_heads]`` -> ``([batch, q_len, num_q_heads, value_head_dim], None)``.
    """
    if dropout:
        raise NotImplementedError(f"dropout: is {dropout}, and the ops are for inference; call model.eval()")
    if position_bias is not None:
        raise NotImplementedError("position_bias: the ops add none to the logits")
    batch, num_q_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    spans = getattr(attention_mask, _SPANS, None)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        spans = _spans.of_shape(batch, kv_len, causal=causal, device=query.device)
        if sliding_window is not None and causal:
            spans.window = sliding_window
    elif spans is None:
        spans = _spans.of_mask(_visible(attention_mask, batch, kv_len), kv_len)

    key_cache, value_cache, block_tables = _pages(spans, key, value)
    rows = query.transpose(1, 2).reshape(batch * q_len, num_q_heads, query.shape[3])
    out = _attention_op(
        rows,
        key_cache,
        value_cache,
        block_tables,
        spans.lengths.to(torch.int32),
        torch.arange(batch + 1, dtype=torch.int32, device=query.device) * q_len,
        causal=spans.causal,
        scale=scaling,
        window=spans.window,
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.to(torch.float32),
    )
    return out.view(batch, q_len, num_q_heads, value.shape[3]), None


def _visible(mask: torch.Tensor, batch: int, kv_len: int) -> torch.Tensor:
    """A mask ``[batch or 1, 1, q_len, >= kv_len]``, bool or additive, as bool ``[batch, q_len, kv_len]``."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise NotImplementedError(
            f"attention_mask: shape is {tuple(mask.shape)}, wanted [batch, 1, q_len, kv_len]"
        )
    mask = mask[:, 0, :, :kv_len].expand(batch, -1, -1)
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
        raise NotImplementedError("attention_mask: adds to logits that it does not hide")
    return seen


def _pages(
    spans: Spans, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key cache, value cache and block table over ``[batch, num_kv_heads, kv_len, head_dim]`` in memory."""
    batch, _, kv_len, _ = key.shape
    if spans.starts is None:
        if (0, 0) not in spans.tables:
            spans.tables[0, 0] = torch.arange(batch, dtype=torch.int32, device=key.device)[:, None]
        return key.transpose(1, 2), value.transpose(1, 2), spans.tables[0, 0]

    # A token is a page, and the next token's the next page: the pages of all sequences lie at one stride, as
    # a batch entry's first key is a whole number of tokens behind that of the entry before.
    pitches = {_pitch(tensor) for tensor in (key, value)}
    if len(pitches) > 1 or None in pitches:
        key, value = key.contiguous(), value.contiguous()
    pitch = _pitch(key)
    assert pitch is not None and pitch == _pitch(value)
    if (pitch, kv_len) not in spans.tables:
        token = torch.arange(kv_len, device=key.device)
        first = torch.arange(batch, device=key.device) * pitch + spans.starts
        # Past a sequence's end there may be no such pages; nothing is read there.
        spans.tables[pitch, kv_len] = (first[:, None] + token).to(torch.int32)
    return _token_pages(key, pitch), _token_pages(value, pitch), spans.tables[pitch, kv_len]


def _pitch(tensor: torch.Tensor) -> int | None:
    """Tokens from one batch entry to the next, if that is a number of them, and rows are contiguous."""
    batch, _, kv_len, _ = tensor.shape
    stride = tensor.stride(2)
    if tensor.stride(3) != 1 or stride == 0 or (batch > 1 and tensor.stride(0) % stride):
        return None
    return tensor.stride(0) // stride if batch > 1 else kv_len


def _token_pages(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    """``[num_pages, 1, num_kv_heads, head_dim]``: pages share memory with others, and are only read."""
    batch, heads, kv_len, head_dim = tensor.shape
    token = tensor.stride(2)
    return tensor.as_strided(
        ((batch - 1) * pitch + kv_len, 1, heads, head_dim), (token, token, tensor.stride(1), 1)
    )


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation=name`` these functions; done for ``"paged_ops"`` on import."""
    AttentionInterface.register(name, paged_ops_attention)
    AttentionMaskInterface.register(name, paged_ops_mask)


register()
