// Thread blocks on the CPU: every CUDA thread is a thread of the system, and the only order among them is that of their
// shuffles and barriers. For ThreadSanitizer.

#ifdef CUDA_HOST_THREADS

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_host.h"

namespace cuda_host {
namespace {

struct Warp {
  std::barrier<> meeting{WARP};
  uint64_t values[WARP];
};

thread_local unsigned current;
std::vector<std::unique_ptr<Warp>> warps;
std::unique_ptr<std::barrier<>> whole_block;

}  // namespace

void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  blockDim = {threads, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    warps.clear();
    for (unsigned i = 0; i < threads / WARP; ++i) warps.push_back(std::make_unique<Warp>());
    whole_block = std::make_unique<std::barrier<>>(threads);
    std::vector<std::thread> all;
    for (unsigned i = 0; i < threads; ++i) {
      all.emplace_back([i, &kernel] {
        current = i;
        kernel();
      });
    }
    for (std::thread& thread : all) thread.join();
  }
}

uint64_t shuffle_xor(uint64_t value, unsigned distance, unsigned, int) {
  Warp& warp = *warps[current / WARP];
  const unsigned lane = current % WARP;
  warp.values[lane] = value;
  warp.meeting.arrive_and_wait();
  const uint64_t other = warp.values[lane ^ distance];
  warp.meeting.arrive_and_wait();
  return other;
}

void barrier(int) {
  whole_block->arrive_and_wait();
}

}  // namespace cuda_host

unsigned ThreadIndex::current() {
  return cuda_host::current;
}

#endif
