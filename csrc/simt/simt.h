// The CUDA vocabulary of kernels and launch code, spelled once: CUDA under nvcc, the emulator under g++.
//
// Kernels (.cuh) and launch code (.cu) include this header and simt/ptx.h, and no CUDA header of their own.
// Compiled by nvcc it is CUDA. Compiled by g++ with -DPAGED_OPS_EMULATED (.cu files as -x c++) it is the
// host emulator of simt/emulator: one fiber per thread, one OS thread per running block, which needs
// nothing but g++ 12 or later (C++20) on Linux.
//
// What is spelled as in CUDA, and what is not:
//   kernel launch      simt::launch(kernel, grid, block, dynamic_shared_nbytes, stream, arguments...)
//   static shared      SIMT_SHARED(float[4][33], tile);      then tile[i][j]
//   dynamic shared     SIMT_DYNAMIC_SHARED(raw);              then raw is unsigned char*, 128-byte aligned
//   CUDA status        SIMT_CHECK(cudaMemsetAsync(...));      throws DeviceError
//   many copies        simt::memcpy_batch_async(destinations, sources, nbytes, count, stream)
//   everything else    threadIdx, __syncthreads(), __shfl_xor_sync(), atomicAdd(), float4, cudaMemcpyAsync
//   ...
//
// Flags an emulated build needs:
//   -fno-strict-aliasing       kernels read packets of one type as another, as device compilers allow
//   -ffp-contract=off          multiplications and additions round as written, on every -march
//   -Wno-unknown-pragmas       #pragma unroll
#pragma once

#if defined(__CUDACC__)
#include "simt/cuda_launch.h"
#elif defined(PAGED_OPS_EMULATED)
#include "simt/emulator/launch.h"
#include "simt/emulator/runtime.h"
#include "simt/emulator/vocabulary.h"
#else
#error "simt/simt.h is for nvcc, or for g++ with -DPAGED_OPS_EMULATED"
#endif
