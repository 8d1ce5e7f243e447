// <cohort/c_api.h> over the C++ interface: exceptions become numbers and this thread's text.
#include "base/result.h"
#include "train/gradients/reducer.h"
#include "train/step/ranks.h"

#include <cohort/c_api.h>
#include <cohort/cohort.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort {
namespace {

/// Operations that have not been waited for; cohort_finalize waits for them.
struct Running {
  std::mutex mutex;
  std::vector<std::shared_ptr<Work>> works;
};

}  // namespace
}  // namespace cohort

struct cohort_comm {
  cohort::Communicator comm;
  std::shared_ptr<cohort::Running> running = std::make_shared<cohort::Running>();
};

struct cohort_work {
  std::shared_ptr<cohort::Work> work;
  std::shared_ptr<cohort::Running> running;
};

namespace cohort {
namespace {

struct LastError {
  std::string text;
  int peer = -1;
};
thread_local LastError last_error;

std::int32_t number_of(ErrorCode code) noexcept { return static_cast<std::int32_t>(code) + 1; }
static_assert(COHORT_INTERNAL == static_cast<int>(ErrorCode::Internal) + 1);
static_assert(COHORT_COMPLEX128 == static_cast<int>(DType::Complex128) && COHORT_COMPLEX128 + 1 == kDTypeCount);
static_assert(COHORT_BIT_XOR == static_cast<int>(ReduceOp::BitXor) && COHORT_BIT_XOR + 1 == kReduceOpCount);

/// Runs `body`, and turns its exception into a status.
template <class Body>
std::int32_t guarded(const Body& body) noexcept {
  try {
    try {
      body();
      return COHORT_OK;
    } catch (const Error& error) {
      last_error = {error.what(), error.context().peer};
      return number_of(error.code());
    } catch (const std::bad_alloc&) {
      last_error = {"out of memory", -1};
      return COHORT_UNAVAILABLE;
    } catch (const std::exception& error) {
      last_error = {error.what(), -1};
      return COHORT_INTERNAL;
    }
  } catch (...) {  // no memory for the text
    last_error.text.clear();
    return COHORT_INTERNAL;
  }
}

template <class T>
T& given(T* pointer, const char* what) {
  if (pointer == nullptr) raise(ErrorCode::InvalidArgument, "{} is null", what);
  return *pointer;
}

/// Returns the caller's options, which may be those of an earlier version: what is missing keeps its default.
template <class Options>
Options complete(const Options* options, Options defaults, const char* what) {
  if (options == nullptr) return defaults;
  const std::size_t bytes = options->struct_bytes;
  if (bytes < sizeof bytes || bytes > sizeof defaults) {
    raise(ErrorCode::InvalidArgument,
          "{} has {} bytes by its struct_bytes, and this library knows {} -- begin with the header's initializer, and "
          "use "
          "a library that is not older than the header",
          what, bytes, sizeof defaults);
  }
  std::memcpy(&defaults, options, bytes);
  return defaults;
}

DType dtype_of(std::int32_t number) {
  if (number < 0 || number >= kDTypeCount) raise(ErrorCode::InvalidArgument, "there is no type number {}", number);
  return static_cast<DType>(number);
}
ReduceOp op_of(std::int32_t number) {
  if (number < 0 || number >= kReduceOpCount)
    raise(ErrorCode::InvalidArgument, "there is no reduction number {}", number);
  return static_cast<ReduceOp>(number);
}

/// Starts an operation, and waits for it unless the caller takes the Work.
template <class Start>
std::int32_t run(cohort_comm* comm, cohort_work** taken, const Start& start) noexcept {
  if (taken != nullptr) *taken = nullptr;
  return guarded([&] {
    Work work = start(given(comm, "the communicator").comm);
    if (taken == nullptr) return work.wait();
    auto handle = std::make_unique<cohort_work>(cohort_work{std::make_shared<Work>(std::move(work)), comm->running});
    const std::lock_guard lock(comm->running->mutex);
    comm->running->works.push_back(handle->work);
    *taken = handle.release();
  });
}

/// Memory that programs have allocated, by its address.
struct Allocated {
  std::mutex mutex;
  std::map<void*, Memory> all;
};
Allocated& allocated() {
  static Allocated memory;
  return memory;
}

InitOptions options_of(const cohort_init_options& given_options) {
  InitOptions options;
  if (given_options.init_method != nullptr) options.init_method = given_options.init_method;
  if (given_options.group_name != nullptr) options.group_name = given_options.group_name;
  if (given_options.secret_file != nullptr) options.secret_file = given_options.secret_file;
  options.rank = given_options.rank;
  options.world_size = given_options.world_size;
  if (given_options.init_timeout_ms >= 0)
    options.init_timeout = std::chrono::milliseconds(given_options.init_timeout_ms);
  if (given_options.timeout_ms >= 0) options.timeout = std::chrono::milliseconds(given_options.timeout_ms);
  options.trust_network = given_options.trust_network != 0;
  options.alone = given_options.alone != 0;
  if (given_options.share != nullptr) {
    options.share = [share = given_options.share, context = given_options.share_context](
                        const std::string&, const std::optional<std::string>& mine, std::chrono::milliseconds) {
      std::string text(4096, '\0');  // longer than any that `init` shares
      if (mine) mine->copy(text.data(), text.size() - 1);
      if (const int failed = share(context, text.data(), text.size()); failed != 0)
        raise(ErrorCode::Unavailable, "the program's own channel (cohort_init_options::share) returned {}", failed);
      text.resize(std::min(text.find('\0'), text.size() - 1));
      return text;
    };
    options.share_name = "the program's own channel (share)";
  }
  return options;
}

}  // namespace
}  // namespace cohort

/// Gradients in the program's own arrays, as the reducer sees them.
struct cohort_gradients final : cohort::gradients::Autograd {
  struct Tensor {
    const void* parameter;
    void* gradient;
    bool there;  // the gradient has been made in this step, or is an average
    std::vector<std::byte> kept;
  };

  cohort_gradients(cohort::Communicator ranks, cohort::nn::DistributedDataParallelOptions its_options)
      : comm(std::move(ranks)), options(std::move(its_options)) {}

  Tensor& at(std::size_t number) { return tensors[number]; }
  std::size_t bytes(std::size_t number) const { return parameters[number].bytes(); }
  void* place(std::size_t number) const { return reducer->place_of(number).data; }

  void take_places() override {}
  bool put_in_place(std::size_t number) override {
    if (at(number).there) std::memcpy(place(number), at(number).gradient, bytes(number));
    return at(number).there;
  }
  void give(std::size_t number) override { at(number).there = true; }
  void drop(std::size_t number) override { at(number).there = false; }
  void drop_all() override {
    for (Tensor& one : tensors) one.there = false;
  }
  void clear(std::size_t number) override { std::memset(place(number), 0, bytes(number)); }
  void keep(std::size_t number) override {
    const auto* const values = static_cast<const std::byte*>(place(number));
    at(number).kept.assign(values, values + bytes(number));
  }
  void put_back(std::size_t number) override {
    std::ranges::copy(at(number).kept, static_cast<std::byte*>(place(number)));
  }
  void drop_kept() override {
    for (Tensor& one : tensors) one.kept = {};
  }
  void call_at_end(std::shared_ptr<void> its_pass) override { pass = std::move(its_pass); }
  std::vector<std::span<const std::byte>> values_of(std::span<const int> numbers) override {
    std::vector<std::span<const std::byte>> all;
    for (const int index : numbers) {
      const auto number = static_cast<std::size_t>(index);
      const auto* const values = static_cast<const std::byte*>(at(number).parameter);
      all.emplace_back(values, values == nullptr ? 0 : bytes(number));
    }
    return all;
  }
  void compare(std::span<const int> numbers, std::int64_t step) override {
    std::vector<cohort::step::NamedValues> all;
    for (const int index : numbers) {
      const auto number = static_cast<std::size_t>(index);
      if (at(number).parameter == nullptr) continue;
      const cohort::gradients::Parameter& one = parameters[number];
      all.push_back({.name = one.name,
                     .sizes = one.sizes,
                     .element_size = cohort::size_of(one.dtype),
                     .bytes = {static_cast<const std::uint8_t*>(at(number).parameter), bytes(number)},
                     .text = [values = at(number).parameter, type = one.dtype](std::int64_t element) {
                       if (type == cohort::DType::Float32)
                         return fmt::format("{}", static_cast<const float*>(values)[element]);
                       if (type == cohort::DType::Float64)
                         return fmt::format("{}", static_cast<const double*>(values)[element]);
                       return std::string();  // its bits are shown
                     }});
    }
    cohort::step::require_same_parameters(*cohort::step::ranks_of(comm), all, step);
  }
  // All is in the host's memory.
  cohort::Memory allocate(const cohort::Device&, std::size_t) override { return {}; }
  void* stream_of(const cohort::Device&) override { return nullptr; }
  bool are_finite(std::span<const int>) override { return true; }
  std::vector<std::byte> copy_to_host(std::size_t) override { return {}; }

  cohort::Communicator comm;
  const cohort::nn::DistributedDataParallelOptions options;
  std::vector<cohort::gradients::Parameter> parameters;
  std::vector<Tensor> tensors;
  std::unique_ptr<cohort::gradients::Reducer> reducer;  // from the first begin on
  std::shared_ptr<void> pass;
};

extern "C" {

using namespace cohort;

int32_t cohort_c_api_version(void) { return COHORT_C_API_VERSION; }
const char* cohort_version(void) { return COHORT_VERSION; }
const char* cohort_last_error(void) { return last_error.text.c_str(); }
int32_t cohort_last_error_peer(void) { return last_error.peer; }
const char* cohort_error_name(int32_t status) {
  return status < COHORT_INVALID_ARGUMENT || status > COHORT_INTERNAL
             ? ""
             : to_string(static_cast<ErrorCode>(status - 1)).data();
}

int32_t cohort_init(const cohort_init_options* options, cohort_comm** comm) {
  return guarded([&] {
    given(comm, "where the communicator is to go") = nullptr;
    const cohort_init_options all = complete(options, cohort_init_options COHORT_INIT_OPTIONS, "cohort_init_options");
    auto handle = std::make_unique<cohort_comm>();
    handle->comm = init(options_of(all));
    *comm = handle.release();
  });
}

int32_t cohort_finalize(cohort_comm* comm) {
  return guarded([&] {
    const std::unique_ptr<cohort_comm> ends(comm);
    if (!ends) return;
    std::vector<std::shared_ptr<Work>> works;
    {
      const std::lock_guard lock(ends->running->mutex);
      works = std::move(ends->running->works);
    }
    for (const auto& work : works) {
      if (!work->done()) work->wait();
    }
  });
}

int32_t cohort_rank(const cohort_comm* comm) { return comm == nullptr ? -1 : comm->comm.rank(); }
int32_t cohort_size(const cohort_comm* comm) { return comm == nullptr ? -1 : comm->comm.size(); }
int32_t cohort_local_rank(const cohort_comm* comm) { return comm == nullptr ? -1 : comm->comm.local_rank(); }
int32_t cohort_local_size(const cohort_comm* comm) { return comm == nullptr ? -1 : comm->comm.local_size(); }
const char* cohort_host(const cohort_comm* comm) { return comm == nullptr ? "" : comm->comm.host().c_str(); }

int32_t cohort_split(cohort_comm* comm, int32_t color, int32_t key, cohort_comm** part) {
  return guarded([&] {
    given(part, "where the communicator is to go") = nullptr;
    Communicator made = given(comm, "the communicator").comm.split({.color = color < 0 ? kNoColor : color, .key = key});
    if (!made) return;
    auto handle = std::make_unique<cohort_comm>();
    handle->comm = std::move(made);
    *part = handle.release();
  });
}

int32_t cohort_abort(cohort_comm* comm, const char* reason) {
  return guarded([&] {
    given(comm, "the communicator").comm.abort(reason == nullptr ? "the program called cohort_abort" : reason);
  });
}

int32_t cohort_allocate(cohort_comm* comm, size_t bytes, void** memory) {
  return guarded([&] {
    given(memory, "where the address is to go") = nullptr;
    Memory made = given(comm, "the communicator").comm.allocate(bytes);
    void* const address = made.data();
    Allocated& known = allocated();
    const std::lock_guard lock(known.mutex);
    known.all.emplace(address, std::move(made));
    *memory = address;
  });
}

int32_t cohort_free(void* memory) {
  return guarded([&] {
    if (memory == nullptr) return;
    Allocated& known = allocated();
    const std::lock_guard lock(known.mutex);
    if (known.all.erase(memory) == 0)
      raise(ErrorCode::InvalidArgument, "cohort_free: that is no memory of cohort_allocate");
  });
}

int32_t cohort_wait(cohort_work* work) {
  return guarded([&] {
    const std::unique_ptr<cohort_work> ends(work);
    if (!ends) return;
    {
      const std::lock_guard lock(ends->running->mutex);
      std::erase(ends->running->works, ends->work);
    }
    ends->work->wait();
  });
}

int32_t cohort_test(cohort_work* work, int32_t* done) {
  return guarded([&] { given(done, "where the answer is to go") = given(work, "the work").work->done() ? 1 : 0; });
}

int32_t cohort_all_reduce(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype, int32_t op,
                          cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.all_reduce(ConstBuffer(input, count, type), Buffer(output, count, type), {.op = op_of(op)});
  });
}

int32_t cohort_all_reduce_weighted(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                                   double weight, cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.all_reduce(ConstBuffer(input, count, type), Buffer(output, count, type),
                            {.op = ReduceOp::Average, .weight = weight});
  });
}

int32_t cohort_reduce(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype, int32_t op,
                      int32_t root, cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.reduce(ConstBuffer(input, count, type), ranks.rank() == root ? Buffer(output, count, type) : Buffer(),
                        {.root = root, .op = op_of(op)});
  });
}

int32_t cohort_broadcast(cohort_comm* comm, void* data, int64_t count, int32_t dtype, int32_t root,
                         cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    return ranks.broadcast(Buffer(data, count, dtype_of(dtype)), {.root = root});
  });
}

int32_t cohort_all_gather(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                          cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.all_gather(ConstBuffer(input, count, type), Buffer(output, count * ranks.size(), type));
  });
}

int32_t cohort_reduce_scatter(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                              int32_t op, cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.reduce_scatter(ConstBuffer(input, count * ranks.size(), type), Buffer(output, count, type),
                                {.op = op_of(op)});
  });
}

int32_t cohort_all_to_all(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                          cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    const DType type = dtype_of(dtype);
    return ranks.all_to_all(ConstBuffer(input, count * ranks.size(), type), Buffer(output, count * ranks.size(), type));
  });
}

int32_t cohort_send(cohort_comm* comm, const void* data, int64_t count, int32_t dtype, int32_t peer, int32_t tag,
                    cohort_work** work) {
  return run(comm, work, [&](Communicator& ranks) {
    return ranks.send(ConstBuffer(data, count, dtype_of(dtype)), peer, {.tag = tag});
  });
}

int32_t cohort_recv(cohort_comm* comm, void* data, int64_t count, int32_t dtype, int32_t peer, int32_t tag,
                    cohort_work** work) {
  return run(comm, work,
             [&](Communicator& ranks) { return ranks.recv(Buffer(data, count, dtype_of(dtype)), peer, {.tag = tag}); });
}

int32_t cohort_barrier(cohort_comm* comm) {
  return run(comm, nullptr, [](Communicator& ranks) { return ranks.barrier(); });
}

int32_t cohort_gradients_create(cohort_comm* comm, const cohort_gradients_options* options,
                                cohort_gradients** gradients) {
  return guarded([&] {
    given(gradients, "where the handle is to go") = nullptr;
    const auto all = complete(options, cohort_gradients_options COHORT_GRADIENTS_OPTIONS, "cohort_gradients_options");
    nn::DistributedDataParallelOptions chosen;
    if (all.bucket_bytes >= 0) chosen.bucket_bytes = static_cast<std::size_t>(all.bucket_bytes);
    if (all.first_bucket_bytes >= 0) chosen.first_bucket_bytes = static_cast<std::size_t>(all.first_bucket_bytes);
    if (all.wire_format < 0 || all.wire_format >= kWireFormatCount)
      raise(ErrorCode::InvalidArgument, "there is no wire format number {}", all.wire_format);
    chosen.wire_format = static_cast<WireFormat>(all.wire_format);
    if (all.raise_non_finite != 0) chosen.non_finite = nn::NonFinite::Raise;
    *gradients = std::make_unique<cohort_gradients>(given(comm, "the communicator").comm, std::move(chosen)).release();
  });
}

int32_t cohort_gradients_add(cohort_gradients* gradients, const char* name, const void* parameter, void* gradient,
                             int64_t count, int32_t dtype) {
  return guarded([&] {
    cohort_gradients& all = given(gradients, "the gradients' handle");
    if (all.reducer) {
      raise(
          ErrorCode::InvalidArgument,
          "cohort_gradients_add: a step has begun with the tensors that are there -- add all of them before the first "
          "cohort_gradients_begin, or make another handle");
    }
    std::string known = name == nullptr ? fmt::format("tensor {}", all.tensors.size()) : std::string(name);
    if (count <= 0) raise(ErrorCode::InvalidArgument, "cohort_gradients_add: '{}' has {} elements", known, count);
    if (gradient == nullptr)
      raise(ErrorCode::InvalidArgument, "cohort_gradients_add: the gradient of '{}' is null", known);
    const DType type = dtype_of(dtype);
    if (!is_floating(type)) {
      raise(ErrorCode::InvalidArgument, "cohort_gradients_add: '{}' is of {}; gradients are of floating types", known,
            to_string(type));
    }
    if (reinterpret_cast<std::uintptr_t>(gradient) % std::min<std::size_t>(size_of(type), 8) != 0)
      raise(ErrorCode::InvalidArgument, "cohort_gradients_add: the gradient of '{}' is not aligned for {}", known,
            to_string(type));
    if (std::ranges::any_of(all.parameters, [&](const auto& one) { return one.name == known; }))
      raise(ErrorCode::InvalidArgument, "cohort_gradients_add: there is a tensor '{}' already", known);
    all.parameters.push_back({.name = std::move(known), .dtype = type, .sizes = {count}, .strides = {1}});
    all.tensors.push_back({parameter, gradient, false, {}});
  });
}

int32_t cohort_gradients_begin(cohort_gradients* gradients, int64_t samples) {
  return guarded([&] {
    cohort_gradients& all = given(gradients, "the gradients' handle");
    if (all.pass)
      raise(ErrorCode::InvalidArgument, "cohort_gradients_begin: a step is under way -- cohort_gradients_wait ends it");
    if (!all.reducer) {
      if (all.tensors.empty()) raise(ErrorCode::InvalidArgument, "cohort_gradients_begin: there are no tensors");
      auto made = std::make_unique<gradients::Reducer>(step::ranks_of(all.comm), all.parameters, all.options, all);
      made->lay_out();
      all.reducer = std::move(made);
    }
    all.drop_all();
    all.reducer->require_whole();
    all.reducer->prepare_synchronising_pass();
    all.reducer->add_forward(samples < 0 ? std::nullopt : std::optional(samples), std::nullopt);
    all.reducer->begin_backward();
  });
}

int32_t cohort_gradients_ready(cohort_gradients* gradients, int32_t number) {
  return guarded([&] {
    cohort_gradients& all = given(gradients, "the gradients' handle");
    if (!all.pass)
      raise(ErrorCode::InvalidArgument, "cohort_gradients_ready: no step is under way -- cohort_gradients_begin first");
    const auto which = static_cast<std::size_t>(number);
    if (number < 0 || which >= all.tensors.size())
      raise(ErrorCode::InvalidArgument, "cohort_gradients_ready: there is no tensor number {}", number);
    if (all.at(which).there) {
      raise(ErrorCode::InvalidArgument, "cohort_gradients_ready: the gradient of '{}' was ready before in this step",
            all.parameters[which].name);
    }
    if (!all.reducer->receive(which)) return;
    if (all.reducer->can_read(which)) {
      all.reducer->read_from(which, all.at(which).gradient, nullptr);
    } else {
      std::memcpy(all.place(which), all.at(which).gradient, all.bytes(which));
    }
    all.at(which).there = true;
    all.reducer->arrive(which);
  });
}

int32_t cohort_gradients_wait(cohort_gradients* gradients) {
  return guarded([&] {
    cohort_gradients& all = given(gradients, "the gradients' handle");
    if (!all.pass)
      raise(ErrorCode::InvalidArgument, "cohort_gradients_wait: no step is under way -- cohort_gradients_begin first");
    all.pass.reset();
    try {
      all.reducer->finish();
    } catch (const Error& error) {
      // Nothing of a step that has failed is used again: the next one compares the tensors anew.
      if (error.code() != ErrorCode::NonFinite) all.reducer.reset();
      throw;
    }
    for (std::size_t i = 0; i < all.tensors.size(); ++i) {
      if (all.at(i).there) std::memcpy(all.at(i).gradient, all.place(i), all.bytes(i));
    }
  });
}

int32_t cohort_gradients_free(cohort_gradients* gradients) {
  return guarded([&] { delete gradients; });
}

}  // extern "C"
