// Device memory that the host cannot touch: a read or write of it outside of a kernel is a segmentation fault.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include "streams.h"

namespace simulated {

constexpr size_t kPage = 4096;

struct Block {
  size_t bytes;
  int device;
};
inline std::recursive_mutex memory_mutex;
inline std::map<void*, Block> blocks;
inline std::map<void*, size_t> pinned;
inline std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, pinned_bytes{0}, free_bytes{INT64_MAX};

inline void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak;
  while (value > seen && !peak.compare_exchange_weak(seen, value)) {
  }
}

// ---- of the device ---------------------------------------------------------------------------------------------------
inline void release(void* data) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  auto found = blocks.find(data);
  if (found == blocks.end()) return;
  live_bytes -= found->second.bytes;
  munmap(data, found->second.bytes);
  blocks.erase(found);
}

// Device memory may be touched while this lives.
struct Open {
  std::unique_lock<std::recursive_mutex> lock{memory_mutex};
  std::vector<std::pair<void*, size_t>> opened;

  void add(const at::Tensor& tensor) {
    if (tensor.is_cuda() && tensor.storage().nbytes()) add(tensor.storage().mutable_data());
  }
  void add(const void* data) {
    auto found = blocks.upper_bound(const_cast<void*>(data));
    if (found == blocks.begin()) return;
    --found;
    mprotect(found->first, found->second.bytes, PROT_READ | PROT_WRITE);
    opened.emplace_back(found->first, found->second.bytes);
  }
  ~Open() {
    for (auto& item : opened) mprotect(item.first, item.second, PROT_NONE);
  }
};

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    require_alive();
    at::Device device(at::kCUDA, device_now);
    note_context(device_now);
    if (bytes == 0) return {nullptr, device};
    size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    int64_t now = live_bytes + int64_t(rounded);
    TORCH_CHECK_WITH(OutOfMemoryError, now <= free_bytes, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
    void* data = mmap(nullptr, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "the host has no memory left for the simulated device");
    {
      std::lock_guard<std::recursive_mutex> guard(memory_mutex);
      blocks[data] = {rounded, device_now};
    }
    raise_to(peak_bytes, live_bytes += rounded);
    return {data, data, &release, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    Open open;
    open.add(to);
    open.add(from);
    memcpy(to, from, count);
  }
};
inline DeviceAllocator device_allocator;

// ---- of the host, pinned: what lies there first is no number that anybody could take for a result -----------------------
inline void unpin(void* data) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  pinned_bytes -= pinned[data];
  pinned.erase(data);
  free(data);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = malloc(bytes ? bytes : 1);
    memset(data, 0x5a, bytes);
    std::lock_guard<std::recursive_mutex> guard(memory_mutex);
    pinned[data] = bytes;
    pinned_bytes += bytes;
    return {data, data, &unpin, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override { memcpy(to, from, count); }
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  auto found = pinned.upper_bound(const_cast<void*>(data));
  if (found == pinned.begin()) return false;
  --found;
  return data < static_cast<char*>(found->first) + found->second;
}

// ---- copies ------------------------------------------------------------------------------------------------------------
// A tensor of its own: what arrives late must not count as a change in place.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_conj() || tensor.is_neg()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// What happens late happens on whichever thread waits: no mode of that thread may see it.
struct Unseen {
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::AutoDispatchBelowAutograd below;
};

inline void copy_now(const at::Tensor& to, const at::Tensor& from) {
  if (!from.numel()) return;
  Unseen unseen;
  Open open;
  open.add(to);
  open.add(from);
  at::NoGradGuard no_grad;
  at::Tensor source = on_host(from);
  on_host(to).copy_(source.is_conj() ? source.resolve_conj() : source);
}

}  // namespace simulated
