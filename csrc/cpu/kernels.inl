// All kernels of one instruction set, and the table that shows them to the rest.
// Included inside the namespace of one instruction set, after its vector vocabulary.

// clang-format off: each needs those before it
#include "cpu/packs.inl"
#include "cpu/page_walk.inl"
#include "cpu/products.inl"
#include "cpu/scales.inl"
#include "cpu/quantised.inl"
#include "cpu/logits.inl"
#include "cpu/softmax.inl"
#include "cpu/rows.inl"
#include "cpu/attention_walk.inl"
#include "cpu/staged.inl"
#include "cpu/attention_vector.inl"
#include "cpu/merge_kernel.inl"
#include "cpu/rope_kernel.inl"
// clang-format on

extern const Kernels kernels;
const Kernels kernels = {
    {attend<VectorProducts<float>>, attend<VectorProducts<f16>>, attend<VectorProducts<bf16>>},
    {attend_scratch_nbytes<VectorProducts<float>>, attend_scratch_nbytes<VectorProducts<f16>>,
     attend_scratch_nbytes<VectorProducts<bf16>>},
    {fold<float>, fold<f16>, fold<bf16>},
    {merge_states<float>, merge_states<f16>, merge_states<bf16>},
    {rope_write<float>, rope_write<f16>, rope_write<bf16>},
};
