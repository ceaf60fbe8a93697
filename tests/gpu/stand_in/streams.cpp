#include "streams.h"

#include <chrono>
#include <map>
#include <set>

#include "capture.h"
#include "process.h"

namespace stand_in {

namespace {

std::set<Stream*>& streams() {
  static auto& all = *new std::set<Stream*>;
  return all;
}

Stream& default_stream(int device) {
  static auto& made = *new std::map<int, Stream*>;
  Stream*& stream = made[device];
  if (stream == nullptr) streams().insert(stream = new Stream{device, {}, nullptr});
  return *stream;
}

bool is_reached(Mark& mark) { return mark.is_reached || (mark.stream->is_idle(), mark.is_reached); }

void finish(Mark& mark) {
  while (!mark.is_reached) mark.stream->finish_one();
}

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void Stream::submit(Task task) {
  if (capture) return;  // It belongs to the graph, which does nothing when it is replayed.
  tasks.push_back(std::move(task));
  is_idle();
}

bool Stream::is_idle() {
  while (!tasks.empty()) {
    const Task& next = tasks.front();
    if (next.kind == Task::Kind::SPIN) return false;
    if (next.kind == Task::Kind::WAIT && !is_reached(*next.mark)) return false;
    finish_one();
  }
  return true;
}

void Stream::finish_one() {
  const Task task = std::move(tasks.front());
  tasks.pop_front();
  if (task.kind == Task::Kind::RUN) task.run();
  if (task.kind == Task::Kind::WAIT) stand_in::finish(*task.mark);
}

void Stream::finish() {
  while (!tasks.empty()) finish_one();
}

Stream& stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return default_stream(current_device());
  }
  return *reinterpret_cast<Stream*>(stream);
}

void finish_device(int device) {
  for (Stream* stream : streams()) {
    if (stream->device == device) stream->finish();
  }
}

void leave_capture(const Capture& capture) {
  for (Stream* stream : streams()) {
    if (stream->capture.get() == &capture) stream->capture = nullptr;
  }
}

}  // namespace stand_in

using namespace stand_in;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  USE_DEVICE();
  auto* made = new Stream{current_device(), {}, nullptr};
  streams().insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  USE_DEVICE();
  Stream& ended = stream_of(stream);
  ended.finish();
  streams().erase(&ended);
  delete &ended;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_captured(stream_of(stream))) return refused;
  return stream_of(stream).is_idle() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_captured(stream_of(stream))) return refused;
  stream_of(stream).finish();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  finish_device(current_device());
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  USE_DEVICE();
  const Event& awaited = *reinterpret_cast<Event*>(event);
  Stream& waiting = stream_of(stream);
  if (awaited.capture) {
    if (awaited.capture->has_ended) return fail(cudaErrorCapturedEvent);
    waiting.capture = awaited.capture;  // It joins (Programming Guide, Cross-stream Dependencies).
  } else if (awaited.mark) {
    waiting.submit(Task{Task::Kind::WAIT, {}, awaited.mark});
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  USE_DEVICE();
  stream_of(stream).submit([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  USE_DEVICE();
  stream_of(stream).submit([=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  USE_DEVICE();
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  USE_DEVICE();
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  USE_DEVICE();
  Event& recorded = *reinterpret_cast<Event*>(event);
  Stream& within = stream_of(stream);
  recorded.capture = within.capture;
  recorded.seconds = now();
  auto mark = std::make_shared<Mark>(Mark{&within, false});
  recorded.mark = mark;
  within.submit([mark] { mark->is_reached = true; });
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  const Event& asked = *reinterpret_cast<Event*>(event);
  if (asked.capture) return fail(cudaErrorCapturedEvent);
  if (!asked.mark || is_reached(*asked.mark)) return cudaSuccess;
  return has_fault("done-too-soon") ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  USE_DEVICE();
  const Event& awaited = *reinterpret_cast<Event*>(event);
  if (awaited.capture) return fail(cudaErrorCapturedEvent);
  if (awaited.mark && !has_fault("done-too-soon")) finish(*awaited.mark);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const Event *first = reinterpret_cast<Event*>(start), *last = reinterpret_cast<Event*>(end);
  *milliseconds = static_cast<float>((last->seconds - first->seconds) * 1e3);
  return cudaSuccess;
}
