// The CUDA kernel of fused8::adam_step_ (its schema stands in py/fused8/ops.py): checks the arguments and launches.
//
// Only PyTorch's stable ABI is used: this compiles against a CPU build of torch and loads under a CUDA build. Nothing
// here waits for the device or reads from it.

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../checks.h"
#include "launches.h"

// Of libtorch_cuda, which declares it only where torch itself was built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fused8 {
namespace {

void check_cuda(cudaError_t error, const char* what) {
  check(error == cudaSuccess, what, " failed: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
}

// May be on the CPU or on the device.
bool is_on_cpu(const char* name, const Tensor& tensor, ScalarType dtype, const Location& location) {
  const bool on_cpu = tensor.is_cpu();
  check_tensor(name, tensor, dtype, on_cpu ? ON_CPU : location);
  return on_cpu;
}

void check_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  check(status == cudaStreamCaptureStatusNone, "a CUDA graph can capture the step only with capturable=True");
}

void adam_step_(const TensorList& params, const TensorList& grads, const TensorList& exp_avg,
                const TensorList& exp_avg_sq, const TensorList& exp_avg_scale, const TensorList& exp_avg_sq_scale,
                const TensorList& max_exp_avg_sq, const TensorList& max_exp_avg_sq_scale,
                const TensorList& param_correction, const Tensor& scalars, const Tensor& table,
                const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                const Tensor& nonfinite, StringHandle codec, int64_t block_size, bool decoupled_weight_decay,
                bool maximize, bool stochastic_rounding) {
  const std::string codec_name = take_string(codec);
  check(nonfinite.is_cuda(), "nonfinite must be on a CUDA device");
  const Location location = {true, nonfinite.get_device_index()};
  const CheckedLists lists = check_lists({params, grads, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale,
                                          max_exp_avg_sq, max_exp_avg_sq_scale, param_correction},
                                         codec_name, block_size, location);
  if (grad_scale) check_scalar("grad_scale", *grad_scale, ScalarType::Float, location);
  if (found_inf) check_scalar("found_inf", *found_inf, ScalarType::Float, location);
  check_scalar("nonfinite", nonfinite, ScalarType::Long, location);
  const bool cpu_scalars = is_on_cpu("scalars", scalars, ScalarType::Float, location);
  const bool cpu_table = is_on_cpu("table", table, ScalarType::Long, location);
  check(cpu_table || !cpu_scalars, "scalars must be on ", location.name(), " where table is");
  check_table_shapes(scalars, table, lists.tensors.size());

  cuda::Call call = {};
  (cpu_scalars ? call.scalars : call.device_scalars) = static_cast<const Scalars*>(scalars.const_data_ptr());
  (cpu_table ? call.table : call.device_table) = static_cast<const int64_t*>(table.const_data_ptr());
  for (size_t i = 0; cpu_table && i < lists.tensors.size(); ++i) {
    check_scalar_row(call.table[i * TABLE_WIDTH], i, scalars);
  }
  call.grad_scale = grad_scale ? static_cast<const float*>(grad_scale->const_data_ptr()) : nullptr;
  call.found_inf = found_inf ? static_cast<const float*>(found_inf->const_data_ptr()) : nullptr;
  call.nonfinite = static_cast<unsigned long long*>(nonfinite.mutable_data_ptr());
  call.codec = lists.codec;
  call.param_dtype = lists.param_dtype;
  call.correction_bits = lists.correction_bits;
  call.stochastic_rounding = stochastic_rounding;
  call.block_size = block_size;
  call.maximize = maximize;
  call.coupled_weight_decay = !decoupled_weight_decay;

  const torch::stable::accelerator::DeviceGuard guard(location.device_index);
  void* current_stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(location.device_index, &current_stream));
  const auto stream = static_cast<cudaStream_t>(current_stream);
  if (cpu_scalars) check_capture(stream);
  const cuda::Kernel kernel = cuda::kernel_of(call, lists.grad_dtype, lists.amsgrad);
  cuda::run_launches(call, lists.tensors, [&](const cuda::Launch& launch) {
    void* parameters[] = {const_cast<cuda::Launch*>(&launch)};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(launch.tiles), dim3(cuda::THREADS),
                                parameters, 0, stream),
               "the launch of the Adam kernel");
  });
}

}  // namespace
}  // namespace fused8

STABLE_TORCH_LIBRARY_IMPL(fused8, CUDA, m) {
  m.impl("adam_step_", TORCH_BOX(&fused8::adam_step_));
}
