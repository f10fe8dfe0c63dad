// An accelerator for the tests, as torch's PrivateUse1: several devices, whose streams are queues and run late. Nothing that is
// queued is done until somebody waits for it, or until the seeded scheduler lets a step of some stream go on.
//
// Memory: each device has an arena that is mapped twice. Tensors have addresses in a mapping that nobody may read or write, so
// a host that touches device memory dies of SIGSEGV; the queued operations use the other mapping. Operations are the CPU's,
// run on that memory when their turn comes, so results are the CPU's to the bit.
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>

#include "late.h"

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using late::Mark;
using torch::jit::Stack;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 3, STREAMS = 32, POISON = 0xDB;
constexpr size_t ARENA_BYTES = size_t(64) << 20, GRANULE_BYTES = 512;

// ---- Streams and events

struct Entry {
  std::function<void()> work;
  Mark awaited;                      // of an entry without work
  std::function<bool(bool)> ready;  // of one that other processes have a part in; see late::Shared
};

struct Queue {
  std::deque<Entry> entries;
  uint64_t done = 0;
  uint64_t queued() const { return done + entries.size(); }
};

struct Settings {
  bool pageable_is_late = false;  // asynchronous copies to pageable memory: torch promises nothing, CUDA's block
  bool refuses_registration = false;
  int chance_percent = 0;       // at each call: of one step of some stream
  int wait_us = 0;              // each wait takes at least so long, in which other threads go on
  int64_t allocations_left = -1, operations_left = -1, copies_left = -1;  // until one fails; -1: none does
};

struct Block {
  size_t size;
  int device, stream;
  std::vector<Mark> used_by;  // other streams, at the time it was freed
};

struct World {
  // Whoever holds the interpreter's lock may wait for this one, so nothing that takes that one is done under this one: no
  // tensor that Python may know is copied or let go of.
  std::recursive_mutex lock;
  std::mutex freeing;
  std::vector<char*> freed;  // just now; tensors die anywhere, so this waits for nobody
  Queue queues[DEVICES][STREAMS];
  int streams_made[DEVICES] = {};
  Settings settings;
  std::mt19937_64 chance{0};
  std::string error;
  uint64_t run = 0;  // operations

  char *handles[DEVICES] = {}, *shadows[DEVICES] = {};
  size_t used[DEVICES] = {};
  std::map<std::tuple<int, int, size_t>, std::vector<char*>> free_blocks;
  std::map<char*, Block> blocks;
  std::vector<char*> waiting;  // freed, but other streams use them still
  std::map<char*, size_t> pinned;
  std::vector<std::pair<char*, std::vector<Mark>>> pinned_waiting;
};

World& world() {
  static World* one = new World;  // for good: tensors are freed when the interpreter ends
  return *one;
}

struct Locked {
  explicit Locked(std::recursive_mutex& lock) : lock_(lock) {
    lock_.lock();
    depth++;
  }
  ~Locked() {
    depth--;
    lock_.unlock();
  }
  static void let_others(std::recursive_mutex& lock, int nap_us) {
    int held = depth;
    for (int times = 0; times < held; times++) lock.unlock();
    usleep(nap_us);
    for (int times = 0; times < held; times++) lock.lock();
  }
  static thread_local int depth;

 private:
  std::recursive_mutex& lock_;
};

thread_local int Locked::depth = 0;

thread_local int current_device = 0;
thread_local int current_streams[DEVICES] = {};

Queue& queue_of(const Mark& mark) { return world().queues[mark.device][mark.stream]; }

bool is_done(const Mark& mark) { return mark.device < 0 || queue_of(mark).done >= mark.number; }

Mark end_of(int device, int stream) { return {device, stream, world().queues[device][stream].queued()}; }

bool runs_out(int64_t& left) { return left >= 0 && left-- == 0; }

bool can_step(const Queue& queue, bool wanted) {
  if (queue.entries.empty()) return false;
  const Entry& front = queue.entries.front();
  return front.work ? !front.ready || front.ready(wanted) : is_done(front.awaited);
}

void step(Queue& queue) {
  Entry entry = std::move(queue.entries.front());
  queue.entries.pop_front();
  queue.done++;
  if (!entry.work) return;
  auto& here = world();
  here.run++;
  try {
    TORCH_CHECK(!runs_out(here.settings.operations_left), "an operation failed");
    entry.work();
  } catch (const c10::Error& error) {
    if (here.error.empty()) here.error = error.what_without_backtrace();  // for good, as on CUDA
  } catch (const std::exception& error) {
    if (here.error.empty()) here.error = error.what();
  }
}

// One step that lets a mark come nearer. Returns false where there is none without another process.
bool step_towards(const Mark& mark) {
  Queue& queue = queue_of(mark);
  const Entry& front = queue.entries.front();
  if (!front.work && !is_done(front.awaited)) return step_towards(front.awaited);
  if (!can_step(queue, true)) return false;
  step(queue);
  return true;
}

void run_until(Mark mark) {
  int nap_us = 20;
  if (!is_done(mark) && world().settings.wait_us) Locked::let_others(world().lock, world().settings.wait_us);
  while (!is_done(mark))
    if (step_towards(mark))
      nap_us = 20;
    else
      Locked::let_others(world().lock, nap_us = std::min(2 * nap_us, 1000));
}

void raise_if_failed() {
  auto& here = world();
  if (here.error.empty()) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "late: an asynchronous error, of an earlier call: " + here.error);
}

void recycle_freed();

// A call from outside: an earlier error shows, and time goes on.
void called() {
  auto& here = world();
  recycle_freed();
  raise_if_failed();
  while (int(here.chance() % 100) < here.settings.chance_percent) {
    std::vector<Queue*> busy;
    for (auto& device : here.queues)
      for (auto& queue : device)
        // Not one that stands before a wait: to go on there would run what it waits for.
        if (can_step(queue, false)) busy.push_back(&queue);
    if (busy.empty()) return;
    step(*busy[here.chance() % busy.size()]);
  }
}

void put(int device, std::function<void()> work) {
  world().queues[device][current_streams[device]].entries.push_back({std::move(work), {}, {}});
}

void let_wait(int device, int stream, const Mark& mark) {
  if (!is_done(mark)) world().queues[device][stream].entries.push_back({nullptr, mark, {}});
}

void wait_for(const Mark& mark) {
  Locked held(world().lock);
  called();
  run_until(mark);
  raise_if_failed();
}

// ---- Memory

void map_arena(int device) {
  auto& here = world();
  if (here.handles[device]) return;
  int file = memfd_create("late", 0);
  TORCH_CHECK(file >= 0 && !ftruncate(file, ARENA_BYTES), "late: no memory for a device");
  here.handles[device] = static_cast<char*>(mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_SHARED, file, 0));
  here.shadows[device] = static_cast<char*>(mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
}

int device_of(const void* address) {
  for (int device = 0; device < DEVICES; device++) {
    char* first = world().handles[device];
    if (first && address >= first && address < first + ARENA_BYTES) return device;
  }
  return -1;
}

char* shadow(const void* address) {
  int device = device_of(address);
  TORCH_INTERNAL_ASSERT(device >= 0);
  return world().shadows[device] + (static_cast<const char*>(address) - world().handles[device]);
}

// What is freed goes to the next tensor of its size on the same stream, at once, and is overwritten then, in the stream's order.
// Not before: who frees memory may let the stream wait for its users after that, as FSDP2 does.
void recycle(char* address) {
  auto& here = world();
  Block& block = here.blocks.at(address);
  block.used_by.clear();
  here.free_blocks[{block.device, block.stream, block.size}].push_back(address);
}

bool all_done(const std::vector<Mark>& marks) { return std::all_of(marks.begin(), marks.end(), is_done); }

void recycle_freed() {
  auto& here = world();
  std::vector<char*> left, freed;
  {
    std::lock_guard<std::mutex> held(here.freeing);
    freed.swap(here.freed);
  }
  for (char* address : freed) {
    for (Mark& mark : here.blocks.at(address).used_by) mark = end_of(mark.device, mark.stream);
    here.waiting.push_back(address);
  }
  for (char* address : here.waiting)
    if (all_done(here.blocks.at(address).used_by)) recycle(address);
    else left.push_back(address);
  here.waiting = left;
}

void free_block(void* address) {
  if (!address) return;
  std::lock_guard<std::mutex> held(world().freeing);
  world().freed.push_back(static_cast<char*>(address));
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto& here = world();
    Locked held(here.lock);
    int device = current_device, stream = current_streams[device];
    Device on(KIND, DeviceIndex(device));
    if (!size) return {nullptr, on};
    called();
    map_arena(device);
    recycle_freed();
    size = (size + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
    if (runs_out(here.settings.allocations_left)) fail(size);
    auto& same = here.free_blocks[{device, stream, size}];
    char* address;
    if (same.empty()) {
      if (here.used[device] + size > ARENA_BYTES) fail(size);
      address = here.handles[device] + here.used[device];
      here.used[device] += size;
      here.blocks[address] = {size, device, stream, {}};
      memset(shadow(address), POISON, size);
    } else {
      address = same.back();
      same.pop_back();
      char* bytes = shadow(address);
      put(device, [bytes, size] { memset(bytes, POISON, size); });
    }
    return {address, address, free_block, on};
  }
  [[noreturn]] static void fail(size_t size) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "late: out of memory: ", size, " bytes");
    abort();
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "late: device memory is not copied so"); }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

std::vector<Mark> ends_of_all() {
  std::vector<Mark> marks;
  for (int device = 0; device < DEVICES; device++)
    for (int stream = 0; stream < STREAMS; stream++) marks.push_back(end_of(device, stream));
  return marks;
}

void free_pinned(void* address) {
  auto& here = world();
  Locked held(here.lock);
  here.pinned.erase(static_cast<char*>(address));
  here.pinned_waiting.push_back({static_cast<char*>(address), ends_of_all()});
  decltype(here.pinned_waiting) left;
  for (auto& [freed, marks] : here.pinned_waiting)
    if (all_done(marks)) free(freed);
    else left.push_back({freed, marks});
  here.pinned_waiting = left;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Locked held(world().lock);
    char* address = static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64));
    world().pinned[address] = size + 1;
    return {address, address, free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  auto& here = world();
  Locked held(here.lock);
  auto* address = static_cast<char*>(const_cast<void*>(data));
  auto next = here.pinned.upper_bound(address);
  return next != here.pinned.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

// ---- What torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(KIND, DeviceIndex(current_device)); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < DEVICES, "late: there is no device ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override { return stream(device, current_streams[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    Locked held(world().lock);
    called();
    int made = world().streams_made[index(device)]++;
    return stream(device, 1 + made % (STREAMS - 1));
  }
  Stream exchangeStream(Stream wanted) const override {
    Stream before = getStream(wanted.device());
    current_streams[index(wanted.device())] = int(wanted.id());
    return before;
  }
  void* getStreamNativeHandle(const Stream wanted) const override {
    return &world().queues[index(wanted.device())][wanted.id()];
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    Locked held(world().lock);
    called();
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = end_of(index(on.device()), int(on.id()));
  }
  void block(void* event, const Stream& on) const override {
    Locked held(world().lock);
    called();
    if (event) let_wait(index(on.device()), int(on.id()), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override { return !event || is_over(*static_cast<Mark*>(event)); }
  bool queryStream(const Stream& on) const override { return is_over(end_of(index(on.device()), int(on.id()))); }
  void synchronizeStream(const Stream& on) const override { wait_for(end_of(index(on.device()), int(on.id()))); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(*static_cast<Mark*>(event));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (int stream = 0; stream < STREAMS; stream++) wait_for(end_of(device, stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    Locked held(world().lock);
    if (!data.get()) return;
    auto& block = world().blocks.at(static_cast<char*>(data.get()));
    if (block.device == index(on.device()) && block.stream == on.id()) return;
    block.used_by.push_back({index(on.device()), int(on.id()), 0});
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

 private:
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(Device device, int number) {
    return Stream(Stream::UNSAFE, Device(KIND, DeviceIndex(index(device))), number);
  }

 public:
  // Who asks again and again lets time go on.
  static bool is_over(const Mark& mark) {
    Locked held(world().lock);
    called();
    bool over = is_done(mark);
    if (!over) step_towards(mark);
    return over;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(KIND, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "late: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "late: a generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

const at::Generator& default_generator(int device) {
  static auto* made = new std::vector<at::Generator>;
  Locked held(world().lock);
  while (made->size() < DEVICES) made->push_back(at::make_generator<Generator>(DeviceIndex(made->size())));
  return made->at(device < 0 ? current_device : device);
}

thread_local bool gives_default = false;  // torch has no name in Python for the default generator

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return DeviceIndex(current_device); }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = DeviceIndex(current_device);
    current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    if (gives_default) return default_generator(device);
    return at::make_generator<Generator>(DeviceIndex(device < 0 ? current_device : device));
  }
  Device getDeviceFromPtr(void* data) const override { return Device(KIND, DeviceIndex(device_of(data))); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_memory.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) {
      Locked held(world().lock);
      char *to = shadow(fresh.get()), *from = shadow(storage.data());
      put(storage.device().index(), [=] { memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- Operations

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

// The tensor's memory as the host sees it when the operation's turn comes. It holds nothing: memory that is freed is used again.
Tensor seen_late(const Tensor& tensor) {
  auto* data = tensor.numel() ? shadow(tensor.const_data_ptr()) : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU).requires_grad(false));
}

Tensor room_for(const Tensor& tensor) {
  auto room = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU).requires_grad(false));
  if (room.numel()) memset(room.mutable_data_ptr(), 0, room.storage().nbytes());
  return room;
}

struct PlainDispatch {  // whoever waits runs what others have queued: not under its own modes
  static c10::impl::LocalDispatchKeySet plain() {
    c10::impl::PODLocalDispatchKeySet none{};
    none.set_excluded(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    return c10::impl::LocalDispatchKeySet(none);
  }
  c10::impl::ForceDispatchKeyGuard guard{plain()};
};

template <typename F>
IValue mapped(const IValue& value, const F& change) {
  if (value.isTensor()) return is_ours(value.toTensor()) ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& one : value.toTensorVector()) list.push_back(is_ours(one) ? change(one) : one);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& one : value.toOptionalTensorVector())
      list.push_back(one && is_ours(*one) ? std::optional<Tensor>(change(*one)) : one);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == KIND) return Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().type() == KIND)
    return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
  return value;
}

template <typename F>
Stack mapped_all(const Stack& args, const F& change) {
  Stack changed;
  for (const IValue& value : args) changed.push_back(mapped(value, change));
  return changed;
}

// Host tensors are read when an operation is queued, as the scalars of CUDA's kernels are.
IValue as_it_is_now(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() ? IValue(value.toTensor().clone()) : value;
}

int device_of(const Stack& args) {
  int device = -1;
  mapped_all(args, [&](const Tensor& tensor) {
    int other = tensor.device().index();
    TORCH_CHECK(device < 0 || device == other, "late: tensors of devices ", device, " and ", other, " in one operation");
    device = other;
    return tensor;
  });
  for (const IValue& value : args)
    if (device < 0 && value.isDevice() && value.toDevice().has_index()) device = value.toDevice().index();
  return device < 0 ? current_device : device;
}

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool needs_values(const c10::OperatorHandle& op, const Stack& args) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!draws(op)) return false;
  bool reads = false;  // numbers are drawn when the operation is queued, so what it reads must be there
  for (size_t number = 0; number < args.size(); number++) {
    const auto* alias = op.schema().arguments()[number].alias_info();
    if (args[number].isTensor() && !(alias && alias->isWrite())) reads = true;
  }
  return reads;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  PlainDispatch plain;
  op.callBoxed(stack);
}

// Where an operation names no generator, the CPU's would be drawn from.
void call_drawing(const c10::OperatorHandle& op, Stack& stack, int device) {
  auto& ours = static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl())->inner;
  auto theirs = at::detail::getDefaultCPUGenerator();
  auto before = theirs.get_state();
  theirs.set_state(ours.get_state());
  call(op, stack);
  ours.set_state(theirs.get_state());
  theirs.set_state(before);
}

// Results that are an argument on the host are that argument on the device; for others there is new memory.
IValue result_on_device(const IValue& value, const std::vector<std::pair<Tensor, Tensor>>& pairs, int device) {
  auto place = [&](const Tensor& made) -> Tensor {
    for (const auto& [host, ours] : pairs)
      if (host.is_same(made)) return ours;
    if (!made.defined()) return made;
    return at::empty_strided(made.sizes(), made.strides(), made.options().device(Device(KIND, DeviceIndex(device))));
  };
  if (value.isTensor()) return place(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& one : value.toTensorVector()) list.push_back(place(one));
  return list;
}

// Each tensor among results, with the place for it on the device, seen from the host.
void move_results(const Stack& results, const Stack& places) {
  auto move = [](const Tensor& made, const Tensor& place) {
    if (made.defined() && made.numel() && made.data_ptr() != place.data_ptr()) place.copy_(made);
  };
  for (size_t number = 0; number < results.size(); number++) {
    if (results[number].isTensor()) move(results[number].toTensor(), places[number].toTensor());
    if (!results[number].isTensorList()) continue;
    auto made = results[number].toTensorVector(), place = places[number].toTensorVector();
    for (size_t one = 0; one < made.size(); one++) move(made[one], place[one]);
  }
}

void follow_sizes(const std::vector<std::pair<Tensor, Tensor>>& pairs) {
  for (const auto& [host, ours] : pairs)
    if (host.sizes() != ours.sizes()) ours.resize_(host.sizes());
}

void now(const c10::OperatorHandle& op, Stack& args, Stack& into, int device) {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  Stack host = mapped_all(args, [&](const Tensor& tensor) {
    pairs.emplace_back(seen_late(tensor).clone(at::MemoryFormat::Preserve), tensor);
    return pairs.back().first;
  });
  draws(op) ? call_drawing(op, host, device) : call(op, host);
  follow_sizes(pairs);
  for (const IValue& value : host) into.push_back(result_on_device(value, pairs, device));
  Stack places = mapped_all(into, seen_late);
  for (const auto& [made, ours] : pairs) {
    host.push_back(made);
    places.push_back(seen_late(ours));
  }
  Locked held(world().lock);
  put(device, [host, places] {
    PlainDispatch plain;
    move_results(host, places);
  });
}

void later(const c10::OperatorHandle& op, Stack& args, Stack& into, int device) {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  bool in_place = op.schema().name().back() == '_' && is_ours(args[0].toTensor()) && op.schema().returns().size() == 1;
  if (in_place) {
    into.push_back(args[0]);
  } else {
    Stack tried = mapped_all(args, [&](const Tensor& tensor) {
      pairs.emplace_back(room_for(tensor), tensor);
      return pairs.back().first;
    });
    call(op, tried);
    follow_sizes(pairs);
    for (const IValue& value : tried) into.push_back(result_on_device(value, pairs, device));
  }
  for (IValue& value : args) value = as_it_is_now(value);
  Stack host = mapped_all(args, seen_late), places = mapped_all(into, seen_late);
  Locked held(world().lock);
  put(device, [op, host, places]() mutable {
    PlainDispatch plain;
    op.callBoxed(host);
    move_results(host, places);
  });
}

void queue_operation(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  Stack args(stack->end() - count, stack->end()), into;
  stack->erase(stack->end() - count, stack->end());
  int device = device_of(args);
  Mark end;
  {
    Locked held(world().lock);
    called();
    end = end_of(device, current_streams[device]);
  }
  c10::DeviceGuard guard(Device(KIND, DeviceIndex(device)));
  bool at_once = draws(op) || needs_values(op, args);
  if (needs_values(op, args)) wait_for(end);
  at_once ? now(op, args, into, device) : later(op, args, into, device);
  for (IValue& value : into) stack->push_back(std::move(value));
}

Tensor same_memory(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false));
}

void enqueue_copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& here = world();
  bool from_pinned = from.is_cpu() && is_pinned(from.const_data_ptr()), to_pinned = to.is_cpu() && is_pinned(to.const_data_ptr());
  Tensor source = is_ours(from)                  ? seen_late(from)
                  : non_blocking && from_pinned ? same_memory(from)
                                                : from.clone(at::MemoryFormat::Preserve);
  Tensor target = is_ours(to) ? seen_late(to) : same_memory(to);
  int device = (is_ours(from) ? from : to).device().index();
  int other = is_ours(from) && is_ours(to) ? to.device().index() : device;
  Locked held(here.lock);
  called();
  TORCH_CHECK(!(to_pinned && runs_out(here.settings.copies_left)), "late: a copy was refused");
  if (other != device) let_wait(device, current_streams[device], end_of(other, current_streams[other]));
  put(device, [source, target] {
    PlainDispatch plain;
    target.copy_(source);
  });
  Mark end = end_of(device, current_streams[device]);
  if (other != device) let_wait(other, current_streams[other], end);
  bool blocks = to.is_cpu() && !to_pinned && !here.settings.pageable_is_late;
  if ((non_blocking && !blocks) || (!from.is_cpu() && !to.is_cpu())) return;
  run_until(end);
  raise_if_failed();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel()) {
    PlainDispatch plain;
    enqueue_copy(from.expand(to.sizes()), to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Device wanted(std::optional<Device> device) {
  return Device(KIND, device && device->has_index() ? device->index() : DeviceIndex(current_device));
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(wanted(device));
  return at::detail::empty_generic(sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(wanted(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  impl->set_sizes_contiguous(sizes);
  return self;
}

void record_stream(Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

Tensor& set_storage(Tensor& self, at::Storage storage) { return at::native::set_(self, std::move(storage)); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_operation>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  // Else torch would put them together from other operations, with other rounding than the CPU's.
  for (auto name : {"native_layer_norm", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queue_operation>());
}

Hooks hooks;
struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(&hooks); }
} registered;

}  // namespace

// ---- For the process group

namespace late {

int new_stream(int device) { return int(Guard().getNewStream(Device(KIND, DeviceIndex(device)), 0).id()); }

int current_stream(int device) { return current_streams[device]; }

Mark queue_behind_current(int device, int stream, std::vector<Shared> operations) {
  Locked held(world().lock);
  called();
  let_wait(device, stream, end_of(device, current_streams[device]));
  for (auto& one : operations)
    world().queues[device][stream].entries.push_back({std::move(one.work), {}, std::move(one.ready)});
  return end_of(device, stream);
}

void let_current_stream_wait(const Mark& mark) {
  Locked held(world().lock);
  called();
  let_wait(mark.device, current_streams[mark.device], mark);
}

void use_on(const at::Tensor& tensor, int stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), Stream(Stream::UNSAFE, tensor.device(), stream));
}

bool is_over(const Mark& mark) { return Guard::is_over(mark); }

bool go_on(const Mark& mark) {
  Locked held(world().lock);
  return !is_done(mark) && step_towards(mark);
}

void block_host_until(const Mark& mark) { wait_for(mark); }

at::Tensor seen_late(const at::Tensor& tensor) { return ::seen_late(tensor); }

}  // namespace late

// ---- For the tests, by ctypes

extern "C" {

void late_set(uint64_t seed, int chance_percent, bool pageable_is_late, bool refuses_registration, int wait_us) {
  Locked held(world().lock);
  world().settings = {pageable_is_late, refuses_registration, chance_percent, wait_us};
  world().chance.seed(seed);
}

void late_fail(int64_t allocations, int64_t operations, int64_t copies) {
  Locked held(world().lock);
  world().settings.allocations_left = allocations;
  world().settings.operations_left = operations;
  world().settings.copies_left = copies;
}

int late_register(uint64_t address, uint64_t size) {
  Locked held(world().lock);
  if (world().settings.refuses_registration) return 1;
  world().pinned[reinterpret_cast<char*>(address)] = size;
  return 0;
}

int late_unregister(uint64_t address) {
  Locked held(world().lock);
  return world().pinned.erase(reinterpret_cast<char*>(address)) ? 0 : 1;
}

uint64_t late_run() { return world().run; }

uint64_t late_waiting() {
  Locked held(world().lock);
  uint64_t count = 0;
  for (auto& device : world().queues)
    for (auto& queue : device) count += queue.entries.size();
  return count;
}

void late_forget_error() {
  Locked held(world().lock);
  world().error.clear();
}

void late_give_default(bool gives) { gives_default = gives; }

int late_devices() { return DEVICES; }
}
