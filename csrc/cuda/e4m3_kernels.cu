#include "adam_cuda.cuh"

namespace fused8::FUSED8_ISA {

Kernel e4m3_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<E4M3Codec>(param, grad, amsgrad);
}

}  // namespace fused8::FUSED8_ISA
