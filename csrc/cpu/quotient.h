// Division of a whole block by one number.

#pragma once

#include "lanes.h"

namespace fused8::FUSED8_ISA {

// x / divisor for |x| <= divisor, divisor > 0: correctly rounded, except that a quotient below 2^-23 may be another one
// below 2^-23, of the same sign; so may be 0.
//
// Where the processor can multiply and add with one rounding, three operations take the place of the division
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor"): with the reciprocal r
// rounded to nearest, q = x * r is off by less than 1.5 units in the last place, and by less than one where x / divisor
// is so close to the middle of two numbers that it matters; then q + (x - q * divisor) * r rounds to x / divisor.
class Quotient {
 public:
  explicit Quotient(float divisor) : divisor_(divisor) {
#if defined(__AVX2__)
    // Here the reciprocal has all its bits, and so has the rest x - q * divisor of every quotient from 2^-23 on.
    corrected_ = divisor >= 0x1p-80f && divisor <= 0x1p126f;
    reciprocal_ = 1.0f / divisor;
#endif
  }

  Floats operator()(Floats x) const {
#if defined(__AVX2__)
    if (__builtin_expect(corrected_, true)) {
      const Floats reciprocal = Floats{} + reciprocal_;
      const Floats estimate = x * reciprocal;
      const Floats rest = multiply_subtract_from(estimate, Floats{} + divisor_, x);
      return with_sign_of(x, multiply_add(rest, reciprocal, estimate));
    }
#endif
    return x / divisor_;
  }

 private:
  float divisor_;
#if defined(__AVX2__)
  float reciprocal_;
  bool corrected_;
#endif
};

}  // namespace fused8::FUSED8_ISA
