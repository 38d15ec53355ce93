// A host of kvpack engines on TensorRT: a context per profile, the compressed cache in place, prints token ids. Neither
// TensorRT nor CUDA is linked: both are loaded when the program runs.
#include "cuda.hpp"
#include "program.hpp"

#include <NvInferRuntime.h>

namespace kvpack {
namespace {

/// Keeps TensorRT's last complaint for the sentence of an Error.
struct Logger : nvinfer1::ILogger {
  std::string last;
  void log(Severity severity, const char *line) noexcept override {
    if (severity <= Severity::kERROR) last = line;
  }
  /// An Error with that complaint.
  Error error(const std::string &what) {
    const std::string reason = last.empty() ? "it does not say why" : last.substr(0, last.find('\n'));
    last.clear();
    return Error("TensorRT " + what + " (" + reason + ")");
  }
};

nvinfer1::DataType element(const std::string &dtype) {
  static const std::map<std::string, nvinfer1::DataType> types{
      {"float32", nvinfer1::DataType::kFLOAT}, {"float16", nvinfer1::DataType::kHALF},
      {"bfloat16", nvinfer1::DataType::kBF16}, {"int8", nvinfer1::DataType::kINT8},
      {"int32", nvinfer1::DataType::kINT32},   {"int64", nvinfer1::DataType::kINT64}};
  const auto found = types.find(dtype);
  if (found == types.end()) throw Error("TensorRT has no " + dtype + ": " + Artefact::REBUILD + ".");
  return found->second;
}

nvinfer1::Dims trt_dims(const Dims &dims) {
  nvinfer1::Dims made{};
  if (dims.size() > nvinfer1::Dims::MAX_DIMS)
    throw Error("a tensor of this engine has too many dimensions for TensorRT.");
  made.nbDims = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), made.d);
  return made;
}

/// What config.json says of the plan.
struct Target {
  struct Profile {
    std::string name;
    int64_t least = 1, most = 1, batch_least = 1, batch_most = 1;  // tokens of a sequence; sequences
  };
  std::string plan, plugins;
  bool in_place = true, brings_runtime = false;
  std::vector<Profile> profiles;

  /// Throws Error.
  explicit Target(const Artefact &artefact) {
    const std::string backend = artefact.backend();
    if (backend != "tensorrt" && backend != "tensorrt-rtx")
      throw Error(artefact.path.string() + " is an engine for '" + backend +
                  "', not for TensorRT: " + Artefact::REBUILD + " --backend tensorrt.");
    const Json &target = artefact.config.at("target");
    try {
      plan = target.at("plan").string();
      if (const Json *file = target.find("plugins"); file && !file->is(Json::Kind::null)) plugins = file->string();
      if (const Json *flag = target.find("in_place"); flag) in_place = flag->truth();
      if (const Json *flag = target.find("version_compatible")) brings_runtime = flag->truth();
      if (const Json *file = target.find("weights"); file && !file->is(Json::Kind::null))
        throw Error((artefact.path / plan).string() +
                    " has no weights in it, and only the Python runtime gives it those "
                    "of the graph: build the engine without --strip-weights.");
      for (const Json &entry : target.at("profiles").array()) {
        const auto &tokens = entry.at("tokens").array(), &batch = entry.at("batch").array();
        if (tokens.size() != 3 || batch.size() != 3)
          throw std::invalid_argument("a range of a profile has not three sizes");
        profiles.push_back({entry.at("name").string(), tokens[0].integer(), tokens[2].integer(), batch[0].integer(),
                            batch[2].integer()});
        const Profile &made = profiles.back();
        if (made.least < 1 || made.most < made.least || made.batch_least < 1 || made.batch_most < made.batch_least)
          throw std::invalid_argument("the profile " + made.name + " has an empty range");
      }
      if (profiles.empty()) throw std::invalid_argument("there is no profile");
      for (const std::string *file : {&plan, &plugins})
        if (!file->empty() && !artefact.has_file(*file))
          throw std::invalid_argument(*file + " is no file of the engine");
    } catch (const std::invalid_argument &error) {
      throw Error((artefact.path / "config.json").string() + ": the target is malformed (" + error.what() + "); " +
                  Artefact::REBUILD + ".");
    }
  }
};

struct Settings {
  std::string library;  // TensorRT's
  bool graphs = false;
};

class TensorRt : public Backend {
 public:
  TensorRt(const Artefact &artefact, const Settings &settings)
      : artefact_(artefact),
        target_(artefact),
        library_(chosen(settings, artefact), "pass --tensorrt FILE"),
        graphs_(settings.graphs),
        stream_(device_) {
    if (graphs_ && target_.plugins.empty())
      throw Error(
          "--cuda-graphs needs a plan with kvpack's plugins, whose steps read their lengths on the GPU: leave it out.");
    const auto create = library_.symbol<void *(void *, int32_t)>("createInferRuntime_INTERNAL");
    runtime_.reset(static_cast<nvinfer1::IRuntime *>(create(&logger_, NV_TENSORRT_VERSION)));
    if (!runtime_) throw sentence("does not start", "compile this program with the headers of the library's release");
    runtime_->setEngineHostCodeAllowed(target_.brings_runtime);  // the plan's hash was checked
    if (!target_.plugins.empty()) {
      const std::string path = std::filesystem::absolute(artefact.path / target_.plugins).string();
      if (!runtime_->getPluginRegistry().loadLibrary(path.c_str()))
        throw sentence("cannot load " + path, Artefact::REBUILD);
    }
    load();
  }

  Memory &memory() override { return device_; }
  bool in_place() const override { return target_.in_place; }
  std::string name() const override {
    return "TensorRT " + artefact_.config.at("target").at("backend").text + ", " +
           (target_.plugins.empty() ? "function bodies" : "native kernels") + (graphs_ ? ", CUDA graphs" : "");
  }
  int64_t most_tokens() const override {
    int64_t most = 1;
    for (const Target::Profile &one : target_.profiles) most = std::max(most, one.most);
    return most;
  }
  int64_t most_sequences() const override {
    int64_t most = 1;
    for (const Target::Profile &one : target_.profiles) most = std::max(most, one.batch_most);
    return most;
  }
  int64_t padded(int64_t tokens) const override {
    int64_t best = INT64_MAX;
    for (const Target::Profile &one : target_.profiles)
      if (one.most >= tokens) best = std::min(best, std::max(tokens, one.least));
    return best == INT64_MAX ? tokens : best;
  }

  void run(const Step &step, const State &state, float *logits) override {
    device_.enter();
    if (state.place() != bound_) recorded_.clear();
    bound_ = state.place();
    const size_t profile = profile_of(step);
    place(logits_, static_cast<size_t>(step.batch * artefact_.vocab_size) * sizeof(float));
    for (const TensorSpec &spec : given_) {
      if (on_host_.count(spec.role)) continue;
      place(inputs_[spec.role], step.nbytes(spec.role));
      device_.upload(inputs_[spec.role].address, step.data(spec.role), step.nbytes(spec.role), stream_.handle);
    }
    if (!graphs_ || step.width != 1 || !replay(step, state, profile)) {
      Context &context = contexts_[profile];
      prepare(context, profile, step, state);
      enqueue(*context);
    }
    device_.download(logits, logits_.address, static_cast<size_t>(step.batch * artefact_.vocab_size) * sizeof(float),
                     stream_.handle);
    device_.finish(stream_.handle);
  }

 private:
  using Context = std::unique_ptr<nvinfer1::IExecutionContext>;
  struct Stream {
    explicit Stream(Device &on) : device(on), handle(on.stream()) {}
    ~Stream() { device.close(handle); }
    Device &device;
    Device::Stream handle;
  };
  struct Buffer {
    size_t nbytes = 0;
    void *address = nullptr;
    Device *device = nullptr;
    ~Buffer() {
      if (address) device->release(address);
    }
  };
  struct Recorded {  // a captured decode step, with a context of its own
    Context context;
    Device::Graph graph = nullptr;
    Device *device = nullptr;
    ~Recorded() {
      if (graph) device->close(graph);
    }
  };
  static constexpr size_t MOST_GRAPHS = 64;

  const Artefact &artefact_;
  Target target_;
  Library library_;
  Logger logger_;
  bool graphs_;
  Device device_;
  Stream stream_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::map<size_t, Context> contexts_;             // by profile
  std::map<std::string, Buffer> inputs_, unread_;  // by role; by name, of outputs that nobody reads
  Buffer logits_;
  std::vector<TensorSpec> given_;  // inputs that every step is given, but for those that nothing reads
  std::map<std::string, std::vector<char>> on_host_;  // by role, what TensorRT reads on the host, where it must stay
  uint64_t bound_ = 0;                                // the state that recorded steps are of
  std::map<std::pair<int64_t, int64_t>, Recorded> recorded_;  // by rows to encode and room for selected rows

  static std::string chosen(const Settings &settings, const Artefact &artefact) {
    const std::string known = KVPACK_TENSORRT_LIBRARY;
    if (!settings.library.empty()) return settings.library;
    if (!known.empty()) return known;
    if (artefact.backend() == "tensorrt-rtx") return "libtensorrt_rtx.so";
    return "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR);
  }
  Error sentence(const std::string &what, const std::string &mend) {
    return Error(std::string(logger_.error(what).what()) + ": " + mend + ".");
  }

  void load() {
    const std::filesystem::path path = artefact_.path / target_.plan;
    std::ifstream stream(path, std::ios::binary);
    std::vector<char> plan(std::filesystem::file_size(path));
    if (!stream.read(plan.data(), static_cast<std::streamsize>(plan.size())))
      throw Error(path.string() + " cannot be read: check its permissions.");
    engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
    if (!engine_) throw sentence("cannot load " + path.string(), "build the engine with this TensorRT, for this GPU");
    const auto refuse = [&path](const std::string &what) {
      throw Error(path.string() + " and config.json disagree about " + what + ": " + Artefact::REBUILD + ".");
    };
    if (static_cast<size_t>(engine_->getNbOptimizationProfiles()) != target_.profiles.size()) refuse("the profiles");
    size_t known = 0;
    for (const auto &[specs, mode] : {std::pair(&artefact_.inputs, nvinfer1::TensorIOMode::kINPUT),
                                      std::pair(&artefact_.outputs, nvinfer1::TensorIOMode::kOUTPUT)})
      for (const TensorSpec &spec : *specs) {
        const bool given = mode == nvinfer1::TensorIOMode::kINPUT && spec.role != "state";
        const nvinfer1::TensorIOMode found = engine_->getTensorIOMode(spec.name.c_str());
        if (given && found == nvinfer1::TensorIOMode::kNONE) continue;  // nothing reads it
        if (found != mode || engine_->getTensorDataType(spec.name.c_str()) != element(spec.dtype))
          refuse("the tensor '" + spec.name + "'");
        if (given) given_.push_back(spec);
        if (given && engine_->getTensorLocation(spec.name.c_str()) == nvinfer1::TensorLocation::kHOST)
          on_host_[spec.role].resize(sizeof(int64_t));
        ++known;
      }
    if (static_cast<size_t>(engine_->getNbIOTensors()) != known) refuse("the number of tensors");
  }

  /// The first profile that holds the step.
  size_t profile_of(const Step &step) const {
    for (size_t n = 0; n < target_.profiles.size(); ++n) {
      const Target::Profile &one = target_.profiles[n];
      if (step.width >= one.least && step.width <= one.most && step.batch >= one.batch_least &&
          step.batch <= one.batch_most)
        return n;
    }
    throw Error("no profile of the plan holds " + std::to_string(step.width) + " tokens of " +
                std::to_string(step.batch) + " sequences, for which it must be built");
  }

  void place(Buffer &buffer, size_t nbytes) {
    if (buffer.address && buffer.nbytes >= nbytes) return;
    recorded_.clear();  // they read the old one
    if (buffer.address) device_.release(buffer.address);
    buffer.address = device_.allocate(nbytes);
    buffer.device = &device_;
    buffer.nbytes = nbytes;
    if (!buffer.address) throw Error("the GPU is out of memory");
  }

  /// Everything that a context must know before a step.
  void prepare(Context &context, size_t profile, const Step &step, const State &state) {
    if (!context) {
      context.reset(engine_->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kON_PROFILE_CHANGE));
      if (!context || !context->setOptimizationProfileAsync(static_cast<int32_t>(profile), stream_.handle)) {
        context.reset();
        throw logger_.error("has no memory for the profile " + target_.profiles[profile].name);
      }
      device_.finish(stream_.handle);
    }
    const auto bind = [&](const std::string &name, const void *address) {
      if (!context->setTensorAddress(name.c_str(), const_cast<void *>(address)))
        throw logger_.error("does not take '" + name + "'");
    };
    const auto shape = [&](const std::string &name, const Dims &dims) {
      if (context->setInputShape(name.c_str(), trt_dims(dims))) return;
      std::string sizes;
      for (const int64_t size : dims) sizes += (sizes.empty() ? "" : " x ") + std::to_string(size);
      throw logger_.error("does not take '" + name + "' of " + sizes + " in the profile " +
                          target_.profiles[profile].name);
    };
    for (const TensorSpec &spec : given_) {
      shape(spec.name, step.dims(spec.role));
      const auto host = on_host_.find(spec.role);
      if (host == on_host_.end()) {
        bind(spec.name, inputs_[spec.role].address);
        continue;
      }
      if (step.nbytes(spec.role) > host->second.size()) throw Error("TensorRT reads '" + spec.name + "' on the host");
      std::memcpy(host->second.data(), step.data(spec.role), step.nbytes(spec.role));
      bind(spec.name, host->second.data());
    }
    for (const State::Tensor &one : state.tensors()) {
      shape(one.spec.name, one.dims);
      bind(one.spec.name, one.input);
      bind(one.spec.alias, one.output);
    }
    for (const TensorSpec &spec : artefact_.outputs) {
      if (spec.role == "logits") bind(spec.name, logits_.address);
      if (spec.role != "selected") continue;
      const int64_t nbytes = context->getMaxOutputSize(spec.name.c_str());
      if (nbytes < 0) throw logger_.error("does not tell the size of '" + spec.name + "'");
      place(unread_[spec.name], static_cast<size_t>(nbytes));
      bind(spec.name, unread_[spec.name].address);
    }
  }
  void enqueue(nvinfer1::IExecutionContext &context) {
    if (!context.enqueueV3(stream_.handle)) throw logger_.error("failed");
  }

  /// A decode step as a CUDA graph, captured when its kind comes for the second time. False: it did not run.
  bool replay(const Step &step, const State &state, size_t profile) {
    const int64_t width = step.select_width ? room(step, state.capacity()) : 0;
    const std::pair kind(step.encode, width);
    if (!recorded_.count(kind) && recorded_.size() >= MOST_GRAPHS) return false;
    Step sized = step;
    sized.live = static_cast<int32_t>(state.capacity());  // a step of one token reads its own lengths
    sized.select_width = static_cast<int32_t>(width);
    if (!recorded_.count(kind)) {
      Context context;
      prepare(context, profile, sized, state);  // may forget what was recorded
      enqueue(*context);
      recorded_[kind].context = std::move(context);
      return true;
    }
    Recorded &one = recorded_[kind];
    if (!one.graph) {
      prepare(one.context, profile, sized, state);  // another kind's numbers may be on the host since
      device_.finish(stream_.handle);
      device_.begin_capture(stream_.handle);
      const bool done = one.context->enqueueV3(stream_.handle);
      one.graph = device_.end_capture(stream_.handle);
      one.device = &device_;
      if (!done || !one.graph) {  // from now on without
        graphs_ = false;
        return false;
      }
    }
    device_.launch(one.graph, stream_.handle);
    return true;
  }
  /// Few sizes, so that few graphs are captured as the count of selected rows grows.
  int64_t room(const Step &step, int64_t capacity) const {
    const int64_t count = *std::max_element(step.select_len.begin(), step.select_len.end());
    int64_t power = 1;
    while (power <= std::max<int64_t>(count - 1, 1)) power *= 2;
    const auto rounded = [](int64_t rows, int64_t by) { return (rows + by - 1) / by * by; };
    const Geometry &geometry = *artefact_.geometry;
    const int64_t most = rounded(geometry.selected(artefact_.max_length), Geometry::SELECT_STEP);  // of the profile
    return std::min({rounded(count, std::max(Geometry::SELECT_STEP, power / 8)), geometry.encoded(capacity), most});
  }
};

}  // namespace
}  // namespace kvpack

int main(int argc, char **argv) {
  using namespace kvpack;
  Settings settings;
  const std::vector<Option> own{
      {"--tensorrt", "FILE", "TensorRT's library (default: what the loader finds)",
       [&](auto &v) { settings.library = v; }},
      {"--cuda-graphs", "", "capture decode steps in CUDA graphs", [&](auto &) { settings.graphs = true; }},
  };
  return run(argc, argv, "Run a kvpack engine on TensorRT.", own,
             [&](const Artefact &artefact) { return std::make_unique<TensorRt>(artefact, settings); });
}
