// For tests of the engine: requests over vectors. One thread.
#pragma once

#include "horovod/named/engine.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::named::testing {

template <class T>
Request all_reduce(std::string name, std::vector<T>& data, ReduceOp op = ReduceOp::Sum) {
  Request request;
  request.name = std::move(name);
  request.kind = Kind::AllReduce;
  request.shape = {static_cast<std::int64_t>(data.size())};
  request.input = request.output = std::span(data);
  request.op = op;
  return request;
}

template <class T>
Request broadcast(std::string name, std::vector<T>& data, int root) {
  Request request = all_reduce(std::move(name), data);
  request.kind = Kind::Broadcast;
  request.input = {};
  request.root = root;
  return request;
}

/// Makes an all_gather, reduce_scatter or all_to_all of rows of `row` elements.
template <class T>
Request by_rows(Kind kind, std::string name, const std::vector<T>& data, std::int64_t row = 1,
                std::vector<std::int64_t> splits = {}) {
  Request request;
  request.name = std::move(name);
  request.kind = kind;
  request.shape = {static_cast<std::int64_t>(data.size()) / row, row};
  request.input = std::span(data);
  request.op = ReduceOp::Sum;
  request.splits = std::move(splits);
  return request;
}

inline Request barrier(std::string name) {
  Request request;
  request.name = std::move(name);
  request.kind = Kind::Barrier;
  return request;
}

template <class T>
std::vector<T> values_of(const Outcome& outcome) {
  std::int64_t count = 1;
  for (const std::int64_t dimension : outcome.shape) count *= dimension;
  const T* const first = static_cast<const T*>(outcome.data);
  return {first, first + count};
}

/// Returns the error that waiting throws; the test fails if there is none.
inline Error error_of(Handle handle) {
  try {
    handle.wait();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorCode::Internal, "none");
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Runs `body` on ranks with an engine each.
inline void with_engines(int size, const std::function<void(Engine&)>& body, const EngineOptions& options = {}) {
  run_on_threads(size, [&](Communicator comm) {
    Engine engine(std::move(comm), options);
    try {
      body(engine);
      engine.submit(barrier("end of the test")).wait();
    } catch (const Error& error) {  // reported now, since the engine's end would make other ranks fail and report first
      ADD_FAILURE() << "rank " << engine.rank() << ": " << error.what();
      throw;
    }
  });
}

}  // namespace cohort::named::testing
