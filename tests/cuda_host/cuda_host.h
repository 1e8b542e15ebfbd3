// Enough of CUDA for a plain C++ compiler to compile the kernel source, and a scheduler that runs one thread block
// after the other on the CPU. Include it before the kernel.
//
// With CUDA_HOST_THREADS each CUDA thread is a thread of the system, so that a race detector sees them race. Otherwise
// each is a fiber, which is much faster; what they do is the same.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

inline uint3 blockIdx, blockDim;

// Of the running thread.
struct ThreadIndex {
  static unsigned current();
  struct {
    operator unsigned() const { return ThreadIndex::current(); }
  } x;
};

inline ThreadIndex threadIdx;

namespace cuda_host {

constexpr unsigned WARP = 32;

// Runs a kernel. Throws if threads that have to meet at a shuffle or at a barrier do not.
void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

// What the thread `lane ^ distance` of the warp gives at the same place of the source.
uint64_t shuffle_xor(uint64_t value, unsigned distance, unsigned mask, int line);
void barrier(int line);

// A GPU's estimates are off by as much as one unit in the last place: so many are added here.
inline int estimate_error = 0;

inline float reciprocal_estimate(float x) {
  const float exact = static_cast<float>(1.0 / x);
  return __builtin_bit_cast(float, __builtin_bit_cast(int32_t, exact) + estimate_error);
}

inline float root_reciprocal_estimate(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}

template <class T>
T shuffle_xor_of(unsigned mask, T value, unsigned distance, int line) {
  return static_cast<T>(shuffle_xor(static_cast<uint64_t>(value), distance, mask, line));
}

}  // namespace cuda_host

#define __shfl_xor_sync(mask, value, distance) cuda_host::shuffle_xor_of(mask, value, distance, __LINE__)
#define __fmaf_rn(x, y, z) std::fma(x, y, z)
#define __syncthreads() cuda_host::barrier(__LINE__)

inline void atomicAdd(unsigned long long* counter, unsigned long long value) {
  __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
}
