// Square roots and divisions for the 16 elements of a thread: computed as if none were special, then tested once.
//
// sqrtf and / are correctly rounded too, but test and branch for every element, which costs more instructions than the
// result and keeps the compiler from interleaving the elements. The steps here are those that they take where nothing
// is special, so the bits are the same.

#pragma once

#include "../adam.h"
#include "lanes.cuh"

namespace fused8::FUSED8_ISA {

// 1 / x within one unit in the last place, for normal x and 1 / x.
__device__ __forceinline__ float reciprocal_estimate(float x) {
#if defined(__CUDACC__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return cuda_host::reciprocal_estimate(x);
#endif
}

// 1 / sqrt(x) within 2^-22.9 of itself, for normal x.
__device__ __forceinline__ float root_reciprocal_estimate(float x) {
#if defined(__CUDACC__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return cuda_host::root_reciprocal_estimate(x);
#endif
}

// x / y from 1 / y correctly rounded; exact where neither the ratio nor its residual is a denormal number.
__device__ __forceinline__ float ratio_by(float x, float y, float reciprocal) {
  const float quotient = x * reciprocal;
  return __fmaf_rn(-__fmaf_rn(y, quotient, -x), reciprocal, quotient);
}

// What adam.h needs, for ordinary numbers.
struct QuickMath {
  __device__ __forceinline__ static float root(float x) {
    const float estimate = root_reciprocal_estimate(x);
    const float y = x * estimate;
    return __fmaf_rn(__fmaf_rn(-y, y, x), estimate * 0.5f, y);
  }

  __device__ __forceinline__ static float ratio(float x, float y) {
    const float estimate = reciprocal_estimate(y);
    return ratio_by(x, y, __fmaf_rn(estimate, __fmaf_rn(-y, estimate, 1.0f), estimate));
  }
};

// From here on the residual of a square root, x - y * y, is no denormal number.
constexpr float SMALLEST_SQUARE = 0x1p-101f;

// The quick ratio m / denom is exact unless |m| < 2^-100 or the ratio is below 2^-125; denom >= eps. Then `small`
// bounds the ratio, and a parameter above 2^28 * step_size * small does not depend on it: the quick result is right all
// the same. This is the smallest |parameter| for which that is certain.
__device__ __forceinline__ float smallest_safe_param(const Scalars& s) {
  if (s.eps > 0x1p100f) return bits_float(0x7F800000);  // its reciprocal may be a denormal number
  const float reciprocal = reciprocal_estimate(s.eps) * 0x1p-100f;
  const float small = reciprocal > 0x1p-125f ? reciprocal : 0x1p-125f;
  const float safe = bits_float(float_bits(s.step_size) & MAGNITUDE_MASK) * (small * 0x1p29f);
  return safe > 0x1p-100f ? safe : 0x1p-100f;
}

// The new parameters from the old ones, m and (max) v. A thread without elements (`idle`) should not send its warp the
// slow way.
__device__ __forceinline__ void update_params(float (&param)[ELEMENTS], const float (&m)[ELEMENTS],
                                              const float (&v)[ELEMENTS], bool idle, const Scalars& s) {
  const float safe = smallest_safe_param(s);
  float quick[ELEMENTS];
  bool all_ordinary = true;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    quick[i] = update_param<QuickMath>(param[i], m[i], v[i], s);
    all_ordinary &= v[i] >= SMALLEST_SQUARE;
    all_ordinary &= bits_float(float_bits(quick[i]) & MAGNITUDE_MASK) >= safe;  // false for NaN
  }
  if (all_ordinary || idle) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) param[i] = quick[i];
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) param[i] = update_param<ExactMath>(param[i], m[i], v[i], s);
  }
}

// x / absmax for many x of one block, and 0 where absmax is 0. |x| <= absmax <= 2^126. Ratios below 2^-40, which no
// codec tells from 0, are not correctly rounded.
struct RelativeTo {
  float power, divisor, reciprocal;
  int32_t kept;  // all bits, or none where absmax is 0: such a block loses its signs too

  __device__ __forceinline__ explicit RelativeTo(float absmax) {
    // A block of small numbers is scaled up, which is exact, so that nothing below becomes denormal.
    power = absmax < 0x1p-20f ? 0x1p100f : 1.0f;
    divisor = absmax > 0.0f ? absmax * power : 1.0f;
    reciprocal = 1.0f / divisor;
    kept = absmax > 0.0f ? -1 : 0;
  }

  __device__ __forceinline__ float operator()(float x) const {
    return ratio_by(bits_float(float_bits(x) & kept) * power, divisor, reciprocal);
  }
};

}  // namespace fused8::FUSED8_ISA
