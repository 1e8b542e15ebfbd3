// Thread blocks on the CPU: every CUDA thread is a fiber. A fiber runs until it comes to a shuffle or to a barrier;
// when all that have to be there are, the scheduler exchanges their values and lets them go on.

#ifndef CUDA_HOST_THREADS

#include <ucontext.h>

#include <memory>
#include <vector>

#include "cuda_host.h"

namespace cuda_host {
namespace {

constexpr size_t STACK_BYTES = 64 * 1024;

struct Fiber {
  enum State { READY, AT_SHUFFLE, AT_BARRIER, DONE } state;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  int line;  // of the source where it waits
  uint64_t value;
  unsigned distance;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
unsigned current;
const std::function<void()>* kernel_of_all;

void wait(Fiber::State state, int line) {
  fibers[current].state = state;
  fibers[current].line = line;
  swapcontext(&fibers[current].context, &scheduler);
}

void body() {
  (*kernel_of_all)();
  fibers[current].state = Fiber::DONE;
  swapcontext(&fibers[current].context, &scheduler);
}

void start(unsigned number) {
  Fiber& fiber = fibers[number];
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
  fiber.state = Fiber::READY;
}

// Whether the fibers from `first` to `last` all wait for each other; if only some do, they never will.
bool all_wait(unsigned first, unsigned last, Fiber::State state) {
  unsigned waiting = 0;
  for (unsigned i = first; i < last; ++i) {
    waiting += fibers[i].state == state && fibers[i].line == fibers[first].line;
  }
  return waiting == last - first;
}

[[noreturn]] void report(unsigned first, unsigned last) {
  std::string text = "threads diverge:";
  for (unsigned i = first; i < last; ++i) {
    const Fiber& fiber = fibers[i];
    const char* names[] = {"runs", "at the shuffle in line ", "at the barrier in line ", "ended"};
    if (i > first && fiber.state == fibers[i - 1].state && fiber.line == fibers[i - 1].line) continue;
    text += " from thread " + std::to_string(i) + " on " + names[fiber.state];
    if (fiber.state == Fiber::AT_SHUFFLE || fiber.state == Fiber::AT_BARRIER) text += std::to_string(fiber.line);
    text += ";";
  }
  throw std::runtime_error(text);
}

void exchange(unsigned first, unsigned last) {
  std::vector<uint64_t> values;
  for (unsigned i = first; i < last; ++i) values.push_back(fibers[i].value);
  for (unsigned i = first; i < last; ++i) {
    fibers[i].value = values[(i - first) ^ fibers[i].distance];
    fibers[i].state = Fiber::READY;
  }
}

// Runs the fibers of one warp until they wait at a barrier or have ended.
void run_warp(unsigned first, unsigned last) {
  for (;;) {
    bool shuffles = false, ready = false;
    for (current = first; current < last; ++current) {
      if (fibers[current].state != Fiber::READY) continue;
      ready = true;
      swapcontext(&scheduler, &fibers[current].context);
    }
    for (unsigned i = first; i < last; ++i) shuffles |= fibers[i].state == Fiber::AT_SHUFFLE;
    if (shuffles) {
      if (!all_wait(first, last, Fiber::AT_SHUFFLE)) report(first, last);
      exchange(first, last);
    } else if (!ready) {
      return;
    }
  }
}

void run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) start(i);
  for (;;) {
    for (unsigned first = 0; first < threads; first += WARP) run_warp(first, first + WARP);
    unsigned done = 0;
    for (const Fiber& fiber : fibers) done += fiber.state == Fiber::DONE;
    if (done == threads) return;
    if (!all_wait(0, threads, Fiber::AT_BARRIER)) report(0, threads);
    for (Fiber& fiber : fibers) fiber.state = Fiber::READY;
  }
}

}  // namespace

void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  fibers = std::vector<Fiber>(threads);
  kernel_of_all = &kernel;
  blockDim = {threads, 1, 1};
  for (unsigned i = 0; i < blocks; ++i) {
    blockIdx = {i, 0, 0};
    run_block(threads);
  }
}

uint64_t shuffle_xor(uint64_t value, unsigned distance, unsigned mask, int line) {
  if (mask != 0xFFFFFFFF) throw std::runtime_error("only shuffles of whole warps are supported");
  const unsigned self = current;
  fibers[self].value = value;
  fibers[self].distance = distance;
  wait(Fiber::AT_SHUFFLE, line);
  return fibers[self].value;
}

void barrier(int line) {
  wait(Fiber::AT_BARRIER, line);
}

}  // namespace cuda_host

unsigned ThreadIndex::current() {
  return cuda_host::current;
}

#endif
