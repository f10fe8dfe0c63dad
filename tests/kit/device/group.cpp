// A process group backend for the accelerator of late.cpp, with NCCL's order of things. It takes tensors of the device alone.
// A collective is queued on a stream of the group's own, behind the caller's current stream; Work::wait() lets the current
// stream wait and not the host; who does not come in time ends the process.
//
// A collective is two operations of that stream: each rank posts its bytes, and takes those of the others. Nobody is in it
// before somebody waits for it, on one rank: then a thread of each rank lets its streams go on until it has taken part.
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <Python.h>
#include <c10/core/StreamGuard.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <thread>

#include "late.h"

namespace {

using at::Tensor;
using late::Mark;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Parts = std::vector<Tensor>;  // what a rank gives: on the device when it is asked for, on the host when it is posted

constexpr int DEVICES = 3, PARTS = 256;
constexpr size_t ROOM_BYTES = size_t(32) << 20;
constexpr auto LOOK = std::chrono::microseconds(200);

// ---- What a rank shows to the others, in memory of its own that they have mapped, too

struct Seat {
  std::atomic<uint64_t> posted{0}, taken{0};  // collectives
  uint64_t parts = 0, at[PARTS] = {}, bytes[PARTS] = {};
  char room[ROOM_BYTES];
};

struct Seats {
  Seat of[DEVICES];  // the n-th device that a rank uses in the group; which one that is may differ between ranks
};

Seats* mapped(const std::string& path) {
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "late: no memory of another rank at ", path);
  auto* seats = mmap(nullptr, sizeof(Seats), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(seats != MAP_FAILED, "late: memory of another rank cannot be mapped");
  return static_cast<Seats*>(seats);
}

struct Collective {
  const char* name;
  Mark end;
  Milliseconds timeout;
  std::atomic<bool> begun{false};  // somebody waits for it, on this rank
  Clock::time_point since;
};

struct Channel {
  int device, stream;
  std::vector<Seat*> seats;  // by rank
  std::mutex lock;
  std::deque<std::shared_ptr<Collective>> left;
  uint64_t issued = 0;
};

struct Group : torch::CustomClassHolder {
  int rank, size;
  std::vector<Seats*> seats;
  std::vector<std::unique_ptr<Channel>> channels;
  std::mutex lock;
  std::atomic<bool> aborted{false};

  Channel& channel_of(int device) {
    std::lock_guard<std::mutex> held(lock);
    for (auto& one : channels)
      if (one->device == device) return *one;
    auto made = std::make_unique<Channel>();
    made->device = device;
    made->stream = late::new_stream(device);
    for (auto* of : seats) made->seats.push_back(&of->of[channels.size()]);
    channels.push_back(std::move(made));
    return *channels.back();
  }
  std::vector<Channel*> all() {
    std::lock_guard<std::mutex> held(lock);
    std::vector<Channel*> found;
    for (auto& one : channels) found.push_back(one.get());
    return found;
  }
};

void begin(Collective& one) {
  if (one.begun) return;
  one.since = Clock::now();
  one.begun = true;
}

[[noreturn]] void die(const Group& group, const Collective& one, const char* why) {
  fprintf(stderr, "late: rank %d of %d: %s: %s. The process ends, as with NCCL's watchdog\n", group.rank, group.size, one.name, why);
  fflush(stderr);
  abort();
}

// ---- The thread that takes part in what others wait for, and looks at the time

struct Attendant {
  std::mutex lock;
  std::vector<c10::intrusive_ptr<Group>> groups;
  bool begun = false;

  void add(const c10::intrusive_ptr<Group>& group) {
    std::lock_guard<std::mutex> held(lock);
    groups.push_back(group);
    if (!begun) std::thread([this] { attend(); }).detach();
    begun = true;
  }
  void drop(const Group* group) {
    std::lock_guard<std::mutex> held(lock);
    std::erase_if(groups, [&](const auto& one) { return one.get() == group; });
  }
  [[noreturn]] void attend() {
    while (true) {
      std::this_thread::sleep_for(LOOK);
      std::vector<c10::intrusive_ptr<Group>> now;
      {
        std::lock_guard<std::mutex> held(lock);
        now = groups;
      }
      for (auto& group : now)
        for (Channel* channel : group->all()) look(*group, *channel);
    }
  }
  static void look(Group& group, Channel& channel) {
    uint64_t mine = channel.seats[group.rank]->taken;
    std::shared_ptr<Collective> next;
    {
      std::lock_guard<std::mutex> held(channel.lock);
      while (channel.left.size() > channel.issued - mine) channel.left.pop_front();
      if (channel.left.empty()) return;
      next = channel.left.front();
    }
    bool asked = next->begun;
    for (Seat* seat : channel.seats) asked = asked || seat->posted > mine;
    if (!asked && !group.aborted) return;
    begin(*next);
    while (late::go_on(next->end)) {
    }
    if (!group.aborted && channel.seats[group.rank]->taken == mine && Clock::now() - next->since > next->timeout)
      die(group, *next, "other ranks did not come in time");
  }
};

Attendant& attendant() {
  static auto* one = new Attendant;
  return *one;
}

// ---- One collective

// What other ranks have posted, while this one takes part.
struct Posted {
  const Group& group;
  const Channel& channel;
  const Collective& one;

  Tensor part(int rank, size_t number, const Tensor& like) const {
    Seat* seat = channel.seats[rank];
    if (number >= seat->parts || seat->bytes[number] != like.nbytes()) die(group, one, "the ranks' tensors do not fit together");
    return at::from_blob(seat->room + seat->at[number], like.sizes(), like.options().device(c10::kCPU).requires_grad(false));
  }
  void give(int rank, size_t number, const Tensor& to) const {
    if (to.numel()) to.copy_(part(rank, number, to));
  }
  void reduce(size_t number, const Tensor& to, c10d::ReduceOp::RedOpType kind) const {
    if (!to.numel()) return;
    Tensor sum = part(0, number, to).clone();
    for (int rank = 1; rank < group.size; rank++) {
      Tensor more = part(rank, number, to);
      if (kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG) sum.add_(more);
      if (kind == c10d::ReduceOp::PRODUCT) sum.mul_(more);
      if (kind == c10d::ReduceOp::MIN) sum = sum.minimum(more);
      if (kind == c10d::ReduceOp::MAX) sum = sum.maximum(more);
      if (kind > c10d::ReduceOp::MAX) die(group, one, "this reduction is not offered");
    }
    if (kind == c10d::ReduceOp::AVG) sum.div_(group.size);
    to.copy_(sum);
  }
};

void post(const Group& group, Seat& seat, const Collective& one, const Parts& parts) {
  size_t at = 0;
  if (parts.size() > PARTS) die(group, one, "too many tensors");
  for (size_t number = 0; number < parts.size(); number++) {
    size_t bytes = parts[number].nbytes();
    if (at + bytes > ROOM_BYTES) die(group, one, "too many bytes");
    if (bytes) at::from_blob(seat.room + at, parts[number].sizes(), parts[number].options()).copy_(parts[number]);
    seat.at[number] = at;
    seat.bytes[number] = bytes;
    at += (bytes + 63) / 64 * 64;
  }
  seat.parts = parts.size();
  seat.posted++;
}

using Take = std::function<void(const Posted&)>;

std::vector<late::Shared> steps_of(c10::intrusive_ptr<Group> group, Channel& channel, std::shared_ptr<Collective> one, Parts parts, Take take) {
  uint64_t number = channel.issued;
  auto* all = &channel;
  auto everybody_has = [=](std::atomic<uint64_t> Seat::*what, uint64_t count, bool wanted) {
    if (wanted) begin(*one);
    return group->aborted || std::all_of(all->seats.begin(), all->seats.end(), [=](Seat* seat) { return seat->*what >= count; });
  };
  late::Shared posts{[=](bool wanted) { return everybody_has(&Seat::taken, number, wanted); },
                     [=] {
                       if (!group->aborted) post(*group, *all->seats[group->rank], *one, parts);
                     }};
  late::Shared takes{[=](bool wanted) { return everybody_has(&Seat::posted, number + 1, wanted); },
                     [=] {
                       if (!group->aborted) take({*group, *all, *one});
                       all->seats[group->rank]->taken++;
                     }};
  return {posts, takes};
}

struct LateWork final : c10d::Work {
  Mark mark;
  bool blocks;
  std::vector<Tensor> results;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<Group> group;

  LateWork(int rank, c10d::OpType kind, Mark mark, bool blocks, std::vector<Tensor> results, c10::intrusive_ptr<Group> group)
      : Work(rank, kind), mark(mark), blocks(blocks), results(std::move(results)), group(std::move(group)) {
    c10::Device device(c10::DeviceType::PrivateUse1, c10::DeviceIndex(mark.device));
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, device, mark.stream));
    future->markCompleted(c10::IValue(this->results));
  }
  bool isCompleted() override { return late::is_over(mark); }
  bool isSuccess() const override { return !group->aborted; }
  void synchronize() override {
    late::let_current_stream_wait(mark);
    if (blocks) late::block_host_until(mark);
  }
  bool wait(Milliseconds) override {
    synchronize();
    TORCH_CHECK(!group->aborted, "late: the process group was aborted");
    return true;
  }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

// ---- The backend

class LateGroup final : public c10d::Backend {
 public:
  LateGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), group_(c10::make_intrusive<Group>()), options_(c10::make_intrusive<Options>("late", timeout)) {
    group_->rank = rank;
    group_->size = size;
    int file = memfd_create("late-group", 0);
    TORCH_CHECK(file >= 0 && !ftruncate(file, sizeof(Seats)), "late: no memory for a process group");
    auto path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    store->set("late/" + std::to_string(rank), path);
    for (int other = 0; other < size; other++) group_->seats.push_back(mapped(store->get_to_str("late/" + std::to_string(other))));
    store->add("late/mapped", 1);
    while (store->add("late/mapped", 0) < size) std::this_thread::sleep_for(LOOK);
    close(file);
    attendant().add(group_);
  }
  ~LateGroup() override { attendant().drop(group_.get()); }

  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { group_->aborted = true; }
  void shutdown() override {  // other ranks may need what was asked for here
    for (Channel* channel : group_->all()) {
      std::unique_lock<std::mutex> held(channel->lock);
      if (channel->left.empty()) continue;
      Mark end = channel->left.back()->end;
      held.unlock();
      late::block_host_until(end);
    }
    attendant().drop(group_.get());
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Parts& tensors, const c10d::BroadcastOptions& opts) override {
    auto places = seen(tensors);
    int root = int(opts.rootRank);
    bool gives = rank_ == root;
    return queue("broadcast", c10d::OpType::BROADCAST, tensors, tensors, gives ? tensors : Parts{}, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size() && !gives; number++) posted.give(root, number, places[number]);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Parts& tensors, const c10d::AllreduceOptions& opts) override {
    auto places = seen(tensors);
    auto kind = opts.reduceOp.op_;
    return queue("allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, tensors, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size(); number++) posted.reduce(number, places[number], kind);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Parts& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Parts& tensors, const c10d::ReduceOptions& opts) override {
    auto places = seen(tensors);
    auto kind = opts.reduceOp.op_;
    bool takes = rank_ == opts.rootRank;
    return queue("reduce", c10d::OpType::REDUCE, tensors, tensors, tensors, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size() && takes; number++) posted.reduce(number, places[number], kind);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Parts>& outputs, Parts& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<Parts> places;
    for (auto& one : outputs) places.push_back(seen(one));
    return queue("allgather", c10d::OpType::ALLGATHER, flat(outputs), inputs, inputs, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size(); number++)
        for (size_t rank = 0; rank < places[number].size(); rank++) posted.give(int(rank), number, places[number][rank]);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    Parts outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Parts& outputs, Parts& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<Parts> places;
    for (auto& one : outputs) places.push_back(cut(one, size_));
    return queue("all_gather_into_tensor", c10d::OpType::_ALLGATHER_BASE, outputs, inputs, inputs, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size(); number++)
        for (size_t rank = 0; rank < places[number].size(); rank++) posted.give(int(rank), number, places[number][rank]);
    });
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<Parts>& outputs, Parts& inputs, const c10d::GatherOptions& opts) override {
    Parts places = outputs.empty() ? Parts{} : seen(outputs[0]);
    return queue("gather", c10d::OpType::GATHER, flat(outputs), inputs, inputs, opts.timeout, [=](const Posted& posted) {
      for (size_t rank = 0; rank < places.size(); rank++) posted.give(int(rank), 0, places[rank]);
    });
  }
  c10::intrusive_ptr<c10d::Work> scatter(Parts& outputs, std::vector<Parts>& inputs, const c10d::ScatterOptions& opts) override {
    auto places = seen(outputs);
    int root = int(opts.rootRank), rank = rank_;
    return queue("scatter", c10d::OpType::SCATTER, outputs, flat(inputs), flat(inputs), opts.timeout,
                 [=](const Posted& posted) { posted.give(root, rank, places.at(0)); });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Parts& outputs, std::vector<Parts>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return scattered(outputs, flat(inputs), opts);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Parts outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Parts& outputs, Parts& inputs, const c10d::ReduceScatterOptions& opts) override {
    Parts cuts;
    for (auto& one : inputs)
      for (auto& part : one.view(-1).chunk(size_)) cuts.push_back(part);
    return scattered(outputs, cuts, opts);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out, std::vector<int64_t>& in,
                                               const c10d::AllToAllOptions& opts) override {
    auto split = [&](const Tensor& whole, std::vector<int64_t>& sizes) {
      if (sizes.empty()) sizes.assign(size_, whole.dim() ? whole.size(0) / size_ : 0);
      return whole.split_with_sizes(sizes);
    };
    Parts outputs = split(output, out), inputs = split(input, in);
    return alltoall(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Parts& outputs, Parts& inputs, const c10d::AllToAllOptions& opts) override {
    auto places = seen(outputs);
    int rank = rank_;
    return queue("alltoall", c10d::OpType::ALLTOALL, outputs, inputs, inputs, opts.timeout, [=](const Posted& posted) {
      for (size_t from = 0; from < places.size(); from++) posted.give(int(from), rank, places[from]);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    int device = opts.device_ids.empty() ? current_device() : int(opts.device_ids[0]);
    return queue_on(device, "barrier", c10d::OpType::BARRIER, {}, {}, opts.timeout, [](const Posted&) {}, true);
  }

 private:
  c10::intrusive_ptr<c10d::Work> scattered(Parts& outputs, const Parts& inputs, const c10d::ReduceScatterOptions& opts) {
    auto places = seen(outputs);
    auto kind = opts.reduceOp.op_;
    int rank = rank_, size = size_;  // of each output there is a part for each rank
    return queue("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs, inputs, inputs, opts.timeout, [=](const Posted& posted) {
      for (size_t number = 0; number < places.size(); number++) posted.reduce(number * size + rank, places[number], kind);
    });
  }
  static Parts flat(const std::vector<Parts>& lists) {
    Parts all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  static Parts seen(const Parts& tensors) {
    Parts places;
    for (auto& one : tensors) {
      refuse_other(one);
      places.push_back(late::seen_late(one));
    }
    return places;
  }
  static Parts cut(const Tensor& whole, int count) { return seen({whole})[0].view(-1).chunk(count); }
  static void refuse_other(const Tensor& one) {
    TORCH_CHECK(one.device().type() == c10::DeviceType::PrivateUse1 && one.layout() == c10::kStrided,
                "late: a collective takes dense tensors of the device, not of ", one.device());
    TORCH_CHECK(one.is_contiguous(), "late: a collective takes contiguous tensors");
  }
  static int current_device() { return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice().index(); }

  c10::intrusive_ptr<c10d::Work> queue(const char* name, c10d::OpType kind, const Parts& outputs, const Parts& inputs, const Parts& given,
                                       Milliseconds timeout, Take take) {
    int device = -1;
    for (const Parts* tensors : {&outputs, &inputs})
      for (auto& one : *tensors) {
        refuse_other(one);
        TORCH_CHECK(device < 0 || device == one.device().index(), "late: ", name, ": tensors are on several devices");
        device = one.device().index();
      }
    auto work = queue_on(device < 0 ? current_device() : device, name, kind, outputs, seen(given), timeout, std::move(take), false);
    int stream = static_cast<LateWork&>(*work).mark.stream;
    for (const Parts* tensors : {&outputs, &inputs})
      for (auto& one : *tensors) late::use_on(one, stream);
    return work;
  }
  c10::intrusive_ptr<c10d::Work> queue_on(int device, const char* name, c10d::OpType kind, const Parts& outputs, Parts given,
                                          Milliseconds timeout, Take take, bool blocks) {
    TORCH_CHECK(!group_->aborted, "late: ", name, ": the process group was aborted");
    Channel& channel = group_->channel_of(device);
    auto one = std::make_shared<Collective>();
    one->name = name;
    one->timeout = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
    std::lock_guard<std::mutex> held(channel.lock);
    one->end = late::queue_behind_current(device, channel.stream, steps_of(group_, channel, one, std::move(given), std::move(take)));
    channel.issued++;
    channel.left.push_back(one);
    return c10::make_intrusive<LateWork>(rank_, kind, one->end, blocks, outputs, group_);
  }

  c10::intrusive_ptr<Group> group_;
  c10::intrusive_ptr<Options> options_;
};

}  // namespace

// What Python has of each group, as of ProcessGroupNCCL: the options, and so the timeout. Once, before the first group.
extern "C" void late_define(PyObject* module) {
  py::class_<LateGroup, c10d::Backend, c10::intrusive_ptr<LateGroup>>(py::reinterpret_borrow<py::object>(module), "ProcessGroupLate")
      .def_property_readonly("options", &LateGroup::getBackendOptions);
}

// For torch.distributed.Backend.register_backend, by ctypes.
extern "C" PyObject* late_make_group(PyObject* store, int rank, int size, double timeout_s) {
  try {
    auto meeting = py::handle(store).cast<c10::intrusive_ptr<c10d::Store>>();
    auto timeout = std::chrono::duration_cast<Milliseconds>(std::chrono::duration<double>(timeout_s));
    c10::intrusive_ptr<c10d::Backend> made;
    {
      py::gil_scoped_release others;
      made = c10::make_intrusive<LateGroup>(meeting, rank, size, timeout);
    }
    return py::cast(made).release().ptr();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}
