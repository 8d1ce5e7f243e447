// The part of cohort.Preemption that needs the core: signals are noticed in C++, so that no Python code has to run for
// it.
#include "bindings.h"
#include "errors.h"

#include "base/signals.h"
#include "telemetry/status_page.h"

#include <cohort/preemption.h>

#include <pybind11/stl.h>

#include <utility>
#include <vector>

namespace cohort::python {
namespace {

/// Handlers of signals, and the word to the agent that this process saves because of them.
class PreemptionSignals {
 public:
  explicit PreemptionSignals(const std::vector<int>& signals) : latch_(made(signals)) {
    status::StatusPage::own().announce_saving();
  }
  ~PreemptionSignals() { status::StatusPage::own().withdraw_saving(); }
  PreemptionSignals(const PreemptionSignals&) = delete;
  PreemptionSignals& operator=(const PreemptionSignals&) = delete;

  int received() noexcept {
    const int signal = latch_.received();
    if (signal != 0) latch_.keep_handlers();
    return signal;
  }
  void say_yes(int signal) {
    latch_.keep_handlers();
    status::StatusPage::own().note_preemption(signal);
  }

 private:
  static sys::SignalLatch made(const std::vector<int>& signals) {
    auto latch = sys::SignalLatch::create(signals);
    if (!latch) raise(latch.error().code(), "Preemption: {}", latch.error().what());
    return *std::move(latch);
  }
  sys::SignalLatch latch_;
};

}  // namespace

void bind_preemption(py::module_& module) {
  py::class_<PreemptionSignals>(module, "PreemptionSignals")
      .def(py::init<const std::vector<int>&>(), py::arg("signals"))
      .def("received", &PreemptionSignals::received, "The first of the signals that has come; 0: none has.")
      .def("say_yes", &PreemptionSignals::say_yes, py::arg("signal"),
           "All ranks save and end because of this signal: the agent is told, and the handlers stay from now on.");
  module.attr("REQUEUE_STATUS") = kRequeueStatus;
}

}  // namespace cohort::python
