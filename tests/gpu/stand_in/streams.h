// Streams: work that waits its turn, and the points in it that events remember.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <thread>

namespace stand_in {

// A capture of a graph, by the stream that began it and those that have joined.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool is_invalidated = false;
  bool has_ended = false;
};

struct Stream;

// A point in the work of a stream: reached, or the stream that has to get there first.
struct Mark {
  Stream* stream;
  bool is_reached;
};

struct Task {
  enum class Kind { RUN, SPIN, WAIT } kind;
  std::function<void()> run;   // For RUN: a copy, or what has been reached.
  std::shared_ptr<Mark> mark;  // For WAIT.
};

// Work begins as soon as nothing is before it. A kernel that spins lasts until somebody waits for
// the stream: no clock decides what a test finds unfinished.
struct Stream {
  int device;
  std::deque<Task> tasks;
  std::shared_ptr<Capture> capture;

  void submit(Task task);
  void submit(std::function<void()> run) { submit(Task{Task::Kind::RUN, std::move(run), nullptr}); }
  bool is_idle();  // Having done whatever can be done without waiting.
  void finish();
  void finish_one();
};

struct Event {
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Capture> capture;  // Of the stream that it was recorded in.
  double seconds = 0;
};

Stream& stream_of(cudaStream_t stream);

// Wait for all work of a device.
void finish_device(int device);

// Have every stream of a capture leave it.
void leave_capture(const Capture& capture);

}  // namespace stand_in
