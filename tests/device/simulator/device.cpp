// A CUDA device that is host memory, for the CPU build of torch: tensors, streams, events and autograd threads are real,
// kernels are those of the CPU and run at once. Whatever CUDA leaves open is done as late as it may be.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorAccessor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "memory.h"

namespace simulated {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- random numbers: one stream per device, lent to the kernels of the CPU while they run --------------------------------
struct Generator final : c10::GeneratorImpl {
  at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);

  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated device has no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the simulated device has no offsets"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.get_state().getIntrusivePtr(); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(or_current(device));
}

// While this lives the default generator of the CPU gives the numbers of the device.
struct Lent {
  std::lock_guard<std::recursive_mutex> lock{work_mutex};
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Tensor before = host.get_state();
  at::Generator& numbers;
  explicit Lent(at::Generator& given) : numbers(given) { host.set_state(numbers.get_state()); }
  ~Lent() {
    numbers.set_state(host.get_state());
    host.set_state(before);
  }
};

// ---- what torch asks of a CUDA build ---------------------------------------------------------------------------------
struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return device_now; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_now = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(device_now, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(device_now, or_current(index));
  }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(or_current(index));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::recursive_mutex> guard(memory_mutex);
    return at::Device(at::kCUDA, std::prev(blocks.upper_bound(data))->second.device);
  }
};

// ---- times of DDP's reducer, which asserts that its device has a timer ---------------------------------------------------
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};

// ---- graphs: what was launched while capturing, run again on the same memory -------------------------------------------
std::mutex graph_mutex;
std::vector<std::function<void()>> captured;

void capture(std::function<void()> launch) {
  std::lock_guard<std::mutex> guard(graph_mutex);
  captured.push_back(std::move(launch));
}

struct Graph {
  std::vector<std::function<void()>> launches;
  void replay() {
    require_alive();
    at::AutoDispatchBelowAutograd below;
    note("graph replay", device_now, stream_of(device_now), 0, std::to_string(launches.size()));
    for (auto& launch : launches) launch();
  }
};

// ---- operators; what is logged as their bytes is the number of their tensors -----------------------------------------------------------------------------------------------------
thread_local int in_kernel = 0;
struct InKernel {
  InKernel() { in_kernel++; }
  ~InKernel() { in_kernel--; }
};

struct OnDevice {
  int before = device_now;
  explicit OnDevice(std::optional<at::Device> device) {
    if (device) device_now = or_current(device->index());
  }
  ~OnDevice() { device_now = before; }
};

using MaybeType = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
using MaybeFormat = std::optional<at::MemoryFormat>;
const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);

at::Tensor empty_memory_format(at::IntArrayRef size, MaybeType dtype, MaybeLayout, MaybeDevice device,
                               std::optional<bool>, MaybeFormat format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, MaybeType dtype, MaybeLayout, MaybeDevice device,
                         std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

void copy_to_pinned_late(const at::Tensor& to, const at::Tensor& from, int device, int64_t stream) {
  auto value = std::make_shared<at::Tensor>();
  read_late(device, stream, [to, from, value] {
    Unseen unseen;
    *value = at::empty_like(to, to.options().pinned_memory(false));
    copy_now(*value, from);
  });
  enqueue(device, stream, [to, value] { copy_now(to, *value); });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  at::Tensor from = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  bool to_device = self.is_cuda(), from_device = from.is_cuda();
  int device = to_device ? self.device().index() : from.device().index();
  int64_t stream = stream_of(device), bytes = self.numel() * self.element_size();
  if (in_kernel) {
    copy_now(self, from);
    return self;
  }
  require_alive();
  bool pins = is_pinned(to_device ? from.const_data_ptr() : self.const_data_ptr());
  if (to_device && from_device) {
    note("copy on device", device, stream, bytes);
    if (is_capturing) capture([self, from] { copy_now(self, from); });
  } else if (non_blocking && pins && !to_device) {
    note("D2H async", device, stream, bytes);
    copy_to_pinned_late(self, from, device, stream);
    return self;
  } else if (non_blocking && pins) {
    note("H2D async", device, stream, bytes);
  } else {
    require_may_wait("a copy that waits");
    note(to_device ? "H2D wait" : "D2H wait", device, stream, bytes);
    run_stream(device, stream);
  }
  read_now(device, stream);
  copy_now(self, from);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  copy_now(to, self);
  return to;
}

void resize_storage(const at::Storage& storage, size_t bytes) {
  OnDevice on(storage.device());
  read_now(device_now, stream_of(device_now));
  auto data = device_allocator.allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept) device_allocator.copy_data(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, MaybeFormat) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.element_size();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  require_may_wait("item");
  require_alive();
  int device = self.device().index();
  note("item", device, stream_of(device), self.element_size());
  run_stream(device, stream_of(device));
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_now(host, self);
  return host.item();
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(at::Tensor& self, at::Stream stream) { note("record_stream", self.device().index(), stream.id()); }

// A kernel; where the operator has random numbers, they are those of the device.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  InKernel in;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  at::Generator chosen = default_generator(-1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (!value.isGenerator()) continue;
    if (value.toGenerator().device().is_cuda()) chosen = value.toGenerator();
    value = c10::IValue();
  }
  Lent lent(static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->numbers);
  at::native::cpu_fallback(op, stack);
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> found;
  for (auto& value : stack) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& item : value.toTensorVector()) found.push_back(item);
  }
  return found;
}

// Runs the operator again and puts its results where they were while capturing.
void launch_again(const c10::OperatorHandle& op, torch::jit::Stack stack, const torch::jit::Stack& made) {
  run_kernel(op, &stack);
  auto results = tensors_in(stack), places = tensors_in(made);
  for (size_t i = 0; i < places.size(); i++)
    if (places[i].defined() && results[i].defined() && !places[i].is_same(results[i])) copy_now(places[i], results[i]);
}

// As generated code does it: a kernel runs on the device of its first tensor, else on the one that it is given.
MaybeDevice device_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  torch::jit::Stack given(stack.end() - op.schema().arguments().size(), stack.end());
  for (const at::Tensor& tensor : tensors_in(given))
    if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  for (auto& value : given)
    if (value.isDevice()) return value.toDevice();
  return std::nullopt;
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_alive();
  OnDevice on(device_of(op, *stack));
  read_now(device_now, stream_of(device_now));
  note("kernel", device_now, stream_of(device_now), tensors_in(*stack).size(), op.schema().operator_name().name);
  if (!is_capturing) return run_kernel(op, stack);
  torch::jit::Stack given(stack->end() - op.schema().arguments().size(), stack->end());
  run_kernel(op, stack);
  torch::jit::Stack made(stack->end() - op.schema().returns().size(), stack->end());
  capture([op, given, made] { launch_again(op, given, made); });
}

}  // namespace simulated

using namespace simulated;
using at::CUDAHooksRegistry;  // for the macro, which expects them here
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(Hooks)
using c10d::TimerRegistry;
using c10d::RegistererTimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::Timer)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  // has a kernel of its own in CUDA, while the CPU has one for each tensor
  m.impl("_foreach_norm.Scalar", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator);
  // torch has asked for its hooks on import already and keeps what it got, an object without data
  static auto* hooks = new Hooks(at::CUDAHooksArgs{});
  auto* kept = const_cast<void*>(static_cast<const void*>(&at::detail::getCUDAHooks()));
  memcpy(kept, static_cast<void*>(hooks), sizeof(void*));

  // - the log
  m.def("start_log", [] {
    std::lock_guard<std::mutex> guard(log_mutex);
    entries.clear();
    is_logging = true;
  });
  m.def("stop_log", [] {
    std::lock_guard<std::mutex> guard(log_mutex);
    is_logging = false;
    py::list found;
    for (auto& e : entries) found.append(py::make_tuple(e.kind, e.device, e.stream, e.bytes, e.what));
    return found;
  });
  m.def("silence", [](int more) { silence += more; });
  m.def("contexts", [] {
    std::lock_guard<std::mutex> guard(log_mutex);
    return std::vector<int>(contexts.begin(), contexts.end());
  });
  m.def("forget_contexts", [] {
    std::lock_guard<std::mutex> guard(log_mutex);
    contexts.clear();
  });

  // - devices, streams, random numbers
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return device_now; });
  m.def("set_device", [](int index) { device_now = index; });
  m.def("synchronize", [](int index) { Guard().synchronizeDevice(index); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int index) { return default_generator(index); });

  // - graphs
  py::class_<Graph>(m, "Graph").def("replay", &Graph::replay);
  m.def("is_capturing", [] { return is_capturing.load(); });
  m.def("begin_capture", [] {
    std::lock_guard<std::mutex> guard(graph_mutex);
    captured.clear();
    is_capturing = true;
  });
  m.def("end_capture", [] {
    std::lock_guard<std::mutex> guard(graph_mutex);
    is_capturing = false;
    return Graph{std::move(captured)};
  });

  // - what goes wrong
  m.def("on_sync", [](int what) { on_sync = what; });
  m.def("die", [] { is_dead = true; });
  m.def("stick", [](int device, int64_t stream) {
    std::lock_guard<std::mutex> guard(stuck_mutex);
    stuck.insert({device, stream});
  });
  m.def("limit_memory", [](int64_t more) { free_bytes = more < 0 ? INT64_MAX : live_bytes + more; });

  // - memory
  m.def("resize_storage", [](py::object given, size_t bytes) { resize_storage(THPStorage_Unpack(given.ptr()), bytes); });
  m.def("live_bytes", [] { return live_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("pinned_bytes", [] { return pinned_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
}
