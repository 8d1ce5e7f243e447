// The classes of the module, each in a file of its own, and what they share.
#pragma once

#include "member.h"

#include <pybind11/pybind11.h>

#include <memory>

namespace cohort::python {

/// cohort.Communicator. Lets its membership go, without waiting, when Python has dropped it.
class PyCommunicator {
 public:
  explicit PyCommunicator(std::shared_ptr<Member> member) noexcept : member_(std::move(member)) {}
  ~PyCommunicator() {
    if (member_) Member::let_go(std::move(member_));
  }
  PyCommunicator(PyCommunicator&&) = default;
  PyCommunicator& operator=(PyCommunicator&&) = delete;

  Member& member() const noexcept { return *member_; }
  const std::shared_ptr<Member>& shared() const noexcept { return member_; }

 private:
  std::shared_ptr<Member> member_;
};

/// cohort.Work. A null operation has finished without an error.
struct PyWork {
  std::shared_ptr<Operation> operation;
};

void bind_types(pybind11::module_& module);
/// Memory, and what is asked of arrays.
void bind_memory(pybind11::module_& module);
void bind_work(pybind11::module_& module);
void bind_named(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
/// Files of tensors.
void bind_formats(pybind11::module_& module);
/// Folders of checkpoints.
void bind_checkpoints(pybind11::module_& module);
/// Records of runs.
void bind_track(pybind11::module_& module);
/// What reduces gradients.
void bind_gradients(pybind11::module_& module);
void bind_process(pybind11::module_& module);
/// The parameter server.
void bind_ps(pybind11::module_& module);
/// The methods that move data.
void bind_collectives(pybind11::class_<PyCommunicator>& communicator);

}  // namespace cohort::python
