// Watches every memory access of the kernels: bounds, alignment, races, shared memory read before it is set.
//
// g++ -fsanitize=thread puts a call such as __tsan_read4(address) before each access. The sanitizer itself is
// not linked: we answer these calls, for we know what a barrier is and where each array ends.
//
// Rules of this file:
// 1. Two accesses of one place, one of them a write, must be ordered. Within a block: by __syncthreads, or in
//    one warp by __syncwarp; a shuffle is no barrier for memory. Between blocks: write, __threadfence, atomic
//    there, and atomic, __threadfence, read here, with __syncthreads where these are in different threads: a
//    fence is for all that comes before it, so the thread with the atomic may make it for the whole block.
// 2. A place is two bytes, the smallest number that kernels.cu has.
// 3. The first fault ends the launch, before the access is made.

struct Access {                   // who touched two bytes last, and when
  unsigned block, warp_barriers;  // blocks are counted over all launches, from 1; 0: nobody
  unsigned long epoch, time;      // block barriers and events before it
  unsigned short thread;
  bool atomic;
};
struct Moment {  // of a thread of the running block, or of one that has run
  unsigned thread;
  unsigned long time, epoch;
};
struct Published {  // what a block did so that others see its writes
  Moment atomic;    // its last one
  Moment released[MAX_THREADS], acquired[MAX_THREADS];  // each thread's last fence before it, and after it
};
struct Cell {
  Access write, read;
};
struct Freed {
  void operator()(Cell *cells) const { free(cells); }
};
struct Region {
  char *begin, *end;
  bool constant;
  std::unique_ptr<Cell, Freed> cells;
};

static std::vector<Region> regions;  // the arrays of this launch
static Region shared;
static unsigned serial, first_serial, warp_barriers[32];  // of the running block; of the launch's first
static unsigned long now;
static std::map<unsigned, Published> published;  // by block
static char message[400];

extern "C" char __ehdr_start[] __attribute__((visibility("hidden"))),
    _end[] __attribute__((visibility("hidden")));

// Cells are 32 times as large as what they watch; of calloc's memory only what is touched takes any room.
static Region watched(char *begin, size_t n_bytes, bool constant) {
  Cell *cells = constant ? nullptr : (Cell *)calloc(n_bytes / 2 + 1, sizeof(Cell));
  return {begin, begin + n_bytes, constant, std::unique_ptr<Cell, Freed>(cells)};
}

// table: begin, bytes, is constant; of each array
extern "C" void emulator_arrays(const size_t *table, int n) {
  regions.clear();
  for (int i = 0; i < n; i++, table += 3) regions.push_back(watched((char *)table[0], table[1], table[2]));
  shared = watched(__start_cuda_shared, __stop_cuda_shared - __start_cuda_shared, false);
  first_serial = serial + 1;
  published.clear();
}

static void checker_begins_block() {
  serial++;
  memset(warp_barriers, 0, sizeof warp_barriers);
}

static void complain(const char *what, void *code, const Access *other = nullptr) {
  int n = snprintf(message, sizeof message, "%s at code %#lx, thread %u of block %u", what,
                   (unsigned long)((char *)code - __ehdr_start - 1), self->id, serial - first_serial);
  if (other)
    snprintf(message + n, sizeof message - n, ", against thread %u of block %u", other->thread,
             other->block - first_serial);
  error = message;
  n_alive = 0;
  void *lost;
  switch_to(&lost, host_stack);
}

// Of two moments of one block: has the other one certainly been when this one is?
static bool follows(const Moment &later, const Moment &before) {
  return before.time && later.time > before.time &&
         (later.thread == before.thread || later.epoch > before.epoch);
}

// Has this earlier access certainly happened, and can it be seen, by what the running thread does now?
static bool ordered(const Access &before) {
  if (before.block == serial)
    return before.thread == self->id || before.epoch < epoch ||
           (before.thread / 32 == self->id / 32 && before.warp_barriers < warp_barriers[self->id / 32]);
  // between the write and an atomic there, and between an atomic here and now, lies a fence of one of the two
  // threads
  Published &there = published[before.block], &here = published[serial];
  Moment write = {before.thread, before.time, before.epoch}, read = {self->id, now + 1, epoch};
  auto fenced = [](const Moment &from, const Moment *fences, const Moment &to) {
    auto lies_between = [&](const Moment &fence) { return follows(fence, from) && follows(to, fence); };
    return lies_between(fences[from.thread]) || lies_between(fences[to.thread]);
  };
  bool released = before.atomic || fenced(write, there.released, there.atomic);
  bool acquired = here.atomic.time && (before.atomic ? follows(read, here.atomic)
                                                     : fenced(here.atomic, here.acquired, read));
  return released && acquired;
}

static Region *region_of(char *address) {
  if (address >= shared.begin && address < shared.end) return &shared;
  for (Region &region : regions)
    if (address >= region.begin && address < region.end) return &region;
  return nullptr;
}

static void access(void *address, size_t n_bytes, bool writes, bool atomic, void *code) {
  char *p = (char *)address;
  if (!self || (p >= stacks && p < stacks + MAX_THREADS * STACK_BYTES)) return;  // a thread's own variables
  Region *region = region_of(p);
  if (!region && p >= __ehdr_start && p < _end) return;  // constants, and what the emulator itself keeps
  if (!region || p + n_bytes > region->end) return complain("out of bounds", code);
  bool is_shared = region == &shared;
  if (region->constant && writes) return complain("a weight is written", code);
  if (region->constant) return;
  Access access = {serial, warp_barriers[self->id / 32], epoch, ++now, (unsigned short)self->id, atomic};
  unsigned since = is_shared ? serial : first_serial;  // what is older is history
  size_t first = (p - region->begin) / 2, last = (p - region->begin + n_bytes - 1) / 2;
  Cell *cells = region->cells.get();
  for (Cell *cell = &cells[first]; cell <= &cells[last]; cell++) {
    const Access &write = cell->write, &read = cell->read;
    if (is_shared && !writes && write.block != serial)
      return complain("shared memory read before it is set", code);
    if (write.block >= since && !(atomic && write.atomic) && !ordered(write))
      return complain(writes ? "two writes race" : "a read races with a write", code, &write);
    if (writes && read.block >= since && !(atomic && read.atomic) && !ordered(read))
      return complain("a write races with a read", code, &read);
    if (writes) cell->write = access;
    if (!writes || atomic) cell->read = access;
  }
}

// What is written as the copy begins; until it ends nobody may read it.
static void checker_begins_copy(void *to, const void *from, void *code) {
  if (((size_t)to | (size_t)from) % COPY_BYTES) return complain("misaligned", code);
  if (region_of((char *)to) != &shared) return complain("a copy to what is not shared", code);
  access(to, COPY_BYTES, true, false, code);
  if (from) access((void *)from, COPY_BYTES, false, false, code);
  Cell *first = shared.cells.get() + ((char *)to - shared.begin) / 2;
  for (Cell *cell = first; cell < first + COPY_BYTES / 2; cell++) cell->write.block = 0;
}
static void checker_ends_copy(void *to, void *code) { access(to, COPY_BYTES, true, false, code); }

void note(Event event, void *address, size_t n_bytes) {
  if (event == WARP_BARRIER) warp_barriers[self->id / 32]++;
  if (event == FENCE) published[serial].acquired[self->id] = {self->id, ++now, epoch};
  if (event == PREFETCH) {  // reads nothing, but a GPU stops at a wrong address
    Region *region = region_of((char *)address);
    void *code = __builtin_return_address(0);
    if (((size_t)address | n_bytes) % COPY_BYTES) complain("misaligned", code);
    if (!region || (char *)address + n_bytes > region->end) complain("out of bounds", code);
  }
  if (event == ATOMIC) {
    access(address, n_bytes, true, true, __builtin_return_address(0));
    if (region_of((char *)address) == &shared) return;  // no other block sees it
    Published &here = published[serial];
    memcpy(here.released, here.acquired, sizeof here.released);
    here.atomic = {self->id, ++now, epoch};
  }
}

extern "C" {
#define WATCH(name, n, writes) \
  void name(void *p) { access(p, n, writes, false, __builtin_return_address(0)); }
#define WATCH_SIZE(n)                       \
  WATCH(__tsan_read##n, n, false)           \
  WATCH(__tsan_write##n, n, true)           \
  WATCH(__tsan_unaligned_read##n, n, false) \
  WATCH(__tsan_unaligned_write##n, n, true)
WATCH_SIZE(1)
WATCH_SIZE(2)
WATCH_SIZE(4)
WATCH_SIZE(8)
WATCH_SIZE(16)
void __tsan_read_range(void *p, size_t n) { access(p, n, false, false, __builtin_return_address(0)); }
void __tsan_write_range(void *p, size_t n) { access(p, n, true, false, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
// -fsanitize=alignment: an address that its type does not allow; a GPU stops there, x86 does not.
void __ubsan_handle_type_mismatch_v1(void *, void *) { complain("misaligned", __builtin_return_address(0)); }
}
