#include "adam_cuda.cuh"

namespace fused8::FUSED8_ISA {

Kernel adaptive_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<AdaptiveCodec>(param, grad, amsgrad);
}

}  // namespace fused8::FUSED8_ISA
