// cohort/_tensorflow_op.so: operations of TensorFlow, over its C interface. TensorFlow loads it into a process that has
// cohort._core; it links neither. CohortReduce gives tensors of its inputs' shapes, CohortCollective of others. They
// are stateful only as ...InOrder: otherwise TensorFlow runs them when their inputs are there, overlapping, in a
// different order on each rank. An optimised graph could run operations on constants once for all, so they have an
// input, `changing`, that Python makes such that it is never taken for a constant. Its value is not used.
#include "horovod/tensorflow_op/execution.h"
#include "horovod/tensorflow_op/tensorflow_api.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace cohort::tensorflow {
namespace {

struct Problem {
  std::string text;
};

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* node) : node_(node), status_(tf.NewStatus()) {}
  ~Attributes() { tf.DeleteStatus(status_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  std::int64_t number(const char* name) {
    std::int64_t value = 0;
    tf.OpKernelConstruction_GetAttrInt64(node_, name, &value, status_);
    check();
    return value;
  }

  /// Reads a factor from text, since TensorFlow's own float attributes have single precision.
  double factor(const char* name) {
    char text[64] = {};
    tf.OpKernelConstruction_GetAttrString(node_, name, text, sizeof text - 1, status_);
    check();
    return std::strtod(text, nullptr);
  }

  std::vector<std::string> texts(const char* name) {
    std::int32_t count = 0;
    std::int32_t bytes = 0;
    tf.OpKernelConstruction_GetAttrSize(node_, name, &count, &bytes, status_);
    check();
    std::vector<char*> begins(static_cast<std::size_t>(count));
    std::vector<std::size_t> lengths(begins.size());
    std::vector<char> storage(static_cast<std::size_t>(bytes) + 1);
    tf.OpKernelConstruction_GetAttrStringList(node_, name, begins.data(), lengths.data(), count, storage.data(),
                                              storage.size(), status_);
    check();
    std::vector<std::string> all;
    for (std::size_t i = 0; i < begins.size(); ++i) all.emplace_back(begins[i], lengths[i]);
    return all;
  }

  void fail(const std::string& text) {
    tf.SetStatus(status_, Code::Internal, text.c_str());
    tf.OpKernelConstruction_Failure(node_, status_);
  }

 private:
  void check() const {
    if (tf.GetCode(status_) != Code::Ok) throw Problem{tf.Message(status_)};
  }

  TF_OpKernelConstruction* const node_;
  TF_Status* const status_;
};

void* create(TF_OpKernelConstruction* node) {
  Attributes attributes(node);
  try {
    Asked asked;
    asked.call.kind = static_cast<python::NamedKind>(attributes.number("kind"));
    asked.engine = static_cast<std::uint64_t>(attributes.number("engine"));
    asked.call.op = static_cast<ReduceOp>(attributes.number("op"));
    asked.call.root = static_cast<std::int32_t>(attributes.number("root"));
    asked.call.prescale = attributes.factor("prescale");
    asked.call.postscale = attributes.factor("postscale");
    asked.call.needs_all_ranks = attributes.number("needs_all_ranks") != 0;
    asked.names = attributes.texts("names");
    return new Kernel(std::move(asked));
  } catch (const Problem& problem) {
    attributes.fail(problem.text);
  } catch (const std::exception& error) {
    attributes.fail(error.what());
  }
  return nullptr;
}

void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  static_cast<Kernel*>(kernel)->run(context, done);
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const std::int64_t outputs = tf.ShapeInferenceContextNumInputs(context) - 1;
  TF_ShapeHandle* const shape = tf.NewShapeHandle();
  for (int i = 0; i < outputs && tf.GetCode(status) == Code::Ok; ++i) {
    tf.ShapeInferenceContextGetInput(context, i, shape, status);
    if (tf.GetCode(status) == Code::Ok) tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.DeleteShapeHandle(shape);
}

// Leaves the shapes unknown; Python sets those that are known.
void any_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
}

using Infer = void (*)(TF_ShapeInferenceContext*, TF_Status*);

/// `stateful`: TensorFlow runs these operations one after another.
void add_operation(const char* name, const std::vector<const char*>& inputs, const std::vector<const char*>& outputs,
                   Infer infer, bool stateful, TF_Status* status) {
  TF_OpDefinitionBuilder* const builder = tf.NewOpDefinitionBuilder(name);
  for (const char* const attribute :
       {"T: list(type) >= 1", "names: list(string) >= 1", "kind: int", "engine: int", "op: int", "root: int",
        "prescale: string", "postscale: string", "needs_all_ranks: int"}) {
    tf.OpDefinitionBuilderAddAttr(builder, attribute);
  }
  if (outputs.size() > 1) tf.OpDefinitionBuilderAddAttr(builder, "count: int >= 1");
  for (const char* const input : inputs) tf.OpDefinitionBuilderAddInput(builder, input);
  for (const char* const output : outputs) tf.OpDefinitionBuilderAddOutput(builder, output);
  tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, infer);
  if (stateful) tf.OpDefinitionBuilderSetIsStateful(builder, true);  // false would set it, too
  tf.RegisterOpDefinition(builder, status);
  if (tf.GetCode(status) != Code::Ok) return;
  tf.RegisterKernelBuilder(name, tf.NewAsyncKernelBuilder(name, "CPU", &create, &compute, &destroy), status);
}

/// Registers the operations. Returns the reason that they cannot be used; empty if they can.
std::string add_operations() {
  if (const char* const missing = find_api()) return "this TensorFlow has no function " + std::string(missing);
  TF_Status* const status = tf.NewStatus();
  for (const bool in_order : {false, true}) {
    if (tf.GetCode(status) == Code::Ok) {
      add_operation(in_order ? "CohortReduceInOrder" : "CohortReduce", {"tensors: T", "changing: int64"},
                    {"results: T"}, &same_shapes, in_order, status);
    }
    if (tf.GetCode(status) == Code::Ok) {
      add_operation(in_order ? "CohortCollectiveInOrder" : "CohortCollective",
                    {"tensors: T", "splits: int64", "changing: int64"}, {"results: T", "received: count * int64"},
                    &any_shapes, in_order, status);
    }
  }
  std::string text = tf.GetCode(status) == Code::Ok ? "" : tf.Message(status);
  tf.DeleteStatus(status);
  return text;
}

std::string& problem() {
  static auto* const text = new std::string();
  return *text;
}

// Runs while TensorFlow loads the library, because TensorFlow takes operations added meanwhile for the library's.
[[gnu::constructor]] void loaded() { problem() = add_operations(); }

}  // namespace
}  // namespace cohort::tensorflow

/// Uses these functions of `_core`. Returns null, or a text that says why the library cannot be used.
extern "C" [[gnu::visibility("default")]] const char* cohort_tensorflow_use(const void* calls) {
  using namespace cohort::tensorflow;
  if (!problem().empty()) return problem().c_str();
  return use(static_cast<const cohort::python::NamedCalls*>(calls));
}
