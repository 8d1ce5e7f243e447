#include "errors.h"

#include "telemetry/status_page.h"

#include <cohort/elastic.h>

#include <exception>

namespace cohort::python {
namespace py = pybind11;

namespace {

py::object number_or_none(std::int64_t number, std::int64_t none) {
  if (number == none) return py::none();
  return py::int_(number);
}

py::object text_or_none(const std::string& text) {
  if (text.empty()) return py::none();
  // Texts of the operating system and of peers need not be UTF-8.
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

}  // namespace

py::object to_python(const Error& error) {
  const bool changed = dynamic_cast<const elastic::MembershipChanged*>(&error) != nullptr;
  const py::module_ errors = py::module_::import(changed ? "cohort.elastic" : "cohort.errors");
  const std::string_view name = changed ? "MembershipChanged" : to_string(error.code());
  const ErrorContext& context = error.context();
  // Noted now, because even a program that catches the error may end because of it.
  if (!changed && (error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted))
    status::StatusPage::own().note_failure(error);
  py::object exception = errors.attr(std::string(name).c_str())(text_or_none(error.what()));
  exception.attr("rank") = number_or_none(context.rank, -1);
  exception.attr("host") = text_or_none(context.host);
  exception.attr("peer") = number_or_none(context.peer, -1);
  exception.attr("operation") = text_or_none(context.operation);
  exception.attr("sequence") = number_or_none(static_cast<std::int64_t>(context.sequence), 0);
  exception.attr("cause") = text_or_none(context.cause);
  if (context.tagged) exception.attr("_tagged") = true;
  exception.attr("system_error") = number_or_none(context.system_error, 0);
  return exception;
}

Error from_python(const py::object& exception) {
  const auto text = [&exception](const char* name) {
    const py::object value = exception.attr(name);
    return value.is_none() ? std::string() : py::cast<std::string>(value);
  };
  const auto number = [&exception](const char* name, auto none) {
    const py::object value = exception.attr(name);
    return value.is_none() ? none : py::cast<decltype(none)>(value);
  };
  ErrorCode code = ErrorCode::InvalidArgument;
  while (code != ErrorCode::Internal && to_string(code) != text("code"))
    code = static_cast<ErrorCode>(static_cast<std::uint8_t>(code) + 1);
  ErrorContext context;
  context.rank = number("rank", -1);
  context.host = text("host");
  context.peer = number("peer", -1);
  context.operation = text("operation");
  context.sequence = number("sequence", std::uint64_t{0});
  context.tagged = py::cast<bool>(exception.attr("_tagged"));
  return Error(code, {}, std::move(context));
}

void translate_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      try {
        const py::object exception = to_python(error);
        PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
      } catch (py::error_already_set& failed) {
        failed.restore();
      }
    }
  });
}

void raise_current() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      const py::object exception = to_python(error);
      PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
    }
  } catch (py::error_already_set& raised) {
    raised.restore();
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& other) {
    PyErr_SetString(PyExc_RuntimeError, other.what());
  }
}

void refuse(const std::string& operation, const std::string& why) {
  ErrorContext context;
  context.operation = operation;
  context.cause = why;
  throw Error(ErrorCode::InvalidArgument, operation + ": " + why, std::move(context));
}

}  // namespace cohort::python
