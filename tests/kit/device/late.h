// What the process group of the accelerator asks of it: see late.cpp.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace late {

struct Mark {  // a place in a stream: what was queued up to there
  int device = -1, stream = 0;
  uint64_t number = 0;
};

struct Shared {  // an operation that other processes have a part in
  std::function<bool(bool)> ready;  // whether it can be done without waiting for them; true: somebody waits for it
  std::function<void()> work;
};

int new_stream(int device);
int current_stream(int device);

// Queues operations on `stream`, behind what the current stream of the device has now. Returns where they end.
Mark queue_behind_current(int device, int stream, std::vector<Shared> operations);

void let_current_stream_wait(const Mark& mark);
void use_on(const at::Tensor& tensor, int stream);   // its memory is not used again before that stream is through
bool is_over(const Mark& mark);                      // who asks again and again lets time go on
bool go_on(const Mark& mark);                        // a step towards it; false where there is none without another process
void block_host_until(const Mark& mark);
at::Tensor seen_late(const at::Tensor& tensor);      // its memory as the host sees it when an operation's turn comes

}  // namespace late
