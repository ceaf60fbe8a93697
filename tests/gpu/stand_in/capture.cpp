#include "capture.h"

#include <set>

#include "process.h"

namespace stand_in {

namespace {

std::set<std::shared_ptr<Capture>>& captures() {  // Those that go on.
  static auto& all = *new std::set<std::shared_ptr<Capture>>;
  return all;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool prohibits(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != cudaStreamCaptureModeRelaxed;
  }
  return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (!stream.capture) return cudaStreamCaptureStatusNone;
  return stream.capture->is_invalidated ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
}

}  // namespace

cudaError_t refuse_if_captured(const Stream& stream) {
  if (!stream.capture) return cudaSuccess;
  stream.capture->is_invalidated = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t refuse_if_unsafe() {
  cudaError_t refused = cudaSuccess;
  for (const auto& capture : captures()) {
    if (prohibits(*capture)) {
      capture->is_invalidated = true;
      refused = fail(cudaErrorStreamCaptureUnsupported);
    }
  }
  return refused;
}

}  // namespace stand_in

using namespace stand_in;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  USE_DEVICE();
  static unsigned long long last_id = 0;
  Stream& origin = stream_of(stream);
  origin.capture = std::make_shared<Capture>(Capture{++last_id, mode, std::this_thread::get_id()});
  captures().insert(origin.capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  USE_DEVICE();
  const std::shared_ptr<Capture> ended = stream_of(stream).capture;
  *graph = nullptr;
  if (!ended) return fail(cudaErrorIllegalState);
  captures().erase(ended);
  ended->has_ended = true;
  leave_capture(*ended);
  if (ended->is_invalidated) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  USE_DEVICE();
  *status = status_of(stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  USE_DEVICE();
  const Stream& asked = stream_of(stream);
  *status = status_of(asked);
  if (id != nullptr) *id = asked.capture ? asked.capture->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}

// A graph is a name and no more: what was captured is not kept, and a replay does nothing.

cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;  // torch warns of a graph without any.
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                         size_t* count) {
  *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  USE_DEVICE();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<char*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<char*>(graph);
  return cudaSuccess;
}
