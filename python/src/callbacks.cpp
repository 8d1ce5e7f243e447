// The thread that tells Python of finished operations, so that the engine's need not wait for the GIL.
#include "named.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace cohort::python {
namespace {

/// References that are owned, and given back with the GIL only.
struct Callback {
  PyObject* function;
  PyObject* work;
};

// The GIL is held.
void make(const Callback& call) {
  PyObject* const result = PyObject_CallOneArg(call.function, call.work);
  if (result == nullptr) PyErr_WriteUnraisable(call.function);
  Py_XDECREF(result);
  Py_DECREF(call.function);
  Py_DECREF(call.work);
}

/// What is shared with the thread. One that was abandoned by a fork is never touched again.
struct Queue {
  const std::uint64_t home = fork_generation();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Callback> calls;
  bool stopping = false;
  std::thread thread;

  void push(const Callback& call) {
    {
      const std::lock_guard lock(mutex);
      calls.push_back(call);
    }
    changed.notify_one();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || !calls.empty(); });
      if (calls.empty()) return;
      const std::deque<Callback> taken = std::exchange(calls, {});
      lock.unlock();
      {
        const py::gil_scoped_acquire gil;
        for (const Callback& call : taken) make(call);
      }
      lock.lock();
    }
  }
};

Queue* current = nullptr;  // with the GIL

Queue& queue() {
  if (current == nullptr || current->home != fork_generation()) {
    current = new Queue();
    try {
      current->thread = sys::start_without_signals([own = current] { own->run(); });
    } catch (...) {
      delete std::exchange(current, nullptr);
      throw;
    }
  }
  return *current;
}

}  // namespace

void Callbacks::add(const py::object& work, NamedOperation& operation, const py::object& function) {
  Callback call{function.ptr(), work.ptr()};
  Py_INCREF(call.function);
  Py_INCREF(call.work);
  if (operation.done()) {
    make(call);
    return;
  }
  // The engine's thread calls it, or this one, which does not wait for what the queue does.
  Queue& to = queue();
  operation.handle().on_done([&to, call] { to.push(call); });
}

void Callbacks::stop() {
  if (current == nullptr || current->home != fork_generation()) return;
  Queue* const ending = std::exchange(current, nullptr);
  const py::gil_scoped_release release;
  {
    const std::lock_guard lock(ending->mutex);
    ending->stopping = true;
  }
  ending->changed.notify_one();
  ending->thread.join();
  // An operation of another engine may still refer to the queue, so it stays; nobody reads it any more.
}

}  // namespace cohort::python
