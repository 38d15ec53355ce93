// Memory of an NVIDIA GPU, streams and graphs, through the driver's library, which every machine with such a GPU has:
// no CUDA toolkit is needed to compile or link.
#pragma once

#include "kvpack_host.hpp"

#include <dlfcn.h>

// The driver's, as its own headers name them.
struct CUctx_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUstream_st;

namespace kvpack {

/// A shared library, loaded when the program runs. It stays loaded: what it made may outlive this object.
class Library {
 public:
  /// Throws Error with the mend.
  Library(const std::string &name, const std::string &mend) : name_(name), handle_(dlopen(name.c_str(), RTLD_NOW)) {
    if (!handle_) {
      const char *reason = dlerror();
      throw Error("the library " + name + " cannot be loaded (" + (reason ? reason : "unknown") + "): " + mend + ".");
    }
  }
  template <class Function> Function *symbol(const char *name) const {
    if (void *found = dlsym(handle_, name)) return reinterpret_cast<Function *>(found);
    throw Error("the library " + name_ + " has no " + name + ": give another version of it.");
  }

 private:
  std::string name_;
  void *handle_;
};

/// The first CUDA device. Allocations live in its primary context, which ONNX Runtime and TensorRT use too.
class Device : public Memory {
 public:
  using Stream = CUstream_st *;
  using Graph = CUgraphExec_st *;

  /// Throws Error when there is no driver or no device.
  Device() : driver_("libcuda.so.1", "install NVIDIA's driver") {
    int device = 0;
    call("cuInit", 0u);
    call("cuDeviceGet", &device, 0);
    call("cuDevicePrimaryCtxRetain", &context_, device);  // kept: it goes with the process
    enter();
  }

  /// Makes the device that of the calling thread.
  void enter() { call("cuCtxSetCurrent", context_); }
  void *allocate(size_t nbytes) override {
    Address address = 0;
    if (attempt("cuMemAlloc_v2", &address, std::max<size_t>(nbytes, 1))) return nullptr;
    if (nbytes) call("cuMemsetD8_v2", address, static_cast<unsigned char>(0), nbytes);
    finish(nullptr);  // other streams do not wait for the default one
    return reinterpret_cast<void *>(address);
  }
  void release(void *address) override { attempt("cuMemFree_v2", of(address)); }
  void copy(void *to, const void *from, size_t nbytes) override {
    call("cuMemcpyDtoD_v2", of(to), of(from), nbytes);
    finish(nullptr);
  }
  size_t free_bytes() override {
    size_t free = 0, total = 0;
    call("cuMemGetInfo_v2", &free, &total);
    return free;
  }

  Stream stream() {
    Stream made = nullptr;
    call("cuStreamCreate", &made, 1u);  // does not wait for the default stream
    return made;
  }
  void close(Stream stream) { attempt("cuStreamDestroy_v2", stream); }
  /// The source may change once the stream has finished.
  void upload(void *to, const void *from, size_t nbytes, Stream stream) {
    if (nbytes) call("cuMemcpyHtoDAsync_v2", of(to), from, nbytes, stream);
  }
  void download(void *to, const void *from, size_t nbytes, Stream stream) {
    if (nbytes) call("cuMemcpyDtoHAsync_v2", to, of(from), nbytes, stream);
  }
  void finish(Stream stream) { call("cuStreamSynchronize", stream); }

  void begin_capture(Stream stream) { call("cuStreamBeginCapture_v2", stream, 1); }  // of this thread's calls
  /// Ends the capture; nullptr when it failed.
  Graph end_capture(Stream stream) {
    CUgraph_st *captured = nullptr;
    Graph made = nullptr;
    if (attempt("cuStreamEndCapture", stream, &captured) || !captured) return nullptr;
    if (attempt("cuGraphInstantiateWithFlags", &made, captured, 0ull)) made = nullptr;
    attempt("cuGraphDestroy", captured);
    return made;
  }
  void launch(Graph graph, Stream stream) { call("cuGraphLaunch", graph, stream); }
  void close(Graph graph) { attempt("cuGraphExecDestroy", graph); }

 private:
  using Address = unsigned long long;
  Library driver_;
  CUctx_st *context_ = nullptr;

  static Address of(const void *address) { return reinterpret_cast<Address>(address); }
  template <class... Arguments> int attempt(const char *name, Arguments... arguments) {
    return driver_.symbol<int(Arguments...)>(name)(arguments...);
  }
  template <class... Arguments> void call(const char *name, Arguments... arguments) {
    if (const int status = attempt(name, arguments...)) {
      const char *reason = nullptr;
      driver_.symbol<int(int, const char **)>("cuGetErrorString")(status, &reason);
      throw Error(std::string("the GPU cannot be used (") + name + ": " + (reason ? reason : "unknown error") +
                  "): check nvidia-smi.");
    }
  }
};

}  // namespace kvpack
