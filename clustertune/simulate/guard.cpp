// CUDA for a torch that was built without it, as far as fake tensors need it: a device guard that does nothing but remember the
// current device, and hooks that say that CUDA is there. No kernel is registered: whatever would compute for real fails.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::DeviceIndex devices = 1;
thread_local c10::DeviceIndex current = 0;  // a new thread begins on device 0, as with the CUDA runtime
using Impl = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
struct FakeGuard final : Impl {
  static c10::Device on(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index); }
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device.index() < 0 ? on(current) : device);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return stream(given.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::Device getDevice() const override { return on(current); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = on(current);
    uncheckedSetDevice(device);
    return before;
  }
};
struct FakeHooks : at::CUDAHooksInterface {
  FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current;
    if (index >= 0) current = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks)
}  // namespace
extern "C" {
void install_guard(int count) {
  devices = static_cast<c10::DeviceIndex>(count);
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (slot.load() == nullptr) slot.store(new FakeGuard());
}
int current_device() { return current; }
void set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
}
