"""What FlashInfer has and this package does not: one place for the refusals and their reasons."""

from __future__ import annotations

from typing import Any

import torch

# Arguments whose being there changes the result, and why they are not carried over.
_REASONS = {
    "jit_args": "kernels made at run time have no place in the ops",
    "kv_cache_sf": "caches of 4-bit floats are not supported",
    "skip_softmax_threshold_scale_factor": "the ops leave no part of the softmax out",
    "prefix_len_ptr": "multi-item scoring is not supported",
    "token_pos_in_items_ptr": "multi-item scoring is not supported",
    "max_item_len_ptr": "multi-item scoring is not supported",
    "profiler_buffer": "the kernels hold no profiler",
    "scale_q": "queries in 8 bits, with a scale per head, are not supported",
    "scale_k": "it comes with queries in 8 bits; k_scale takes a number, or a tensor for quantised caches",
    "scale_v": "it comes with queries in 8 bits; v_scale takes a number, or a tensor for quantised caches",
}


def given(**arguments: Any) -> None:
    """``NotImplementedError`` for the first of these arguments that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {_REASONS[name]}")


def custom_arguments(arguments: tuple[Any, ...]) -> None:
    """``NotImplementedError`` for positional arguments that FlashInfer hands to kernels made at run time."""
    if arguments:
        raise NotImplementedError(f"*args: {_REASONS['jit_args']}")


def position_encoding(pos_encoding_mode: str) -> None:
    """``NotImplementedError`` but for NONE: the ops rotate nothing, FlashInfer scales ALiBi its own way."""
    if pos_encoding_mode == "ROPE_LLAMA":
        raise NotImplementedError(
            "pos_encoding_mode: is 'ROPE_LLAMA', and the ops rotate nothing; write rotated keys to the cache"
        )
    if pos_encoding_mode == "ALIBI":
        raise NotImplementedError(
            "pos_encoding_mode: is 'ALIBI', whose bias FlashInfer multiplies by sm_scale; the public ops "
            "take alibi_slopes as they are"
        )
    if pos_encoding_mode != "NONE":
        raise KeyError(f"pos_encoding_mode: is {pos_encoding_mode!r}, wanted 'NONE'")


def backend(name: str) -> None:
    """``NotImplementedError`` for backends whose arguments mean something else than in the others."""
    if name == "cudnn":
        raise NotImplementedError("backend: 'cudnn' counts qo_indptr in elements; the others count tokens")
    if name == "cutlass":
        raise NotImplementedError("backend: 'cutlass' runs without a plan; call plan and leave backend out")


def output_dtype(o_data_type: torch.dtype | None, q_data_type: torch.dtype) -> None:
    """``NotImplementedError`` unless outputs are of the query's dtype."""
    if o_data_type is not None and o_data_type != q_data_type:
        raise NotImplementedError(
            f"o_data_type: is {o_data_type}, and the ops write the query's dtype, {q_data_type}"
        )
