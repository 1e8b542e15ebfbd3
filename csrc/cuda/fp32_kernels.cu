#include "adam_cuda.cuh"

namespace fused8::FUSED8_ISA {

Kernel fp32_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<Fp32Codec>(param, grad, amsgrad);
}

}  // namespace fused8::FUSED8_ISA
