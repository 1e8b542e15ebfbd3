// A program that tries every number: what the CPU kernel computes by short cuts against the plain way.
// tests/test_cpu_numbers.py compiles it, for one instruction set, and runs it.
// Prints "ok", or the first number that comes out wrong.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "../../csrc/cpu/dynamic_buckets.h"
#include "../../csrc/cpu/quotient.h"

using namespace fused8;
using namespace fused8::FUSED8_ISA;

namespace {

constexpr uint32_t ONE = 0x3F800000;  // the pattern of 1
constexpr uint32_t SIGN_BIT = 0x80000000;

template <class Register>
auto lane(const Register& x, int i) {
  if constexpr (LANES == 1) {
    return x;
  } else {
    return x[i];
  }
}

Floats from_patterns(uint32_t first) {
  return bits_float((Ints)(first + lane_numbers()));
}

[[noreturn]] void fail(const char* what, double x, double got, double expected) {
  std::printf("%s of %a: %a, expected %a\n", what, x, got, expected);
  std::exit(1);
}

void check_code(const char* what, float y, int got, int expected) {
  if (static_cast<uint8_t>(got) != expected) fail(what, y, static_cast<uint8_t>(got), expected);
}

// The codes of all y from -1 to 1, but for those that are too small to be anything but 0.
void check_codes() {
  constexpr uint32_t SMALLEST = (127 - 30) << 23;
  for (const uint32_t sign : {0u, SIGN_BIT}) {
    for (uint32_t bits = SMALLEST; bits <= ONE; bits += LANES) {
      const Floats y = from_patterns(sign | bits);
      const Ints code = dynamic::encode_by_bucket(y);
      const Ints sq_code = dynamic::encode_sq_by_bucket(bits_float(float_bits(y) & MAGNITUDE_MASK), y);
      for (int i = 0; i < LANES && bits + i <= ONE; ++i) {
        check_code("code", lane(y, i), lane(code, i), dynamic::encode(lane(y, i), dynamic::SIGNED));
        if (sign != 0) continue;
        check_code("code as v", lane(y, i), lane(sq_code, i),
                   dynamic::encode_sq(lane(y, i), lane(y, i), dynamic::UNSIGNED));
      }
    }
  }
}

// x / divisor for all mantissas of x and one divisor; and the signs of quotients that are next to nothing.
void check_quotients(uint32_t divisor_bits) {
  const float divisor = bits_float(static_cast<int32_t>(divisor_bits));
  const Quotient quotient(divisor);
  for (uint32_t i = 0; i < 1u << 16; ++i) {
    const Floats x = from_patterns((i & 1) << 31 | (i >> 1) << 8);  // +-0 and on to 2^-125
    const Floats got = quotient(x);
    for (int k = 0; k < LANES; ++k) {
      const float expected = lane(x, k) / divisor;
      const bool right = std::fabs(expected) < 0x1p-23f ? std::fabs(lane(got, k)) < 0x1p-23f : lane(got, k) == expected;
      if (!right || std::signbit(lane(got, k)) != std::signbit(expected)) {
        fail("small quotient", lane(x, k), lane(got, k), expected);
      }
    }
  }
  for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa += LANES) {
    const Floats x = from_patterns((divisor_bits & ~0x7FFFFFu) - (1 << 23) + mantissa);
    const Floats got = quotient(x);
    const Floats expected = x / divisor;
    for (int i = 0; i < LANES; ++i) {
      if (lane(got, i) != lane(expected, i)) fail("quotient", lane(x, i), lane(got, i), lane(expected, i));
    }
  }
}

}  // namespace

int main() {
  check_codes();
  uint32_t random = 1;
  for (uint32_t i = 0; i < 96; ++i) {
    random = random * 1664525 + 1013904223;
    const uint32_t mantissas[] = {i / 3, 0x7FFFFF - i / 3, random >> 9};  // near 1, near 2, any
    const uint32_t exponent = 127 - 79 + random % (79 + 126);
    check_quotients(exponent << 23 | mantissas[i % 3]);
  }
  std::puts("ok");
}
