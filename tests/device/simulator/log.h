// What the device was asked to do, in order, and which devices were touched at all.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;

struct Entry {
  std::string kind;
  int device;
  int64_t stream;
  int64_t bytes;
  std::string what;
};

inline std::mutex log_mutex;
inline std::vector<Entry> entries;
inline std::set<int> contexts;
inline std::atomic<bool> is_logging{false};
inline thread_local int silence = 0;  // what stands in for a library that is not there is not logged

inline void note(const std::string& kind, int device, int64_t stream, int64_t bytes = 0, const std::string& what = "") {
  std::lock_guard<std::mutex> guard(log_mutex);
  contexts.insert(device);
  if (is_logging && !silence) entries.push_back({kind, device, stream, bytes, what});
}

inline void note_context(int device) {
  std::lock_guard<std::mutex> guard(log_mutex);
  contexts.insert(device);
}

}  // namespace simulated
