// The operations of cohort.Communicator that move data, with the names and contracts of <cohort/communicator.h>. Each
// turns arrays into buffers and passes them to the Member, which starts the operation.
#include "arguments.h"
#include "bindings.h"
#include "errors.h"

#include <pybind11/stl.h>

#include <iterator>

namespace cohort::python {
namespace {

using Counts = std::vector<std::int64_t>;

/// The arguments that every operation has in addition to its arrays.
struct CollectiveCall {
  const PyCommunicator& self;
  const char* name;
  bool async_op;
  py::object result;  // for the synchronous form
};

template <class... Array_>
std::vector<Array> keep(Array_&&... arrays) {
  std::vector<Array> kept;
  kept.reserve(sizeof...(arrays));
  (kept.push_back(std::move(arrays)), ...);
  return kept;
}

py::object start(const CollectiveCall& call, std::vector<Array> arrays,
                 const std::function<Work(Communicator&)>& body) {
  std::shared_ptr<Operation> operation = call.self.member().start(call.name, body, std::move(arrays));
  if (call.async_op) return py::cast(PyWork{std::move(operation)});
  if (!operation) return call.result;
  operation->wait(std::nullopt);
  const std::optional<int> source = operation->source();
  return source ? py::cast(*source) : call.result;
}

Array read(const char* operation, const py::object& array, const char* name = "the input") {
  return Array(array, Access::Read, {operation, name}, Where::HostOrGpu);
}

Array write(const char* operation, const py::object& array, const char* name = "the output") {
  return Array(array, Access::Write, {operation, name}, Where::HostOrGpu);
}

/// Starts an operation on one array, in place: `body(world, buffer)`.
template <class Body>
py::object start_with(const CollectiveCall& call, Array array, const Body& body) {
  const Buffer buffer = array.buffer();
  return start(call, keep(std::move(array)), [&](Communicator& world) { return body(world, buffer); });
}

/// Starts an operation from one array to another: `body(world, input, output)`.
template <class Body>
py::object start_between(const CollectiveCall& call, const py::object& input, const py::object& output,
                         const Body& body) {
  Array from = read(call.name, input);
  Array to = write(call.name, output);
  const ConstBuffer in = from.const_buffer();
  const Buffer out = to.buffer();
  return start(call, keep(std::move(from), std::move(to)), [&](Communicator& world) { return body(world, in, out); });
}

/// Starts an operation from one list of arrays to another.
template <class Body>
py::object start_group(const CollectiveCall& call, const py::object& input, const py::object& output,
                       const Body& body) {
  std::vector<Array> arrays = arrays_of(input, Access::Read, {call.name, "the input", "input"}, Where::HostOrGpu);
  const std::vector<ConstBuffer> inputs = const_buffers_of(arrays);
  std::vector<Array> written = arrays_of(output, Access::Write, {call.name, "the output", "output"}, Where::HostOrGpu);
  const std::vector<Buffer> outputs = buffers_of(written);
  std::move(written.begin(), written.end(), std::back_inserter(arrays));
  return start(call, std::move(arrays), [&](Communicator& world) { return body(world, inputs, outputs); });
}

template <class Options>
Options reduction_of(const char* name, const py::object& op, double prescale, double postscale,
                     const py::object& gpu_sums, const py::object& timeout) {
  Options options;
  if (!gpu_sums.is_none()) {
    const std::string sums = py::str(gpu_sums);
    if (sums != "fast" && sums != "exact") refuse(name, "gpu_sums is 'fast' or 'exact', and not '" + sums + "'");
    options.gpu_sums = sums == "fast" ? GpuSums::Fast : GpuSums::Exact;
  }
  options.op = reduce_op_of(op, name);
  options.prescale = prescale;
  options.postscale = postscale;
  options.timeout = milliseconds_of(timeout, name);
  return options;
}

py::object all_reduce(const PyCommunicator& self, const py::object& data, const py::object& output,
                      const py::object& op, std::optional<double> weight, double prescale, double postscale,
                      const py::object& wire_format, const py::object& residual, bool check_finite, std::uint32_t tag,
                      const py::object& gpu_sums, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "all_reduce";
  auto options = reduction_of<AllReduceOptions>(kName, op, prescale, postscale, gpu_sums, timeout);
  options.weight = weight;
  if (check_finite && !async_op) refuse(kName, "check_finite: the Work tells what was found -- give async_op=True too");
  options.check_finite = check_finite;
  options.tag = tag;
  options.wire_format = wire_format_of(kName, wire_format);
  if (!residual.is_none() && is_group(data)) refuse(kName, "a residual is of one sum, not of a group");
  const CollectiveCall call{self, kName, async_op, output};
  if (is_group(data)) {
    if (!output.is_none()) refuse(kName, "the grouped form reduces in place; it takes no output");
    std::vector<Array> arrays = arrays_of(data, Access::Write, {kName, "the group"}, Where::HostOrGpu);
    const std::vector<Buffer> buffers = buffers_of(arrays);
    return start(call, std::move(arrays), [&](Communicator& world) { return world.all_reduce(buffers, options); });
  }
  std::vector<Array> arrays;
  if (!output.is_none()) arrays.push_back(read(kName, data));
  arrays.push_back(write(kName, output.is_none() ? data : output, output.is_none() ? "the array" : "the output"));
  const Buffer to = arrays.back().buffer();
  const ConstBuffer from = output.is_none() ? ConstBuffer(to) : arrays.front().const_buffer();
  if (!residual.is_none()) {
    arrays.push_back(Array(residual, Access::Write, {kName, "the residual"}));
    const Buffer lost = arrays.back().buffer();
    if (lost.dtype != DType::Float32 || lost.count != from.count)
      refuse(kName, "the residual is as many float32 as the sum has elements");
    options.residual = static_cast<float*>(lost.data);
  }
  return start(call, std::move(arrays), [&](Communicator& world) { return world.all_reduce(from, to, options); });
}

py::object reduce(const PyCommunicator& self, const py::object& data, const py::object& output, int root,
                  const py::object& op, std::optional<double> weight, double prescale, double postscale,
                  const py::object& gpu_sums, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "reduce";
  auto options = reduction_of<ReduceOptions>(kName, op, prescale, postscale, gpu_sums, timeout);
  options.weight = weight;
  options.root = root;
  const CollectiveCall call{self, kName, async_op, output};
  if (!output.is_none()) {
    return start_between(call, data, output,
                         [&](auto& world, auto from, auto to) { return world.reduce(from, to, options); });
  }
  // Only the root's array is written, so the others may be read-only.
  return start_with(call, self.member().rank == root ? write(kName, data, "the array") : read(kName, data),
                    [&](auto& world, auto buffer) { return world.reduce(buffer, options); });
}

py::object reduce_scatter(const PyCommunicator& self, const py::object& input, const py::object& output,
                          const py::object& op, double prescale, double postscale, const py::object& gpu_sums,
                          const py::object& timeout, bool async_op) {
  constexpr auto* kName = "reduce_scatter";
  const auto options = reduction_of<ReduceScatterOptions>(kName, op, prescale, postscale, gpu_sums, timeout);
  const CollectiveCall call{self, kName, async_op, output};
  if (is_group(input)) {
    return start_group(call, input, output, [&](auto& world, auto& inputs, auto& outputs) {
      return world.reduce_scatter(inputs, outputs, options);
    });
  }
  return start_between(call, input, output,
                       [&](auto& world, auto from, auto to) { return world.reduce_scatter(from, to, options); });
}

py::object reduce_scatter_v(const PyCommunicator& self, const py::object& input, const py::object& output,
                            const Counts& counts, const py::object& op, double prescale, double postscale,
                            const py::object& gpu_sums, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "reduce_scatter_v";
  const auto options = reduction_of<ReduceScatterOptions>(kName, op, prescale, postscale, gpu_sums, timeout);
  return start_between({self, kName, async_op, output}, input, output, [&](auto& world, auto from, auto to) {
    return world.reduce_scatter_v(from, to, counts, options);
  });
}

py::object broadcast(const PyCommunicator& self, const py::object& data, int root, const py::object& timeout,
                     bool async_op) {
  constexpr auto* kName = "broadcast";
  const BroadcastOptions options{root, milliseconds_of(timeout, kName)};
  // The root's array is only read.
  const Access access = self.member().rank == root ? Access::Read : Access::Write;
  const CollectiveCall call{self, kName, async_op, py::none()};
  if (is_group(data)) {
    std::vector<Array> arrays = arrays_of(data, access, {kName, "the group"}, Where::HostOrGpu);
    const std::vector<Buffer> buffers = buffers_of(arrays);
    return start(call, std::move(arrays), [&](Communicator& world) { return world.broadcast(buffers, options); });
  }
  return start_with(call, Array(data, access, {kName, "the array"}, Where::HostOrGpu),
                    [&](auto& world, auto buffer) { return world.broadcast(buffer, options); });
}

py::object all_gather(const PyCommunicator& self, const py::object& input, const py::object& output,
                      const py::object& timeout, bool async_op) {
  constexpr auto* kName = "all_gather";
  const AllGatherOptions options{milliseconds_of(timeout, kName)};
  const CollectiveCall call{self, kName, async_op, output};
  if (is_group(input)) {
    return start_group(call, input, output, [&](auto& world, auto& inputs, auto& outputs) {
      return world.all_gather(inputs, outputs, options);
    });
  }
  return start_between(call, input, output,
                       [&](auto& world, auto from, auto to) { return world.all_gather(from, to, options); });
}

py::object all_gather_v(const PyCommunicator& self, const py::object& input, const py::object& output,
                        const Counts& counts, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "all_gather_v";
  const AllGatherOptions options{milliseconds_of(timeout, kName)};
  return start_between({self, kName, async_op, output}, input, output,
                       [&](auto& world, auto from, auto to) { return world.all_gather_v(from, to, counts, options); });
}

/// Starts gather or scatter: every rank has a `part`; only the root has `parts`, one for each rank. Calls `body(world,
/// part, parts)`, where `parts` is empty except on the root.
template <class Body>
py::object start_rooted(const CollectiveCall& call, int root, bool gathers, const py::object& part,
                        const py::object& parts, const Body& body) {
  const bool is_root = call.self.member().rank == root;
  if (is_root && parts.is_none()) {
    refuse(call.name, std::string("the root has given no ") + (gathers ? "output" : "input"));
  }
  std::vector<Array> arrays = keep(gathers ? read(call.name, part) : write(call.name, part));
  if (is_root) arrays.push_back(gathers ? write(call.name, parts) : read(call.name, parts));
  const Buffer own = arrays.front().buffer();
  const Buffer all = is_root ? arrays.back().buffer() : Buffer();
  return start({call.self, call.name, call.async_op, is_root || !gathers ? call.result : py::none()}, std::move(arrays),
               [&](Communicator& world) { return body(world, own, all); });
}

py::object gather(const PyCommunicator& self, const py::object& input, const py::object& output, int root,
                  const py::object& timeout, bool async_op) {
  constexpr auto* kName = "gather";
  const GatherOptions options{root, milliseconds_of(timeout, kName)};
  return start_rooted({self, kName, async_op, output}, root, true, input, output,
                      [&](auto& world, auto part, auto parts) { return world.gather(part, parts, options); });
}

py::object gather_v(const PyCommunicator& self, const py::object& input, const py::object& output, const Counts& counts,
                    int root, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "gather_v";
  const GatherOptions options{root, milliseconds_of(timeout, kName)};
  return start_rooted({self, kName, async_op, output}, root, true, input, output,
                      [&](auto& world, auto part, auto parts) { return world.gather_v(part, parts, counts, options); });
}

py::object scatter(const PyCommunicator& self, const py::object& input, const py::object& output, int root,
                   const py::object& timeout, bool async_op) {
  constexpr auto* kName = "scatter";
  const ScatterOptions options{root, milliseconds_of(timeout, kName)};
  return start_rooted({self, kName, async_op, output}, root, false, output, input,
                      [&](auto& world, auto part, auto parts) { return world.scatter(parts, part, options); });
}

py::object scatter_v(const PyCommunicator& self, const py::object& input, const py::object& output,
                     const Counts& counts, int root, const py::object& timeout, bool async_op) {
  constexpr auto* kName = "scatter_v";
  const ScatterOptions options{root, milliseconds_of(timeout, kName)};
  return start_rooted(
      {self, kName, async_op, output}, root, false, output, input,
      [&](auto& world, auto part, auto parts) { return world.scatter_v(parts, part, counts, options); });
}

py::object all_to_all(const PyCommunicator& self, const py::object& input, const py::object& output,
                      const py::object& timeout, bool async_op) {
  constexpr auto* kName = "all_to_all";
  const AllToAllOptions options{milliseconds_of(timeout, kName)};
  return start_between({self, kName, async_op, output}, input, output,
                       [&](auto& world, auto from, auto to) { return world.all_to_all(from, to, options); });
}

py::object all_to_all_v(const PyCommunicator& self, const py::object& input, const Counts& input_counts,
                        const py::object& output, const Counts& output_counts, const py::object& timeout,
                        bool async_op) {
  constexpr auto* kName = "all_to_all_v";
  const AllToAllOptions options{milliseconds_of(timeout, kName)};
  return start_between({self, kName, async_op, output}, input, output, [&](auto& world, auto from, auto to) {
    return world.all_to_all_v(from, input_counts, to, output_counts, options);
  });
}

py::object barrier(const PyCommunicator& self, const py::object& timeout, bool async_op) {
  const BarrierOptions options{milliseconds_of(timeout, "barrier")};
  return start({self, "barrier", async_op, py::none()}, {},
               [&](Communicator& world) { return world.barrier(options); });
}

py::object send(const PyCommunicator& self, const py::object& data, int peer, int tag, const py::object& timeout,
                bool async_op) {
  const SendOptions options{tag, milliseconds_of(timeout, "send")};
  return start_with({self, "send", async_op, py::none()}, read("send", data, "the array"),
                    [&](auto& world, auto buffer) { return world.send(buffer, peer, options); });
}

py::object recv(const PyCommunicator& self, const py::object& data, std::optional<int> peer, int tag,
                const py::object& timeout, bool async_op) {
  const RecvOptions options{tag, milliseconds_of(timeout, "recv")};
  return start_with({self, "recv", async_op, py::none()}, write("recv", data, "the array"),
                    [&](auto& world, auto buffer) { return world.recv(buffer, peer.value_or(kAnySource), options); });
}

}  // namespace

void bind_collectives(py::class_<PyCommunicator>& communicator) {
  const py::arg_v kNoOutput(py::arg("output") = py::none());
  const py::arg_v kOp(py::arg("op") = "sum");
  const py::arg_v kNoWeight(py::arg("weight") = py::none());
  const py::arg_v kPrescale(py::arg("prescale") = 1.0);
  const py::arg_v kPostscale(py::arg("postscale") = 1.0);
  const py::arg_v kRoot(py::arg("root") = 0);
  const py::arg_v kTag(py::arg("tag") = 0);
  const py::arg_v kSums(py::arg("gpu_sums") = py::none());
  const py::arg_v kTimeout(py::arg("timeout") = py::none());
  const py::arg_v kAsync(py::arg("async_op") = false);
  const py::kw_only kOnly;

  communicator
      .def(
          "all_reduce", &all_reduce, py::arg("data"), kNoOutput, kOnly, kOp, kNoWeight, kPrescale, kPostscale,
          py::arg("wire_format") = py::none(), py::arg("residual") = py::none(), py::arg("check_finite") = false, kTag,
          kSums, kTimeout, kAsync,
          "Reduces `data` over all ranks: in place, or into `output`. A list of arrays is reduced in place, as one "
          "operation. With op='average', `weight` is this rank's (its number of samples): sum(weight * x) / "
          "sum(weight). wire_format='bfloat16', 'int8' or 'int4': what float32 travels as between hosts "
          "(sums and averages; each host's sum is rounded, beyond two hosts the result as well). `residual`: as many "
          "float32, zero at first, which get what rounding loses; it is added to the next sum with the same residual. "
          "check_finite=True: `finite()` of the Work says "
          "whether the result is free of NaN and infinities, on one host for next to nothing. `tag`, of 32 bits, tells "
          "operations of the same type and size apart: ranks that give different ones get Mismatch. gpu_sums='exact': "
          "memory "
          "of GPUs is reduced with the CPU's bits; 'fast': by NCCL, where it is used.")
      .def("reduce", &reduce, py::arg("data"), kNoOutput, kOnly, kRoot, kOp, kNoWeight, kPrescale, kPostscale, kSums,
           kTimeout, kAsync, "As all_reduce, but only the root receives the result; all other arrays stay as they are.")
      .def("reduce_scatter", &reduce_scatter, py::arg("input"), py::arg("output"), kOnly, kOp, kPrescale, kPostscale,
           kSums, kTimeout, kAsync,
           "`input` holds size() parts of as many elements as `output`; rank r receives the reduction of part r. Lists "
           "of inputs and outputs are one operation.")
      .def("reduce_scatter_v", &reduce_scatter_v, py::arg("input"), py::arg("output"), py::arg("counts"), kOnly, kOp,
           kPrescale, kPostscale, kSums, kTimeout, kAsync,
           "Part r has counts[r] elements; `counts` is the same on all ranks.")
      .def("broadcast", &broadcast, py::arg("data"), kOnly, kRoot, kTimeout, kAsync,
           "Copies `data`, or a list of arrays, from the root to all other ranks.")
      .def("all_gather", &all_gather, py::arg("input"), py::arg("output"), kOnly, kTimeout, kAsync,
           "`output` receives the inputs of all ranks, by ascending rank. Lists of inputs and outputs are one "
           "operation.")
      .def("all_gather_v", &all_gather_v, py::arg("input"), py::arg("output"), py::arg("counts"), kOnly, kTimeout,
           kAsync, "Rank r brings counts[r] elements; `counts` is the same on all ranks.")
      .def("gather", &gather, py::arg("input"), kNoOutput, kOnly, kRoot, kTimeout, kAsync,
           "As all_gather, on the root only; elsewhere `output` may be None.")
      .def("gather_v", &gather_v, py::arg("input"), py::arg("output"), py::arg("counts"), kOnly, kRoot, kTimeout,
           kAsync, "As all_gather_v, on the root only; elsewhere `output` may be None.")
      .def("scatter_v", &scatter_v, py::arg("input"), py::arg("output"), py::arg("counts"), kOnly, kRoot, kTimeout,
           kAsync, "Part r has counts[r] elements; `counts` is the same on all ranks. Else as scatter.")
      .def("scatter", &scatter, py::arg("input"), py::arg("output"), kOnly, kRoot, kTimeout, kAsync,
           "Rank r receives part r of the root's `input`, which may be None elsewhere.")
      .def("all_to_all", &all_to_all, py::arg("input"), py::arg("output"), kOnly, kTimeout, kAsync,
           "Rank r's part s goes to rank s, where it becomes part r. Both hold size() parts of the same count.")
      .def("all_to_all_v", &all_to_all_v, py::arg("input"), py::arg("input_counts"), py::arg("output"),
           py::arg("output_counts"), kOnly, kTimeout, kAsync,
           "input_counts[s] elements go to rank s, output_counts[s] come from it; parts lie one after the other.")
      .def("barrier", &barrier, kOnly, kTimeout, kAsync, "Done once every rank has come to it.")
      .def("send", &send, py::arg("data"), py::arg("peer"), kOnly, kTag, kTimeout, kAsync,
           "To another rank, whose recv has the same type, number of elements and tag. Done once `data` may be used "
           "again: if it is small as soon as it is buffered.")
      .def("recv", &recv, py::arg("data"), py::arg("peer") = py::none(), kOnly, kTag, kTimeout, kAsync,
           "What another rank sends with this tag. Sends and receives progress apart from the collectives. Without "
           "`peer`, from whichever rank sends first, which is returned (async_op: `source()` of the Work tells it). A "
           "message goes to the receive that was started first of those that it fits; of several messages that are "
           "there, a receive takes the one that this rank has seen first.");
}

}  // namespace cohort::python
