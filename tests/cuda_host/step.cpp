// The step of one bucket by the CUDA kernel source, on the CPU: what the op in csrc/cuda/adam_cuda.cu does after it has
// checked its arguments, for ctypes.

#ifndef CUDA_HOST_THREADS

#include "cuda_host.h"
// After cuda_host.h, which it needs.
#include "../../csrc/cuda/launches.h"

namespace fused8::FUSED8_ISA {

Kernel adaptive_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<AdaptiveCodec>(param, grad, amsgrad);
}
Kernel dynamic_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<DynamicCodec>(param, grad, amsgrad);
}
Kernel e4m3_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<E4M3Codec>(param, grad, amsgrad);
}
Kernel fp32_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return choose_kernel<Fp32Codec>(param, grad, amsgrad);
}

}  // namespace fused8::FUSED8_ISA

namespace {

thread_local std::string error;

}  // namespace

extern "C" {

const char* cuda_host_error() {
  return error.c_str();
}

// The number of launches, or -1 and cuda_host_error(). `on_device`: the kernel reads scalars (1), table (2) itself.
int cuda_host_step(const fused8::TensorView* views, int64_t count, const void* scalars, const int64_t* table,
                   int on_device, const float* grad_scale, const float* found_inf, unsigned long long* nonfinite,
                   int codec, int param_dtype, int correction_bits, int stochastic_rounding, int grad_dtype,
                   int amsgrad, int64_t block_size, int maximize, int coupled_weight_decay) {
  using namespace fused8::FUSED8_ISA;
  try {
    Call call = {};
    (on_device & 1 ? call.device_scalars : call.scalars) = static_cast<const fused8::Scalars*>(scalars);
    (on_device & 2 ? call.device_table : call.table) = table;
    call.grad_scale = grad_scale;
    call.found_inf = found_inf;
    call.nonfinite = nonfinite;
    call.codec = static_cast<fused8::CodecName>(codec);
    call.param_dtype = static_cast<fused8::Dtype>(param_dtype);
    call.correction_bits = correction_bits;
    call.stochastic_rounding = stochastic_rounding != 0;
    call.block_size = block_size;
    call.maximize = maximize != 0;
    call.coupled_weight_decay = coupled_weight_decay != 0;
    const Kernel kernel = kernel_of(call, static_cast<fused8::Dtype>(grad_dtype), amsgrad != 0);
    int launches = 0;
    run_launches(call, {views, views + count}, [&](const Launch& launch) {
      cuda_host::run(launch.tiles, THREADS, [&] { kernel(launch); });
      ++launches;
    });
    return launches;
  } catch (const std::exception& exception) {
    error = exception.what();
    return -1;
  }
}

void cuda_host_set_estimate_error(int error_in_ulps) {
  cuda_host::estimate_error = error_in_ulps;
}

// A kernel whose threads diverge at a shuffle (1) or at a barrier (2): it must be noticed.
int cuda_host_diverge(int where) {
  try {
    cuda_host::run(1, 64, [where] {
      if (threadIdx.x == 5) return;
      if (where == 1) __shfl_xor_sync(0xFFFFFFFF, 1, 1);
      if (where == 2) __syncthreads();
    });
    return 0;
  } catch (const std::exception& exception) {
    error = exception.what();
    return -1;
  }
}
}

#endif
