// The scheduler behind cuda.h: fibers, barriers, blocks, and the order in which threads run.
//
//     emulator_launch(kernel, arguments, grid, block, order) --> nullptr, or what went wrong
//
// Rules of this file:
// 1. One block after another, and in it one fiber at a time, so a run can be repeated exactly.
// 2. `order` decides who goes next: 0 first to last, 1 last to first, else a random seed. Of any two threads
//    between two barriers each goes first in one of the orders 0 and 1.
// 3. Shared memory begins each block as NaN, and is so where a copy to it is on its way.

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda.h"

namespace emulator {

// Leave one fiber at label 1 and enter another where it left off. The asm claims to change every register, so
// the compiler saves what it needs around it.
static inline __attribute__((always_inline)) void switch_to(void **save, void *load) {
  asm volatile(
      "push %%rbp; lea 1f(%%rip), %%rax; push %%rax; mov %%rsp, (%0); mov %1, %%rsp; pop %%rax; jmp *%%rax\n"
      "1: pop %%rbp"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
}

static const int MAX_THREADS = 1024;
static const size_t STACK_BYTES = 64 << 10;

Thread threads[MAX_THREADS], *self;
Warp warps[32];
dim3 block_index, block_size, grid_size;

static unsigned long epoch;  // counts the block barriers
static char *stacks;         // one a thread, the same for all libraries
static void *host_stack;     // where emulator_launch was left
static void (*kernel)(void **), **arguments;
static uint32_t warps_ready, warps_live;  // one bit a warp, as in Warp
static unsigned n_waiting, n_alive;       // threads at the block barrier; threads that have not returned
static int order;
static std::minstd_rand dice;
static const char *error;

extern "C" char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));

#ifdef CHECKER
static void checker_begins_block();
static void checker_begins_copy(void *to, const void *from, void *code);
static void checker_ends_copy(void *to, void *code);
#else
void note(Event, void *, size_t) {}
static void checker_begins_block() {}
static void checker_begins_copy(void *, const void *, void *) {}
static void checker_ends_copy(void *, void *) {}
#endif

// Which of the set bits goes next, after bit `from`?
static int pick(uint32_t set, int from) {
  uint32_t below = set & uint32_t((1ull << from) - 1), above = set & ~uint32_t((1ull << from) - 1);
  if (order == 0) return __builtin_ctz(above ? above : set);
  if (order == 1) return 31 - __builtin_clz(below ? below : set);
  for (int n = dice() % __builtin_popcount(set); n; n--) set &= set - 1;
  return __builtin_ctz(set);
}

static int begin() { return order == 1 ? 32 : 0; }

static void enter(unsigned id, void **save) {
  self = &threads[id];
  switch_to(save, self->stack);
}

// Let another fiber run; back to the host when none can.
static void leave(void **save) {
  unsigned w = self->id / 32;
  if (!warps[w].ready) warps_ready &= ~(1u << w);
  if (!warps_ready) {
    if (n_alive) error = "deadlock: some threads wait where others never come";
    switch_to(save, host_stack);
    return;
  }
  bool same = warps_ready >> w & 1;  // stay with this warp while it has work
  if (!same) w = pick(warps_ready, w);
  enter(w * 32 + pick(warps[w].ready, same ? self->id % 32 : begin()), save);
}

void wait_in_warp() { leave(&self->stack); }

static void release_block() {
  for (Warp &warp : warps) warp.ready = warp.live & ~warp.arrived;
  warps_ready = warps_live;
  n_waiting = 0;
  epoch++;
}

void wait_at_block_barrier() {
  if (++n_waiting == n_alive) return release_block();
  warps[self->id / 32].ready &= ~(1u << self->id % 32);
  leave(&self->stack);
}

// ---- Copies to shared memory that go on by themselves

static const size_t COPY_BYTES = 16;
struct Copy {
  void *to, *code;
  const void *from;  // null: zeros
};
static std::deque<std::vector<Copy>> copies[MAX_THREADS];  // groups on their way; the last is not ended yet

void begin_copy(void *to, const void *from, bool is_there) {
  Copy copy = {to, __builtin_return_address(0), is_there ? from : nullptr};
  checker_begins_copy(copy.to, copy.from, copy.code);
  memset(to, 0xff, COPY_BYTES);
  copies[self->id].back().push_back(copy);
}

void end_copies() { copies[self->id].emplace_back(); }

void await_copies(int n) {
  for (auto &groups = copies[self->id]; groups.size() > size_t(n) + 1; groups.pop_front())
    for (Copy &copy : groups.front()) {
      checker_ends_copy(copy.to, copy.code);
      if (copy.from) memcpy(copy.to, copy.from, COPY_BYTES);
      else memset(copy.to, 0, COPY_BYTES);
    }
}

static void fiber() {
  kernel(arguments);
  for (auto &group : copies[self->id])
    if (!group.empty()) {
      error = "a thread ended while copies of its own were on their way";
      n_alive = 0;
      switch_to(&self->stack, host_stack);
    }
  Warp &warp = warps[self->id / 32];
  uint32_t bit = 1u << self->id % 32;
  warp.live &= ~bit, warp.ready &= ~bit;
  if (!warp.live) warps_live &= ~(1u << self->id / 32);
  if (--n_alive && n_waiting == n_alive) release_block();  // those that returned are not waited for
  leave(&self->stack);
  abort();
}

static uint32_t ones(unsigned n) { return n >= 32 ? ~0u : (1u << n) - 1; }

static void run_block() {
  if (__start_cuda_shared) memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
  n_waiting = 0, n_alive = block_size.x * block_size.y * block_size.z;
  dim3 index = {0, 0, 0};
  for (unsigned id = 0; id < n_alive; id++) {
    size_t stagger = id % 61 * 192 & ~63;  // or all stacks would share a few sets of the processor's cache
    void **stack = (void **)(stacks + (id + 1) * STACK_BYTES - stagger) - 2;
    stack[0] = (void *)fiber;  // the address to jump to; leaves the stack as a call would
    threads[id] = {stack, index, id};
    copies[id].assign(1, {});
    if (++index.x == block_size.x) {
      index.x = 0;
      if (++index.y == block_size.y) index.y = 0, index.z++;
    }
  }
  unsigned n_warps = (n_alive + 31) / 32;
  for (unsigned w = 0; w < 32; w++) {
    uint32_t lanes = w < n_warps ? ones(n_alive - w * 32) : 0;
    warps[w] = {lanes, lanes, 0, {}};
  }
  warps_ready = warps_live = ones(n_warps);
  checker_begins_block();
  int w = pick(warps_ready, begin());
  enter(w * 32 + pick(warps[w].ready, begin()), &host_stack);
}

extern "C" const char *emulator_launch(void (*kernel_)(void **), void **arguments_, const unsigned *grid,
                                       const unsigned *block, int order_, char *stacks_) {
  kernel = kernel_, arguments = arguments_, order = order_, stacks = stacks_, error = nullptr;
  dice.seed(order + 1);
  grid_size = {grid[0], grid[1], grid[2]}, block_size = {block[0], block[1], block[2]};
  unsigned n_blocks = grid[0] * grid[1] * grid[2], first = 0, stride = 1;
  if (order == 1) first = stride = n_blocks - 1;
  if (order > 1) {
    first = dice() % n_blocks;
    do stride = 1 + dice() % n_blocks;
    while (std::gcd(stride, n_blocks) != 1);
  }
  for (unsigned n = 0; n < n_blocks && !error; n++) {
    unsigned b = (first + (unsigned long)n * stride) % n_blocks;
    block_index = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
    run_block();
  }
  self = nullptr;
  return error;
}

#ifdef CHECKER
#include "checker.h"
#endif

}  // namespace emulator
