// Calls the plugins of plugins/native/src/tensorrt.cc as TensorRT would, without TensorRT: for ctypes, by
// tests/test_native_tensorrt.py. With KVPACK_FUZZ it is a program that makes plugins of fields that were tampered with.
#include "NvInferRuntime.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

extern "C" IPluginCreatorInterface *const *getCreators(int32_t &count);
extern "C" void setLoggerFinder(ILoggerFinder *finder);

namespace {

struct Logger : ILogger {
  std::string last;
  void log(Severity, const char *line) noexcept override { last = line; }
};
struct Finder : ILoggerFinder {
  Logger logger;
  ILogger *findLogger() override { return &logger; }
};
Finder finder;

// Expressions of dimensions are known numbers here.
struct Number : apiv::VDimensionExpr {
  explicit Number(int64_t value) : value(value) {}
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
  int64_t value;
};
struct Expression : IDimensionExpr {
  explicit Expression(int64_t value) : number(value) { mImpl = &number; }
  Number number;
};
struct Expressions : apiv::VExprBuilder {
  const IDimensionExpr *constant(int64_t value) override {
    made.push_back(std::make_unique<Expression>(value));
    return made.back().get();
  }
  const IDimensionExpr *operation(DimensionOperation op, const IDimensionExpr &a, const IDimensionExpr &b) override {
    const int64_t x = a.getConstantValue(), y = b.getConstantValue();
    if (op == DimensionOperation::kFLOOR_DIV) return constant(x / y);
    return op == DimensionOperation::kPROD ? constant(x * y) : nullptr;
  }
  const IDimensionExpr *declareSizeTensor(int32_t, const IDimensionExpr &, const IDimensionExpr &) override {
    return nullptr;
  }
  std::vector<std::unique_ptr<Expression>> made;
};
struct Builder : IExprBuilder {
  Builder() { mImpl = &expressions; }
  Expressions expressions;
};

}  // namespace

extern "C" {

struct Given {  // a tensor; rank -1: a null input
  int32_t rank, type;
  int64_t dims[Dims::MAX_DIMS];
  void *data;
};

#define SHOWN __attribute__((visibility("default")))

SHOWN int32_t trt_count() {
  setLoggerFinder(&finder);
  int32_t count = 0;
  getCreators(count);
  return count;
}
SHOWN IPluginCreatorV3One *trt_creator(int32_t n) {
  int32_t count = 0;
  IPluginCreatorInterface *creator = getCreators(count)[n];
  if (std::strcmp(creator->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE")) return nullptr;
  return static_cast<IPluginCreatorV3One *>(creator);
}
SHOWN const char *trt_name(IPluginCreatorV3One *creator) { return creator->getPluginName(); }
SHOWN const char *trt_namespace(IPluginCreatorV3One *creator) { return creator->getPluginNamespace(); }
SHOWN const char *trt_said() {
  static std::string told;
  told.swap(finder.logger.last), finder.logger.last.clear();
  return told.c_str();
}
SHOWN const PluginField *trt_field_names(IPluginCreatorV3One *creator, int32_t *count) {
  return *count = creator->getFieldNames()->nbFields, creator->getFieldNames()->fields;
}
SHOWN IPluginV3 *trt_create(IPluginCreatorV3One *creator, const PluginField *fields, int32_t count) {
  const PluginFieldCollection collection{count, fields};
  return creator->createPlugin("node", &collection, TensorRTPhase::kBUILD);
}
SHOWN void trt_delete(IPluginV3 *plugin) { delete plugin; }
SHOWN IPluginV3 *trt_clone(IPluginV3 *plugin) { return plugin->clone(); }

static IPluginV3OneCore *core(IPluginV3 *plugin) {
  return static_cast<IPluginV3OneCore *>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}
static IPluginV3OneBuildV2 *build(IPluginV3 *plugin) {
  IPluginCapability *found = plugin->getCapabilityInterface(PluginCapabilityType::kBUILD);
  const InterfaceInfo info = found->getInterfaceInfo();
  if (std::strcmp(info.kind, "PLUGIN_V3ONE_BUILD") || info.major != 2) abort();
  return static_cast<IPluginV3OneBuildV2 *>(found);
}
static IPluginV3OneRuntime *runtime(IPluginV3 *plugin) {
  return static_cast<IPluginV3OneRuntime *>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

// As a plan is written and read again: the plugin's fields, their data copied, then a new plugin of them.
SHOWN IPluginV3 *trt_restored(IPluginV3 *plugin, IPluginCreatorV3One *creator) {
  const PluginFieldCollection *fields = runtime(plugin)->getFieldsToSerialize();
  if (!fields || std::strcmp(core(plugin)->getPluginName(), creator->getPluginName())) return nullptr;
  std::vector<PluginField> copies(fields->fields, fields->fields + fields->nbFields);
  std::vector<std::vector<char>> data;
  for (PluginField &field : copies) {
    const size_t size = field.type == PluginFieldType::kCHAR ? 1 : 4;
    const char *from = static_cast<const char *>(field.data);
    data.emplace_back(from, from + size * static_cast<size_t>(field.length));
    field.data = data.back().data();
  }
  const PluginFieldCollection collection{fields->nbFields, copies.data()};
  return creator->createPlugin("node", &collection, TensorRTPhase::kRUNTIME);
}

static PluginTensorDesc desc_of(const Given &given) {
  PluginTensorDesc desc{};
  desc.dims.nbDims = given.rank < 0 ? 0 : given.rank;
  std::memcpy(desc.dims.d, given.dims, sizeof(given.dims));
  desc.type = static_cast<DataType>(given.type);
  desc.format = TensorFormat::kLINEAR;
  desc.scale = 1;
  return desc;
}
static std::vector<PluginTensorDesc> descs_of(const Given *given, int32_t count) {
  std::vector<PluginTensorDesc> descs;
  for (int32_t n = 0; n < count; ++n) descs.push_back(desc_of(given[n]));
  return descs;
}
static std::vector<DynamicPluginTensorDesc> ranges_of(const Given *given, int32_t count) {
  std::vector<DynamicPluginTensorDesc> ranges;
  for (const PluginTensorDesc &desc : descs_of(given, count)) ranges.push_back({desc, desc.dims, desc.dims, desc.dims});
  return ranges;
}

// What a builder asks. Fills in types and dims of out and the aliases; returns the number of outputs, -1: it failed.
SHOWN int32_t trt_describe(IPluginV3 *plugin, const Given *in, int32_t inputs, const int64_t *numbers, int32_t count,
                           Given *out, int32_t *aliases) {
  const int32_t outputs = build(plugin)->getNbOutputs();
  std::vector<DataType> given, types(outputs);
  for (int32_t n = 0; n < inputs; ++n) given.push_back(static_cast<DataType>(in[n].type));
  if (build(plugin)->getOutputDataTypes(types.data(), outputs, given.data(), inputs)) return -1;
  Builder builder;
  std::vector<DimsExprs> dims(inputs), shapes(count), found(outputs);
  for (int32_t n = 0; n < inputs; ++n) {
    dims[n].nbDims = in[n].rank < 0 ? 0 : in[n].rank;
    for (int32_t axis = 0; axis < dims[n].nbDims; ++axis)
      dims[n].d[axis] = builder.expressions.constant(in[n].dims[axis]);
  }
  for (int32_t n = 0; n < count; ++n) shapes[n].nbDims = 1, shapes[n].d[0] = builder.expressions.constant(numbers[n]);
  if (build(plugin)->getOutputShapes(dims.data(), inputs, shapes.data(), count, found.data(), outputs, builder))
    return -1;
  for (int32_t n = 0; n < outputs; ++n) {
    out[n].rank = found[n].nbDims, out[n].type = static_cast<int32_t>(types[n]);
    for (int32_t axis = 0; axis < found[n].nbDims; ++axis) out[n].dims[axis] = found[n].d[axis]->getConstantValue();
    aliases[n] = build(plugin)->getAliasedInput(n);
  }
  return outputs;
}

// Whether tensor `at` may have its type, in the format (1: linear) given, all before it being as they are.
SHOWN int32_t trt_supports(IPluginV3 *plugin, int32_t at, int32_t linear, const Given *in, int32_t inputs,
                           const Given *out, int32_t outputs) {
  std::vector<DynamicPluginTensorDesc> all = ranges_of(in, inputs);
  for (const DynamicPluginTensorDesc &each : ranges_of(out, outputs)) all.push_back(each);
  if (!linear) all[at].desc.format = TensorFormat::kHWC8;
  for (size_t n = at + 1; n < all.size(); ++n) all[n].desc.type = static_cast<DataType>(77);  // not to be looked at
  return build(plugin)->supportsFormatCombination(at, all.data(), inputs, outputs);
}

SHOWN int64_t trt_workspace(IPluginV3 *plugin, const Given *in, int32_t inputs, const Given *out, int32_t outputs) {
  const auto from = ranges_of(in, inputs), to = ranges_of(out, outputs);
  if (build(plugin)->configurePlugin(from.data(), inputs, to.data(), outputs)) return -1;
  return static_cast<int64_t>(build(plugin)->getWorkspaceSize(from.data(), inputs, to.data(), outputs));
}

SHOWN IPluginV3 *trt_attach(IPluginV3 *plugin) { return runtime(plugin)->attachToContext(nullptr); }

SHOWN int32_t trt_enqueue(IPluginV3 *plugin, const Given *in, int32_t inputs, const Given *out, int32_t outputs,
                          void *workspace, void *stream) {
  const auto from = descs_of(in, inputs), to = descs_of(out, outputs);
  if (int32_t code = runtime(plugin)->onShapeChange(from.data(), inputs, to.data(), outputs)) return code;
  std::vector<const void *> data;
  std::vector<void *> results;
  for (int32_t n = 0; n < inputs; ++n) data.push_back(in[n].data);
  for (int32_t n = 0; n < outputs; ++n) results.push_back(out[n].data);
  return runtime(plugin)->enqueue(from.data(), to.data(), data.data(), results.data(), workspace,
                                    static_cast<cudaStream_t>(stream));
}

}  // extern "C"

#ifdef KVPACK_FUZZ

namespace {

struct Field {
  std::string name;
  PluginFieldType type;
  int32_t length;
  std::vector<char> data;
  bool null = false;
  int32_t held() const { return static_cast<int32_t>(data.size() / 4); }  // at least, whatever the type
};

// Lines "op NAME", then of its attributes "i NAME NUMBER...", "f NAME NUMBER" and "s NAME WORD".
std::vector<std::pair<std::string, std::vector<Field>>> read_nodes(const char *path) {
  std::vector<std::pair<std::string, std::vector<Field>>> nodes;
  std::ifstream file(path);
  for (std::string line, kind, name; std::getline(file, line);) {
    std::istringstream words(line);
    words >> kind >> name;
    if (kind == "op") {
      nodes.push_back({name, {}});
      continue;
    }
    Field field{name, PluginFieldType::kCHAR, 0, {}};
    const auto put = [&](const void *from, size_t size) {
      field.data.insert(field.data.end(), static_cast<const char *>(from), static_cast<const char *>(from) + size);
      ++field.length;
    };
    if (kind == "i") {
      field.type = PluginFieldType::kINT32;
      for (int32_t number; words >> number;) put(&number, sizeof(number));
    } else if (kind == "f") {
      field.type = PluginFieldType::kFLOAT32;
      for (float number; words >> number;) put(&number, sizeof(number));
    } else {
      for (char letter; words >> letter;) put(&letter, 1);
    }
    nodes.back().second.push_back(field);
  }
  return nodes;
}

std::mt19937 dice(1);
int roll(int sides) { return static_cast<int>(dice() % static_cast<unsigned>(sides)); }

void tamper(std::vector<Field> &fields) {
  if (fields.empty()) return;
  const size_t at = static_cast<size_t>(roll(static_cast<int>(fields.size())));
  Field &field = fields[at];
  switch (roll(8)) {
    case 0: field.type = static_cast<PluginFieldType>(roll(15) - 1); break;
    case 1: {  // one that there are data for, or out of all bounds
      const int32_t lengths[] = {-1, 0, INT32_MIN, 65, 1000, INT32_MAX, roll(field.held() + 1)};
      field.length = lengths[roll(7)];
      break;
    }
    case 2: field.null = true; break;
    case 3: field.name += "x"; break;
    case 4: fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(at)); break;
    case 5: fields.push_back(Field(field)); break;
    case 6:  // another value
      for (char &byte : field.data) byte = roll(2) ? byte : static_cast<char>(roll(256));
      break;
    default: {  // a small number
      const int32_t number = roll(300) - 20;
      if (field.type == PluginFieldType::kINT32 && field.data.size() >= 4) std::memcpy(field.data.data(), &number, 4);
    }
  }
}

// Whatever the plugin is asked, and of whatever shapes, it has to answer.
void ask(IPluginV3 *plugin, IPluginCreatorV3One *creator) {
  Given in[32] = {}, out[16] = {};
  int32_t aliases[16];
  const int32_t inputs = roll(32), types[] = {0, 1, 2, 3, 7, 8};
  for (Given &each : in) {
    each.rank = roll(6) ? 3 + roll(2) : roll(10) - 1;
    if (each.rank > Dims::MAX_DIMS) each.rank = Dims::MAX_DIMS;
    each.type = types[roll(6)];
    for (int64_t &dim : each.dims) dim = roll(4) ? roll(300) - 1 : int64_t(dice()) << roll(20);
  }
  const int64_t numbers[2] = {roll(100), roll(100)};
  const int32_t count = roll(3);
  const int32_t outputs = build(plugin)->getNbOutputs();
  if (outputs > 16) abort();
  trt_describe(plugin, in, inputs, numbers, count, out, aliases);
  for (int32_t at = 0; at < inputs + outputs; ++at) trt_supports(plugin, at, roll(2), in, inputs, out, outputs);
  trt_workspace(plugin, in, inputs, out, outputs);
  if (trt_enqueue(plugin, in, 0, out, outputs, nullptr, nullptr) == 0) abort();
  IPluginV3 *again = trt_restored(plugin, creator), *context = trt_attach(plugin);
  if (!again || !context) abort();  // what was taken once is taken again
  delete again;
  delete context;
}

}  // namespace

int main(int, char **arguments) {
  const auto nodes = read_nodes(arguments[1]);
  std::map<std::string, IPluginCreatorV3One *> creators;
  for (int32_t n = 0, count = trt_count(); n < count; ++n) creators[trt_name(trt_creator(n))] = trt_creator(n);
  int made = 0, refused = 0;
  for (int round = 0, rounds = std::atoi(arguments[2]); round < rounds; ++round) {
    const auto &[name, base] = nodes[static_cast<size_t>(round) % nodes.size()];
    std::vector<Field> fields = base;
    for (int n = roll(4); n > 0; --n) tamper(fields);
    std::vector<PluginField> given;
    for (const Field &field : fields) {
      const void *data = field.null ? nullptr : field.data.data();
      given.emplace_back(roll(200) ? field.name.c_str() : nullptr, data, field.type, field.length);
    }
    IPluginCreatorV3One *creator = creators.at(name);
    IPluginV3 *plugin = trt_create(creator, roll(100) ? given.data() : nullptr, static_cast<int32_t>(given.size()));
    if (!plugin && !*trt_said()) abort();  // an error comes with a reason
    plugin ? ++made : ++refused;
    if (!plugin) continue;
    ask(plugin, creator);
    delete plugin;
  }
  std::printf("%d made, %d refused\n", made, refused);
}
#endif
