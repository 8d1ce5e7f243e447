// What this process says of itself to the agent that started it.
#include "bindings.h"
#include "errors.h"

#include "telemetry/last_words.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"

#include <chrono>
#include <string>

namespace cohort::python {

void bind_status(py::module_& module) {
  module.def(
      "status_fd", [] { return status::StatusPage::own().fd(); },
      "The agent's file for stacks; -1 where no agent started this process.");
  module.def(
      "begin_join", [](int size) { status::StatusPage::own().begin_join(size); }, py::arg("size"),
      "This process waits for the others of a world of so many, until end_join: for the launcher.");
  module.def(
      "end_join", [](bool formed) { status::StatusPage::own().end_join(formed); }, py::arg("formed"),
      "It waits no more.");
  module.def(
      "count_step", [] { status::StatusPage::own().count_step(); }, "Another step of an optimizer is done.");
  module.def(
      "begin_call", [](const std::string& name) { status::StatusPage::own().begin_call(name); }, py::arg("name"),
      "The program is in this, which consists of operations, until `end_call`.");
  module.def("end_call", [] { status::StatusPage::own().end_call(); });
  module.def(
      "traced", [] { return status::timeline::on(); }, "Whether somebody takes spans: `cohort run --trace`.");
  module.def(
      "add_span",
      [](const std::string& name, std::int64_t begun_ns) {
        using status::timeline::Clock;
        const Clock::time_point begun{std::chrono::nanoseconds(begun_ns)};
        status::timeline::add(
            {status::TimelineKind::Span, name, begun, Clock::now(), status::timeline::this_thread(), 0, 0, {}});
      },
      py::arg("name"), py::arg("begun_ns"), "Something that this thread did from then (time.monotonic_ns) until now.");
  module.def(
      "say_last_words",
      [](const std::string& words, const py::object& cause) {
        auto& page = status::StatusPage::own();
        if (!cause.is_none()) page.note_end(from_python(cause));
        return page.say_last_words(words);
      },
      py::arg("words"), py::arg("cause") = py::none(),
      "What ends this process, and the cohort.Error that it comes from. Only the first call counts; it returns True.");
  module.def("keep_last_words", &status::keep_last_words,
             "From now on fatal signals and uncaught C++ exceptions leave word with the agent.");
  module.def("add_to_last_words", &status::add_to_last_words, py::arg("fd"),
             "What this file holds by the time of a fatal signal becomes part of the last words.");
  module.def(
      "announce_stacks", [] { status::StatusPage::own().announce_stacks(); },
      "Tells the agent that SIGQUIT makes this process write its stacks to the file.");
}

}  // namespace cohort::python
