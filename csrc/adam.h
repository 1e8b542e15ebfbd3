// Adam on FP32 registers: Kingma and Ba, "Adam: A Method for Stochastic Optimization"; decoupled weight decay from
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; AMSGrad from Reddi, Kale and Kumar, "On the
// Convergence of Adam and Beyond".
//
// Every operation is one FP32 operation, rounded to nearest, in the order written here, so that all backends give the
// same bits. That needs -ffp-contract=off (nvcc: -fmad=false -prec-sqrt=true -prec-div=true -ftz=false).

#pragma once

#include "platform.h"

namespace fused8 {

// One row of the `scalars` tensor; the columns are SCALAR_COLUMNS in py/fused8/step_plan.py.
struct Scalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float step_size;                  // lr / bias_correction1
  float inv_bias_correction2_sqrt;  // 1 / sqrt(bias_correction2)
  float decay;                      // 1 - lr * weight_decay when decoupled, else 1
  float weight_decay;
  uint32_t time_offset;   // the dither's offset at this step
  uint32_t rounding_key;  // of the random bits of this step
  float unused[5];
};
static_assert(sizeof(Scalars) == 16 * sizeof(float));

namespace FUSED8_ISA {

// A gradient element that is NaN, infinite or too large to square counts as 0. So |m| <= 2^63 and v <= 2^126.
constexpr int32_t LARGEST_GRAD_BITS = (127 + 63) << 23;  // 2^63; above it stand infinity and NaN

template <class Float>
FUSED8_HD Float usable_or_zero(Float grad) {
  return (float_bits(grad) & MAGNITUDE_MASK) <= LARGEST_GRAD_BITS ? grad : Float{};
}

// How a kernel takes square roots and divides; both correctly rounded.
struct ExactMath {
  template <class Float>
  FUSED8_HD static Float root(Float x) {
    return square_root(x);
  }
  template <class Float>
  FUSED8_HD static Float ratio(Float x, Float y) {
    return x / y;
  }
};

template <class Float>
FUSED8_HD void update_moments(Float grad, Float& exp_avg, Float& exp_avg_sq, const Scalars& s) {
  exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * grad;
  exp_avg_sq = s.beta2 * exp_avg_sq + (s.one_minus_beta2 * grad) * grad;
}

template <class Float>
FUSED8_HD Float update_max(Float max_exp_avg_sq, Float exp_avg_sq) {
  return bits_float(larger(float_bits(max_exp_avg_sq), float_bits(exp_avg_sq)));
}

// The new parameter from the new moments. With AMSGrad `exp_avg_sq` is the largest one so far.
template <class Math, class Float>
FUSED8_HD Float update_param(Float param, Float exp_avg, Float exp_avg_sq, const Scalars& s) {
  const Float denom = Math::root(exp_avg_sq) * s.inv_bias_correction2_sqrt + s.eps;
  return param * s.decay - s.step_size * Math::ratio(exp_avg, denom);
}

// One step for one parameter, in place. With AMSGRAD, `max_exp_avg_sq` takes the place of `exp_avg_sq` in the
// denominator; without, it is not touched.
template <bool AMSGRAD, class Float>
FUSED8_HD void adam_update(Float& param, Float grad, Float& exp_avg, Float& exp_avg_sq, Float& max_exp_avg_sq,
                           const Scalars& s) {
  update_moments(grad, exp_avg, exp_avg_sq, s);
  if (AMSGRAD) max_exp_avg_sq = update_max(max_exp_avg_sq, exp_avg_sq);
  param = update_param<ExactMath>(param, exp_avg, AMSGRAD ? max_exp_avg_sq : exp_avg_sq, s);
}

}  // namespace FUSED8_ISA
}  // namespace fused8
