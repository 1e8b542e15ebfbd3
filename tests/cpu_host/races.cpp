// A program that steps tensors by several threads at once, for ThreadSanitizer; tests/test_cpu_races.py runs it.
//   races ISA          shares out the elements to four threads and compares the bits with those of one thread
//   races ISA shared   two threads step two tensors that have one array in common: each such array has to be reported,
//                      or silence would prove nothing
// One line for each kind of call: "ok", or what is wrong.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/step_args.h"

using namespace fused8;

namespace {

int reports = 0;

// The arrays that a step writes.
struct Array {
  const char* name;
  void* TensorView::* pointer;
};

constexpr Array ARRAYS[] = {
    {"param", &TensorView::param},
    {"exp_avg", &TensorView::exp_avg},
    {"exp_avg_sq", &TensorView::exp_avg_sq},
    {"max_exp_avg_sq", &TensorView::max_exp_avg_sq},
    {"exp_avg_scale", &TensorView::exp_avg_scale},
    {"exp_avg_sq_scale", &TensorView::exp_avg_sq_scale},
    {"max_exp_avg_sq_scale", &TensorView::max_exp_avg_sq_scale},
    {"param_correction", &TensorView::param_correction},
};
constexpr int PARAM = 0, MAX_EXP_AVG_SQ = 3, FIRST_SCALE = 4, MAX_SCALE = 6, CORRECTION = 7, COUNT = 8;

int64_t size_of(Dtype dtype) {
  return dtype == Dtype::FLOAT32 ? 4 : dtype <= Dtype::FLOAT16 ? 2 : 1;
}

bool is_scale(int array) {
  return FIRST_SCALE <= array && array <= MAX_SCALE;
}

// Bytes of an element; 0 if such a call has no such array.
int64_t element_size(const StepArgs& call, int array) {
  if (array == PARAM) return size_of(call.param_dtype);
  if (array == CORRECTION) return call.correction_bits / 8;
  if ((array == MAX_EXP_AVG_SQ || array == MAX_SCALE) && !call.amsgrad) return 0;
  if (call.codec == CodecName::FP32) return is_scale(array) ? 0 : 4;
  return is_scale(array) ? 4 : 1;
}

struct Shape {
  int64_t rows, inner;
};

// The tensors of one call. In each array they stand one after the other, from an unaligned place on: what is written
// beyond a tensor falls into the next one.
class Tensors {
 public:
  StepArgs call;
  std::vector<TensorArgs> tensors;
  std::vector<uint8_t> arrays[COUNT];

  Tensors(const StepArgs& kind, const std::vector<Shape>& shapes) : call(kind) {
    int64_t elements = 0, blocks = 0;
    for (const Shape& shape : shapes) {
      elements += shape.rows * shape.inner;
      blocks += shape.rows * blocks_per_row(shape);
    }
    for (int i = 0; i < COUNT; ++i) arrays[i].resize((1 + (is_scale(i) ? blocks : elements)) * element_size(call, i));
    grad_.resize((1 + elements) * size_of(call.grad_dtype));
    std::mt19937 random(1);
    for (uint8_t& byte : arrays[PARAM]) byte = small_number(random);

    int64_t element = 0, block = 0;
    for (const Shape& shape : shapes) {
      TensorArgs tensor = {};
      for (int i = 0; i < COUNT; ++i) {
        const int64_t size = element_size(call, i);
        if (size != 0) tensor.*ARRAYS[i].pointer = arrays[i].data() + (1 + (is_scale(i) ? block : element)) * size;
      }
      tensor.grad = grad_.data() + (1 + element) * size_of(call.grad_dtype);
      tensor.rows = shape.rows;
      tensor.inner = shape.inner;
      tensor.blocks_per_row = blocks_per_row(shape);
      tensor.begin = element;
      tensor.end = element += shape.rows * shape.inner;
      block += shape.rows * tensor.blocks_per_row;
      tensor.first_index = static_cast<uint32_t>(7 * tensor.begin);
      tensor.row_stride = static_cast<uint32_t>(shape.inner);
      tensors.push_back(tensor);
    }
    call.tensors = tensors.data();
    call.tensor_count = static_cast<int64_t>(tensors.size());
  }

  int64_t end() const { return tensors.back().end; }

  // New gradients, and the scalars of this step.
  void prepare(int step) {
    std::mt19937 random(100 + step);
    for (uint8_t& byte : grad_) byte = small_number(random) | (random() & 0x80);
    const size_t unusable = 53 * size_of(call.grad_dtype);
    for (size_t i = unusable; i < grad_.size(); i += unusable) {
      std::memset(&grad_[i], 0x7F, size_of(call.grad_dtype));
    }
    for (TensorArgs& tensor : tensors) {
      tensor.scalars = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-2f, 1.0f, 0.999f, 0.1f, 7u * step, 0x9E3779B9u * step,
                        {}};
    }
  }

 private:
  std::vector<uint8_t> grad_;

  // Of such bytes every format makes a positive number below 2.
  static uint8_t small_number(std::mt19937& random) { return 0x30 | (random() & 0x0F); }

  int64_t blocks_per_row(const Shape& shape) const { return (shape.inner + call.block_size - 1) / call.block_size; }
};

// All at once.
void run(const std::vector<std::function<void()>>& jobs) {
  std::vector<std::thread> threads;
  for (const auto& job : jobs) threads.emplace_back(job);
  for (std::thread& thread : threads) thread.join();
}

// "ok", or what differs from the steps of one thread.
std::string compare(StepFunction step, const StepArgs& kind) {
  const std::vector<Shape> shapes = {{5, 300}, {9, 37}, {40, 8}, {1, 1001}, {0, 5}, {33, 1}, {2, 512}, {1, 1}, {3, 77}};
  constexpr int THREADS = 4;
  Tensors one(kind, shapes), many(kind, shapes);
  const int64_t end = one.end();
  std::mt19937 random(2);
  for (int i = 1; i <= 4; ++i) {
    one.prepare(i);
    many.prepare(i);
    const int64_t expected = step(one.call, 0, end);
    std::vector<int64_t> cuts = {0, 1, 2, end - 1, end};  // in the first step; anywhere in those that follow
    for (int k = 1; i > 1 && k < THREADS; ++k) cuts[k] = random() % end;
    std::sort(cuts.begin(), cuts.end());
    int64_t counts[THREADS];
    std::vector<std::function<void()>> jobs;
    for (int k = 0; k < THREADS; ++k) {
      jobs.push_back([&, k] { counts[k] = step(many.call, cuts[k], cuts[k + 1]); });
    }
    run(jobs);
    int64_t nonfinite = 0;
    for (const int64_t count : counts) nonfinite += count;
    if (nonfinite != expected || expected == 0) return "the number of unusable gradients differs";
    for (int k = 0; k < COUNT; ++k) {
      if (many.arrays[k] != one.arrays[k]) return std::string(ARRAYS[k].name) + " differs";
    }
  }
  return "ok";
}

// "ok", or an array that two threads wrote unnoticed.
std::string share(StepFunction step, const StepArgs& kind) {
  for (int k = 0; k < COUNT; ++k) {
    if (element_size(kind, k) == 0) continue;
    Tensors a(kind, {{1, 19}}), b(kind, {{1, 19}});
    a.prepare(1);
    b.prepare(1);
    b.tensors[0].*ARRAYS[k].pointer = a.tensors[0].*ARRAYS[k].pointer;
    reports = 0;
    run({[&] { step(a.call, 0, a.end()); }, [&] { step(b.call, 0, b.end()); }});
    if (reports == 0) return std::string(ARRAYS[k].name) + " is shared and not reported";
  }
  return "ok";
}

StepFunction step_function(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2") return avx2::step_elements;
  if (isa == "avx512") return avx512::step_elements;
#endif
  return isa == "generic" ? generic::step_elements : nullptr;
}

struct Storage {
  const char* name;
  Dtype dtype;
  int32_t correction_bits;
  bool stochastic;
};

}  // namespace

// ThreadSanitizer, a library outside this program, calls it.
extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void __tsan_on_report(void*) {
  ++reports;
}

int main(int argc, char** argv) {
  const StepFunction step = step_function(argc > 1 ? argv[1] : "");
  const bool shared = argc > 2 && std::strcmp(argv[2], "shared") == 0;
  if (step == nullptr) return 1;
  const char* const codecs[] = {"fp32", "adaptive", "dynamic", "e4m3"};  // the order of CodecName
  const Storage storages[] = {
      {"float32", Dtype::FLOAT32, 0, false},
      {"bfloat16", Dtype::BFLOAT16, 0, false},
      {"bfloat16 stochastic", Dtype::BFLOAT16, 0, true},
      {"bfloat16 + 8", Dtype::BFLOAT16, 8, false},
      {"bfloat16 + 16", Dtype::BFLOAT16, 16, false},
      {"float16", Dtype::FLOAT16, 0, false},
      {"float16 + 8 stochastic", Dtype::FLOAT16, 8, true},
      {"float8_e4m3fn", Dtype::FLOAT8_E4M3FN, 0, false},
      {"float8_e4m3fn + 16", Dtype::FLOAT8_E4M3FN, 16, false},
      {"float8_e5m2 stochastic", Dtype::FLOAT8_E5M2, 0, true},
      {"float8_e5m2 + 8", Dtype::FLOAT8_E5M2, 8, false},
  };
  int i = 0;
  for (int codec = 0; codec < 4; ++codec) {
    for (const Storage& storage : storages) {
      StepArgs call = {};
      call.codec = static_cast<CodecName>(codec);
      call.block_size = 64 << i % 3;
      call.param_dtype = storage.dtype;
      call.grad_dtype = static_cast<Dtype>(i % 3);
      call.correction_bits = storage.correction_bits;
      call.stochastic_rounding = storage.stochastic;
      call.amsgrad = i % 2 != 0;
      call.maximize = call.coupled_weight_decay = i % 4 > 1;
      call.grad_scale = 1.0f;
      const std::string result = shared ? share(step, call) : compare(step, call);
      std::printf("%s %s: %s\n", codecs[codec], storage.name, result.c_str());
      ++i;
    }
  }
}
