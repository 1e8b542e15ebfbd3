// The floating-point environment in which the kernels promise their bits.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fused8 {

// Round to nearest, denormals kept, no traps, for one thread and scope. Others may have changed that, and
// torch.set_flush_denormal reaches the calling thread only.
class DefaultFloatEnv {
 public:
  DefaultFloatEnv() : saved_(get()) { set(DEFAULT); }
  ~DefaultFloatEnv() { set(saved_); }
  DefaultFloatEnv(const DefaultFloatEnv&) = delete;
  DefaultFloatEnv& operator=(const DefaultFloatEnv&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t DEFAULT = 0x1F80;  // MXCSR: all exceptions masked, everything else off
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t value) { _mm_setcsr(static_cast<uint32_t>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t DEFAULT = 0;
  static uint64_t get() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  static constexpr uint64_t DEFAULT = 0;
  static uint64_t get() { return DEFAULT; }
  static void set(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace fused8
