#include "horovod/tensorflow_op/execution.h"

#include <cohort/error.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>

namespace cohort::tensorflow {

using python::NamedCall;
using python::NamedGroup;
using python::NamedKind;
using python::NamedMade;
using python::NamedReply;

namespace {

const python::NamedCalls* calls = nullptr;

struct DeleteStatus {
  void operator()(TF_Status* status) const noexcept { tf.DeleteStatus(status); }
};
using Status = std::unique_ptr<TF_Status, DeleteStatus>;

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const noexcept { tf.DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

/// Throws std::runtime_error if the status is an error of TensorFlow.
void check(const Status& status) {
  if (tf.GetCode(status.get()) != Code::Ok) throw std::runtime_error(tf.Message(status.get()));
}

std::optional<DType> dtype_of(Type type) noexcept {
  switch (type) {
    case Type::Float: return DType::Float32;
    case Type::Double: return DType::Float64;
    case Type::Half: return DType::Float16;
    case Type::BFloat16: return DType::BFloat16;
    case Type::Int8: return DType::Int8;
    case Type::Int16: return DType::Int16;
    case Type::Int32: return DType::Int32;
    case Type::Int64: return DType::Int64;
    case Type::UInt8: return DType::UInt8;
    case Type::UInt16: return DType::UInt16;
    case Type::UInt32: return DType::UInt32;
    case Type::UInt64: return DType::UInt64;
    case Type::Bool: return DType::Bool;
    case Type::Complex64: return DType::Complex64;
    case Type::Complex128: return DType::Complex128;
  }
  return std::nullopt;
}

/// Converts the number of a cohort::ErrorCode. Never gives Unavailable, for TensorFlow a failure of its network.
Code code_of(int code) noexcept {
  constexpr Code kCodes[] = {Code::InvalidArgument, Code::Aborted, Code::DeadlineExceeded, Code::Aborted,
                             Code::FailedPrecondition};
  if (code == static_cast<int>(ErrorCode::Internal)) return Code::Internal;
  return code >= 0 && code < static_cast<int>(std::size(kCodes)) ? kCodes[code] : Code::Aborted;
}

// cohort/tensorflow/_errors.py looks for the mark. Invalid arguments are a ValueError there, and carry no mark.
std::string text_of(const NamedReply& reply) {
  return (code_of(reply.code) == Code::InvalidArgument ? "" : "HorovodInternalError: ") + std::string(reply.failure);
}

/// Time to wait for a small operation: if ranks are in step, a loss or a metric is there before two threads have been
/// woken for it. Larger ones, and groups, are left to these threads, since TensorFlow's threads have to compute.
constexpr std::int64_t kPatience = 100'000;  // ns
constexpr std::size_t kSmall = 4096;         // bytes

/// Memory whose address stands for empty tensors.
alignas(64) char nothing;

}  // namespace

class Execution {
 public:
  /// `done` runs on the thread that ends this object.
  Execution(Kernel& kernel, TF_OpKernelContext* context, std::function<void()> done)
      : kernel_(kernel), context_(context), done_(std::move(done)) {}

  /// Owns itself until the operations are done.
  static void start(std::unique_ptr<Execution> one) {
    Execution* const self = one.release();
    try {
      if (calls == nullptr) throw std::runtime_error("cohort.tensorflow was not imported in this process");
      self->prepare();
    } catch (const std::exception& error) {
      self->end({error.what(), static_cast<int>(ErrorCode::Internal), nullptr});
      return;
    }
    NamedGroup group;
    group.engine = self->kernel_.asked().engine;
    group.calls = self->calls_.data();
    group.count = self->calls_.size();
    if (group.count == 1 && self->bytes_ <= kSmall) group.patience_ns = kPatience;
    group.done = [](void* own, const NamedReply& reply) { static_cast<Execution*>(own)->end(reply); };
    if (!self->kernel_.asked().keeps_shape()) {
      group.allocate = [](void* own, std::size_t index, const std::int64_t* shape, std::size_t dimensions) {
        return static_cast<Execution*>(own)->allocate(index, shape, dimensions);
      };
    }
    group.context = self;
    calls->submit(group);
  }

 private:
  void prepare() {
    const Asked& asked = kernel_.asked();
    const std::size_t count = asked.names.size();
    calls_.resize(count);
    shapes_.resize(count);
    if (!asked.keeps_shape()) outputs_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      NamedCall& call = calls_[i];
      call = asked.call;
      call.name = asked.names[i].data();
      call.name_bytes = asked.names[i].size();
      bring(static_cast<int>(i), call);
    }
    if (asked.call.kind == NamedKind::AllToAll) {
      const Tensor splits = input(static_cast<int>(count));
      const auto* const rows = static_cast<const std::int64_t*>(tf.TensorData(splits.get()));
      splits_.assign(rows, rows + tf.TensorByteSize(splits.get()) / sizeof(std::int64_t));
      calls_[0].splits = splits_.data();
      calls_[0].split_count = splits_.size();
    }
  }

  Tensor input(int index) {
    TF_Tensor* tensor = nullptr;
    tf.GetInput(context_, index, &tensor, status_.get());
    check(status_);
    return Tensor(tensor);
  }

  static void* data_of(const Tensor& tensor) {
    void* const data = tf.TensorData(tensor.get());
    return data != nullptr ? data : &nothing;
  }

  void bring(int index, NamedCall& call) {
    Tensor brought = input(index);
    const auto dtype = dtype_of(tf.TensorType(brought.get()));
    if (!dtype) {
      throw std::runtime_error("'" + std::string(call.name, call.name_bytes) + "': tensors of this type do not travel");
    }
    call.dtype = *dtype;
    std::vector<std::int64_t>& shape = shapes_[static_cast<std::size_t>(index)];
    shape.resize(static_cast<std::size_t>(tf.NumDims(brought.get())));
    for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = tf.Dim(brought.get(), static_cast<int>(i));
    bytes_ += tf.TensorByteSize(brought.get());
    call.shape = shape.data();
    call.dimensions = shape.size();
    if (!kernel_.asked().keeps_shape()) {
      call.input = data_of(brought);
      held_.push_back(std::move(brought));
      return;
    }
    // As long as it is held, TensorFlow would not give up the memory.
    brought.reset();
    int forwarded = -1;
    Tensor result(tf.ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.data(),
                                                  static_cast<int>(shape.size()), &forwarded, status_.get()));
    check(status_);
    call.output = data_of(result);
    call.input = call.output;
    held_.push_back(std::move(result));
    if (forwarded >= 0) return;
    brought = input(index);
    call.input = data_of(brought);
    held_.push_back(std::move(brought));
  }

  /// Called on the engine's thread.
  void* allocate(std::size_t index, const std::int64_t* shape, std::size_t dimensions) noexcept {
    const Type type = tf.TensorType(held_[index].get());
    std::size_t bytes = size_of(calls_[index].dtype);
    for (std::size_t i = 0; i < dimensions; ++i) bytes *= static_cast<std::size_t>(shape[i]);
    const Status status(tf.NewStatus());
    outputs_[index].reset(tf.AllocateOutput(context_, static_cast<int>(index), type, shape,
                                            static_cast<int>(dimensions), bytes, status.get()));
    if (!outputs_[index] || tf.GetCode(status.get()) != Code::Ok) return nullptr;
    return data_of(outputs_[index]);
  }

  /// Outputs the number of rows that came from each rank.
  void tell_received(const NamedMade* made) {
    const std::size_t count = calls_.size();
    for (std::size_t i = 0; i < count; ++i) {
      const auto rows = static_cast<std::int64_t>(made[i].received_count);
      const Tensor received(tf.AllocateOutput(context_, static_cast<int>(count + i), Type::Int64, &rows, 1,
                                              made[i].received_count * sizeof(std::int64_t), status_.get()));
      check(status_);
      std::copy_n(made[i].received_splits, made[i].received_count, static_cast<std::int64_t*>(data_of(received)));
    }
  }

  void end(const NamedReply& reply) noexcept {
    const std::unique_ptr<Execution> self(this);
    try {
      if (reply.failure != nullptr) {
        tf.SetStatus(status_.get(), code_of(reply.code), text_of(reply).c_str());
        tf.OpKernelContext_Failure(context_, status_.get());
      } else if (!kernel_.asked().keeps_shape()) {
        tell_received(reply.made);
      }
    } catch (const std::exception& error) {
      tf.SetStatus(status_.get(), Code::ResourceExhausted, error.what());
      tf.OpKernelContext_Failure(context_, status_.get());
    }
    held_.clear();
    outputs_.clear();
    // The kernel may be destroyed as soon as its last run is over, so it is not used afterwards.
    std::unique_ptr<Execution> next = kernel_.next();
    done_();
    if (next) start(std::move(next));
  }

  Kernel& kernel_;
  TF_OpKernelContext* const context_;
  std::function<void()> done_;
  Status status_{tf.NewStatus()};
  std::vector<NamedCall> calls_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<std::int64_t> splits_;
  std::size_t bytes_ = 0;
  std::vector<Tensor> held_;     // inputs and outputs
  std::vector<Tensor> outputs_;  // their size is known when all ranks have come
};

void Kernel::run(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* lent) {
  DoneCallback done(lent);
  if (!done) {
    // Waiting here would hold TensorFlow's threads, which have operations in a different order on each rank.
    const Status status(tf.NewStatus());
    tf.SetStatus(status.get(), Code::FailedPrecondition,
                 "HorovodInternalError: the op library of cohort.tensorflow -- this TensorFlow's std::function is not "
                 "libstdc++'s, so an operation cannot tell when it is done -- install TensorFlow from PyPI");
    tf.OpKernelContext_Failure(context, status.get());
    tf.RunAsyncOpKernelDoneCallback(lent);
    return;
  }
  start(std::make_unique<Execution>(*this, context, [done = std::move(done)]() mutable { done.run(); }));
}

void Kernel::start(std::unique_ptr<Execution> one) {
  {
    const std::lock_guard lock(mutex_);
    if (running_) {
      waiting_.push_back(std::move(one));
      return;
    }
    running_ = true;
  }
  Execution::start(std::move(one));
}

std::unique_ptr<Execution> Kernel::next() {
  const std::lock_guard lock(mutex_);
  running_ = !waiting_.empty();
  if (!running_) return nullptr;
  std::unique_ptr<Execution> one = std::move(waiting_.front());
  waiting_.pop_front();
  return one;
}

Kernel::Kernel(Asked asked) : asked_(std::move(asked)) {}

Kernel::~Kernel() = default;

const char* use(const python::NamedCalls* given) noexcept {
  if (const char* const problem = given->problem()) return problem;
  calls = given;
  return nullptr;
}

}  // namespace cohort::tensorflow
