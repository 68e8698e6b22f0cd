// Streams whose work is late: an asynchronous copy or an event is done only when its own stream is waited for.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <utility>

#include "log.h"

namespace simulated {

// ---- which device and stream a thread is on --------------------------------------------------------------------------
inline thread_local int device_now = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline int64_t stream_of(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

inline int or_current(int device) { return device < 0 ? device_now : device; }

// ---- what goes wrong with a device -----------------------------------------------------------------------------------
inline std::atomic<bool> is_capturing{false};
inline std::atomic<bool> is_dead{false};
inline std::set<std::pair<int, int64_t>> stuck;  // streams whose work never ends
inline std::mutex stuck_mutex;
inline std::condition_variable stuck_changed;

inline void require_alive() {
  TORCH_CHECK(!is_dead, "CUDA error: device-side assert triggered");
}

inline void require_no_capture(const char* what) {
  TORCH_CHECK(!is_capturing, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// As torch.cuda.set_sync_debug_mode: 1 warns, 2 raises where the host waits for a stream; not where it waits for an event.
inline std::atomic<int> on_sync{0};

inline void require_may_wait(const char* what) {
  require_no_capture(what);
  TORCH_CHECK(on_sync != 2 || silence, "called a synchronizing CUDA operation");
  if (on_sync == 1 && !silence) TORCH_WARN("called a synchronizing CUDA operation");
}

inline void wait_while_stuck(int device, int64_t stream) {
  std::unique_lock<std::mutex> guard(stuck_mutex);
  stuck_changed.wait(guard, [&] { return !stuck.count({device, stream}); });
}

// ---- work that has not been done yet ---------------------------------------------------------------------------------
struct Pending {
  int64_t number;
  std::function<void()> act;
};
inline std::recursive_mutex work_mutex;
inline std::map<std::pair<int, int64_t>, std::vector<Pending>> pending;
inline std::map<std::pair<int, int64_t>, std::vector<std::function<void()>>> unread;
inline int64_t last_number = 0;

// What a copy reads it reads before whatever comes after it on its stream, and may read it as late as that.
inline void read_late(int device, int64_t stream, std::function<void()> read) {
  std::lock_guard<std::recursive_mutex> guard(work_mutex);
  unread[{device, stream}].push_back(std::move(read));
}

inline void read_now(int device, int64_t stream) {
  std::lock_guard<std::recursive_mutex> guard(work_mutex);
  auto reads = std::move(unread[{device, stream}]);
  unread[{device, stream}].clear();
  for (auto& read : reads) read();
}

inline int64_t enqueue(int device, int64_t stream, std::function<void()> act) {
  std::lock_guard<std::recursive_mutex> guard(work_mutex);
  pending[{device, stream}].push_back({++last_number, std::move(act)});
  return last_number;
}

inline void run_until(int device, int64_t stream, int64_t number) {
  wait_while_stuck(device, stream);
  std::lock_guard<std::recursive_mutex> guard(work_mutex);
  read_now(device, stream);
  auto& queue = pending[{device, stream}];
  size_t done = 0;
  while (done < queue.size() && queue[done].number <= number) queue[done++].act();
  queue.erase(queue.begin(), queue.begin() + done);
}

inline bool is_stuck(int device, int64_t stream) {
  std::lock_guard<std::mutex> guard(stuck_mutex);
  return stuck.count({device, stream}) != 0;
}

// Whether the work up to a number was done when asked; who asks again finds that the device has got on meanwhile.
inline bool had_finished(int device, int64_t stream, int64_t number) {
  bool finished;
  {
    std::lock_guard<std::recursive_mutex> guard(work_mutex);
    auto& queue = pending[{device, stream}];
    finished = queue.empty() || queue.front().number > number;
  }
  if (is_stuck(device, stream)) return finished && number != INT64_MAX;
  if (!finished) run_until(device, stream, number);
  return finished;
}

inline void run_stream(int device, int64_t stream) { run_until(device, stream, INT64_MAX); }

inline void run_device(int device) {
  std::set<int64_t> streams;
  {
    std::lock_guard<std::recursive_mutex> guard(work_mutex);
    for (auto& item : pending)
      if (item.first.first == device) streams.insert(item.first.second);
  }
  {
    std::lock_guard<std::mutex> guard(stuck_mutex);
    for (auto& item : stuck)
      if (item.first == device) streams.insert(item.second);
  }
  for (auto stream : streams) run_stream(device, stream);
}

// ---- torch's view of it ----------------------------------------------------------------------------------------------
struct Event {
  int device;
  int64_t stream;
  int64_t number;
  double at_ms;
};

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::atomic<int64_t> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return c10::Device(static_type, device_now); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = or_current(device.index()); }

  c10::Stream stream(int device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(static_type, or_current(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device.index(), stream_of(or_current(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device.index(), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device.index(), next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream given) const override {
    auto before = getStream(given.device());
    current_streams[given.device_index()] = given.id();
    return before;
  }
  bool queryStream(const c10::Stream& given) const override {
    require_alive();
    return had_finished(given.device_index(), given.id(), INT64_MAX);
  }
  void synchronizeStream(const c10::Stream& given) const override {
    require_may_wait("stream synchronize");
    require_alive();
    note("stream synchronize", given.device_index(), given.id());
    run_stream(given.device_index(), given.id());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    require_no_capture("device synchronize");
    require_alive();
    note("device synchronize", index, -1);
    run_device(index);
  }
  bool isStreamCapturing(const c10::Stream&) const override { return is_capturing; }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto number = enqueue(on.device_index(), on.id(), [] {});  // the device is behind its host
    *static_cast<Event*>(*event) = {on.device_index(), on.id(), number, now_ms()};
    note("event record", on.device_index(), on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    auto* of = static_cast<Event*>(event);
    note("stream waits", on.device_index(), on.id());
    if (!of) return;
    if (!is_stuck(of->device, of->stream)) return run_until(of->device, of->stream, of->number);
    std::lock_guard<std::mutex> guard(stuck_mutex);
    stuck.insert({on.device_index(), on.id()});  // the host goes on, the stream does not
  }
  bool queryEvent(void* event) const override {
    require_alive();
    auto* of = static_cast<Event*>(event);
    return !of || had_finished(of->device, of->stream, of->number);
  }
  void synchronizeEvent(void* event) const override {
    require_no_capture("event synchronize");
    require_alive();
    auto* of = static_cast<Event*>(event);
    if (!of) return;
    note("event synchronize", of->device, of->stream);
    run_until(of->device, of->stream, of->number);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "CUDA error: device not ready");
    return static_cast<Event*>(second)->at_ms - static_cast<Event*>(first)->at_ms;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

}  // namespace simulated
